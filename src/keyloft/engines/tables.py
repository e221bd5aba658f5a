"""What the tables of the SQLite and the PostgreSQL engine share: the form of a layout, and SQL that both understand."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from keyloft.core import schema
from keyloft.core.records import Key, Page, Record, Scan
from keyloft.core.schema import Row
from keyloft.core.values import JSON


@dataclass(kw_only=True, eq=False)
class Layout:
    """The table of one key space: what is its own, and the statements that follow from that.

    Statements take the bindings that their docstring names.
    """

    mark: ClassVar[str]
    """What stands before the number of a binding: `?` or `$`."""
    table: str
    key: tuple[str, ...]
    """The columns of the key."""
    create: tuple[str, ...]
    now: str
    """SQL: the time, as a column holds it."""
    listed: str
    """SQL: the columns of a list of entries."""
    keys_only: str
    """SQL: the same, without values."""
    source: str | None = None
    """SQL: where a list of entries selects from, if not from the table alone."""
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
    bind_keys: Callable[[Sequence[Key]], Sequence[Any]]

    def __post_init__(self) -> None:
        is_pair = len(self.key) > 1
        self.bind_key: Callable[[Key], Row] = (lambda key: key) if is_pair else (lambda key: (key,))
        self.bind_range: Callable[[Key, Key], Row] = (
            (lambda start, end: (*start, end[1])) if is_pair else (lambda start, end: (start, end))
        )
        self.alive = f"(expires_at IS NULL OR expires_at > {self.now})"
        self.scans = {flags: self._scan(*flags) for flags in product((False, True), repeat=3)}
        """now, range, limit; by (reverse, keys_only, after)"""
        self.expired = (
            f"SELECT {self.keys_only} FROM {self.table} WHERE expires_at <= {self.now} "
            f"ORDER BY expires_at LIMIT {self.mark}2"
        )
        """now, limit"""

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]

    def _scan(self, reverse: bool, keys_only: bool, after: bool) -> str:
        return (
            f"SELECT {self.keys_only if keys_only else self.listed} "
            f"FROM {self.table if keys_only else self.source or self.table} "
            f"WHERE {self.within('>' if after else '>=')} AND {self.alive} "
            f"ORDER BY {self.table}.{self.key[-1]} {'DESC' if reverse else 'ASC'} LIMIT {self.mark}{len(self.key) + 3}"
        )

    def equal(self, first: int) -> str:
        """SQL: whether the key equals the one that is bound from this number on."""
        return " AND ".join([f"{column} = {self.mark}{at}" for at, column in enumerate(self.key, first)])

    def within(self, over: str = ">=", sign: str = "") -> str:
        """SQL: whether the key lies in a range, which is bound after `now`: all columns but the last are equal."""
        *equal, last = [f"{sign}{self.table}.{column}" for column in self.key]
        start = len(equal) + 2
        conditions = [f"{column} = {self.mark}{at}" for at, column in enumerate(equal, 2)]
        return " AND ".join([*conditions, f"{last} {over} {self.mark}{start}", f"{last} < {self.mark}{start + 1}"])


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
        f"WHERE expires_at IS NULL OR expires_at > {now} GROUP BY plugin_name ORDER BY plugin_name"
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
