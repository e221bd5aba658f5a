"""Decides whether a table `plugin_kv_storage` that another program made can become Keyloft's, and by which statements.

Opening a database, `keyloft migrate` and `keyloft doctor` ask the same questions here, each through its own driver.
"""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft.core.schema import PLUGIN_TABLE, Row
from keyloft.errors import CannotOpen

TABLE: Final = PLUGIN_TABLE
CHAPTER: Final = "docs/DATABASE.md, «A table that is there already»"
_TEXTS: Final = ("plugin_name", "key", "value_json")
_TIMES: Final = ("expires_at", "created_at", "updated_at")
_COLUMNS: Final = (*_TEXTS, *_TIMES, "version")
_KEY: Final = ("plugin_name", "key")


class Adoption(Struct, frozen=True):
    """What to do with a table that exists already."""

    statements: tuple[str, ...] = ()
    """The statements that make the table Keyloft's; empty if it is as Keyloft would have made it."""
    differences: tuple[str, ...] = ()
    """Why the table can't become Keyloft's."""

    def check(self, database: str) -> None:
        """Refuse a table that can't become Keyloft's.

        Raises:
            CannotOpen: The message says what differs, and what to do.
        """
        if self.differences:
            raise CannotOpen(
                f"{database} has a table {TABLE} that can't be adopted: {'; '.join(self.differences)}. Nothing was "
                f"changed. Change or rename the table: {CHAPTER}, has the statements"
            )


Examination: TypeAlias = Generator[str, Sequence[Row], Adoption | None]
"""Yields queries, is sent their rows, and returns what to do; None if there is no such table."""


def examined(examination: Examination, fetch: Callable[[str], Iterable[Row]]) -> Adoption | None:
    """What an examination finds through a driver that blocks."""
    query = next(examination)
    while True:
        try:
            query = examination.send([tuple(row) for row in fetch(query)])
        except StopIteration as end:
            found: Adoption | None = end.value
            return found


def _misnamed(columns: Iterable[str]) -> list[str]:
    """The differences in the names of the columns."""
    found = list(columns)
    missing = [f"column {name}: expected a text, found no such column" for name in _TEXTS if name not in found]
    return missing + [f"column {name}: expected no such column" for name in found if name not in _COLUMNS]


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


# SQLite

_SQLITE_NOW: Final = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
_SQLITE_TYPES: Final = {
    "plugin_name": "VARCHAR(100)",
    "key": "VARCHAR(255)",
    "value_json": "TEXT",
    **dict.fromkeys(_TIMES, "DATETIME"),
    "version": "BIGINT",
}
_SQLITE_DEFAULTS: Final = {"created_at": _SQLITE_NOW, "updated_at": _SQLITE_NOW, "version": "0"}
_IS_NORMAL: Final = "{} GLOB '" + re.sub("0", "[0-9]", "0000-00-00 00:00:00.000000") + "'"
"""SQL: whether a time has the form in which Keyloft stores times, whose texts sort as the times do."""
_NORMALIZED: Final = f"CASE WHEN {_IS_NORMAL} THEN {{}} ELSE strftime('%Y-%m-%d %H:%M:%f000', {{}}) END"
"""SQL: the same time in that form."""
_COPY: Final = "keyloft_adopted"
_A_TEXT: Final = "a text"
_A_TIME: Final = "a time such as 2030-01-31 12:00:00, in UTC"
_MISFITS: Final = {
    _A_TEXT: "count(CASE WHEN typeof({0}) <> 'text' THEN 1 END)",
    _A_TIME: "count(CASE WHEN typeof({0}) <> 'null' AND (typeof({0}) <> 'text' OR julianday({0}) IS NULL) THEN 1 END)",
}
"""SQL: in how many rows a column does not hold a text, or a time."""


def examine_sqlite(create: Sequence[str]) -> Examination:
    """Examine the table of an SQLite file.

    SQLite can't change most of a column, so a table that differs is rebuilt, with the rows that it had.

    Args:
        create: The statements that make the table and its indexes.
    """
    kinds = yield f"SELECT type FROM sqlite_schema WHERE name = '{TABLE}' AND type IN ('table', 'view')"
    if not kinds:
        return None
    if kinds != [("table",)]:
        return Adoption(differences=(f"{TABLE}: expected a table, found a view",))
    columns = {
        name: (str(kind).upper(), bool(required), default, key_position)
        for name, kind, required, default, key_position in (
            yield f"SELECT name, type, \"notnull\", dflt_value, pk FROM pragma_table_xinfo('{TABLE}')"
        )
    }
    differences = _misnamed(columns)
    for name, (kind, *_) in columns.items():
        is_text, is_number = re.search("CHAR|CLOB|TEXT", kind), re.search("INT|REAL|FLOA|DOUB", kind)
        if (name in _TEXTS and not is_text) or (name in _TIMES and is_number and not is_text):
            differences.append(f"column {name}: expected {_SQLITE_TYPES[name]}, found {kind or 'no type'}")
    triggers = yield f"SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = '{TABLE}'"
    differences += [f"trigger {name}: expected none" for [name] in triggers]
    if differences:
        return Adoption(differences=tuple(differences))

    wanted = {name: _A_TEXT if name in _TEXTS else _A_TIME for name in columns if name != "version"}
    counts = ", ".join([_MISFITS[what].format(name) for name, what in wanted.items()])
    keys = f"(SELECT count(*) FROM (SELECT DISTINCT {', '.join(_KEY)} FROM {TABLE}))"
    [[*wrong, repeated]] = yield f"SELECT {counts}, count(*) - {keys} FROM {TABLE}"
    differences = [
        f"column {name}: expected {what}, found something else in {_rows(number)}"
        for (name, what), number in zip(wanted.items(), wrong, strict=True)
        if number
    ]
    if repeated:
        differences.append(f"primary key: expected each (plugin_name, key) once, found {_rows(repeated)} more")
    if differences:
        return Adoption(differences=tuple(differences))

    same = columns == {
        name: (kind, name != "expires_at", _SQLITE_DEFAULTS.get(name), _KEY.index(name) + 1 if name in _KEY else 0)
        for name, kind in _SQLITE_TYPES.items()
    }
    collations = yield (
        f"SELECT DISTINCT x.coll FROM pragma_index_list('{TABLE}') AS l, pragma_index_xinfo(l.name) AS x "
        "WHERE l.origin = 'pk' AND x.key = 1"
    )
    restricted = yield (
        f"SELECT 1 FROM pragma_index_list('{TABLE}') WHERE \"unique\" AND origin <> 'pk' UNION ALL "
        f"SELECT 1 FROM pragma_foreign_key_list('{TABLE}') UNION ALL "
        f"SELECT 1 FROM sqlite_schema WHERE name = '{TABLE}' AND sql LIKE '%CHECK%'"
    )
    if same and not restricted and collations == [("BINARY",)]:
        odd = " OR ".join([f"NOT ({_IS_NORMAL.format(name)})" for name in _TIMES])
        if not (yield f"SELECT 1 FROM {TABLE} WHERE version <> 0 OR {odd} LIMIT 1"):
            return Adoption((yield from _sqlite_indexes(create[1:])))
    return Adoption(_rebuilt(create, columns))


def _sqlite_indexes(create: Sequence[str]) -> Generator[str, Sequence[Row], tuple[str, ...]]:
    """The statements that make the indexes that are missing, or that have another form."""
    found: dict[str, str] = dict(
        (yield f"SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = '{TABLE}'")
    )
    statements: list[str] = []
    for statement in create:
        name = statement.split()[2]
        if (found.get(name) or "").replace('"', "") != statement:
            statements += [f"DROP INDEX IF EXISTS {name}", statement]
    return tuple(statements)


def _rebuilt(create: Sequence[str], columns: Iterable[str]) -> tuple[str, ...]:
    """The statements that rebuild the table with its rows. They use a copy, because a rename would change views."""
    selected = {name: name for name in _TEXTS}
    for name in _TIMES:
        if name in columns:
            time = _NORMALIZED.format(name, name, name)
            selected[name] = time if name == "expires_at" else f"coalesce({time}, {_SQLITE_NOW})"
    names = ", ".join(selected)
    copied = ", ".join([f"{sql} AS {name}" for name, sql in selected.items()])
    return (
        f"CREATE TEMP TABLE {_COPY} AS SELECT {copied} FROM {TABLE}",
        f"DROP TABLE {TABLE}",
        *create,
        f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM temp.{_COPY}",
        f"DROP TABLE temp.{_COPY}",
    )


# PostgreSQL

_TZ: Final = "timestamp with time zone"
_NO_TZ: Final = "timestamp without time zone"
_VARCHAR: Final = re.compile(r"character varying\((\d+)\)")
_WIDTHS: Final = {"plugin_name": 100, "key": 255}
_SAME_AS_C: Final = ("C", "POSIX")
_OBSTACLES: Final = " UNION ALL ".join(
    [
        "SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = {table} AND NOT tgisinternal",
        "SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = {table}",
        "SELECT 'row security' FROM pg_class WHERE oid = {table} AND relrowsecurity",
        "SELECT 'inheritance' WHERE EXISTS (SELECT FROM pg_inherits WHERE {table} IN (inhrelid, inhparent))",
        # Checks, foreign keys in both directions, exclusions; a deferrable key, which ON CONFLICT can't use.
        "SELECT CASE WHEN condeferrable THEN 'deferrable ' ELSE '' END || 'constraint ' || conname FROM pg_constraint "
        "WHERE {table} IN (conrelid, confrelid) "
        "AND (contype IN ('c', 'f', 'x') OR (contype IN ('p', 'u') AND condeferrable))",
        # A unique index of both columns of the primary key, and perhaps of others, forbids nothing more.
        "SELECT 'unique index ' || c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid "
        "WHERE i.indrelid = {table} AND i.indisunique AND NOT i.indisprimary "
        "AND 2 > (SELECT count(*) FROM pg_attribute AS a WHERE a.attrelid = i.indrelid "
        f"AND a.attname IN {_KEY} AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))",
    ]
)
"""SQL: what would change or refuse some of Keyloft's writes."""


def examine_postgres(create: Sequence[str]) -> Examination:
    """Examine the table of a PostgreSQL database, in the schema in which Keyloft would make it.

    Args:
        create: The statements that make the table and its indexes.
    """
    kinds = yield (
        f"SELECT oid::bigint, relkind::text, relpersistence = 'u' FROM pg_class WHERE relname = '{TABLE}' "
        "AND relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())"
    )
    if not kinds:
        return None
    [(table, kind, is_unlogged)] = kinds
    if kind != "r":
        found = "a partitioned one" if kind == "p" else "a view or the like"
        return Adoption(differences=(f"{TABLE}: expected a table, found {found}",))
    rows = yield (
        "SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull, c.collname::text, "
        "pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute AS a LEFT JOIN pg_collation AS c ON c.oid = a.attcollation "
        "LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum "
        f"WHERE a.attrelid = {table} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
    )
    columns = {name: tuple(about) for name, *about in rows}
    differences = _misnamed(columns)
    expected = {
        **dict.fromkeys(_TEXTS, ("TEXT or VARCHAR", ("text", "character varying"))),
        **dict.fromkeys(_TIMES, ("TIMESTAMP WITH TIME ZONE", (_TZ, _NO_TZ))),
        "version": ("BIGINT", ("bigint", "integer", "smallint")),
    }
    for name, (kind, *_) in columns.items():
        wanted, allowed = expected.get(name, ("", (kind,)))
        # The name of a type may have a precision in it, as in timestamp(3) with time zone.
        if re.sub(r"\(\d+\)", "", kind) not in allowed:
            differences.append(f"column {name}: expected {wanted}, found {kind.upper()}")
    primary = yield (
        "SELECT a.attname::text FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid "
        f"AND a.attnum = ANY (i.indkey) WHERE i.indrelid = {table} AND i.indisprimary ORDER BY 1"
    )
    key = [name for [name] in primary]
    if key and sorted(key) != sorted(_KEY):
        differences.append(f"primary key: expected plugin_name, key, found {', '.join(key)}")
    obstacles = yield _OBSTACLES.format(table=table)
    differences += [f"{what}: expected none" for [what] in obstacles]
    if differences:
        return Adoption(differences=tuple(differences))

    nulls = ", ".join([f"count(*) - count({name})" for name in _TEXTS])
    version = "count(*) FILTER (WHERE version IS DISTINCT FROM 0)" if "version" in columns else "0"
    distinct = f"(SELECT count(*) FROM (SELECT DISTINCT {', '.join(_KEY)} FROM {TABLE}) AS keys)"
    [[*missing, repeated, numbered]] = yield f"SELECT {nulls}, count(*) - {distinct}, {version} FROM {TABLE}"
    differences = [
        f"column {name}: expected a text, found NULL in {_rows(number)}"
        for name, number in zip(_TEXTS, missing, strict=True)
        if number
    ]
    if repeated:
        differences.append(f"primary key: expected each (plugin_name, key) once, found {_rows(repeated)} more")
    if differences:
        return Adoption(differences=tuple(differences))
    durable = [f"ALTER TABLE {TABLE} SET LOGGED"] if is_unlogged else []  # else a crash of the server empties it
    altered = _altered(columns, bool(key), bool(numbered))
    return Adoption((*durable, *altered, *(yield from _postgres_indexes(create[1:]))))


def _altered(columns: dict[str, Row], has_key: bool, is_numbered: bool) -> list[str]:
    """The statements that make an existing table Keyloft's."""
    statements: list[str] = []

    def alter(action: str) -> None:
        statements.append(f"ALTER TABLE {TABLE} {action}")

    for name in _TEXTS:
        kind, is_required, collation, _ = columns[name]
        if name == "value_json":
            if kind != "text":
                alter(f"ALTER COLUMN {name} TYPE TEXT")
        else:
            width = _VARCHAR.fullmatch(kind)
            is_narrow = width is not None and int(width[1]) < _WIDTHS[name]
            if is_narrow or collation not in _SAME_AS_C:
                alter(f'ALTER COLUMN {name} TYPE {f"VARCHAR({_WIDTHS[name]})" if is_narrow else kind} COLLATE "C"')
        if not is_required:
            alter(f"ALTER COLUMN {name} SET NOT NULL")
    for name in _TIMES:
        default = "" if name == "expires_at" else " DEFAULT CURRENT_TIMESTAMP NOT NULL"
        if name not in columns:
            alter(f"ADD COLUMN {name} {_TZ.upper()}{default}")
            continue
        kind, is_required, _, found_default = columns[name]
        if kind != _TZ:
            if found_default is not None:
                alter(f"ALTER COLUMN {name} DROP DEFAULT")
                found_default = None
            # As everywhere in Keyloft, a time without a zone counts as UTC.
            using = f" USING {name} AT TIME ZONE 'UTC'" if "without" in kind else ""
            alter(f"ALTER COLUMN {name} TYPE {_TZ.upper()}{using}")
        if not default:
            if is_required:
                alter(f"ALTER COLUMN {name} DROP NOT NULL")
            continue
        if found_default is None:
            alter(f"ALTER COLUMN {name} SET DEFAULT CURRENT_TIMESTAMP")
        if not is_required:
            statements.append(f"UPDATE {TABLE} SET {name} = CURRENT_TIMESTAMP WHERE {name} IS NULL")
            alter(f"ALTER COLUMN {name} SET NOT NULL")
    if "version" not in columns:
        alter("ADD COLUMN version BIGINT DEFAULT 0 NOT NULL")
    else:
        kind, is_required, _, found_default = columns["version"]
        if is_numbered:  # the versions are not from this database's version counter
            statements.append(f"UPDATE {TABLE} SET version = 0 WHERE version IS DISTINCT FROM 0")
        if kind != "bigint":
            alter("ALTER COLUMN version TYPE BIGINT")
        if found_default is None:
            alter("ALTER COLUMN version SET DEFAULT 0")
        if not is_required:
            alter("ALTER COLUMN version SET NOT NULL")
    if not has_key:
        alter(f"ADD CONSTRAINT pk_{TABLE} PRIMARY KEY ({', '.join(_KEY)})")
    return statements


def _postgres_indexes(create: Sequence[str]) -> Generator[str, Sequence[Row], list[str]]:
    found: dict[str, str] = dict(
        (
            yield "SELECT indexname::text, indexdef FROM pg_indexes "
            f"WHERE schemaname = current_schema() AND tablename = '{TABLE}'"
        )
    )
    statements: list[str] = []
    for statement in create:
        name, is_partial = statement.split()[2], " WHERE " in statement
        columns = statement[statement.index("(") :].split(")")[0] + ")"
        definition = found.get(name)
        if definition is None:
            statements.append(statement)
        elif f"USING btree {columns}" not in definition or (" WHERE " in definition) != is_partial:
            statements += [f"DROP INDEX {name}", statement]
    return statements
