"""How each key space lies in its table of PostgreSQL: the SQL of every statement, and how rows become records.

Whatever is looked up or written comes as arrays, so that one statement serves many callers. `$1` is the time in
milliseconds, or NULL for the server's own: reads go by the start of their transaction, so that all answers of a
snapshot share one time, and writes by the moment at which it is their turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from keyloft.core import schema
from keyloft.core.records import Key, Page, Record, Scan, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON


class PostgresLayout(Struct, frozen=True):
    """A table that holds one key space. Statements take `now`, then the bindings that stand beside them."""

    table: str
    create: tuple[str, ...]
    bind_key: Callable[[Key], Row]
    bind_keys: Callable[[Sequence[Key]], Row]
    bind_range: Callable[[Key, Key], Row]
    bind_puts: Callable[[Sequence[Record]], Row]
    found: Callable[[Sequence[Row]], Mapping[Key, Record]]
    """Makes what was found of the rows of `get` and `gets`, by key."""
    page: Callable[[Sequence[Row]], Page]
    """Makes a page of the rows of a scan, or of `expired`."""
    get: str
    """key"""
    get_expired: str
    """key, and no time before it; also selects what has expired"""
    gets: str
    """keys"""
    scans: Mapping[tuple[bool, bool, bool], str]
    """range, limit; by (reverse, keys_only, after)"""
    count: str
    """range"""
    expired: str
    """limit"""
    load: str
    """keys; selects the clock and the time, then what `gets` selects, or NULLs where there is nothing"""
    set: str
    """by how much the clock moves, who moves it, puts; selects the clock before it, and the time.

    The records of the puts have versions that count from that clock, and expiries that count from that time.
    """
    put: str
    """puts, whose versions and expiries are as they will be stored"""
    remove: str
    """keys, and no time before them"""
    retime: str
    """expiries, keys, and no time before them"""

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


CHANNEL: Final = "keyloft"
"""Where commits are announced to whoever watches from another process."""

_FLAGS: Final = (False, True)


def milliseconds(moment: str) -> str:
    """SQL: a timestamptz as we count time."""
    return f"floor(extract(epoch FROM {moment}) * 1000)::bigint"


def _clock_and(time: str) -> str:
    return (
        f"SELECT version, coalesce($1::bigint, {milliseconds(time)}) AS now "
        f"FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1"
    )


def _tick(count: str) -> str:
    # RETURNING is worked out when the row is ours, be it after a wait: `clock_timestamp` is the time of our turn.
    return (
        f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = version + {count}::bigint WHERE id = 1 "
        f"RETURNING version - {count}::bigint AS base, coalesce($1::bigint, {milliseconds('clock_timestamp()')}) AS now"
    )


def _statements(insert: Callable[[str, int], str]) -> dict[str, str]:
    """The two ways to put rows: with the clock in one statement, and after the clock was taken."""
    return {
        "set": (
            f"WITH tick AS ({_tick('$2')}), written AS ({insert('(SELECT base, now, now AS since FROM tick)', 4)}) "
            f"SELECT base, now, pg_notify('{CHANNEL}', $3::text || ' ' || (base + $2)) FROM tick"
        ),
        "put": insert("(SELECT 0::bigint AS base, $1::bigint AS now, 0::bigint AS since)", 2),
    }


def bytes_layout(table: str, *, lists_times: bool = False) -> PostgresLayout:
    """A table with one binary key."""
    told = "value, encoding, version, expires_at, created_at, updated_at"
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

    def insert(tick: str, first: int) -> str:
        key, value, encoding, version, due = [f"${first + place}" for place in range(5)]
        return (
            f"INSERT INTO {table} AS old (key, value, encoding, version, expires_at, created_at, updated_at) "
            "SELECT new.key, new.value, new.encoding, base + new.version, since + new.due, now, now "
            f"FROM {tick} AS tick CROSS JOIN unnest({key}::bytea[], {value}::bytea[], {encoding}::int[], "
            f"{version}::bigint[], {due}::bigint[]) AS new (key, value, encoding, version, due) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value, encoding = excluded.encoding, "
            "version = excluded.version, expires_at = excluded.expires_at, updated_at = excluded.updated_at, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )

    return PostgresLayout(
        table=table,
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
        found=lambda rows: {row[0]: Record(*row) for row in rows},
        page=lambda rows: Page(*zip(*rows, strict=True)),
        get=f"SELECT key, {told} FROM {table} WHERE key = $2 AND {alive}",
        get_expired=f"SELECT key, {told} FROM {table} WHERE key = $1",
        gets=f"SELECT key, {told} FROM {table} WHERE key = ANY($2::bytea[]) AND {alive}",
        scans={(r, k, a): scan(r, k, a) for r in _FLAGS for k in _FLAGS for a in _FLAGS},
        count=f"SELECT count(*) FROM {table} WHERE key >= $2 AND key < $3 AND {alive}",
        expired=(
            f"SELECT key, ''::bytea, encoding, version, expires_at FROM {table} "
            f"WHERE expires_at <= {now} ORDER BY expires_at LIMIT $2"
        ),
        load=(
            "SELECT clock.version, clock.now, key, value, encoding, stored.version, expires_at, created_at, "
            f"updated_at FROM ({_clock_and('clock_timestamp()')}) AS clock "
            f"LEFT JOIN {table} AS stored ON key = ANY($2::bytea[])"
        ),
        **_statements(insert),
        remove=f"DELETE FROM {table} WHERE key = ANY($1::bytea[])",
        retime=(
            f"UPDATE {table} AS old SET expires_at = new.due "
            "FROM unnest($1::bigint[], $2::bytea[]) AS new (due, key) WHERE old.key = new.key"
        ),
    )


def _plugin_layout() -> PostgresLayout:
    """The plugins' table, made to be read by people. A row that somebody inserted by hand is as good as ours."""
    table = schema.PLUGIN_TABLE
    # Of what somebody wrote by hand: rounded up to a whole millisecond; 'infinity' never comes.
    due = (
        "CASE WHEN expires_at IS NULL THEN NULL WHEN isfinite(expires_at) "
        "THEN ceil(extract(epoch FROM expires_at) * 1000)::bigint "
        f"WHEN expires_at > now() THEN {schema.NEVER} ELSE 0 END"
    )
    now = f"(SELECT coalesce({moment('$1::bigint')}, now()))"
    alive = f"(expires_at IS NULL OR expires_at > {now})"

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        value = "''" if keys_only else "value_json"
        return (
            f"SELECT plugin_name, key, {value}, version, {due} FROM {table} "
            f"WHERE plugin_name = $2 AND key {'>' if after else '>='} $3 AND key < $4 AND {alive} "
            f"ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT $5"
        )

    def insert(tick: str, first: int) -> str:
        plugin, key, value, version, due = [f"${first + place}" for place in range(5)]
        return (
            f"INSERT INTO {table} AS old (plugin_name, key, value_json, version, expires_at, created_at, updated_at) "
            f"SELECT new.plugin_name, new.key, new.value, base + new.version, {moment('since + new.due')}, "
            f"{moment('now')}, {moment('now')} "
            f"FROM {tick} AS tick CROSS JOIN unnest({plugin}::text[], {key}::text[], {value}::text[], "
            f"{version}::bigint[], {due}::bigint[]) AS new (plugin_name, key, value, version, due) "
            "ON CONFLICT (plugin_name, key) DO UPDATE SET value_json = excluded.value_json, "
            "version = excluded.version, expires_at = excluded.expires_at, updated_at = excluded.updated_at, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )

    def record(plugin: str, key: str, value: str, version: int, expires_at: int | None) -> Record:
        return Record((plugin, key), value.encode(), JSON, version, expires_at)

    def page(rows: Sequence[Row]) -> Page:
        if not rows:
            return Page()
        plugins, keys, values, versions, expiries = zip(*rows, strict=True)
        encoded = [value.encode() for value in values]
        return Page(list(zip(plugins, keys, strict=True)), encoded, [JSON] * len(keys), versions, expiries)

    def bind_keys(keys: Sequence[Key]) -> Row:
        return [plugin for plugin, _ in keys], [key for _, key in keys]

    columns = f"plugin_name, key, value_json, version, {due}"
    # LIMIT keeps PostgreSQL from turning the join round and walking the whole table.
    asked = (
        "unnest($2::text[], $3::text[]) AS asked (asked_plugin, asked_key) CROSS JOIN LATERAL "
        f"(SELECT * FROM {table} WHERE plugin_name = asked_plugin AND key = asked_key LIMIT 1) AS stored"
    )
    return PostgresLayout(
        table=table,
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
            [record.value.decode() for record in records],
            [record.version for record in records],
            [record.expires_at for record in records],
        ),
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
            f"SELECT clock.version, clock.now, found.* FROM ({_clock_and('clock_timestamp()')}) AS clock "
            f"LEFT JOIN LATERAL (SELECT {columns} FROM {asked}) AS found ON true"
        ),
        **_statements(insert),
        remove=(
            f"DELETE FROM {table} AS old USING unnest($1::text[], $2::text[]) AS asked (plugin_name, key) "
            "WHERE old.plugin_name = asked.plugin_name AND old.key = asked.key"
        ),
        retime=(
            f"UPDATE {table} AS old SET expires_at = {moment('new.due')} "
            "FROM unnest($1::bigint[], $2::text[], $3::text[]) AS new (due, plugin_name, key) "
            "WHERE old.plugin_name = new.plugin_name AND old.key = new.key"
        ),
    )


def moment(time: str) -> str:
    """SQL: milliseconds as a timestamptz; exact, which a float of seconds is not for times far away.

    By hours, because an interval is multiplied as a float, too: of whole hours that is exact up to the year 9999.
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

READ_CLOCK: Final = _clock_and("clock_timestamp()")
"""now; selects the clock and the time"""

LOCK_CLOCK: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1 FOR UPDATE"
WRITE_CLOCK_AND_COMMIT: Final = (
    f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = {{clock}} WHERE id = 1; "
    f"SELECT pg_notify('{CHANNEL}', '{{name}} {{clock}}'); COMMIT"
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
"""What makes an empty database ours."""
