"""The tables of the key spaces: the SQL of every hot statement, and how a row becomes a record.

Commits, versions, watches and expiry work the same way in all spaces; only the layouts differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from typing import Any, Final
from zlib import adler32

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Due, DuePage, Head, Page, PluginKey, Record, Set, Space
from keyloft.core.schema import Row
from keyloft.core.values import DAMAGED, JSON, LOST
from keyloft.engines import tables
from keyloft.engines.tables import Layout


class LargeValueTable:
    """The statements of a table for large values, which would otherwise be stored between the keys of a tree (ADR 5).

    Its rows hold the keys of their entries, too. The docstring of a statement names its bindings.
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
        # Not an upsert, for which SQLite would first write what it replaces to a temporary file.
        self.add = f"INSERT INTO {table} (key, value) VALUES (?1, ?2)"
        """key, value"""
        self.replace = f"UPDATE {table} SET value = ?3 WHERE id = ?2 AND key = ?1"
        """key, id, value"""
        self.remove = f"DELETE FROM {table} WHERE id = ?2 AND key = ?1"
        """key, id"""

    @staticmethod
    def holds(record: Record | Set) -> bool:
        return len(record.key) + len(record.value) > limits.ROW_BYTES


@dataclass(kw_only=True, eq=False)
class SqliteLayout(Layout):
    """The table of one key space.

    `milliseconds` calls an SQL function with that name, which must be registered with the connection.
    """

    mark = "?"
    now: str = "?1"
    found: str
    """SQL: the columns from which `record` makes a record; instead of a large value, its id."""
    content: tuple[str, ...]
    """The three columns of key and value."""
    bind_time: Callable[[int | None], Any]
    """A time in milliseconds as the columns hold it."""
    time_of: Callable[[Any], int | None]
    """The reverse of `bind_time`."""
    bind_put: Callable[[Record, bool], Row]
    bind_sets: Callable[[Sequence[Set], int, int], list[Row]]
    """What `bind_put` returns for the records of plain sets, given the version before them and the time."""
    bind_expected: Callable[[Record], Row]
    head: str
    """SQL: the columns from which `head_record` makes a head."""
    head_record: Callable[..., "StoredHead"]
    page: Callable[[Iterable[Row]], Page]
    """The page of the rows that a cursor is about to read; all of them are read."""
    large: LargeValueTable | None = None
    version: str = "version"
    """SQL: the version of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        table = self.table
        self.get = f"SELECT {self.found} FROM {table} WHERE {self.equal(1)}"
        """key"""
        self.get_without_times = self.get.replace(", created_at, updated_at", "")
        """the same, without these two columns"""
        self.get_head = f"SELECT {self.head} FROM {table} WHERE {self.equal(1)}"
        """key; does not read the value"""
        self.get_heads = f"SELECT {', '.join(self.key)}, {self.head} FROM {table} WHERE {self.equal(1)}"
        """the same, with the key"""
        self.gets = tuple(map(self._gets, range(limits.SQLITE_GETS_PER_STATEMENT + 1)))
        """by their number, so many keys; selects each key's position, then what `found` says"""
        self.gets_without_times = tuple([one.replace(", created_at, updated_at", "") for one in self.gets])
        """the same, without these two columns"""
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
        small = "" if self.large is None else " AND large IS NULL"
        at = len(self.key) + 1
        self.remove_expected = f"{self.remove} AND {self.version} = ?{at} AND expires_at = ?{at + 1}{small}"
        """what `bind_expected` returns; changes nothing where another row, or a large value, is stored"""
        self.replace_expected = self._replace_expected()
        """what `bind_put` returns, and the version to be replaced; changes nothing where there is no live entry of that
        version, or one with a large value"""
        self.put = self._upsert() if self.large is None else f"{self._upsert()} WHERE large IS NULL"
        """what `bind_put` returns; changes nothing where a large value is stored"""
        self.put_large = self._upsert("large")
        """the same, with NULL for a large value, and the id of the large value or NULL"""

    def _gets(self, count: int) -> str:
        asked = [f"asked_{column}" for column in self.key]
        keys = ", ".join([f"({at}{', ?' * len(asked)})" for at in range(count)])
        same = " AND ".join(map("{} = {}".format, self.key, asked))
        # CROSS JOIN keeps SQLite from swapping the two tables, and scanning this one as a whole.
        return (
            f"WITH asked (position, {', '.join(asked)}) AS (VALUES {keys}) "
            f"SELECT position, {self.found} FROM asked CROSS JOIN {self.table} ON {same}"
        )

    def selected_time(self, column: str) -> str:
        return column

    def due_page(self, rows: Sequence[Row], next_expiry: Any, ask: Due, now: int, version: int) -> DuePage:
        found = [(*row[:-1], self.time_of(row[-1])) for row in rows]
        return super().due_page(found, self.time_of(next_expiry), ask, now, version)

    def _marks(self) -> dict[str, str]:
        """The columns that `bind_put` binds, each with its binding; ?8 says whether the entry is new."""
        names = [*self.content, "version", "expires_at", "created_at", "updated_at"]
        marks = {name: f"?{at}" for at, name in enumerate(names, 1)}
        return marks if self.large is None else marks | {"checksum": "?9"}

    def _updates(self, marks: Mapping[str, str]) -> str:
        return ", ".join([f"{name} = {mark}" for name, mark in marks.items() if name not in (*self.key, "created_at")])

    def _upsert(self, *large: str) -> str:
        marks = self._marks() | dict.fromkeys(large, "?10")
        return (
            f"INSERT INTO {self.table} ({', '.join(marks)}) VALUES ({', '.join(marks.values())}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {self._updates(marks)}, "
            "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
        )

    def _replace_expected(self) -> str:
        small, last = ("", 9) if self.large is None else (" AND large IS NULL", 10)
        return (
            f"UPDATE {self.table} SET {self._updates(self._marks())} WHERE {self.equal(1)} "
            f"AND {self.version} = ?{last} AND (expires_at IS NULL OR expires_at > ?7){small}"
        )


class StoredHead(Head, frozen=True, gc=False):
    """What a row holds besides its value."""

    large: int | None = None
    """The id of its large value."""


CHECKSUM_BASE: Final = 2**32
"""Added to each checksum, so that SQLite stores it in six bytes: one flipped bit could turn a column of four bytes into
NULL, which is what a row written by hand has."""


def checksum(key: bytes, encoding: int, value: bytes) -> int:
    """The checksum of a row. Adler-32 is faster than a CRC for a small row, and notices every changed byte."""
    return adler32(value, adler32(key, encoding)) + CHECKSUM_BASE


def bind_set(key: bytes, value: bytes, encoding: int, version: int, now: int) -> Row:
    """What `bind_put` returns for an entry that never expires, in a table with one binary key."""
    return key, value, encoding, version, None, now, now, False, adler32(value, adler32(key, encoding)) + CHECKSUM_BASE


def _page_by_column(rows: Iterable[Row]) -> Page:
    """A page of rows. All cells are put into one list, of which every nth cell is a column: `zip` would be slower.

    No row is kept besides its cells, so that Python reuses the memory of each row for the next one.
    """
    rows = iter(rows)
    if (first := next(rows, None)) is None:
        return Page(value_bytes=0)
    cells, width = [*first, *chain.from_iterable(rows)], len(first)
    columns = [cells[at::width] for at in range(width)]
    try:
        value_bytes = len(b"".join(columns[1]))  # faster than a look at the type of each
    except TypeError:  # one is the id of a large value, NULL or text
        value_bytes = None
    return Page(*columns, value_bytes=value_bytes)


def _head_by_column(
    key: bytes, encoding: int, version: int, expires_at: int | None, created_at: int, updated_at: int, large: int | None
) -> StoredHead:
    if type(version) is int and (expires_at is None or type(expires_at) is int):
        return StoredHead(key, b"", encoding, version, expires_at, created_at, updated_at, large)
    # A changed bit has changed the type of a column, and then the columns after it are wrong, too. A commit may still
    # replace or remove such a row.
    return StoredHead(key, b"", DAMAGED, version if type(version) is int else 0, None)


def _bytes_layout(table: str) -> SqliteLayout:
    """A table with one binary key, whose rows are stored in the order of their keys.

    In a WITHOUT ROWID table a row is part of the key's tree: one lookup finds key and value, and a list reads
    neighbours from the same page. That holds for small rows; large values have a table of their own (ADR 5).
    """
    large = LargeValueTable(table)
    columns = "encoding, version, expires_at, created_at, updated_at"

    def bind_put(record: Record, is_new_entry: bool) -> Row:
        key, value, encoding = record.key, record.value, record.encoding
        return (
            key,
            value,
            encoding,
            record.version,
            record.expires_at,
            record.created_at,
            record.updated_at,
            is_new_entry,
            adler32(value, adler32(key, encoding)) + CHECKSUM_BASE,  # as `checksum` does it, without the call
        )

    def bind_sets(sets: Sequence[Set], before: int, now: int) -> list[Row]:
        return [
            bind_set(one.key, one.value, one.encoding, version, now) for version, one in enumerate(sets, before + 1)
        ]

    return SqliteLayout(
        table=table,
        key=("key",),
        content=("key", "value", "encoding"),
        large=large,
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, checksum INTEGER, large INTEGER, value BLOB) WITHOUT ROWID",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE TABLE {large.table} (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        ),
        found=f"coalesce(value, large), {columns}, checksum",
        keys_only=f"{table}.key, x'', encoding, version, expires_at",
        # The id of a large value instead of the value, as in a get: a join would make lists of small values slower.
        listed=f"{table}.key, coalesce(value, large), encoding, version, expires_at",
        head=f"{columns}, large",
        head_record=_head_by_column,
        row=f"key, coalesce(value, {large.value}, x''), "
        f"CASE WHEN {large.is_lost} THEN {LOST} ELSE encoding END, version",
        row_record=Record,
        length=f"coalesce(length(value), {large.length}, 0)",
        milliseconds=lambda column: column,
        record=Record,
        page=_page_by_column,
        bind_keys=tuple,
        bind_time=lambda moment: moment,
        bind_expected=lambda row: (row.key, row.version, row.expires_at),
        time_of=lambda moment: moment,
        bind_put=bind_put,
        bind_sets=bind_sets,
    )


def _plugin_layout() -> SqliteLayout:
    """The plugins' table, made to be read by people: texts, JSON, and times that any SQL shell can compare.

    A row that was inserted by hand is read like any other; the 0 in its column `version` counts as VERSION_BY_HAND.
    """
    key = ("plugin_name", "key")
    value, version = "CAST(value_json AS BLOB)", f"max(version, {schema.VERSION_BY_HAND})"

    def bind_time(moment: int | None) -> str | None:
        return None if moment is None else time_text(moment)

    def record(key: PluginKey, value: bytes, version: int, expires_at: object) -> Record:
        return Record(key, value, JSON, version, None if expires_at is None else milliseconds(expires_at))

    def head_record(key: PluginKey, version: int, expires_at: object) -> StoredHead:
        return StoredHead(key, b"", JSON, version, milliseconds(expires_at))

    def page(rows: Iterable[Row]) -> Page:
        page = tables.plugin_page([*rows])
        if not any(page.expiries) and not page.created:
            return page
        columns = page.expiries, page.created, page.updated
        expiries, created, updated = [list(map(milliseconds, times)) for times in columns]
        return replace(page, expiries=expiries, created=created, updated=updated)

    def bind_put(record: Record, is_new_entry: bool) -> Row:
        expires_at = None if record.expires_at is None else time_text(record.expires_at)
        times = expires_at, time_text(record.created_at), time_text(record.updated_at)
        return (*record.key, plugin_text(record), record.version, *times, is_new_entry)

    def bind_sets(sets: Sequence[Set], before: int, now: int) -> list[Row]:
        at = time_text(now)
        return [
            (*one.key, plugin_text(one), version, None, at, at, False) for version, one in enumerate(sets, before + 1)
        ]

    return SqliteLayout(
        table=schema.PLUGIN_TABLE,
        key=key,
        content=(*key, "value_json"),
        create=tables.create_plugin_table("", "DATETIME", "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"),
        found=f"{value}, {version}, expires_at",
        keys_only=f"plugin_name, key, x'', {version}, expires_at",
        listed=f"plugin_name, key, {value}, {version}, expires_at",
        head=f"{version}, expires_at",
        head_record=head_record,
        row=f"plugin_name, key, {value}, {version}",
        row_record=lambda plugin, key, value, version, *times: Record((plugin, key), value, JSON, version, *times),
        length=f"length({value})",
        milliseconds=lambda column: f"milliseconds({column})",
        record=record,
        page=page,
        bind_keys=lambda keys: tuple(chain.from_iterable(keys)),
        bind_time=bind_time,
        bind_expected=lambda row: (*row.key, row.version, bind_time(row.expires_at)),
        time_of=milliseconds,
        bind_put=bind_put,
        bind_sets=bind_sets,
        version=version,
    )


_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)


@lru_cache(limits.SQLITE_TIME_TEXTS)
def time_text(moment: int) -> str:
    """A time as SQLite and SQLAlchemy write it, in UTC and of fixed width, so that texts sort as times."""
    return (_EPOCH + moment * _MILLISECOND).isoformat(" ", "microseconds")


@lru_cache(limits.SQLITE_TIME_TEXTS)
def milliseconds(text: object) -> int | None:
    """The time of a text, rounded up to a whole millisecond.

    A cell that was written by hand may not be a time. It counts as SQL compares it: a number comes before all texts, so
    the entry has expired; any other text comes after all times, so the entry never expires.
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
    Space.SEMANTIC: _bytes_layout(schema.SEMANTIC_TABLE),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = tables.plugin_usage(LAYOUTS[Space.PLUGINS])
"""now, plugin and key after which, rows"""

CHANGES: Final = schema.CHANGES_TABLE
READ_VERSION: Final = f"SELECT version, at, size, base FROM {CHANGES} ORDER BY version DESC, part DESC LIMIT 1"
"""Selects the version counter: the version of the log's newest row, with its time, the size of the log, and the version
before its group."""
LOG: Final = f"INSERT INTO {CHANGES} (version, part, base, at, size, changes) VALUES (?1, ?2, ?3, ?4, ?5, ?6)"
"""version, part, the version before the group, time, size of the log, changes"""
FIND_LOGGED: Final = f"SELECT base, at, version FROM {CHANGES} WHERE version >= ?1 ORDER BY version, part LIMIT 1"
"""version; selects its row"""
OLDEST_LOGGED: Final = f"SELECT base, at, size FROM {CHANGES} ORDER BY version, part LIMIT 1"
SECOND_LOGGED: Final = f"SELECT at, size FROM {CHANGES} ORDER BY version, part LIMIT 1 OFFSET 1"
"""Selects the second row of the log: while it is too new to be removed, the first row stays, too."""
_AFTER: Final = f"FROM {CHANGES} WHERE (version, part) > (?1, ?2)"
READ_LOG: Final = (
    f"SELECT version, part, base, at, changes {_AFTER} "
    f"AND size <= ?3 + (SELECT size {_AFTER} ORDER BY version, part LIMIT 1) ORDER BY version, part LIMIT ?4"
)
"""version, part, bytes, rows; selects the log after that position: one row, and as many more as have these bytes"""
IS_LOGGED_AFTER: Final = f"SELECT EXISTS (SELECT 1 {_AFTER})"
"""version, part; selects whether the log goes on after that position"""
TRIM_LOG: Final = f"DELETE FROM {CHANGES} WHERE version < ({tables.oldest_kept('at < ?1 OR size <= ?2', '?3')})"
"""oldest time, oldest size, rows; the newest row that may go stays, and so do all rows of its version"""

CREATE: Final = tables.create_all(
    LAYOUTS.values(),
    f"CREATE TABLE {CHANGES} (version INTEGER NOT NULL, part INTEGER NOT NULL, base INTEGER NOT NULL, "
    "at INTEGER NOT NULL, size INTEGER NOT NULL, changes BLOB NOT NULL, PRIMARY KEY (version, part)) WITHOUT ROWID",
    f"INSERT INTO {CHANGES} (version, part, base, at, size, changes) "
    f"VALUES ({schema.VERSION_BY_HAND}, 0, -1, 0, 0, x'90')",
    f"CREATE TABLE {schema.STORE_TABLE} (id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1), store_id TEXT NOT NULL)",
    f"INSERT INTO {schema.STORE_TABLE} (id, store_id) VALUES (1, lower(hex(randomblob(16))))",
)
"""The statements that turn an empty database into one of Keyloft's."""
