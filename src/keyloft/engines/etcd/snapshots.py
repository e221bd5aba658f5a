"""A whole store at one moment, as operators' commands read it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import LogFacts, LogRow, Range, Size
from keyloft.core.records import Key, LoggedChange, Record
from keyloft.core.slices import by_weight
from keyloft.core.values import DAMAGED
from keyloft.engines import loading
from keyloft.engines.etcd import log, scans
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import KeyLayout, StoredRow
from keyloft.engines.etcd.views import RevisionView
from keyloft.errors import Busy, Undecodable

T = TypeVar("T")


class EtcdSnapshot:
    """A store at one revision; or, with `newest`, each page at its newest revision."""

    def __init__(self, view: RevisionView, newest: Callable[[], Awaitable[RevisionView]] | None = None) -> None:
        """With `newest`, each page is read from the view that it returns."""
        self._view = view
        self._newest = newest
        self.version = view.counter.version
        self.now = view.now

    async def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        async for view, page in self._pages(part, after):
            for rows in by_weight(page, lambda row: row.size, limits.SCAN_BYTES):
                try:
                    records = await explained(view, scans.records_of(view, rows))
                except Undecodable:
                    records = [await _readable(view, row) for row in rows]
                yield records

    async def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        async for _, rows in self._pages(part):
            yield [Size(row.record.key, row.size, row.record.expires_at) for row in rows]

    async def count(self, part: Range) -> int:
        view = await self._current()
        reply = await explained(view, view.range(*_bounds(view.keys, part), count_only=True))
        return int(reply.count)

    async def log(self, since: int | None = None) -> AsyncIterator[Sequence[LogRow]]:
        first = 0 if since is None else since + 1
        while True:
            view = await self._current()
            rows = await explained(view, log.rows_from(view, first, limits.ETCD_LOG_ROWS))
            if not rows:
                return
            # The parts of the last version may be cut off: they come with the next rows.
            whole = [row for row in rows if row.version < rows[-1].version]
            if len(rows) < limits.ETCD_LOG_ROWS or not whole:
                yield rows
                if len(rows) < limits.ETCD_LOG_ROWS:
                    return
                first = rows[-1].version + 1
            else:
                yield whole
                first = rows[-1].version

    def changes(self, since: int | None) -> AsyncIterator[Sequence[LoggedChange]]:
        return loading.changes_in(self, since)

    async def log_facts(self) -> LogFacts:
        view = await self._current()
        [oldest] = await explained(view, log.rows_from(view, 0, 1))
        count = (await explained(view, view.range(*view.keys.log_range, count_only=True))).count
        size = view.counter.log_size - oldest.size + len(oldest.changes)
        return LogFacts(int(count), size, oldest.base + 1, oldest.at)

    async def store_id(self) -> str:
        return (await self._current()).counter.store_id

    async def _current(self) -> RevisionView:
        return self._view if self._newest is None else await self._newest()

    async def _pages(
        self, part: Range, after: Key | None = None
    ) -> AsyncIterator[tuple[RevisionView, list[StoredRow]]]:
        rows = limits.FIRST_PAGE_ROWS
        while True:
            view = await self._current()
            start, end = _bounds(view.keys, part)
            if after is not None:
                start = view.keys.data(part.space, after) + b"\x00"
            if start >= end:
                return
            reply = await explained(view, view.range(start, end, limit=rows))
            if reply.kvs:
                found = [view.keys.row(part.space, kv.key, kv.value) for kv in reply.kvs]
                yield view, found
                after = found[-1].record.key
                weight = sum(row.size for row in found) // len(found) + 1
                rows = max(1, min(limits.MAINTENANCE_ROWS, limits.PAGE_GROWTH * rows, limits.SCAN_BYTES // weight))
            if not reply.more:
                return


async def _readable(view: RevisionView, row: StoredRow) -> Record:
    try:
        [record] = await explained(view, scans.records_of(view, [row]))
        return record
    except Undecodable:
        return replace(row.record, value=b"", encoding=DAMAGED)


def _bounds(keys: KeyLayout, part: Range) -> tuple[bytes, bytes]:
    start, end = keys.space_range(part.space)
    if part.start is not None:
        start = keys.data(part.space, part.start)
    if part.end is not None:
        end = keys.data(part.space, part.end)
    return start, end


async def explained(view: RevisionView, reading: Awaitable[T]) -> T:
    """Read from a view.

    Raises:
        Busy: Its revision is compacted.
    """
    try:
        return await reading
    except Failure as error:
        raise Busy(
            f"{view.cluster.name} compacted the revision {view.revision} while it was being read: try again, or let "
            "etcd keep revisions for longer (--auto-compaction-retention)"
        ) from error
