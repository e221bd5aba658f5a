"""Reads and loads whole databases, the same way on every engine: page by page, merging rows, or replacing all."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec.structs import replace

from keyloft.core import maintenance
from keyloft.core.maintenance import Existing, Loaded, Progress, Range, Size, Snapshot, movable_time
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import Row
from keyloft.engines.tables import Layout
from keyloft.errors import DatabaseError

R = TypeVar("R", Record, Size)

TIMES: Final = ("expires_at", "created_at", "updated_at")


class LoadTransaction(Protocol):
    """An open transaction in which no other process can commit."""

    version: int
    """The version counter."""
    now: int

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        """What is stored under the keys of some rows, expired or not."""

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        """Store rows over whatever is stored under their keys."""

    async def clear(self) -> None:
        """Remove all rows."""


async def load(
    transaction: LoadTransaction, rows: Sequence[tuple[Space, Record]], source_version: int, existing: Existing
) -> tuple[Loaded, int | None]:
    """Store rows; returns what they met, and the new version counter, or None if nothing was written."""
    loaded, all_written = Loaded(), list[Record]()
    new_version = max(transaction.version, source_version) + 1
    for space in Space:
        if some := [row for at, row in rows if at is space]:
            stored = await transaction.stored(space, some)
            if space is Space.PLUGINS:
                stored = {key: movable(row) for key, row in stored.items()}
            written, met = maintenance.merge(space, some, stored, existing, transaction.now, new_version)
            await transaction.put(space, written)
            loaded.add(met)
            all_written += written
    if not all_written:
        return loaded, None
    return loaded, maintenance.version_after_load(transaction.version, source_version, all_written, new_version)


async def replace_all(
    transaction: LoadTransaction, source: Snapshot, progress: Progress, expected_version: int | None
) -> tuple[int, int]:
    """Replace all rows by those of a snapshot; returns how many those are, and the new version counter."""
    before = transaction.version
    maintenance.check_unchanged(before, expected_version)
    await transaction.clear()
    done = 0
    for part in maintenance.EVERYTHING:
        async for rows in source.rows(part):
            await transaction.put(part.space, rows)
            done += len(rows)
            progress(done, None)
    return done, before + 1 if before >= source.version else source.version


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
