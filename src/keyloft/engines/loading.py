"""Reads and loads whole databases, the same way on every engine: page by page, merging rows, or replacing all."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec.structs import replace

from keyloft import limits
from keyloft.core import maintenance
from keyloft.core.maintenance import Existing, Loaded, LogFacts, LogRow, Progress, Range, Size, Snapshot, movable_time
from keyloft.core.records import ChangeKind, Key, LoggedChange, LogPosition, Record, Space
from keyloft.core.schema import CHANGES_TABLE, READ_STORE_ID, Row, lost_counter, lost_store_id
from keyloft.engines import change_log
from keyloft.engines.tables import Layout
from keyloft.errors import DatabaseError, HistoryGone

R = TypeVar("R", Record, Size)

TIMES: Final = ("expires_at", "created_at", "updated_at")
[NO_CHANGES] = change_log.pack((), 0)
"""The part of a log row that lists no changes."""
_LOG_COLUMNS: Final = "version, part, base, at, size, changes"


class LoadTransaction(Protocol):
    """An open transaction in which no other process can commit."""

    version: int
    """The version counter."""
    now: int
    log_size: int
    """Of the change log, in bytes."""

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        """What is stored under the keys of some rows, expired or not."""

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        """Store rows over whatever is stored under their keys."""

    async def clear(self) -> None:
        """Remove all rows."""

    async def log(self, rows: Sequence[LogRow]) -> None:
        """Add rows to the change log."""

    async def clear_log(self) -> None:
        """Remove all rows of the change log."""

    async def name_store(self, store_id: str) -> None:
        """Give the store another id."""


async def load(
    transaction: LoadTransaction,
    rows: Sequence[tuple[Space, Record]],
    source_version: int,
    existing: Existing,
    *,
    is_copy: bool,
) -> tuple[Loaded, int | None]:
    """Store rows and log their keys; returns what they met, and the version counter, or None if nothing was written."""
    loaded, changes = Loaded(), list[LoggedChange]()
    version = _version_after_load(transaction.version, source_version, is_copy=is_copy)
    for space in Space:
        if some := [row for at, row in rows if at is space]:
            stored = await transaction.stored(space, some)
            if space is Space.PLUGINS:
                stored = {key: movable(row) for key, row in stored.items()}
            written, met = maintenance.merge(space, some, stored, existing, transaction.now, version)
            await transaction.put(space, written)
            loaded.add(met)
            changes += [LoggedChange(version, space, row.key, ChangeKind.PUT, transaction.now) for row in written]
    if not changes:
        return loaded, None
    await transaction.log(
        change_log.rows_of(changes, transaction.version, version, transaction.now, transaction.log_size)
    )
    return loaded, version


def _version_after_load(counter: int, source: int, *, is_copy: bool) -> int:
    """The version counter once rows of a source are stored: at or above all their versions.

    After a copy, no version that the source gives from then on may be given here, too. Once the counter is a jump above
    that of the source, it stays there: a copy that is repeated, or has many slices, jumps once.
    """
    if is_copy and counter // limits.VERSION_JUMP <= source // limits.VERSION_JUMP:
        return maintenance.version_after_jump(counter, source)
    return maintenance.check_version(max(counter + 1, source))


async def replace_all(
    transaction: LoadTransaction,
    source: Snapshot,
    progress: Progress,
    *,
    expected_version: int | None,
    with_history: bool,
) -> tuple[int, int]:
    """Replace all rows by those of a snapshot; returns how many those are, and the new version counter."""
    maintenance.check_unchanged(transaction.version, expected_version)
    await transaction.clear()
    done, highest = 0, max(transaction.version, source.version)
    for part in maintenance.EVERYTHING:
        async for rows in source.rows(part):
            await transaction.put(part.space, rows)
            done += len(rows)
            # A row may have a version that its database never gave.
            highest = max(highest, *[row.version for row in rows])
            progress(done, None)
    if with_history:
        await _take_history(transaction, source)
        return done, source.version
    version = maintenance.version_after_jump(highest)
    await restart_history(transaction, version)
    return done, version


async def restart_history(transaction: LoadTransaction, version: int) -> None:
    """Replace the change log by one empty row of a version, and give the store another id."""
    await transaction.clear_log()
    await transaction.log([LogRow(version, 0, version - 1, transaction.now, 0, NO_CHANGES)])
    await transaction.name_store(secrets.token_hex(16))


async def _take_history(transaction: LoadTransaction, source: Snapshot) -> None:
    """Take over the change log and the id of a source."""
    await transaction.clear_log()
    last: LogRow | None = None
    async for rows in source.log():
        await transaction.log(rows)
        last = rows[-1]
    if last is None or last.version != source.version:
        # Where the counter is a row of its own, it may stand above the log.
        before, at, size = (source.version - 1, 0, 0) if last is None else (last.version, last.at, last.size)
        await transaction.log([LogRow(source.version, 0, before, at, size, NO_CHANGES)])
    await transaction.name_store(await source.store_id())


async def changes_in(snapshot: Snapshot, since: int | None) -> AsyncIterator[Sequence[LoggedChange]]:
    """What the change log of a snapshot tells, or what it tells after a version.

    Raises:
        HistoryGone: The log does not reach back to `since`.
    """
    if since is not None:
        oldest = await snapshot.log_facts()
        change_log.check_kept(LogPosition(since), oldest.oldest_version - 1, snapshot.version)
    async for rows in snapshot.log(since):
        for row in rows:
            if since is not None and row.base < since and not change_log.is_of_group(since, row.base, row.version):
                raise HistoryGone(since, row.version, snapshot.version)
            some = change_log.unpack(row.base, row.at, row.changes)
            yield [change for change in some if since is None or change.version > since]


def movable(row: Record) -> Record:
    """A plugin's row with times that any database can hold: people may have written others."""
    expires_at, created_at, updated_at = map(movable_time, (row.expires_at, row.created_at, row.updated_at))
    return replace(row, expires_at=expires_at, created_at=created_at or 0, updated_at=updated_at or 0)


def _plugin_size(plugin: str, key: str, value_bytes: int, expires_at: int | None) -> Size:
    return Size((plugin, key), value_bytes, movable_time(expires_at))


class TableSnapshot(ABC):
    """A database at one moment: a transaction that stays open, in which tables are read page by page."""

    def __init__(self, database: str, layouts: Mapping[Space, Layout], version: int, now: int) -> None:
        self._database = database
        self._layouts = layouts
        self.version = version
        self.now = now

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        layout = self._layouts[part.space]
        columns = ", ".join((layout.row, *map(layout.milliseconds, TIMES)))
        make = layout.row_record
        if part.space is Space.PLUGINS:
            return self._pages(part, after, columns, lambda *row: movable(make(*row)), with_values=True)
        return self._pages(part, after, columns, make, with_values=True)

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        layout = self._layouts[part.space]
        columns = ", ".join((*layout.key, layout.length, layout.milliseconds("expires_at")))
        make = _plugin_size if part.space is Space.PLUGINS else Size
        return self._pages(part, None, columns, make, with_values=False)

    async def count(self, part: Range) -> int:
        [[count]] = await self.fetch(*select(self._layouts[part.space], "count(*)", part))
        return int(count)

    async def log(self, since: int | None = None) -> AsyncIterator[Sequence[LogRow]]:
        mark = next(iter(self._layouts.values())).mark
        rest = ""
        bindings: Row = ()
        if since is not None:
            rest, bindings = f" WHERE version > {mark}1", (since,)
        end = f"ORDER BY version, part LIMIT {limits.MAINTENANCE_LOG_ROWS}"
        while found := await self.fetch(f"SELECT {_LOG_COLUMNS} FROM {CHANGES_TABLE}{rest} {end}", bindings):
            rows = [
                # A commit that was abandoned has no changes.
                LogRow(version, part, base, at, size, NO_CHANGES if changes is None else changes)
                for version, part, base, at, size, changes in found
            ]
            yield rows
            rest, bindings = f" WHERE (version, part) > ({mark}1, {mark}2)", (rows[-1].version, rows[-1].part)

    def changes(self, since: int | None) -> AsyncIterator[Sequence[LoggedChange]]:
        return changes_in(self, since)

    async def log_facts(self) -> LogFacts:
        [[rows, size]] = await self.fetch(
            f"SELECT count(*), coalesce(sum(length(changes)), 0) FROM {CHANGES_TABLE}", ()
        )
        oldest = await self.fetch(f"SELECT base, at FROM {CHANGES_TABLE} ORDER BY version, part LIMIT 1", ())
        if not oldest:
            raise lost_counter(self._database, CHANGES_TABLE)
        return LogFacts(int(rows), int(size), oldest[0][0] + 1, oldest[0][1])

    async def store_id(self) -> str:
        for [store_id] in await self.fetch(READ_STORE_ID, ()):
            return str(store_id)
        raise lost_store_id(self._database)

    async def _pages(
        self, part: Range, after: Key | None, columns: str, make: Callable[..., R], *, with_values: bool
    ) -> AsyncIterator[Sequence[R]]:
        layout = self._layouts[part.space]
        while rows := await self.page(layout, columns, part, after, with_values=with_values):
            page = [make(*row) for row in rows]
            before, after = after, page[-1].key
            # With a damaged index this could go on for ever.
            if before is not None and type(before) is type(after) and before >= after:
                raise DatabaseError(
                    f"{self._database} is damaged: {layout.table} is not in the order of its keys; "
                    "restore it from a backup"
                )
            yield page

    @abstractmethod
    async def fetch(self, statement: str, bindings: Row) -> Sequence[Row]:
        """All rows that a statement selects."""

    @abstractmethod
    async def page(
        self, layout: Layout, columns: str, part: Range, after: Key | None, *, with_values: bool
    ) -> Sequence[Row]:
        """Columns of the first rows of a range, or after a key of it: about a megabyte of values, one row at least."""


def select(layout: Layout, columns: str, part: Range, after: Key | None = None) -> tuple[str, Row]:
    """The statement that selects from a range, or from what is left of it after a key, and its bindings."""
    conditions: list[str] = []
    bindings: list[Any] = []
    start, operator = (part.start, ">=") if after is None else (after, ">")
    for bound, comparison in ((start, operator), (part.end, "<")):
        if bound is not None:
            first = len(bindings) + 1
            bindings += layout.bind_key(bound)
            marks = ", ".join([f"{layout.mark}{number}" for number in range(first, len(bindings) + 1)])
            conditions.append(f"({', '.join(layout.key)}) {comparison} ({marks})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {columns} FROM {layout.table}{where}", tuple(bindings)
