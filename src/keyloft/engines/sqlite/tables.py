"""How each key space lies in its table: the SQL of every hot statement, and how a row becomes a record.

The commit path, the clock, watches and expiry are the same for all spaces; a layout is all that sets them apart.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Key, Page, PluginKey, Record, Scan, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON, LOST


class Aside(Struct, frozen=True):
    """A second table for large values, which would keep the keys of a tree apart. A row there knows its key, too."""

    table: str
    get: str
    """key, id; selects a value"""
    find: str
    """key; selects the id of its value, or NULL"""
    add: str
    """key, value"""
    replace: str
    """key, id, value"""
    remove: str
    """key, id"""
    refer: str
    """what `bind_put` gives, with no value if it is large, and the id"""

    @staticmethod
    def takes(record: Record) -> bool:
        return len(record.key) + len(record.value) > limits.ROW_BYTES


class Layout(Struct, frozen=True):
    """A table that holds one key space. Statements take the row of bindings that stands beside them."""

    table: str
    create: tuple[str, ...]
    value: str
    """Selects a whole value, also from aside."""
    encoding: str
    """Selects its encoding, or LOST."""
    length: str
    """Selects how many bytes it takes."""
    record: Callable[..., Record]
    """Makes a record of a key and the columns that `get` selects."""
    page: Callable[[Sequence[Row]], Page]
    """Makes a page of the rows that `scan` and `expired` select."""
    bind_key: Callable[[Key], Row]
    bind_keys: Callable[[Sequence[Key]], Row]
    """What `gets` takes."""
    bind_range: Callable[[Key, Key], Row]
    bind_time: Callable[[int | None], Any]
    """A moment in milliseconds as the columns hold it."""
    get: str
    """key; where the value lies aside, it selects the id in its place"""
    gets: str
    """up to GETS_AT_ONCE keys; selects the key's place among them, then whole records, and NULL for a lost value"""
    scans: Mapping[tuple[bool, bool, bool], str]
    """start, end, now, limit; by (reverse, keys_only, after)"""
    count: str
    """start, end, now"""
    expired: str
    """now, limit"""
    bind_put: Callable[[Record, bool], Row]
    put: str
    """With a table aside: changes nothing where the value lies there."""
    retime: str
    """expires_at, key"""
    remove: str
    """key"""
    aside: Aside | None = None

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


GETS_AT_ONCE: Final = 16
"""How many points one statement looks up, where there are that many: 1.2 µs each instead of 2.1."""

_NO_KEYS: Final = (None,) * GETS_AT_ONCE  # nothing is equal to NULL


def _gets(table: str, columns: str, key: tuple[str, ...]) -> str:
    names = [f"asked_{column}" for column in key]
    rows = ", ".join([f"({at}{', ?' * len(key)})" for at in range(GETS_AT_ONCE)])
    match = " AND ".join([f"{column} = {name}" for column, name in zip(key, names, strict=True)])
    # CROSS JOIN keeps SQLite from turning it round and walking the whole table.
    return (
        f"WITH asked (place, {', '.join(names)}) AS (VALUES {rows}) "
        f"SELECT place, {columns} FROM asked CROSS JOIN {table} ON {match}"
    )


def bytes_layout(table: str, *, lists_times: bool = False) -> Layout:
    """A table with one binary key, whose rows lie in the order of their keys.

    In WITHOUT ROWID a row is part of the key's tree: one way down finds key and value, and a list reads neighbours from
    the same page. That holds for small rows; a large value lies aside (ADR 5).
    """
    told = "encoding, version, expires_at, created_at, updated_at"
    is_ours = f"aside.id = large AND aside.key = {table}.key"
    aside = f"FROM {table}_large AS aside WHERE {is_ours}"
    value = f"coalesce(value, (SELECT aside.value {aside}), x'')"
    encoding = f"CASE WHEN value IS NULL THEN coalesce((SELECT encoding {aside}), {LOST}) ELSE encoding END"
    length = f"coalesce(length(value), (SELECT length(aside.value) {aside}), 0)"
    # Where no list shows when an entry was written: leaving that out takes a scan of 1000 from 0.41 to 0.35 ms.
    time = ", updated_at" if lists_times else ""
    no_value = f"{table}.key, x'', encoding, version, expires_at{time}"
    # Joined, a large value is looked up once and not copied on its way; for a point, opening both tables takes longer.
    joined = f"{table} LEFT JOIN {table}_large AS aside ON {is_ours}"
    listed = (
        f"{table}.key, coalesce({table}.value, aside.value, x''), "
        f"CASE WHEN {table}.value IS NULL AND aside.id IS NULL THEN {LOST} ELSE encoding END, version, expires_at{time}"
    )

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        return (
            f"SELECT {no_value if keys_only else listed} FROM {table if keys_only else joined} "
            f"WHERE {table}.key {'>' if after else '>='} ?1 AND {table}.key < ?2 "
            "AND (expires_at IS NULL OR expires_at > ?3) "
            f"ORDER BY {table}.key {'DESC' if reverse else 'ASC'} LIMIT ?4"
        )

    upsert = (
        "ON CONFLICT (key) DO UPDATE SET value = ?2, encoding = ?3, version = ?4, expires_at = ?5, updated_at = ?7, "
        "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
    )
    flags = (False, True)
    return Layout(
        table=table,
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, large INTEGER, value BLOB) WITHOUT ROWID",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        ),
        value=value,
        encoding=encoding,
        length=length,
        record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
        bind_key=lambda key: (key,),
        bind_keys=lambda keys: (*keys, *_NO_KEYS[len(keys) :]),
        bind_range=lambda start, end: (start, end),
        bind_time=lambda moment: moment,
        get=f"SELECT coalesce(value, large), {told} FROM {table} WHERE key = ?1",
        gets=_gets(table, f"coalesce(value, (SELECT aside.value {aside})), {told}", ("key",)),
        scans={(r, k, a): scan(r, k, a) for r in flags for k in flags for a in flags},
        count=(
            f"SELECT (SELECT count(*) FROM {table} WHERE key >= ?1 AND key < ?2) - "
            f"(SELECT count(*) FROM {table} WHERE expires_at <= ?3 AND +key >= ?1 AND +key < ?2)"
        ),
        expired=f"SELECT {no_value} FROM {table} WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
        bind_put=lambda record, anew: (
            record.key,
            record.value,
            record.encoding,
            record.version,
            record.expires_at,
            record.created_at,
            record.updated_at,
            anew,
        ),
        put=(
            f"INSERT INTO {table} (key, value, {told}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) {upsert} WHERE large IS NULL"
        ),
        retime=f"UPDATE {table} SET expires_at = ?1 WHERE key = ?2",
        remove=f"DELETE FROM {table} WHERE key = ?1",
        aside=Aside(
            table=f"{table}_large",
            get=f"SELECT value FROM {table}_large WHERE id = ?2 AND key = ?1",
            find=f"SELECT large FROM {table} WHERE key = ?1",
            # Not an upsert: for that, SQLite would keep all it replaces in a temporary file.
            add=f"INSERT INTO {table}_large (key, value) VALUES (?1, ?2)",
            replace=f"UPDATE {table}_large SET value = ?3 WHERE id = ?2 AND key = ?1",
            remove=f"DELETE FROM {table}_large WHERE id = ?2 AND key = ?1",
            refer=(
                f"INSERT INTO {table} (key, value, {told}, large) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?9) "
                f"{upsert}, large = ?9"
            ),
        ),
    )


def _plugin_layout() -> Layout:
    """The plugins' table, made to be read by people: texts, JSON, and times that any SQL shell can compare.

    A row that somebody inserted by hand is as good as ours: it has version 0.
    """
    table = schema.PLUGIN_TABLE
    value = "CAST(value_json AS BLOB)"
    told = f"{value}, version, expires_at"
    columns = f"plugin_name, key, {told}"
    no_value = "plugin_name, key, x'', version, expires_at"

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        return (
            f"SELECT {no_value if keys_only else columns} FROM {table} "
            f"WHERE plugin_name = ?1 AND key {'>' if after else '>='} ?2 AND key < ?3 "
            f"AND (expires_at IS NULL OR expires_at > ?4) ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?5"
        )

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

    def bind_range(start: PluginKey, end: PluginKey) -> Row:
        return start[0], start[1], end[1]

    flags = (False, True)
    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
    return Layout(
        table=table,
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
        bind_range=bind_range,
        bind_time=lambda moment: None if moment is None else time_text(moment),
        get=f"SELECT {told} FROM {table} WHERE plugin_name = ?1 AND key = ?2",
        gets=_gets(table, told, ("plugin_name", "key")),
        scans={(r, k, a): scan(r, k, a) for r in flags for k in flags for a in flags},
        count=(
            f"SELECT (SELECT count(*) FROM {table} WHERE plugin_name = ?1 AND key >= ?2 AND key < ?3) - "
            f"(SELECT count(*) FROM {table} WHERE expires_at <= ?4 AND +plugin_name = ?1 AND +key >= ?2 AND +key < ?3)"
        ),
        expired=f"SELECT {no_value} FROM {table} WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
        bind_put=lambda record, anew: (
            *record.key,
            plugin_text(record),
            record.version,
            None if record.expires_at is None else time_text(record.expires_at),
            time_text(record.created_at),
            time_text(record.updated_at),
            anew,
        ),
        put=(
            f"INSERT INTO {table} (plugin_name, key, value_json, version, expires_at, created_at, updated_at) "
            "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (plugin_name, key) DO UPDATE SET "
            "value_json = ?3, version = ?4, expires_at = ?5, updated_at = ?7, "
            "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
        ),
        retime=f"UPDATE {table} SET expires_at = ?1 WHERE plugin_name = ?2 AND key = ?3",
        remove=f"DELETE FROM {table} WHERE plugin_name = ?1 AND key = ?2",
    )


_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)


@lru_cache(maxsize=256)  # a group has one time, and expiries come in few lengths
def time_text(moment: int) -> str:
    """A time as SQLite and SQLAlchemy write it, in UTC and always of one width, so that texts sort as times."""
    return (_EPOCH + moment * _MILLISECOND).isoformat(" ", "microseconds")


def milliseconds(text: object) -> int | None:
    """The time of a text, rounded up to a whole millisecond.

    Somebody may have written it by hand. What is no time compares in SQL like this: a number before all texts, another
    text after them.
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

READ_CLOCK: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE}"
WRITE_CLOCK: Final = f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = ?1"

CREATE: Final[tuple[str, ...]] = (
    f"CREATE TABLE {schema.REVISION_TABLE} (version_num VARCHAR(32) NOT NULL, "
    f"CONSTRAINT {schema.REVISION_TABLE}_pkc PRIMARY KEY (version_num))",
    f"CREATE TABLE {schema.VERSION_COUNTER_TABLE} "
    "(id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL)",
    f"INSERT INTO {schema.VERSION_COUNTER_TABLE} (id, version) VALUES (1, 0)",
    *(statement for layout in LAYOUTS.values() for statement in layout.create),
    f"INSERT INTO {schema.REVISION_TABLE} (version_num) VALUES ('{schema.REVISION}')",
)
"""What makes an empty database ours."""
