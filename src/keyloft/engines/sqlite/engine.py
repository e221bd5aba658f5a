"""Stores records in an SQLite file: reads and small writes inline on the event loop, and a thread for what takes long.

A point read takes a few microseconds from the page cache, less than handing it to a thread would; so does a write, but
for the sync at its end. That takes a disk's time, and never happens on the event loop.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import apsw

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.engine import Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Count, Expired, Get, Scan, Space, Usage
from keyloft.engines.commit.groups import Groups
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import Lifetime
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.reads import LongReader, View, answer, number, point, points
from keyloft.engines.sqlite.tables import READ_CLOCK
from keyloft.engines.sqlite.wal import Log
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.sqlite.writes import Begun, Interrupted, SqliteWriter
from keyloft.engines.watches import Notifier
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


class SqliteEngine:
    """An engine on one SQLite file, or on a private database in memory (`:memory:`)."""

    @classmethod
    async def open(
        cls,
        path: str,
        clock: Clock,
        *,
        durability: str = "full",
        vfs: str | None = None,
        cache_mib: int = limits.SQLITE_CACHE_MIB,
    ) -> "SqliteEngine":
        """Open a file, creating it if need be.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        file = SqliteFile(path, durability, vfs, cache_mib)
        worker = Worker(f"keyloft writer of {path}")
        try:
            writer = await worker.call(file.open_writer)
            try:
                # Half as much: what it reads while something is written, it forgets as soon as that is done.
                reader = writer if file.in_memory else file.open_reader(cache_mib=(cache_mib + 1) // 2)
            except BaseException:
                await worker.call(writer.close)
                raise
        except BaseException:
            worker.stop()
            raise
        return cls(file, clock, worker, writer, reader)

    def __init__(
        self, file: SqliteFile, clock: Clock, worker: Worker, writer: apsw.Connection, reader: apsw.Connection
    ) -> None:
        self._file = file
        self._clock = clock
        self._worker = worker
        self._writer = SqliteWriter(file, clock, writer)
        self._reader = reader
        # Our commits make every other connection forget the pages it has cached: reads use the writing one, unless the
        # worker has it. And whoever reads an entry to write it finds its pages there (ADR 2).
        self._own_view = View(writer, own_transaction=not file.in_memory)
        self._view_beside = View(reader, own_transaction=not file.in_memory)
        self._iteration = LoopIteration(at_end=self._end_views)
        self._is_writing = False
        self._log = Log(file, writer, worker, let_go=self._own_view.end)
        self._long_reader: LongReader | None = None
        self._groups = Groups(self._start)
        self._notifier = Notifier(self, clock)
        self._poller: asyncio.Task[None] | None = None
        self._lifetime = Lifetime(self._close)

    async def read(self, *asks: Ask) -> list[Any]:
        if self._lifetime.refusal is not None:
            raise Closed(self._lifetime.refusal)
        if self._iteration.enter():
            # Once, not until a turn is short: another task may use up the next one, too.
            await asyncio.sleep(0)
            self._iteration.enter()
            if self._lifetime.refusal is not None:
                raise Closed(self._lifetime.refusal)
        view = self._view_beside if self._is_writing or self._log.is_moving else self._own_view
        try:
            if len(asks) == 1 and type(asks[0]) is Get:
                # The hot path: one entry, and no look at the time unless it expires.
                record = point(view.cursor(), asks[0].space, asks[0].key)
                if record is None or record.expires_at is None:
                    return [record]
            others = [ask for ask in asks if type(ask) is not Get]
            if others and any([_is_long(ask) for ask in others]) and not self._file.in_memory:
                return await self._read_aside(asks)
            cursor, now = view.cursor(), self._clock.now()
            if not others:
                return points(cursor, cast("Sequence[Get]", asks), now)
            return [answer(cursor, ask, now) for ask in asks]
        except apsw.Error as error:
            raise self._file.explain(error, view.connection) from error

    async def commit(self, batch: Batch) -> Committed | Conflict:
        if self._lifetime.refusal is not None:
            raise Closed(self._lifetime.refusal)
        return await self._groups.commit(batch)

    def watch(self, *asks: Get | Scan) -> Watch:
        self._lifetime.check()
        watch = self._notifier.watch(asks, self._latest)
        if not self._file.in_memory and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll())
        return watch

    @property
    def location(self) -> str:
        return self._file.path

    @property
    def is_closed(self) -> bool:
        return self._lifetime.refusal is not None

    async def aclose(self) -> None:
        await self._lifetime.aclose()

    def _start(self, group: list[Batch]) -> None:
        if self._file.in_memory:
            self._finished(self._writer.commit(group))
            return
        begun: Begun | None = None
        syncs = self._file.syncs
        try:
            self._end_views()  # also the one beside: a log that somebody reads can't begin anew
            # Each statement lets go of the interpreter: on a thread, all of them would wait for a busy loop in turn.
            if not self._log.is_moving and _is_small(group):
                syncs = syncs or self._log.begins_anew()
                begun = self._writer.begin(group)
        finally:
            # Also after a Ctrl-C: somebody waits for this group.
            if begun is None or syncs:
                self._hand_to_worker(group, begun)
            else:
                self._finish_at_once(begun)

    def _hand_to_worker(self, group: list[Batch], begun: Begun | None) -> None:
        job = partial(self._writer.commit, group) if begun is None else partial(self._writer.finish, begun)
        self._is_writing = True
        self._worker.submit(job, self._finished)

    def _finish_at_once(self, begun: Begun) -> None:
        try:
            outcome = self._writer.finish_at_once(begun)
        except Interrupted as interrupted:
            if interrupted.outcome is None:
                self._hand_to_worker(begun.group, begun)
            else:
                self._finished(interrupted.outcome)
            raise interrupted.error from None
        except BaseException:
            if self._writer.connection.in_transaction:
                self._hand_to_worker(begun.group, begun)
            raise
        if outcome is None:
            self._hand_to_worker(begun.group, None)
        else:
            self._finished(outcome)

    def _finished(self, outcome: Outcome) -> None:
        self._is_writing = False
        # What these callers read next must show what they wrote.
        self._end_views()
        self._notifier.observe(outcome.version_before, outcome.version_after)
        self._notifier.committed(outcome.touched, outcome.version_after)
        self._groups.finished(outcome.verdicts)
        self._log.look_after()

    def _end_views(self) -> None:
        self._own_view.end()
        self._view_beside.end()

    async def _poll(self) -> None:
        """SQLite has no way to announce a commit to other processes: while somebody watches, look at the clock."""
        while self._notifier.has_watches:
            await asyncio.sleep(limits.WATCH_POLL_SECONDS)
            if not self._groups.idle:
                continue  # our own group is under way, and will find out by itself
            try:
                latest = self._latest()
            except DatabaseError as error:
                logger.warning("looking for changes failed, trying again: %s", error)
            else:
                self._notifier.observe(latest, latest)

    def _latest(self) -> int:
        try:
            return number(self._reader.cursor(), READ_CLOCK)
        except apsw.Error as error:
            raise self._file.explain(error, self._reader) from error

    async def _read_aside(self, asks: tuple[Ask, ...]) -> list[Any]:
        if self._long_reader is None:
            self._long_reader = LongReader(self._file)
        return await self._long_reader.read(asks, self._clock.now())

    async def wait_for_jobs(self) -> None:
        await self._worker.call(lambda: None)

    async def abandon_group(self) -> None:
        await self._worker.call(self._writer.roll_back)
        self._is_writing = False

    async def _close(self) -> None:
        await self._groups.close(recovery=self)
        if self._poller is not None:
            self._poller.cancel()
        self._notifier.close()
        self._end_views()
        if self._long_reader is not None:
            await self._long_reader.aclose()
        if self._reader is not self._writer.connection:
            self._file.close(self._reader)
        self._log.close()
        await self._worker.call(partial(self._file.close, self._writer.connection))
        self._worker.stop()


def _is_small(group: list[Batch]) -> bool:
    """Whether it is written in a fraction of a millisecond, as long as it meets no disk."""
    operations = sum([batch.operations for batch in group])
    return operations <= limits.INLINE_OPERATIONS and sum([batch.size for batch in group]) <= limits.INLINE_BYTES


def _is_long(ask: Ask) -> bool:
    if isinstance(ask, Scan) and ask.space is Space.PLUGINS and ask.limit > limits.PLUGIN_SCAN_ROWS:
        return True
    return isinstance(ask, (Count, Usage)) or (isinstance(ask, (Scan, Expired)) and ask.limit > limits.SCAN_ROWS + 1)
