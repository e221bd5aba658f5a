"""The tables of the key spaces: the SQL of every hot statement, and how a row becomes a record.

Commits, versions, watches and expiry work the same way in all spaces; a layout is all that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import astuple

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Page, PluginKey, Record, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON, LOST
from keyloft.engines import tables
from keyloft.engines.tables import Layout, equal, within


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
    lost: str
    """SQL: whether the value of an entry is lost"""
    put_entry: str
    """the bindings of `Layout.put`, with NULL for a large value, and the id of the large value or NULL"""

    @staticmethod
    def holds(record: Record) -> bool:
        return len(record.key) + len(record.value) > limits.ROW_BYTES


class SqliteLayout(Layout, frozen=True, kw_only=True):
    """The table of one key space. `get` selects what `record` takes after a key; `gets` begins with its position.

    `get` selects the id of a large value instead of the value; `gets` selects NULL for a value that is lost.
    `milliseconds` calls a function of that name, which the connection must be given.
    """

    bind_time: Callable[[int | None], Any]
    """A time in milliseconds as the columns hold it."""
    bind_put: Callable[[Record, bool], Row]
    put: str
    """what `bind_put` returns; changes nothing where a large value is stored"""
    set_expiry: str
    """expires_at, key"""
    large: LargeValueTable | None = None


_NO_KEYS: Final = (None,) * limits.SQLITE_GETS_PER_STATEMENT  # no key equals NULL


def _statements(table: str, key: tuple[str, ...], **lists: str) -> dict[str, Any]:
    """The fields of a layout whose SQL differs in the columns of the key alone; takes what `tables.lists` takes."""
    full_key = [f"{table}.{column}" for column in key]
    # The unary plus keeps SQLite from the index of keys: the expired entries are few.
    not_by_key = [f"+{column}" for column in full_key]
    return {
        **tables.lists(table, key, "?", "?1", **lists),
        "count": f"SELECT (SELECT count(*) FROM {table} WHERE {within(full_key, '?')}) - "
        f"(SELECT count(*) FROM {table} WHERE expires_at <= ?1 AND {within(not_by_key, '?')})",
        "set_expiry": f"UPDATE {table} SET expires_at = ?1 WHERE {equal(key, '?', 2)}",
        "remove": f"DELETE FROM {table} WHERE {equal(key, '?', 1)}",
    }


def _upsert(table: str, key: tuple[str, ...], columns: tuple[str, ...], large: tuple[str, ...] = ()) -> str:
    """The statement that puts a row: three columns of key and value, version, times, whether the entry is new.

    The column `large` of a table with large values is bound after those.
    """
    names = [*columns, "version", "expires_at", "created_at", "updated_at"]
    marks = {name: f"?{at}" for at, name in enumerate(names, 1)} | dict.fromkeys(large, "?9")
    updates = [f"{name} = {mark}" for name, mark in marks.items() if name not in (*key, "created_at")]
    return (
        f"INSERT INTO {table} ({', '.join(marks)}) VALUES ({', '.join(marks.values())}) "
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {', '.join(updates)}, "
        "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
    )


def _gets(table: str, columns: str, key: tuple[str, ...]) -> str:
    names = [f"asked_{column}" for column in key]
    rows = ", ".join([f"({at}{', ?' * len(key)})" for at in range(limits.SQLITE_GETS_PER_STATEMENT)])
    match = " AND ".join([f"{column} = {name}" for column, name in zip(key, names, strict=True)])
    # CROSS JOIN keeps SQLite from swapping the two and scanning the whole table.
    return (
        f"WITH asked (position, {', '.join(names)}) AS (VALUES {rows}) "
        f"SELECT position, {columns} FROM asked CROSS JOIN {table} ON {match}"
    )


def _bytes_layout(table: str, *, lists_times: bool = False) -> SqliteLayout:
    """A table with one binary key, whose rows lie in the order of their keys.

    In a WITHOUT ROWID table a row is part of the key's tree: one lookup finds key and value, and a list reads
    neighbours from the same page. That holds for small rows; large values have a table of their own (ADR 5).
    """
    key, content = ("key",), ("key", "value", "encoding")
    columns = "encoding, version, expires_at, created_at, updated_at"
    same = f"big.id = large AND big.key = {table}.key"
    big = f"FROM {table}_large AS big WHERE {same}"
    # Lists of tuples don't show `updated_at`: leaving it out makes a list of 1000 a seventh faster.
    time = ", updated_at" if lists_times else ""
    return SqliteLayout(
        **_statements(
            table,
            key,
            keys_only=f"{table}.key, x'', encoding, version, expires_at{time}",
            listed=f"{table}.key, coalesce({table}.value, big.value, x''), CASE WHEN {table}.value IS NULL "
            f"AND big.id IS NULL THEN {LOST} ELSE encoding END, version, expires_at{time}",
            # A join looks a large value up once and does not copy it; for a single key, opening both tables takes
            # longer.
            source=f"{table} LEFT JOIN {table}_large AS big ON {same}",
        ),
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, large INTEGER, value BLOB) WITHOUT ROWID",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        ),
        row=f"key, coalesce(value, (SELECT big.value {big}), x''), "
        f"CASE WHEN value IS NULL THEN coalesce((SELECT encoding {big}), {LOST}) ELSE encoding END, version",
        row_record=Record,
        milliseconds=lambda column: column,
        length=f"coalesce(length(value), (SELECT length(big.value) {big}), 0)",
        record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
        bind_keys=lambda keys: (*keys, *_NO_KEYS[len(keys) :]),
        bind_time=lambda moment: moment,
        bind_put=lambda record, is_new_entry: (*astuple(record), is_new_entry),
        get=f"SELECT coalesce(value, large), {columns} FROM {table} WHERE key = ?1",
        gets=_gets(table, f"coalesce(value, (SELECT big.value {big})), {columns}", key),
        put=f"{_upsert(table, key, content)} WHERE large IS NULL",
        large=LargeValueTable(
            table=f"{table}_large",
            get=f"SELECT value FROM {table}_large WHERE id = ?2 AND key = ?1",
            find=f"SELECT large FROM {table} WHERE key = ?1",
            # Not an upsert: SQLite would write all that it replaces to a temporary file first.
            add=f"INSERT INTO {table}_large (key, value) VALUES (?1, ?2)",
            replace=f"UPDATE {table}_large SET value = ?3 WHERE id = ?2 AND key = ?1",
            remove=f"DELETE FROM {table}_large WHERE id = ?2 AND key = ?1",
            lost=f"value IS NULL AND NOT EXISTS (SELECT 1 {big})",
            put_entry=_upsert(table, key, content, large=("large",)),
        ),
    )


def _plugin_layout() -> SqliteLayout:
    """The plugins' table, made to be read by people: texts, JSON, and times that any SQL shell can compare.

    A row that was inserted by hand has version 0, and is read like any other.
    """
    table, key = schema.PLUGIN_TABLE, ("plugin_name", "key")
    value = "CAST(value_json AS BLOB)"
    columns = f"{value}, version, expires_at"

    def bind_time(moment: int | None) -> str | None:
        return None if moment is None else time_text(moment)

    def record(key: PluginKey, value: bytes, version: int, expires_at: object) -> Record:
        return Record(key, value, JSON, version, None if expires_at is None else milliseconds(expires_at))

    def page(rows: Sequence[Row]) -> Page:
        page = tables.plugin_page(rows)
        if any(page.expiries):
            page.expiries = list(map(milliseconds, page.expiries))
        return page

    def bind_put(record: Record, is_new_entry: bool) -> Row:
        times = map(bind_time, (record.expires_at, record.created_at, record.updated_at))
        return (*record.key, plugin_text(record), record.version, *times, is_new_entry)

    return SqliteLayout(
        **_statements(
            table,
            key,
            keys_only="plugin_name, key, x'', version, expires_at",
            listed=f"plugin_name, key, {columns}",
        ),
        create=tables.create_plugin_table("", "DATETIME", "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"),
        row=f"plugin_name, key, {value}, version",
        row_record=lambda plugin, key, value, version, *times: Record((plugin, key), value, JSON, version, *times),
        milliseconds=lambda column: f"milliseconds({column})",
        length=f"length({value})",
        record=record,
        page=page,
        bind_keys=lambda keys: (*chain.from_iterable(keys), *(2 * _NO_KEYS[len(keys) :])),
        bind_time=bind_time,
        bind_put=bind_put,
        get=f"SELECT {columns} FROM {table} WHERE plugin_name = ?1 AND key = ?2",
        gets=_gets(table, columns, key),
        put=_upsert(table, key, (*key, "value_json")),
    )


_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)


@lru_cache(maxsize=256)  # a group has one time, and most expiries of it are the same
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


LAYOUTS: Final[Mapping[Space, SqliteLayout]] = {
    Space.TUPLES: _bytes_layout(schema.TUPLE_TABLE),
    Space.SEMANTIC: _bytes_layout(schema.SEMANTIC_TABLE, lists_times=True),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = tables.plugin_usage("?1", "sum(octet_length(value_json))")
"""now"""

READ_VERSION: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE}"
WRITE_VERSION: Final = f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = ?1"

CREATE: Final = tables.create_all(LAYOUTS.values(), "INTEGER")
"""The statements that turn an empty database into one of Keyloft's."""
