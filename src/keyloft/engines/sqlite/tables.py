"""The tables of the key spaces: the SQL of every hot statement, and how a row becomes a record.

Commits, versions, watches and expiry work the same way in all spaces; a layout is all that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain, product
from typing import Any, Final

from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Key, Page, PluginKey, Record, Scan, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON, LOST


class LargeValueTable(Struct, frozen=True):
    """The statements of a table for large values, which would otherwise lie between the keys of a tree (ADR 5).

    A row there holds the key of its entry, too. Statements take the bindings that their docstring names.
    """

    table: str
    get: str
    """key, id; selects the value"""
    find: str
    """key; selects the id of its value, or NULL"""
    add: str
    """key, value"""
    replace: str
    """key, id, value"""
    remove: str
    """key, id"""
    put_entry: str
    """the bindings of `Layout.put`, with NULL for a large value, and the id of the large value or NULL"""

    @staticmethod
    def holds(record: Record) -> bool:
        return len(record.key) + len(record.value) > limits.ROW_BYTES


class Layout(Struct, frozen=True):
    """The table of one key space. Statements take the bindings that their docstring names."""

    table: str
    key: tuple[str, ...]
    """The columns of the key."""
    create: tuple[str, ...]
    value: str
    """Selects a whole value, a large one included."""
    encoding: str
    """Selects its encoding, or LOST."""
    length: str
    """Selects its size in bytes."""
    record: Callable[..., Record]
    """Makes a record of a key and the columns that `get` selects."""
    page: Callable[[Sequence[Row]], Page]
    """Makes a page of the rows that `scan` and `expired` select."""
    bind_key: Callable[[Key], Row]
    bind_keys: Callable[[Sequence[Key]], Row]
    """The bindings of `gets`."""
    bind_range: Callable[[Key, Key], Row]
    bind_time: Callable[[int | None], Any]
    """A time in milliseconds as the columns hold it."""
    get: str
    """key; selects the id of a large value instead of the value"""
    gets: str
    """up to SQLITE_GETS_PER_STATEMENT keys; selects each key's position, then a record, with NULL for a lost value"""
    scans: Mapping[tuple[bool, bool, bool], str]
    """start, end, now, limit; by (reverse, keys_only, after)"""
    count: str
    """start, end, now"""
    expired: str
    """now, limit"""
    bind_put: Callable[[Record, bool], Row]
    put: str
    """changes nothing where a large value is stored"""
    set_expiry: str
    """expires_at, key"""
    remove: str
    """key"""
    large: LargeValueTable | None = None

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


_NO_KEYS: Final = (None,) * limits.SQLITE_GETS_PER_STATEMENT  # no key equals NULL


def _statements(table: str, key: tuple[str, ...], *, no_value: str, listed: str, source: str) -> dict[str, Any]:
    """The fields of a layout whose SQL differs in the columns of the key alone.

    Args:
        table: The table.
        key: The columns of its key; a range covers the last one, the others are equal.
        no_value: The columns of a list of keys.
        listed: The columns of a list of entries.
        source: Where such a list selects from.
    """
    last, size = f"{table}.{key[-1]}", len(key)

    def equal(first: int) -> str:
        return " AND ".join([f"{column} = ?{at}" for at, column in enumerate(key, first)])

    def within(plus: str = "", over: str = ">=") -> str:
        equal = "".join([f"{plus}{column} = ?{at} AND " for at, column in enumerate(key[:-1], 1)])
        return f"{equal}{plus}{last} {over} ?{size} AND {plus}{last} < ?{size + 1}"

    scans = {
        (reverse, keys_only, after): (
            f"SELECT {no_value if keys_only else listed} FROM {table if keys_only else source} "
            f"WHERE {within(over='>' if after else '>=')} AND (expires_at IS NULL OR expires_at > ?{size + 2}) "
            f"ORDER BY {last} {'DESC' if reverse else 'ASC'} LIMIT ?{size + 3}"
        )
        for reverse, keys_only, after in product((False, True), repeat=3)
    }
    return {
        "table": table,
        "key": key,
        "scans": scans,
        # The unary plus keeps SQLite from the index of keys: the expired entries are few.
        "count": f"SELECT (SELECT count(*) FROM {table} WHERE {within()}) - "
        f"(SELECT count(*) FROM {table} WHERE expires_at <= ?{size + 2} AND {within('+')})",
        "expired": f"SELECT {no_value} FROM {table} WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
        "set_expiry": f"UPDATE {table} SET expires_at = ?1 WHERE {equal(2)}",
        "remove": f"DELETE FROM {table} WHERE {equal(1)}",
    }


def _gets(table: str, columns: str, key: tuple[str, ...]) -> str:
    names = [f"asked_{column}" for column in key]
    rows = ", ".join([f"({at}{', ?' * len(key)})" for at in range(limits.SQLITE_GETS_PER_STATEMENT)])
    match = " AND ".join([f"{column} = {name}" for column, name in zip(key, names, strict=True)])
    # CROSS JOIN keeps SQLite from swapping the two and scanning the whole table.
    return (
        f"WITH asked (position, {', '.join(names)}) AS (VALUES {rows}) "
        f"SELECT position, {columns} FROM asked CROSS JOIN {table} ON {match}"
    )


def bytes_layout(table: str, *, lists_times: bool = False) -> Layout:
    """A table with one binary key, whose rows lie in the order of their keys.

    In a WITHOUT ROWID table a row is part of the key's tree: one lookup finds key and value, and a list reads
    neighbours from the same page. That holds for small rows; large values have a table of their own (ADR 5).
    """
    columns = "encoding, version, expires_at, created_at, updated_at"
    same = f"big.id = large AND big.key = {table}.key"
    big = f"FROM {table}_large AS big WHERE {same}"
    # Lists of tuples don't show `updated_at`: leaving it out makes a list of 1000 a seventh faster.
    time = ", updated_at" if lists_times else ""
    no_value = f"{table}.key, x'', encoding, version, expires_at{time}"
    # A join looks a large value up once and does not copy it; for a single key, opening both tables takes longer.
    joined = f"{table} LEFT JOIN {table}_large AS big ON {same}"
    listed = (
        f"{table}.key, coalesce({table}.value, big.value, x''), "
        f"CASE WHEN {table}.value IS NULL AND big.id IS NULL THEN {LOST} ELSE encoding END, version, expires_at{time}"
    )

    upsert = (
        "ON CONFLICT (key) DO UPDATE SET value = ?2, encoding = ?3, version = ?4, expires_at = ?5, updated_at = ?7, "
        "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
    )
    return Layout(
        **_statements(table, ("key",), no_value=no_value, listed=listed, source=joined),
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, large INTEGER, value BLOB) WITHOUT ROWID",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        ),
        value=f"coalesce(value, (SELECT big.value {big}), x'')",
        encoding=f"CASE WHEN value IS NULL THEN coalesce((SELECT encoding {big}), {LOST}) ELSE encoding END",
        length=f"coalesce(length(value), (SELECT length(big.value) {big}), 0)",
        record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
        bind_key=lambda key: (key,),
        bind_keys=lambda keys: (*keys, *_NO_KEYS[len(keys) :]),
        bind_range=lambda start, end: (start, end),
        bind_time=lambda moment: moment,
        get=f"SELECT coalesce(value, large), {columns} FROM {table} WHERE key = ?1",
        gets=_gets(table, f"coalesce(value, (SELECT big.value {big})), {columns}", ("key",)),
        bind_put=lambda record, is_new_entry: (
            record.key,
            record.value,
            record.encoding,
            record.version,
            record.expires_at,
            record.created_at,
            record.updated_at,
            is_new_entry,
        ),
        put=(
            f"INSERT INTO {table} (key, value, {columns}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) {upsert} "
            "WHERE large IS NULL"
        ),
        large=LargeValueTable(
            table=f"{table}_large",
            get=f"SELECT value FROM {table}_large WHERE id = ?2 AND key = ?1",
            find=f"SELECT large FROM {table} WHERE key = ?1",
            # Not an upsert: SQLite would write all that it replaces to a temporary file first.
            add=f"INSERT INTO {table}_large (key, value) VALUES (?1, ?2)",
            replace=f"UPDATE {table}_large SET value = ?3 WHERE id = ?2 AND key = ?1",
            remove=f"DELETE FROM {table}_large WHERE id = ?2 AND key = ?1",
            put_entry=(
                f"INSERT INTO {table} (key, value, {columns}, large) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?9) "
                f"{upsert}, large = ?9"
            ),
        ),
    )


def _plugin_layout() -> Layout:
    """The plugins' table, made to be read by people: texts, JSON, and times that any SQL shell can compare.

    A row that was inserted by hand has version 0, and is read like any other.
    """
    table, key = schema.PLUGIN_TABLE, ("plugin_name", "key")
    value = "CAST(value_json AS BLOB)"
    columns = f"{value}, version, expires_at"
    no_value = "plugin_name, key, x'', version, expires_at"

    def record(key: PluginKey, value: bytes, version: int, expires_at: object) -> Record:
        return Record(key, value, JSON, version, None if expires_at is None else milliseconds(expires_at))

    def page(rows: Sequence[Row]) -> Page:
        if not rows:
            return Page()
        plugins, keys, values, versions, expiries = zip(*rows, strict=True)
        return Page(
            list(zip(plugins, keys, strict=True)),
            values,
            [JSON] * len(rows),
            versions,
            list(map(milliseconds, expiries)) if any(expiries) else expiries,
        )

    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
    return Layout(
        **_statements(table, key, no_value=no_value, listed=f"plugin_name, key, {columns}", source=table),
        create=(
            f"CREATE TABLE {table} (plugin_name VARCHAR(100) NOT NULL, key VARCHAR(255) NOT NULL, "
            f"value_json TEXT NOT NULL, expires_at DATETIME, created_at DATETIME DEFAULT ({now}) NOT NULL, "
            f"updated_at DATETIME DEFAULT ({now}) NOT NULL, version BIGINT DEFAULT 0 NOT NULL, "
            f"CONSTRAINT pk_{table} PRIMARY KEY (plugin_name, key))",
            f"CREATE INDEX idx_plugin_kv_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE INDEX idx_plugin_kv_prefix ON {table} (plugin_name, key)",
        ),
        value=value,
        encoding=f"{int(JSON)}",
        length=f"length({value})",
        record=record,
        page=page,
        bind_key=lambda key: key,
        bind_keys=lambda keys: (*chain.from_iterable(keys), *(2 * _NO_KEYS[len(keys) :])),
        bind_range=lambda start, end: (*start, end[1]),
        bind_time=lambda moment: None if moment is None else time_text(moment),
        get=f"SELECT {columns} FROM {table} WHERE plugin_name = ?1 AND key = ?2",
        gets=_gets(table, columns, key),
        bind_put=lambda record, is_new_entry: (
            *record.key,
            plugin_text(record),
            record.version,
            None if record.expires_at is None else time_text(record.expires_at),
            time_text(record.created_at),
            time_text(record.updated_at),
            is_new_entry,
        ),
        put=(
            f"INSERT INTO {table} (plugin_name, key, value_json, version, expires_at, created_at, updated_at) "
            "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (plugin_name, key) DO UPDATE SET "
            "value_json = ?3, version = ?4, expires_at = ?5, updated_at = ?7, "
            "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
        ),
    )


_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)


@lru_cache(limits.SQLITE_TIME_TEXTS)
def time_text(moment: int) -> str:
    """A time as SQLite and SQLAlchemy write it, in UTC and of fixed width, so that texts sort as times."""
    return (_EPOCH + moment * _MILLISECOND).isoformat(" ", "microseconds")


def milliseconds(text: object) -> int | None:
    """The time of a text, rounded up to a whole millisecond.

    A cell that was written by hand may be no time. It counts as SQL compares it: a number comes before all texts, so it
    has expired; any other text comes after them, so it never expires.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        return 0
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return schema.NEVER
    return -((_EPOCH - moment) // _MILLISECOND)


LAYOUTS: Final[Mapping[Space, Layout]] = {
    Space.TUPLES: bytes_layout(schema.TUPLE_TABLE),
    Space.SEMANTIC: bytes_layout(schema.SEMANTIC_TABLE, lists_times=True),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = (
    f"SELECT plugin_name, count(*), sum(octet_length(value_json)) FROM {schema.PLUGIN_TABLE} "
    "WHERE expires_at IS NULL OR expires_at > ?1 GROUP BY plugin_name ORDER BY plugin_name"
)
"""now"""

READ_VERSION: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE}"
WRITE_VERSION: Final = f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = ?1"

CREATE: Final[tuple[str, ...]] = (
    f"CREATE TABLE {schema.REVISION_TABLE} (version_num VARCHAR(32) NOT NULL, "
    f"CONSTRAINT {schema.REVISION_TABLE}_pkc PRIMARY KEY (version_num))",
    f"CREATE TABLE {schema.VERSION_COUNTER_TABLE} "
    "(id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL)",
    f"INSERT INTO {schema.VERSION_COUNTER_TABLE} (id, version) VALUES (1, 0)",
    *(statement for layout in LAYOUTS.values() for statement in layout.create),
    f"INSERT INTO {schema.REVISION_TABLE} (version_num) VALUES ('{schema.REVISION}')",
)
"""The statements that turn an empty database into one of Keyloft's."""
