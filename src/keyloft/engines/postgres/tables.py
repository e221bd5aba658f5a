"""The table of each key space in PostgreSQL: the SQL of every statement, and how rows become records.

Keys and rows are bound as arrays, so that one statement serves many callers. `$1` is the time in milliseconds, or NULL
for the server's: reads use the start of their transaction, so that all answers of a snapshot share one time; writes use
the moment at which they got the lock of the version counter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any, Final, cast

from msgspec.structs import astuple

from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Key, Page, Record, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON
from keyloft.engines import tables
from keyloft.engines.tables import Layout, alive, equal, within


class PostgresLayout(Layout, frozen=True, kw_only=True):
    """The table of one key space. Statements bind `now`, then what stands below each; `get` a key, `gets` keys.

    `record` takes a row of `get`, and the times of creation and last change if they follow. `remove` binds keys alone.
    """

    columns: Mapping[str, str]
    """The columns of key and value, and their types."""
    moment: Callable[[str], str]
    """SQL: milliseconds as a column holds them."""
    bind_row: Callable[[Record], Row]
    """A whole row: the columns of key and value, the version and the times."""
    get_expired: str
    """key, without `now`; selects expired entries, too"""
    load: str
    """keys; selects the version counter and the time, then what `gets` selects, or NULLs where nothing is stored"""
    set: str
    """how many versions to take, the name of the process, puts; selects the version counter before, and the time.

    Versions of the puts count from that counter, and their expiries from that time.
    """
    put: str
    """puts, with versions and expiries as they are stored"""
    set_expiries: str
    """expiries, keys, without `now`"""

    def found(self, rows: Iterable[Row]) -> dict[Key, Record]:
        """Turns rows of `get` and `gets` into records by key."""
        return {record.key: record for record in starmap(self.record, rows)}

    def loaded(self, rows: Iterable[Row]) -> dict[Key, Record]:
        """Turns rows of `load` into records by key."""
        return self.found([row[2:] for row in rows if row[2] is not None])

    def bind_rows(self, records: Iterable[Record]) -> Sequence[Row]:
        """Whole rows, as an array for each column."""
        return list(zip(*map(self.bind_row, records), strict=True))

    def bind_puts(self, records: Iterable[Record]) -> Sequence[Row]:
        """The same, without the times of creation and last change."""
        return self.bind_rows(records)[:-2]


CHANNEL: Final = "keyloft"
"""The channel of NOTIFY that announces commits to other processes."""


def milliseconds(moment: str) -> str:
    """SQL: a timestamptz in milliseconds since 1970."""
    return f"floor(extract(epoch FROM {moment}) * 1000)::bigint"


_NOW: Final = f"coalesce($1::bigint, {milliseconds('clock_timestamp()')}) AS now"

READ_VERSION: Final = f"SELECT version, {_NOW} FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1"
"""now; selects the version counter and the time"""

LOCK_VERSION: Final = f"SELECT version FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1 FOR UPDATE"
WRITE_VERSION_AND_COMMIT: Final = (
    f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = {{version}} WHERE id = 1; "
    f"SELECT pg_notify('{CHANNEL}', '{{name}} {{version}}'); COMMIT"
)
# RETURNING is evaluated once the row is locked, perhaps after a wait: `clock_timestamp` is the time of that moment.
_ADVANCE_VERSION: Final = (
    f"UPDATE {schema.VERSION_COUNTER_TABLE} SET version = version + $2::bigint WHERE id = 1 "
    f"RETURNING version - $2::bigint AS base, {_NOW}"
)


def arrays(types: Iterable[str], first: int) -> str:
    """SQL: bindings that are arrays of these types; the first has this number."""
    return ", ".join([f"${at}::{kind}[]" for at, kind in enumerate(types, first)])


def _same(time: str) -> str:
    return time


def _statements(
    table: str,
    types: Mapping[str, str],
    key: tuple[str, ...],
    *,
    columns: str,
    asked: str,
    now: str,
    moment: Callable[[str], str] = _same,
    **lists: str,
) -> dict[str, Any]:
    """The fields of a layout whose SQL differs in its columns alone.

    Args:
        table: The table.
        types: The columns of key and value, and their types.
        key: The columns of the key.
        columns: What a get selects.
        asked: Where to select the rows of some keys from; these are bound from `$2` on.
        now: SQL: the time, as a column holds it.
        moment: SQL: milliseconds as a column holds them.
        lists: The columns of lists, as `tables.lists` takes them.
    """
    key_types = [types[column] for column in key]
    key_names, names = ", ".join(key), ", ".join(types)
    is_same = " AND ".join([f"old.{column} = new.{column}" for column in key])
    replaced = [column for column in (*types, "version", "expires_at", "updated_at") if column not in key]

    def insert(counter: str, first: int) -> str:
        rows = f"unnest({arrays([*types.values(), 'bigint', 'bigint'], first)})"
        return (
            f"INSERT INTO {table} AS old ({names}, version, expires_at, created_at, updated_at) "
            f"SELECT {names}, base + new.version, {moment('since + new.due')}, {moment('now')}, {moment('now')} "
            f"FROM {counter} AS counter CROSS JOIN {rows} AS new ({names}, version, due) "
            f"ON CONFLICT ({key_names}) DO UPDATE SET "
            f"{', '.join([f'{column} = excluded.{column}' for column in replaced])}, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )

    return {
        **tables.lists(table, key, "$", now, **lists),
        "columns": types,
        "moment": moment,
        "get": f"SELECT {columns} FROM {table} WHERE {equal(key, '$', 2)} AND {alive(now)}",
        "get_expired": f"SELECT {columns} FROM {table} WHERE {equal(key, '$', 1)}",
        "gets": f"SELECT {columns} FROM {asked} WHERE {alive(now)}",
        "count": f"SELECT count(*) FROM {table} WHERE {within(key, '$')} AND {alive(now)}",
        "load": f"SELECT counter.version, counter.now, found.* FROM ({READ_VERSION}) AS counter "
        f"LEFT JOIN LATERAL (SELECT {columns} FROM {asked}) AS found ON true",
        "set": f"WITH counter AS ({_ADVANCE_VERSION}), "
        f"written AS ({insert('(SELECT base, now, now AS since FROM counter)', 4)}) "
        f"SELECT base, now, pg_notify('{CHANNEL}', $3::text || ' ' || (base + $2)) FROM counter",
        "put": insert("(SELECT 0::bigint AS base, $1::bigint AS now, 0::bigint AS since)", 2),
        "remove": f"DELETE FROM {table} AS old USING unnest({arrays(key_types, 1)}) AS new ({key_names}) "
        f"WHERE {is_same}",
        "set_expiries": f"UPDATE {table} AS old SET expires_at = {moment('new.due')} "
        f"FROM unnest({arrays(['bigint', *key_types], 1)}) AS new (due, {key_names}) WHERE {is_same}",
    }


def _bytes_layout(table: str, *, lists_times: bool = False) -> PostgresLayout:
    """A table with one binary key."""
    times = f"encoding, version, expires_at{', updated_at' if lists_times else ''}"
    return PostgresLayout(
        **_statements(
            table,
            {"key": "bytea", "value": "bytea", "encoding": "int"},
            ("key",),
            columns="key, value, encoding, version, expires_at, created_at, updated_at",
            asked=f"(SELECT * FROM {table} WHERE key = ANY($2::bytea[])) AS stored",
            now=f"(SELECT coalesce($1::bigint, {milliseconds('now()')}))",
            listed=f"key, value, {times}",
            keys_only=f"key, ''::bytea, {times}",
        ),
        row="key, value, encoding, version",
        length="octet_length(value)",
        milliseconds=_same,
        create=(
            f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version BIGINT NOT NULL, expires_at BIGINT, created_at BIGINT NOT NULL, "
            "updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        ),
        bind_keys=lambda keys: (keys,),
        bind_row=astuple,
        record=Record,
        row_record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
    )


def moment(time: str) -> str:
    """SQL: milliseconds as a timestamptz, exact up to the year 9999.

    A float of seconds would not be exact. Intervals are multiplied as floats, too, which is exact for whole hours.
    """
    hours = f"(({time}) / 3600000) * interval '1 hour'"
    return f"('epoch'::timestamptz + {hours} + (({time}) % 3600000) * interval '1 millisecond')"


_PLUGIN_NOW: Final = f"(SELECT coalesce({moment('$1::bigint')}, now()))"


def _plugin_milliseconds(column: str) -> str:
    """SQL: a time that a person may have written: rounded up to a whole millisecond; 'infinity' is never reached."""
    return (
        f"CASE WHEN {column} IS NULL THEN NULL WHEN isfinite({column}) "
        f"THEN ceil(extract(epoch FROM {column}) * 1000)::bigint "
        f"WHEN {column} > now() THEN {schema.NEVER} ELSE 0 END"
    )


def _plugin_layout() -> PostgresLayout:
    """The plugins' table, which people can read. A row inserted by hand counts like any other."""
    table, due = schema.PLUGIN_TABLE, _plugin_milliseconds("expires_at")
    columns = f"plugin_name, key, value_json, version, {due}"

    def record(plugin: str, key: str, value: str, version: int, *times: Any) -> Record:
        return Record((plugin, key), value.encode(), JSON, version, *times)

    def page(rows: Sequence[Row]) -> Page:
        page = tables.plugin_page(rows)
        page.values = [text.encode() for text in cast("Sequence[str]", page.values)]
        return page

    def bind_row(record: Record) -> Row:
        times = record.expires_at, record.created_at, record.updated_at
        return (*record.key, plugin_text(record), record.version, *times)

    return PostgresLayout(
        **_statements(
            table,
            {"plugin_name": "text", "key": "text", "value_json": "text"},
            ("plugin_name", "key"),
            columns=columns,
            # LIMIT keeps PostgreSQL from starting the join with the whole table.
            asked="unnest($2::text[], $3::text[]) AS asked (asked_plugin, asked_key) CROSS JOIN LATERAL "
            f"(SELECT * FROM {table} WHERE plugin_name = asked_plugin AND key = asked_key LIMIT 1) AS stored",
            now=_PLUGIN_NOW,
            moment=moment,
            listed=columns,
            keys_only=f"plugin_name, key, '', version, {due}",
        ),
        row="plugin_name, key, value_json, version",
        length="octet_length(value_json)",
        milliseconds=_plugin_milliseconds,
        create=tables.create_plugin_table(' COLLATE "C"', "TIMESTAMP WITH TIME ZONE", "CURRENT_TIMESTAMP"),
        bind_keys=lambda keys: tuple(zip(*keys, strict=True)),
        bind_row=bind_row,
        record=record,
        row_record=record,
        page=page,
    )


LAYOUTS: Final[Mapping[Space, PostgresLayout]] = {
    Space.TUPLES: _bytes_layout(schema.TUPLE_TABLE),
    Space.SEMANTIC: _bytes_layout(schema.SEMANTIC_TABLE, lists_times=True),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = tables.plugin_usage(_PLUGIN_NOW, "sum(octet_length(value_json))::bigint")
"""now"""

CREATE: Final = tables.create_all(LAYOUTS.values(), "BIGINT")
"""Creates Keyloft's tables in a database without them."""
