"""The table of each key space in PostgreSQL: the SQL of every statement, and how rows become records.

Keys and rows are bound as arrays, so that one statement serves many callers. `$1` is the time in milliseconds, or NULL
for the server's: reads use the start of their transaction, so that all answers of a snapshot share one time; writes use
the moment at which they got the lock of the version counter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final, cast

from msgspec.structs import astuple, replace

from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Key, Page, Record, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON
from keyloft.engines import tables
from keyloft.engines.tables import Layout

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


@dataclass(kw_only=True, eq=False)
class PostgresLayout(Layout):
    """The table of one key space. Statements bind `now`, then what stands below each.

    `record` takes what `selected` says, and the times of creation and last change if they follow.
    """

    mark = "$"
    columns: Mapping[str, str]
    """The columns of key and value, and their types."""
    selected: str
    """SQL: the columns that gets select."""
    asked: str
    """SQL: where the rows of some keys are selected from; these are bound from `$2` on."""
    moment: Callable[[str], str] = _same
    """SQL: milliseconds as a column holds them."""
    bind_row: Callable[[Record], Row]
    """A whole row: the columns of key and value, the version and the times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        table, key = self.table, ", ".join(self.key)
        types = [self.columns[column] for column in self.key]
        is_same = " AND ".join([f"old.{column} = new.{column}" for column in self.key])
        self.get = f"SELECT {self.selected} FROM {table} WHERE {self.equal(2)} AND {self.alive}"
        """key"""
        self.get_expired = f"SELECT {self.selected} FROM {table} WHERE {self.equal(1)}"
        """key, without `now`; selects expired entries, too"""
        self.gets = f"SELECT {self.selected} FROM {self.asked} WHERE {self.alive}"
        """keys"""
        self.count = f"SELECT count(*) FROM {table} WHERE {self.within()} AND {self.alive}"
        """range"""
        self.load = (
            f"SELECT counter.version, counter.now, found.* FROM ({READ_VERSION}) AS counter "
            f"LEFT JOIN LATERAL (SELECT {self.selected} FROM {self.asked}) AS found ON true"
        )
        """keys; selects the version counter and the time, then what `gets` selects, or NULLs where nothing is stored"""
        self.set = (
            f"WITH counter AS ({_ADVANCE_VERSION}), "
            f"written AS ({self._insert('(SELECT base, now, now AS since FROM counter)', 4)}) "
            f"SELECT base, now, pg_notify('{CHANNEL}', $3::text || ' ' || (base + $2)) FROM counter"
        )
        """how many versions to take, the name of the process, puts; selects the version counter before, and the time.

        Versions of the puts count from that counter, and their expiries from that time.
        """
        self.put = self._insert("(SELECT 0::bigint AS base, $1::bigint AS now, 0::bigint AS since)", 2)
        """puts, with versions and expiries as they are stored"""
        self.remove = f"DELETE FROM {table} AS old USING unnest({arrays(types, 1)}) AS new ({key}) WHERE {is_same}"
        """keys, without `now`"""
        self.set_expiries = (
            f"UPDATE {table} AS old SET expires_at = {self.moment('new.due')} "
            f"FROM unnest({arrays(['bigint', *types], 1)}) AS new (due, {key}) WHERE {is_same}"
        )
        """expiries, keys, without `now`"""

    def _insert(self, counter: str, first: int) -> str:
        """The statement that puts rows, which are bound from this number on."""
        names, now = ", ".join(self.columns), self.moment("now")
        replaced = [name for name in (*self.columns, "version", "expires_at", "updated_at") if name not in self.key]
        rows = f"unnest({arrays([*self.columns.values(), 'bigint', 'bigint'], first)})"
        return (
            f"INSERT INTO {self.table} AS old ({names}, version, expires_at, created_at, updated_at) "
            f"SELECT {names}, base + new.version, {self.moment('since + new.due')}, {now}, {now} "
            f"FROM {counter} AS counter CROSS JOIN {rows} AS new ({names}, version, due) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET "
            f"{', '.join([f'{column} = excluded.{column}' for column in replaced])}, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )

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


def _bytes_layout(table: str, *, lists_times: bool = False) -> PostgresLayout:
    """A table with one binary key."""
    times = f"encoding, version, expires_at{', updated_at' if lists_times else ''}"
    return PostgresLayout(
        table=table,
        key=("key",),
        columns={"key": "bytea", "value": "bytea", "encoding": "int"},
        create=(
            f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version BIGINT NOT NULL, expires_at BIGINT, created_at BIGINT NOT NULL, "
            "updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        ),
        now=f"(SELECT coalesce($1::bigint, {milliseconds('now()')}))",
        selected="key, value, encoding, version, expires_at, created_at, updated_at",
        asked=f"(SELECT * FROM {table} WHERE key = ANY($2::bytea[])) AS stored",
        listed=f"key, value, {times}",
        keys_only=f"key, ''::bytea, {times}",
        row="key, value, encoding, version",
        row_record=Record,
        length="octet_length(value)",
        milliseconds=_same,
        record=Record,
        page=lambda rows: Page(*zip(*rows, strict=True)),
        bind_keys=lambda keys: (keys,),
        bind_row=astuple,
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
        return replace(page, values=[text.encode() for text in cast("Sequence[str]", page.values)])

    def bind_row(record: Record) -> Row:
        times = record.expires_at, record.created_at, record.updated_at
        return (*record.key, plugin_text(record), record.version, *times)

    return PostgresLayout(
        table=table,
        key=("plugin_name", "key"),
        columns={"plugin_name": "text", "key": "text", "value_json": "text"},
        create=tables.create_plugin_table(' COLLATE "C"', "TIMESTAMP WITH TIME ZONE", "CURRENT_TIMESTAMP"),
        now=_PLUGIN_NOW,
        selected=columns,
        # LIMIT keeps PostgreSQL from starting the join with the whole table.
        asked="unnest($2::text[], $3::text[]) AS asked (asked_plugin, asked_key) CROSS JOIN LATERAL "
        f"(SELECT * FROM {table} WHERE plugin_name = asked_plugin AND key = asked_key LIMIT 1) AS stored",
        listed=columns,
        keys_only=f"plugin_name, key, '', version, {due}",
        row="plugin_name, key, value_json, version",
        row_record=record,
        length="octet_length(value_json)",
        milliseconds=_plugin_milliseconds,
        moment=moment,
        record=record,
        page=page,
        bind_keys=lambda keys: tuple(zip(*keys, strict=True)),
        bind_row=bind_row,
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
