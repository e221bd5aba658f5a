"""What the tables of the SQLite and the PostgreSQL engine share: the form of a layout, and SQL that both understand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from msgspec import Struct

from keyloft.core import schema
from keyloft.core.records import Key, Page, Record, Scan
from keyloft.core.schema import Row
from keyloft.core.values import JSON


class Layout(Struct, frozen=True, kw_only=True):
    """The table of one key space. Statements take the bindings that their docstring names."""

    table: str
    key: tuple[str, ...]
    """The columns of the key."""
    create: tuple[str, ...]
    mark: str
    """What stands before the number of a binding: `?` or `$`."""
    row: str
    """SQL: the columns of a whole row up to its version."""
    row_record: Callable[..., Record]
    """Makes a record of those columns and the row's times in milliseconds."""
    length: str
    """SQL: the size of the value in bytes."""
    milliseconds: Callable[[str], str]
    """SQL: the time in a column in milliseconds."""
    record: Callable[..., Record]
    page: Callable[[Sequence[Row]], Page]
    """Makes a page of the rows that `scan` and `expired` select."""
    bind_key: Callable[[Key], Row]
    bind_keys: Callable[[Sequence[Key]], Row]
    bind_range: Callable[[Key, Key], Row]
    get: str
    gets: str
    scans: Mapping[tuple[bool, bool, bool], str]
    """now, range, limit; by (reverse, keys_only, after)"""
    count: str
    """now, range"""
    expired: str
    """now, limit"""
    remove: str

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


def equal(key: Sequence[str], mark: str, first: int) -> str:
    """The condition that each column of a key equals its binding, of which the first has this number."""
    return " AND ".join([f"{column} = {mark}{at}" for at, column in enumerate(key, first)])


def within(key: Sequence[str], mark: str, over: str = ">=") -> str:
    """The condition that a key lies in a range, which is bound after `now`: all columns but the last are equal."""
    last, end = key[-1], len(key) + 2
    conditions = [f"{last} {over} {mark}{end - 1}", f"{last} < {mark}{end}"]
    return " AND ".join([equal(key[:-1], mark, 2), *conditions] if key[:-1] else conditions)


def lists(
    table: str, key: tuple[str, ...], mark: str, now: str, *, listed: str, keys_only: str, source: str | None = None
) -> dict[str, Any]:
    """The fields of a layout that name its table, bind its keys, and select live or expired entries.

    Args:
        table: The table.
        key: The columns of its key.
        mark: What stands before the number of a binding: `?` or `$`.
        now: Selects the time.
        listed: The columns of a list of entries.
        keys_only: The same, without values.
        source: Where a list of entries selects from, if not from the table alone.
    """
    full_key, is_plugins = [f"{table}.{column}" for column in key], table == schema.PLUGIN_TABLE

    def scan(reverse: bool, without_values: bool, after: bool) -> str:
        return (
            f"SELECT {keys_only if without_values else listed} FROM {table if without_values else source or table} "
            f"WHERE {within(full_key, mark, '>' if after else '>=')} AND {alive(now)} "
            f"ORDER BY {full_key[-1]} {'DESC' if reverse else 'ASC'} LIMIT {mark}{len(key) + 3}"
        )

    return {
        "table": table,
        "key": key,
        "mark": mark,
        "bind_key": (lambda key: key) if is_plugins else (lambda key: (key,)),
        "bind_range": (lambda start, end: (*start, end[1])) if is_plugins else (lambda start, end: (start, end)),
        "scans": {flags: scan(*flags) for flags in product((False, True), repeat=3)},
        "expired": f"SELECT {keys_only} FROM {table} WHERE expires_at <= {now} ORDER BY expires_at LIMIT {mark}2",
    }


def alive(now: str) -> str:
    """The condition that an entry has not expired."""
    return f"(expires_at IS NULL OR expires_at > {now})"


def plugin_page(rows: Sequence[Row]) -> Page:
    """The page of rows that hold a plugin's name, key, value, version and expiry."""
    if not rows:
        return Page()
    plugins, keys, values, versions, expiries = zip(*rows, strict=True)
    return Page(list(zip(plugins, keys, strict=True)), values, [JSON] * len(rows), versions, expiries)


def plugin_usage(now: str, total: str) -> str:
    """The statement that selects how many live entries each plugin has, and how many bytes their values take."""
    return (
        f"SELECT plugin_name, count(*), {total} FROM {schema.PLUGIN_TABLE} "
        f"WHERE {alive(now)} GROUP BY plugin_name ORDER BY plugin_name"
    )


def create_plugin_table(text: str, time: str, now: str) -> tuple[str, ...]:
    """The statements that make the plugins' table, which people can read and write.

    Args:
        text: What follows the type of a text.
        time: The type of a time.
        now: The default of a time.
    """
    table = schema.PLUGIN_TABLE
    return (
        f"CREATE TABLE {table} (plugin_name VARCHAR(100){text} NOT NULL, key VARCHAR(255){text} NOT NULL, "
        f"value_json TEXT NOT NULL, expires_at {time}, created_at {time} DEFAULT {now} NOT NULL, "
        f"updated_at {time} DEFAULT {now} NOT NULL, version BIGINT DEFAULT 0 NOT NULL, "
        f"CONSTRAINT pk_{table} PRIMARY KEY (plugin_name, key))",
        f"CREATE INDEX idx_plugin_kv_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        f"CREATE INDEX idx_plugin_kv_prefix ON {table} (plugin_name, key)",
    )


def create_all(layouts: Iterable[Layout], integer: str) -> tuple[str, ...]:
    """The statements that make Keyloft's tables in a database without them; `integer` is the type of a version."""
    return (
        f"CREATE TABLE {schema.REVISION_TABLE} (version_num VARCHAR(32) NOT NULL, "
        f"CONSTRAINT {schema.REVISION_TABLE}_pkc PRIMARY KEY (version_num))",
        f"CREATE TABLE {schema.VERSION_COUNTER_TABLE} "
        f"(id {integer} NOT NULL PRIMARY KEY CHECK (id = 1), version {integer} NOT NULL)",
        f"INSERT INTO {schema.VERSION_COUNTER_TABLE} (id, version) VALUES (1, 0)",
        *[statement for layout in layouts for statement in layout.create],
        f"INSERT INTO {schema.REVISION_TABLE} (version_num) VALUES ('{schema.REVISION}')",
    )


def created_names(statements: Iterable[str]) -> list[str]:
    """The names of the tables and indexes that some statements make."""
    return [statement.split()[2] for statement in statements if statement.startswith("CREATE")]
