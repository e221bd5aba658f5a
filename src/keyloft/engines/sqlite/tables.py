"""The tables of the key spaces: the SQL of every hot statement, and how a row becomes a record.

Commits, versions, watches and expiry work the same way in all spaces; a layout is all that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from msgspec.structs import astuple, replace

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Page, PluginKey, Record, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON, LOST
from keyloft.engines import tables
from keyloft.engines.tables import Layout


class LargeValueTable:
    """The statements of a table for large values, which would otherwise lie between the keys of a tree (ADR 5).

    A row there holds the key of its entry, too. Statements take the bindings that their docstring names.
    """

    def __init__(self, entries: str) -> None:
        self.table = table = f"{entries}_large"
        self.same = f"big.id = large AND big.key = {entries}.key"
        """SQL: whether a row `big` of this table holds the value of an entry"""
        self.value = f"(SELECT big.value FROM {table} AS big WHERE {self.same})"
        """SQL: the large value of an entry, or NULL"""
        # Neither of these two reads the value.
        self.length = f"(SELECT length(big.value) FROM {table} AS big WHERE {self.same})"
        self.is_lost = f"value IS NULL AND NOT EXISTS (SELECT 1 FROM {table} AS big WHERE {self.same})"
        """SQL: whether an entry has no value in either table"""
        self.get = f"SELECT value FROM {table} WHERE id = ?2 AND key = ?1"
        """key, id; selects the value"""
        self.find = f"SELECT large FROM {entries} WHERE key = ?1"
        """key; selects the id of its value, or NULL"""
        # Not an upsert: SQLite would write all that it replaces to a temporary file first.
        self.add = f"INSERT INTO {table} (key, value) VALUES (?1, ?2)"
        """key, value"""
        self.replace = f"UPDATE {table} SET value = ?3 WHERE id = ?2 AND key = ?1"
        """key, id, value"""
        self.remove = f"DELETE FROM {table} WHERE id = ?2 AND key = ?1"
        """key, id"""

    @staticmethod
    def holds(record: Record) -> bool:
        return len(record.key) + len(record.value) > limits.ROW_BYTES


@dataclass(kw_only=True, eq=False)
class SqliteLayout(Layout):
    """The table of one key space.

    `milliseconds` calls an SQL function of that name, which the connection must be given.
    """

    mark = "?"
    now: str = "?1"
    found: str
    """SQL: the columns of which `record` makes a record of a key; the id of a large value instead of the value."""
    found_whole: str
    """SQL: the same, with large values, and NULL for one that is lost."""
    content: tuple[str, ...]
    """The three columns of key and value."""
    bind_time: Callable[[int | None], Any]
    """A time in milliseconds as the columns hold it."""
    bind_put: Callable[[Record, bool], Row]
    large: LargeValueTable | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        table = self.table
        self.get = f"SELECT {self.found} FROM {table} WHERE {self.equal(1)}"
        """key"""
        asked = [f"asked_{column}" for column in self.key]
        keys = ", ".join([f"({at}{', ?' * len(asked)})" for at in range(limits.SQLITE_GETS_PER_STATEMENT)])
        same = " AND ".join(map("{} = {}".format, self.key, asked))
        # CROSS JOIN keeps SQLite from swapping the two and scanning the whole table.
        self.gets = (
            f"WITH asked (position, {', '.join(asked)}) AS (VALUES {keys}) "
            f"SELECT position, {self.found_whole} FROM asked CROSS JOIN {table} ON {same}"
        )
        """up to SQLITE_GETS_PER_STATEMENT keys; selects each key's position, then what `found_whole` says"""
        # The unary plus makes SQLite use the index of expiries: expired entries are few.
        self.count = (
            f"SELECT (SELECT count(*) FROM {table} WHERE {self.within()}) - "
            f"(SELECT count(*) FROM {table} WHERE expires_at <= ?1 AND {self.within(sign='+')})"
        )
        """now, range"""
        self.set_expiry = f"UPDATE {table} SET expires_at = ?1 WHERE {self.equal(2)}"
        """expires_at, key"""
        self.remove = f"DELETE FROM {table} WHERE {self.equal(1)}"
        """key"""
        self.put = self._upsert() if self.large is None else f"{self._upsert()} WHERE large IS NULL"
        """what `bind_put` returns; changes nothing where a large value is stored"""
        self.put_large = self._upsert("large")
        """the same, with NULL for a large value, and the id of the large value or NULL"""

    def _upsert(self, *large: str) -> str:
        names = [*self.content, "version", "expires_at", "created_at", "updated_at"]
        marks = {name: f"?{at}" for at, name in enumerate(names, 1)} | dict.fromkeys(large, "?9")
        updates = [f"{name} = {mark}" for name, mark in marks.items() if name not in (*self.key, "created_at")]
        return (
            f"INSERT INTO {self.table} ({', '.join(marks)}) VALUES ({', '.join(marks.values())}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {', '.join(updates)}, "
            "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
        )


_NO_KEYS: Final = (None,) * limits.SQLITE_GETS_PER_STATEMENT  # no key equals NULL


def _bytes_layout(table: str, *, lists_times: bool = False) -> SqliteLayout:
    """A table with one binary key, whose rows lie in the order of their keys.

    In a WITHOUT ROWID table a row is part of the key's tree: one lookup finds key and value, and a list reads
    neighbours from the same page. That holds for small rows; large values have a table of their own (ADR 5).
    """
    large = LargeValueTable(table)
    columns = "encoding, version, expires_at, created_at, updated_at"
    # Lists of tuples don't show `updated_at`: leaving it out makes a list of 1000 a seventh faster.
    times = f"version, expires_at{', updated_at' if lists_times else ''}"
    return SqliteLayout(
        table=table,
        key=("key",),
        content=("key", "value", "encoding"),
        large=large,
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, large INTEGER, value BLOB) WITHOUT ROWID",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE TABLE {large.table} (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        ),
        found=f"coalesce(value, large), {columns}",
        found_whole=f"coalesce(value, {large.value}), {columns}",
        keys_only=f"{table}.key, x'', encoding, {times}",
        # A join looks a large value up once and does not copy it; for a single key, opening both tables takes longer.
        source=f"{table} LEFT JOIN {large.table} AS big ON {large.same}",
        listed=f"{table}.key, coalesce({table}.value, big.value, x''), "
        f"CASE WHEN {table}.value IS NULL AND big.id IS NULL THEN {LOST} ELSE encoding END, {times}",
        row=f"key, coalesce(value, {large.value}, x''), "
        f"CASE WHEN {large.is_lost} THEN {LOST} ELSE encoding END, version",
        row_record=Record,
        length=f"coalesce(length(value), {large.length}, 0)",
        milliseconds=lambda column: column,
        record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
        bind_keys=lambda keys: (*keys, *_NO_KEYS[len(keys) :]),
        bind_time=lambda moment: moment,
        bind_put=lambda record, is_new_entry: (*astuple(record), is_new_entry),
    )


def _plugin_layout() -> SqliteLayout:
    """The plugins' table, made to be read by people: texts, JSON, and times that any SQL shell can compare.

    A row that was inserted by hand has version 0, and is read like any other.
    """
    key = ("plugin_name", "key")
    value = "CAST(value_json AS BLOB)"

    def bind_time(moment: int | None) -> str | None:
        return None if moment is None else time_text(moment)

    def record(key: PluginKey, value: bytes, version: int, expires_at: object) -> Record:
        return Record(key, value, JSON, version, None if expires_at is None else milliseconds(expires_at))

    def page(rows: Sequence[Row]) -> Page:
        page = tables.plugin_page(rows)
        return replace(page, expiries=list(map(milliseconds, page.expiries))) if any(page.expiries) else page

    def bind_put(record: Record, is_new_entry: bool) -> Row:
        times = map(bind_time, (record.expires_at, record.created_at, record.updated_at))
        return (*record.key, plugin_text(record), record.version, *times, is_new_entry)

    return SqliteLayout(
        table=schema.PLUGIN_TABLE,
        key=key,
        content=(*key, "value_json"),
        create=tables.create_plugin_table("", "DATETIME", "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"),
        found=f"{value}, version, expires_at",
        found_whole=f"{value}, version, expires_at",
        keys_only="plugin_name, key, x'', version, expires_at",
        listed=f"plugin_name, key, {value}, version, expires_at",
        row=f"plugin_name, key, {value}, version",
        row_record=lambda plugin, key, value, version, *times: Record((plugin, key), value, JSON, version, *times),
        length=f"length({value})",
        milliseconds=lambda column: f"milliseconds({column})",
        record=record,
        page=page,
        bind_keys=lambda keys: (*chain.from_iterable(keys), *(2 * _NO_KEYS[len(keys) :])),
        bind_time=bind_time,
        bind_put=bind_put,
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
