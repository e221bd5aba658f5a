"""What the tables of the SQLite and the PostgreSQL engine share: the form of a layout, and SQL that both understand."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Final

from keyloft import limits
from keyloft.core import schema
from keyloft.core.adoption import Adoption
from keyloft.core.records import Due, DuePage, Key, Page, Record, Scan, UsageSlice, Used
from keyloft.core.schema import Row
from keyloft.core.values import JSON

_TIMES: Final = ("created_at", "updated_at")


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
        self.scans = {flags: self._scan(*flags) for flags in product((False, True), repeat=4)}
        """now, range, limit; by (reverse, keys_only, after, times)"""
        self.expired = (
            f"SELECT {self.keys_only} FROM {self.table} WHERE expires_at <= {self.now} "
            f"ORDER BY expires_at LIMIT {self.mark}2"
        )
        """now, limit"""
        key = ", ".join(self.key)
        moment = f"FROM {self.table} WHERE expires_at > {self.mark}2 AND expires_at <= {self.now}"
        self.due = (
            f"SELECT {key}, {self.selected_time('expires_at')} {moment} AND expires_at <= coalesce("
            f"(SELECT expires_at {moment} ORDER BY expires_at LIMIT 1 OFFSET {self.mark}3), {self.now})"
        )
        """now, the moment after which, limit; selects keys and their expiries, up to one millisecond of them more"""
        self.next_expiry = (
            f"SELECT {self.selected_time('min(expires_at)')} FROM {self.table} WHERE expires_at > {self.now}"
        )
        """now; selects the next expiry, or NULL"""

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after, ask.times]

    def _scan(self, reverse: bool, keys_only: bool, after: bool, times: bool) -> str:
        columns = self.keys_only if keys_only else self.listed
        if times:
            columns += "".join([f", {self.selected_time(f'{self.table}.{time}')}" for time in _TIMES])
        return (
            f"SELECT {columns} "
            f"FROM {self.table} "
            f"WHERE {self.within('>' if after else '>=')} AND {self.alive} "
            f"ORDER BY {self.table}.{self.key[-1]} {'DESC' if reverse else 'ASC'} LIMIT {self.mark}{len(self.key) + 3}"
        )

    def selected_time(self, column: str) -> str:
        """SQL: the time in a column, as `page` and `due_page` take it."""
        return self.milliseconds(column)

    def due_page(self, rows: Sequence[Row], next_expiry: Any, ask: Due, now: int, version: int) -> DuePage:
        """What rows of `due` and the answer of `next_expiry` tell."""
        keys = [row[:-1] if len(self.key) > 1 else row[0] for row in rows]
        expired_at = [row[-1] for row in rows]
        if len(rows) > ask.limit:
            return DuePage(keys, expired_at, max(expired_at), version, is_last=False, next_expiry=None)
        return DuePage(keys, expired_at, now, version, is_last=True, next_expiry=next_expiry)

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
    """The page of rows that hold a plugin's name, key, value, version, expiry and perhaps the other times."""
    if not rows:
        return Page()
    plugins, keys, values, versions, expiries, *times = zip(*rows, strict=True)
    return Page(list(zip(plugins, keys, strict=True)), values, [JSON] * len(rows), versions, expiries, *times)


def plugin_usage(layout: Layout) -> str:
    """The statement that selects what plugins store in a slice of their keys: a row per plugin.

    A row has the plugin's name, its last key in the slice, the number of its rows, and the number and size of those
    that live. Sizes are taken where rows are read: to hand the values on would read them.
    """
    first, second = [f"{layout.mark}{at}" for at in (2, 3)]
    size = f"CASE WHEN {layout.alive} THEN octet_length(value_json) END AS size"
    return (
        "SELECT plugin_name, max(key), count(*), count(size), coalesce(sum(size), 0) FROM "
        f"(SELECT plugin_name, key, {size} FROM {layout.table} WHERE (plugin_name, key) > ({first}, {second}) "
        f"ORDER BY plugin_name, key LIMIT {layout.mark}4) AS slice GROUP BY plugin_name ORDER BY plugin_name"
    )


def usage_slice(rows: Sequence[Row], limit: int, version: int) -> UsageSlice:
    """What the rows of `plugin_usage` tell."""
    used = [Used(plugin, entries, int(size)) for plugin, _, _, entries, size in rows]
    is_last = sum([row[2] for row in rows]) < limit
    return UsageSlice(used, None if is_last else (rows[-1][0], rows[-1][1]), version)


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


def oldest_kept(may_go: str, rows: str) -> str:
    """SQL: the version of the change log before which all is removed: that of the newest row that may go.

    It considers `rows` of the oldest rows, and the first row of the second version, because the oldest version may have
    more rows than that. Usually few rows may go: unless all of the first TRIM_FIRST_ROWS may, no others are considered.

    Args:
        may_go: SQL: whether a row may be removed, by its columns `at` and `size`; if it may, so may all older rows.
        rows: SQL: how many rows are considered.
    """
    log, in_order = schema.CHANGES_TABLE, "ORDER BY version, part LIMIT"
    second = f"version > (SELECT version FROM {log} {in_order} 1)"
    last_of_first = f"SELECT {may_go} FROM {log} {in_order} 1 OFFSET {limits.TRIM_FIRST_ROWS - 1}"
    most = f"(CASE WHEN ({last_of_first}) THEN {rows} ELSE {limits.TRIM_FIRST_ROWS} END)"
    return (
        f"SELECT max(version) FROM (SELECT * FROM (SELECT version, at, size FROM {log} {in_order} {most}) AS oldest "
        f"UNION ALL SELECT * FROM (SELECT version, at, size FROM {log} WHERE {second} {in_order} 1) AS second_version"
        f") AS considered WHERE {may_go}"
    )


def create_all(layouts: Iterable[Layout], *own: str) -> tuple[str, ...]:
    """The statements that make Keyloft's tables in a database without them.

    Args:
        layouts: The tables of the key spaces.
        own: What this database has besides: the change log, and the id of the store.
    """
    return (
        f"CREATE TABLE {schema.REVISION_TABLE} (version_num VARCHAR(32) NOT NULL, "
        f"CONSTRAINT {schema.REVISION_TABLE}_pkc PRIMARY KEY (version_num))",
        *own,
        *[statement for layout in layouts for statement in layout.create],
        f"INSERT INTO {schema.REVISION_TABLE} (version_num) VALUES ('{schema.REVISION}')",
    )


def create_beside(create: Sequence[str], plugin_table: Sequence[str], adoption: Adoption | None) -> list[str]:
    """The statements that make Keyloft's tables in a database that may have the plugins' table already.

    Args:
        create: The statements for a database without any.
        plugin_table: Those of them that make the plugins' table.
        adoption: What is to be done with the one that is there.
    """
    if adoption is None:
        return list(create)
    *others, stamp = [statement for statement in create if statement not in plugin_table]
    return [*others, *adoption.statements, stamp]


def created_names(statements: Iterable[str]) -> list[str]:
    """The names of the tables and indexes that some statements make."""
    return [statement.split()[2] for statement in statements if statement.startswith("CREATE")]
