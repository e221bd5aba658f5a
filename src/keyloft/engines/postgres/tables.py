"""The table of each key space in PostgreSQL: the SQL of every statement, and how rows become records.

Keys and rows are bound as arrays, so that one statement serves many callers. `$1` is the time in milliseconds, or NULL
for the server's: reads use the start of their transaction, so that all answers of a snapshot share one time; writes use
the moment at which they got the lock of the version counter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Key, Page, Record, Scan, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON


class PostgresLayout(Struct, frozen=True):
    """The table of one key space. Statements bind `now`, then what stands below each."""

    table: str
    key: tuple[str, ...]
    """The columns of the key."""
    columns: Mapping[str, str]
    """The columns of key and value, and their types."""
    value: str
    """The column of the value."""
    milliseconds: Callable[[str], str]
    """SQL: the time in a column in milliseconds."""
    moment: Callable[[str], str]
    """SQL: milliseconds as a column holds them."""
    create: tuple[str, ...]
    bind_key: Callable[[Key], Row]
    bind_keys: Callable[[Sequence[Key]], Row]
    bind_range: Callable[[Key, Key], Row]
    bind_puts: Callable[[Sequence[Record]], Row]
    record: Callable[..., Record]
    """Turns a row of `get`, and the times of creation and last change if they follow, into a record."""
    found: Callable[[Sequence[Row]], Mapping[Key, Record]]
    """Turns rows of `get` and `gets` into records by key."""
    page: Callable[[Sequence[Row]], Page]
    """Turns rows of a scan, or of `expired`, into a page."""
    get: str
    """key"""
    get_expired: str
    """key, without `now`; selects expired entries, too"""
    gets: str
    """keys"""
    scans: Mapping[tuple[bool, bool, bool], str]
    """range, limit; by (reverse, keys_only, after)"""
    count: str
    """range"""
    expired: str
    """limit"""
    load: str
    """keys; selects the version counter and the time, then what `gets` selects, or NULLs where nothing is stored"""
    set: str
    """how many versions to take, the name of the process, puts; selects the version counter before, and the time.

    Versions of the puts count from that counter, and their expiries from that time.
    """
    put: str
    """puts, with versions and expiries as they are stored"""
    remove: str
    """keys, without `now`"""
    set_expiries: str
    """expiries, keys, without `now`"""

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


CHANNEL: Final = "keyloft"
"""The channel of NOTIFY that announces commits to other processes."""

_FLAGS: Final = (False, True)


def milliseconds(moment: str) -> str:
    """SQL: a timestamptz in milliseconds since 1970."""
    return f"floor(extract(epoch FROM {moment}) * 1000)::bigint"


def _version_and(time: str) -> str:
    return (
        f"SELECT version, coalesce($1::bigint, {milliseconds(time)}) AS now "
        f"FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1"
    )


def _advance(count: str) -> str:
    # RETURNING is evaluated once the row is locked, perhaps after a wait: `clock_timestamp` is the time of that moment.
    return (
        f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = version + {count}::bigint WHERE id = 1 "
        f"RETURNING version - {count}::bigint AS base, coalesce($1::bigint, {milliseconds('clock_timestamp()')}) AS now"
    )


def _puts(
    table: str, key: Sequence[str], columns: Mapping[str, str], moment: Callable[[str], str] = lambda time: time
) -> dict[str, str]:
    """The two ways to put rows: advancing the version counter in the same statement, and after it was locked.

    Args:
        table: Its name.
        key: The columns of its key.
        columns: The columns of key and value, and their types.
        moment: SQL: milliseconds as a column of the table holds them.
    """
    names = ", ".join(columns)
    replaced = [column for column in (*columns, "version", "expires_at", "updated_at") if column not in key]

    def insert(counter: str, first: int) -> str:
        arrays = ", ".join(
            [f"${at}::{kind}[]" for at, kind in enumerate((*columns.values(), "bigint", "bigint"), first)]
        )
        return (
            f"INSERT INTO {table} AS old ({names}, version, expires_at, created_at, updated_at) "
            f"SELECT {names}, base + new.version, {moment('since + new.due')}, {moment('now')}, {moment('now')} "
            f"FROM {counter} AS counter CROSS JOIN unnest({arrays}) AS new ({names}, version, due) "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET "
            f"{', '.join([f'{column} = excluded.{column}' for column in replaced])}, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )

    return {
        "set": (
            f"WITH counter AS ({_advance('$2')}), "
            f"written AS ({insert('(SELECT base, now, now AS since FROM counter)', 4)}) "
            f"SELECT base, now, pg_notify('{CHANNEL}', $3::text || ' ' || (base + $2)) FROM counter"
        ),
        "put": insert("(SELECT 0::bigint AS base, $1::bigint AS now, 0::bigint AS since)", 2),
    }


def bytes_layout(table: str, *, lists_times: bool = False) -> PostgresLayout:
    """A table with one binary key."""
    types = {"key": "bytea", "value": "bytea", "encoding": "int"}
    columns = "value, encoding, version, expires_at, created_at, updated_at"
    now = f"(SELECT coalesce($1::bigint, {milliseconds('now()')}))"
    alive = f"(expires_at IS NULL OR expires_at > {now})"
    time = ", updated_at" if lists_times else ""

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        value = "''::bytea" if keys_only else "value"
        return (
            f"SELECT key, {value}, encoding, version, expires_at{time} FROM {table} "
            f"WHERE key {'>' if after else '>='} $2 AND key < $3 AND {alive} "
            f"ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT $4"
        )

    return PostgresLayout(
        table=table,
        key=("key",),
        columns=types,
        value="value",
        milliseconds=lambda column: column,
        moment=lambda time: time,
        create=(
            f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version BIGINT NOT NULL, expires_at BIGINT, created_at BIGINT NOT NULL, "
            "updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        ),
        bind_key=lambda key: (key,),
        bind_keys=lambda keys: (keys,),
        bind_range=lambda start, end: (start, end),
        bind_puts=lambda records: (
            [record.key for record in records],
            [record.value for record in records],
            [record.encoding for record in records],
            [record.version for record in records],
            [record.expires_at for record in records],
        ),
        record=Record,
        found=lambda rows: {row[0]: Record(*row) for row in rows},
        page=lambda rows: Page(*zip(*rows, strict=True)),
        get=f"SELECT key, {columns} FROM {table} WHERE key = $2 AND {alive}",
        get_expired=f"SELECT key, {columns} FROM {table} WHERE key = $1",
        gets=f"SELECT key, {columns} FROM {table} WHERE key = ANY($2::bytea[]) AND {alive}",
        scans={(r, k, a): scan(r, k, a) for r in _FLAGS for k in _FLAGS for a in _FLAGS},
        count=f"SELECT count(*) FROM {table} WHERE key >= $2 AND key < $3 AND {alive}",
        expired=(
            f"SELECT key, ''::bytea, encoding, version, expires_at FROM {table} "
            f"WHERE expires_at <= {now} ORDER BY expires_at LIMIT $2"
        ),
        load=(
            "SELECT counter.version, counter.now, key, value, encoding, stored.version, expires_at, created_at, "
            f"updated_at FROM ({_version_and('clock_timestamp()')}) AS counter "
            f"LEFT JOIN {table} AS stored ON key = ANY($2::bytea[])"
        ),
        **_puts(table, ("key",), types),
        remove=f"DELETE FROM {table} WHERE key = ANY($1::bytea[])",
        set_expiries=(
            f"UPDATE {table} AS old SET expires_at = new.due "
            "FROM unnest($1::bigint[], $2::bytea[]) AS new (due, key) WHERE old.key = new.key"
        ),
    )


def _plugin_layout() -> PostgresLayout:
    """The plugins' table, which people can read. A row inserted by hand counts like any other."""
    table = schema.PLUGIN_TABLE
    key, types = ("plugin_name", "key"), {"plugin_name": "text", "key": "text", "value_json": "text"}

    def milliseconds(column: str) -> str:
        # A time written by hand is rounded up to a whole millisecond; 'infinity' is never reached.
        return (
            f"CASE WHEN {column} IS NULL THEN NULL WHEN isfinite({column}) "
            f"THEN ceil(extract(epoch FROM {column}) * 1000)::bigint "
            f"WHEN {column} > now() THEN {schema.NEVER} ELSE 0 END"
        )

    due = milliseconds("expires_at")
    now = f"(SELECT coalesce({moment('$1::bigint')}, now()))"
    alive = f"(expires_at IS NULL OR expires_at > {now})"

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        value = "''" if keys_only else "value_json"
        return (
            f"SELECT plugin_name, key, {value}, version, {due} FROM {table} "
            f"WHERE plugin_name = $2 AND key {'>' if after else '>='} $3 AND key < $4 AND {alive} "
            f"ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT $5"
        )

    def record(plugin: str, key: str, value: str, version: int, *times: Any) -> Record:
        return Record((plugin, key), value.encode(), JSON, version, *times)

    def page(rows: Sequence[Row]) -> Page:
        if not rows:
            return Page()
        plugins, keys, values, versions, expiries = zip(*rows, strict=True)
        encoded = [value.encode() for value in values]
        return Page(list(zip(plugins, keys, strict=True)), encoded, [JSON] * len(keys), versions, expiries)

    def bind_keys(keys: Sequence[Key]) -> Row:
        return [plugin for plugin, _ in keys], [key for _, key in keys]

    columns = f"plugin_name, key, value_json, version, {due}"
    # LIMIT keeps PostgreSQL from starting the join with the whole table.
    asked = (
        "unnest($2::text[], $3::text[]) AS asked (asked_plugin, asked_key) CROSS JOIN LATERAL "
        f"(SELECT * FROM {table} WHERE plugin_name = asked_plugin AND key = asked_key LIMIT 1) AS stored"
    )
    return PostgresLayout(
        table=table,
        key=key,
        columns=types,
        value="value_json",
        milliseconds=milliseconds,
        moment=moment,
        create=(
            f'CREATE TABLE {table} (plugin_name VARCHAR(100) COLLATE "C" NOT NULL, '
            f'key VARCHAR(255) COLLATE "C" NOT NULL, value_json TEXT NOT NULL, expires_at TIMESTAMP WITH TIME ZONE, '
            "created_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL, "
            "updated_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL, "
            f"version BIGINT DEFAULT 0 NOT NULL, CONSTRAINT pk_{table} PRIMARY KEY (plugin_name, key))",
            f"CREATE INDEX idx_plugin_kv_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
            f"CREATE INDEX idx_plugin_kv_prefix ON {table} (plugin_name, key)",
        ),
        bind_key=lambda key: key,
        bind_keys=bind_keys,
        bind_range=lambda start, end: (start[0], start[1], end[1]),
        bind_puts=lambda records: (
            *bind_keys([record.key for record in records]),
            list(map(plugin_text, records)),
            [record.version for record in records],
            [record.expires_at for record in records],
        ),
        record=record,
        found=lambda rows: {(row[0], row[1]): record(*row) for row in rows},
        page=page,
        get=f"SELECT {columns} FROM {table} WHERE plugin_name = $2 AND key = $3 AND {alive}",
        get_expired=(f"SELECT {columns} FROM {table} WHERE plugin_name = $1 AND key = $2"),
        gets=f"SELECT {columns} FROM {asked} WHERE {alive}",
        scans={(r, k, a): scan(r, k, a) for r in _FLAGS for k in _FLAGS for a in _FLAGS},
        count=f"SELECT count(*) FROM {table} WHERE plugin_name = $2 AND key >= $3 AND key < $4 AND {alive}",
        expired=(
            f"SELECT plugin_name, key, '', version, {due} FROM {table} "
            f"WHERE expires_at <= {now} ORDER BY expires_at LIMIT $2"
        ),
        load=(
            f"SELECT counter.version, counter.now, found.* FROM ({_version_and('clock_timestamp()')}) AS counter "
            f"LEFT JOIN LATERAL (SELECT {columns} FROM {asked}) AS found ON true"
        ),
        **_puts(table, key, types, moment),
        remove=(
            f"DELETE FROM {table} AS old USING unnest($1::text[], $2::text[]) AS asked (plugin_name, key) "
            "WHERE old.plugin_name = asked.plugin_name AND old.key = asked.key"
        ),
        set_expiries=(
            f"UPDATE {table} AS old SET expires_at = {moment('new.due')} "
            "FROM unnest($1::bigint[], $2::text[], $3::text[]) AS new (due, plugin_name, key) "
            "WHERE old.plugin_name = new.plugin_name AND old.key = new.key"
        ),
    )


def moment(time: str) -> str:
    """SQL: milliseconds as a timestamptz, exact up to the year 9999.

    A float of seconds would not be exact. Intervals are multiplied as floats, too, which is exact for whole hours.
    """
    hours = f"(({time}) / 3600000) * interval '1 hour'"
    return f"('epoch'::timestamptz + {hours} + (({time}) % 3600000) * interval '1 millisecond')"


LAYOUTS: Final[Mapping[Space, PostgresLayout]] = {
    Space.TUPLES: bytes_layout(schema.TUPLE_TABLE),
    Space.SEMANTIC: bytes_layout(schema.SEMANTIC_TABLE, lists_times=True),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = (
    f"SELECT plugin_name, count(*), sum(octet_length(value_json))::bigint FROM {schema.PLUGIN_TABLE} "
    f"WHERE expires_at IS NULL OR expires_at > (SELECT coalesce({moment('$1::bigint')}, now())) "
    "GROUP BY plugin_name ORDER BY plugin_name"
)
"""now"""

READ_VERSION: Final = _version_and("clock_timestamp()")
"""now; selects the version counter and the time"""

LOCK_VERSION: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1 FOR UPDATE"
WRITE_VERSION_AND_COMMIT: Final = (
    f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = {{version}} WHERE id = 1; "
    f"SELECT pg_notify('{CHANNEL}', '{{name}} {{version}}'); COMMIT"
)

CREATE: Final[tuple[str, ...]] = (
    f"CREATE TABLE {schema.REVISION_TABLE} (version_num VARCHAR(32) NOT NULL, "
    f"CONSTRAINT {schema.REVISION_TABLE}_pkc PRIMARY KEY (version_num))",
    f"CREATE TABLE {schema.VERSION_COUNTER_TABLE} "
    "(id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL)",
    f"INSERT INTO {schema.VERSION_COUNTER_TABLE} (id, version) VALUES (1, 0)",
    *(statement for layout in LAYOUTS.values() for statement in layout.create),
    f"INSERT INTO {schema.REVISION_TABLE} (version_num) VALUES ('{schema.REVISION}')",
)
"""Creates Keyloft's tables in a database without them."""
