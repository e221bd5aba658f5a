"""The table of each key space in PostgreSQL: the SQL of every statement, and how rows become records.

Keys and rows are bound as arrays, so that one statement serves many callers. `$1` is the time in milliseconds, or NULL
for the server's: reads use the start of their transaction, so that all answers of a snapshot share one time; commits
use the moment at which they got the lock of the version counter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final, cast

from msgspec.structs import astuple, replace

from keyloft import limits
from keyloft.core import schema
from keyloft.core.maintenance import plugin_text
from keyloft.core.records import Head, Key, Page, Record, Space
from keyloft.core.schema import Row
from keyloft.core.values import JSON
from keyloft.engines import tables
from keyloft.engines.postgres import log
from keyloft.engines.postgres.log import READ_VERSION, milliseconds
from keyloft.engines.tables import Layout

# The time never goes below that of the newest commit. PostgreSQL reads the counter only for entries that expire.
_NOW: Final = (
    f"greatest(coalesce($1::bigint, {milliseconds('now()')}), "
    f"(SELECT at FROM {schema.VERSION_COUNTER_TABLE} WHERE id = 1))"
)

RELATIVE: Final = 3 * 2**61
"""An expiry from here on counts milliseconds from the time of its commit, which is not known before."""


def arrays(types: Iterable[str], first: int) -> str:
    """SQL: bindings that are arrays of these types; the first has this number."""
    return ", ".join(_arrays(types, first))


def _arrays(types: Iterable[str], first: int) -> list[str]:
    return [f"${at}::{kind}[]" for at, kind in enumerate(types, first)]


def _rows_of_arguments(arrays: Sequence[str], names: Sequence[str]) -> str:
    """SQL: the rows of some arrays, which are arguments of a PL/pgSQL function, by the names of their columns.

    `unnest` of all of them would store every element once more. Each element is looked up instead: an argument is
    expanded, so that this takes no longer in a long array. Elsewhere it would, for elements without a fixed length.
    """
    others = [f"({array})[given.at::int] AS {name}" for array, name in zip(arrays[1:], names[1:], strict=True)]
    selected = ", ".join([f"given.{names[0]}", *others])
    return f"(SELECT {selected} FROM unnest({arrays[0]}) WITH ORDINALITY AS given ({names[0]}, at))"


def _same(time: str) -> str:
    return time


def _part_of_key(version: str) -> str:
    """SQL: a version as an int of a tuple key: a byte that gives its length, then its bytes without leading zeros."""
    size = f"((length(to_hex({version})) + 1) / 2)"
    return f"set_byte(decode('00', 'hex'), 0, 20 + {size}) || substring(int8send({version}) FROM 9 - {size})"


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
    head: str
    """SQL: the same, with NULL for a large value."""
    stamp: str | None = None
    """SQL: when a row was last changed, more exactly than its record says it: people write to it, too."""
    of_keys: Callable[..., str]
    """SQL: the rows of some keys, by the arrays of their columns, locked by a clause such as FOR UPDATE."""
    version: Callable[[str], str] = _same
    """SQL: the version in a column."""
    moment: Callable[[str], str] = _same
    """SQL: milliseconds as a column holds them."""
    in_key: Callable[[str], str] = _same
    """SQL: a version as the key of an Append contains it."""
    bind_row: Callable[[Record], Row]
    """A whole row: the columns of key and value, the version and the times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        table, key = self.table, ", ".join(self.key)
        self.key_types = [self.columns[column] for column in self.key]
        keys, later_keys = _arrays(self.key_types, 1), _arrays(self.key_types, 2)
        asked = self.of_keys(*later_keys)
        self.get = f"SELECT {self.selected} FROM {table} WHERE {self.equal(2)} AND {self.alive}"
        """key"""
        self.get_expired = f"SELECT {self.selected} FROM {table} WHERE {self.equal(1)}"
        """key, without `now`; selects expired entries, too"""
        self.gets = f"SELECT {self.selected} FROM {asked} WHERE {self.alive}"
        """keys"""
        self.count = f"SELECT count(*) FROM {table} WHERE {self.within()} AND {self.alive}"
        """range"""
        due = self.milliseconds("expires_at")
        between = f"FROM {table} WHERE expires_at > {self.moment('$2::bigint')} AND expires_at <= {self.now}"
        # As a whole millisecond: a column may also hold fractions of it.
        last = f"(SELECT {self.moment(due)} {between} ORDER BY expires_at LIMIT 1 OFFSET $3)"
        self.due = f"SELECT {key}, {due} {between} AND expires_at <= coalesce({last}, {self.now})"
        self.next_expiry = f"SELECT {due} FROM {table} WHERE expires_at > {self.now} ORDER BY expires_at LIMIT 1"

        # Commits
        self.load_values = f"SELECT {self.selected} FROM {self.of_keys(*keys)}"
        """keys, without `now`; selects expired entries, too"""
        head = self.head if self.stamp is None else f"{self.head}, {self.stamp}"
        self.load_heads = f"SELECT {head} FROM {self.of_keys(*keys)}"
        """keys, without `now`; selects `head` and `stamp`, also of expired entries"""
        self.load_moment = self._beside_counter(head, asked)
        """keys; selects the version counter and the time, then the same, or NULLs where nothing is stored"""
        self.lock = self.lock_rows(keys)
        """keys, without `now`; selects how many rows there are, and how many of these it has locked"""
        free = self.of_keys(*keys, lock="FOR UPDATE SKIP LOCKED")
        self.find_locked = f"SELECT {key} FROM {self.of_keys(*keys)} WHERE ({key}) NOT IN (SELECT {key} FROM {free})"
        """keys, without `now`; selects those whose rows others have locked"""
        put = [*self.columns.values(), "bigint", "bigint"]
        self.put = self.insert("0", "$1::bigint", _arrays(put, 2))
        """time, puts"""
        self.remove = self.delete_rows(keys)
        """keys, without `now`"""
        self.set_expiries = self.touch_rows("0", _arrays([*self.key_types, "bigint"], 1))
        """keys, expiries, without `now`"""

    @property
    def seen_stamp(self) -> str:
        """SQL: the column that shows, besides version and expiry, whether a row has changed."""
        return self.stamp or "updated_at"

    @property
    def stamp_type(self) -> str:
        return "bigint" if self.stamp is None else "text"

    @staticmethod
    def _beside_counter(columns: str, asked: str) -> str:
        return (
            f"SELECT counter.version, counter.now, found.* FROM ({READ_VERSION}) AS counter "
            f"LEFT JOIN LATERAL (SELECT {columns} FROM {asked}) AS found ON true"
        )

    def lock_rows(self, keys: Sequence[str]) -> str:
        """The statement that locks rows of some keys without waiting; selects how many exist, and how many it got."""
        locked = self.of_keys(*keys, lock="FOR UPDATE SKIP LOCKED")
        return f"SELECT (SELECT count(*) FROM {self.of_keys(*keys)}), (SELECT count(*) FROM {locked})"

    def delete_rows(self, keys: Sequence[str]) -> str:
        names = ", ".join(self.key)
        return f"DELETE FROM {self.table} AS old USING unnest({', '.join(keys)}) AS new ({names}) WHERE {self._is_same}"

    def touch_rows(self, now: str, touches: Sequence[str]) -> str:
        """The statement that gives rows another expiry, by the arrays of their keys and expiries."""
        return (
            f"UPDATE {self.table} AS old SET expires_at = {self._expiry(now)} "
            f"FROM unnest({', '.join(touches)}) AS new ({', '.join(self.key)}, due) WHERE {self._is_same}"
        )

    def insert(self, base: str, now: str, puts: Sequence[str], *, with_suffix: bool = False, over: bool = True) -> str:
        """The statement that puts rows which may be new.

        Args:
            base: SQL: the version from which the versions of the puts count.
            now: SQL: the time.
            puts: SQL: arrays of the columns of key and value, the versions and the expiries.
            with_suffix: Whether suffixes follow; NULL except for the keys of Appends, which contain their version.
            over: Whether rows that are there are replaced, or else left as they are.
        """
        names, at = ", ".join(self.columns), self.moment(now)
        version = f"{base} + new.version"
        selected = [f"new.{column}" for column in self.columns]
        if with_suffix:
            selected[0] = (
                f"CASE WHEN new.suffix IS NULL THEN new.key ELSE new.key || {self.in_key(version)} || new.suffix END"
            )
        replaced = [name for name in (*self.columns, "version", "expires_at", "updated_at") if name not in self.key]
        update = (
            f"UPDATE SET {', '.join([f'{column} = excluded.{column}' for column in replaced])}, "
            "created_at = CASE WHEN old.expires_at <= excluded.updated_at THEN excluded.created_at "
            "ELSE old.created_at END"
        )
        return (
            f"INSERT INTO {self.table} AS old ({names}, version, expires_at, created_at, updated_at) "
            f"SELECT {', '.join(selected)}, {version}, {self._expiry(now)}, {at}, {at} "
            f"FROM unnest({', '.join(puts)}) AS new ({names}, version, due{', suffix' if with_suffix else ''}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO {update if over else 'NOTHING'}"
        )

    def update_rows(self, base: str, now: str, puts: Sequence[str], *seen: str, condition: str = "true") -> str:
        """The statement by which a PL/pgSQL function puts rows over others that are there.

        Args:
            base: SQL: the version from which the versions of the puts count.
            now: SQL: the time.
            puts: Arguments of the function that are arrays: of the columns of key and value, the versions and the
                expiries; then of what `seen` names.
            seen: Names for what a condition compares.
            condition: SQL: on `old` and `new`.
        """
        names, at = (*self.columns, "version", "due", *seen), self.moment(now)
        values = [f"{column} = new.{column}" for column in self.columns if column not in self.key]
        return (
            f"UPDATE {self.table} AS old SET {', '.join(values)}, version = {base} + new.version, "
            f"expires_at = {self._expiry(now)}, updated_at = {at}, "
            f"created_at = CASE WHEN old.expires_at <= {at} THEN {at} ELSE old.created_at END "
            f"FROM {_rows_of_arguments(puts, names)} AS new WHERE {self._is_same} AND {condition}"
        )

    @property
    def _is_same(self) -> str:
        """SQL: `old` has the key of `new`.

        Not by `=`, which PostgreSQL can also join by walking the whole index and comparing each row with each key. It
        did so for large batches, in a table that it took for small. For a range there is the index alone.
        """
        old, new = [", ".join([f"{row}.{column}" for column in self.key]) for row in ("old", "new")]
        return f"({old}) >= ({new}) AND ({old}) <= ({new})"

    def _expiry(self, now: str) -> str:
        """SQL: the expiry of `new` as a column holds it."""
        due = f"CASE WHEN new.due >= {RELATIVE} THEN {now} + (new.due - {RELATIVE}) ELSE new.due END"
        return (
            due
            if self.moment is _same
            else f"CASE new.due WHEN {schema.NEVER} THEN 'infinity' " + (f"ELSE {self.moment(due)} END")
        )

    def found(self, rows: Iterable[Row]) -> dict[Key, Record]:
        """Turns rows of `get`, `gets` and `load_values` into records by key."""
        return {record.key: record for record in starmap(self.record, rows)}

    def heads(self, rows: Iterable[Row]) -> dict[Key, Record]:
        """Turns rows of `load_heads` into records by key, with a Head for each large value."""
        found: dict[Key, Record] = {}
        end = None if self.stamp is None else -1
        value = len(self.key)
        for row in rows:
            if row[value] is None:
                record = self.record(*row[:value], self.no_value, *row[value + 1 : end])
                record = Head(*astuple(record))
            else:
                record = self.record(*row[:end])
            found[record.key] = record
        return found

    def stamps(self, rows: Iterable[Row]) -> dict[Key, str]:
        """The stamps in rows of `load_heads`, by key."""
        if self.stamp is None:
            return {}
        return {tuple(row[: len(self.key)]): row[-1] for row in rows}

    @property
    def no_value(self) -> Any:
        return b"" if self.stamp is None else ""

    def bind_rows(self, records: Iterable[Record]) -> Sequence[Row]:
        """Whole rows, as an array for each column."""
        return list(zip(*map(self.bind_row, records), strict=True))

    def bind_puts(self, records: Iterable[Record]) -> Sequence[Row]:
        """The same, without the times of creation and last change."""
        return self.bind_rows(records)[:-2]


def _bytes_layout(table: str, in_key: Callable[[str], str]) -> PostgresLayout:
    """A table with one binary key."""
    columns = "encoding, version, expires_at"

    def of_keys(keys: str, lock: str = "") -> str:
        return f"(SELECT * FROM {table} WHERE key = ANY({keys}) {lock}) AS stored"

    return PostgresLayout(
        table=table,
        key=("key",),
        in_key=in_key,
        columns={"key": "bytea", "value": "bytea", "encoding": "int"},
        create=(
            f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version BIGINT NOT NULL, expires_at BIGINT, created_at BIGINT NOT NULL, "
            "updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        ),
        now=f"(SELECT {_NOW})",
        selected=f"key, value, {columns}, created_at, updated_at",
        head=f"key, CASE WHEN octet_length(value) <= {limits.POSTGRES_HEAD_BYTES} THEN value END, {columns}, "
        "created_at, updated_at",
        of_keys=of_keys,
        listed=f"key, value, {columns}",
        keys_only=f"key, ''::bytea, {columns}",
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


_PLUGIN_NOW: Final = f"(SELECT {moment(_NOW)})"


def _plugin_milliseconds(column: str) -> str:
    """SQL: a time that a person may have written: rounded up to a whole millisecond; 'infinity' is never reached."""
    return (
        f"CASE WHEN {column} IS NULL THEN NULL WHEN isfinite({column}) "
        f"THEN ceil(extract(epoch FROM {column}) * 1000)::bigint "
        f"WHEN {column} > now() THEN {schema.NEVER} ELSE 0 END"
    )


def _plugin_version(column: str) -> str:
    """SQL: the version of a row that a person may have inserted."""
    return f"greatest({column}, {schema.VERSION_BY_HAND})"


def _plugin_layout() -> PostgresLayout:
    """The plugins' table, which people can read. A row inserted by hand counts like any other, as VERSION_BY_HAND."""
    table, version, due = schema.PLUGIN_TABLE, _plugin_version("version"), _plugin_milliseconds("expires_at")
    columns = f"plugin_name, key, value_json, {version}, {due}"

    def of_keys(plugins: str, keys: str, lock: str = "") -> str:
        # LIMIT keeps PostgreSQL from starting the join with the whole table.
        return (
            f"unnest({plugins}, {keys}) AS asked (asked_plugin, asked_key) CROSS JOIN LATERAL (SELECT * FROM {table} "
            f"WHERE plugin_name = asked_plugin AND key = asked_key LIMIT 1 {lock}) AS stored"
        )

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
        head="plugin_name, key, "
        f"CASE WHEN octet_length(value_json) <= {limits.POSTGRES_HEAD_BYTES} THEN value_json END, {version}, {due}",
        stamp="extract(epoch FROM updated_at)::text",
        of_keys=of_keys,
        listed=columns,
        keys_only=f"plugin_name, key, '', {version}, {due}",
        row=f"plugin_name, key, value_json, {version}",
        row_record=record,
        length="octet_length(value_json)",
        milliseconds=_plugin_milliseconds,
        version=_plugin_version,
        moment=moment,
        record=record,
        page=page,
        bind_keys=lambda keys: tuple(zip(*keys, strict=True)),
        bind_row=bind_row,
    )


LAYOUTS: Final[Mapping[Space, PostgresLayout]] = {
    Space.TUPLES: _bytes_layout(schema.TUPLE_TABLE, _part_of_key),
    Space.SEMANTIC: _bytes_layout(schema.SEMANTIC_TABLE, "int8send({})".format),
    Space.PLUGINS: _plugin_layout(),
}

PLUGIN_USAGE: Final = (
    f"SELECT counter.version, used.* FROM ({READ_VERSION}) AS counter "
    f"LEFT JOIN ({tables.plugin_usage(LAYOUTS[Space.PLUGINS])}) AS used ON true"
)
"""now, plugin and key after which, rows; selects the version counter, then what plugins store, or NULLs"""

CREATE: Final = tables.create_all(LAYOUTS.values(), *log.CREATE)
"""Creates Keyloft's tables in a database without them."""
