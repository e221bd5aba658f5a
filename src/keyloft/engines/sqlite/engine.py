"""Stores records in an SQLite file: reads and small writes run on the event loop, a thread does what takes long.

A read from SQLite's page cache takes a few microseconds, less than a hand-over to a thread; so does a write, up to its
COMMIT. COMMIT waits for the disk, and so never runs on the event loop (ADR 2 and 6).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, cast

import apsw

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.engine import Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Count, Expired, Get, Scan, Space, Usage
from keyloft.engines.commit.groups import Groups
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.sqlite.errors import opened_read_only
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.reads import LongReader, View, answer, point, points, read_version
from keyloft.engines.sqlite.wal import WriteAheadLog
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.sqlite.writes import SqliteWriter, UncommittedGroup
from keyloft.engines.watches import Notifier
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


class CommitStep(StrEnum):
    """The steps of a group that run on the event loop, where a signal's handler may raise."""

    TO_THREAD = "to thread"
    INLINE = "inline"
    FINISHED = "finished"


class SqliteEngine(ClosableEngine):
    """An engine on one SQLite file, or on a private database in memory (`:memory:`)."""

    @classmethod
    async def open(cls, file: SqliteFile, clock: Clock) -> "SqliteEngine":
        """Open a file, making it if it is not there; the clock decides what has expired.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        worker = Worker(f"keyloft writer of {file.path}")
        writer: apsw.Connection | None = None
        try:
            if file.read_only:
                await worker.call(file.check_schema)
                reader = writer = file.open_reader()
            else:
                writer = await worker.call(file.open_writer)
                # Half as much: it is used during commits only, and each commit empties its cache.
                reader = writer if file.in_memory else file.open_reader(cache_mib=(file.cache_mib + 1) // 2)
        except BaseException:
            if writer is not None:
                await worker.call(writer.close)
            worker.stop()
            raise
        return cls(file, clock, worker, writer, reader)

    def __init__(
        self, file: SqliteFile, clock: Clock, worker: Worker, writer: apsw.Connection, reader: apsw.Connection
    ) -> None:
        super().__init__()
        self._file = file
        self.location = file.path
        self._clock = clock
        self._worker = worker
        self._writer = SqliteWriter(file, clock, writer)
        self._reader = reader
        # A commit empties the page cache of every other connection, so reads use the writing one, unless the worker
        # has it. A caller that reads an entry and then writes it also finds its pages cached (ADR 2).
        self._writer_view = View(writer, own_transaction=not file.in_memory)
        self._reader_view = View(reader, own_transaction=not file.in_memory)
        self._iteration = LoopIteration(at_end=self._end_views)
        self._is_writing = False
        self._long_reader: LongReader | None = None
        self._groups = Groups(self._start)
        self._notifier = Notifier(self, clock)
        self._poller: asyncio.Task[None] | None = None
        self.wal = WriteAheadLog(file, writer, worker, end_reads=self._writer_view.end)
        self.connection = writer
        """For tests: the writing connection, which the worker uses during a COMMIT and a checkpoint."""
        self.before_step: Callable[[CommitStep], None] = lambda step: None
        """For tests: called before each step of a group; what it raises is as if a signal's handler had raised it."""

    async def read(self, *asks: Ask) -> list[Any]:
        if self.refusal is not None:
            raise Closed(self.refusal)
        if self._iteration.enter():
            # Once, not until an iteration is short: another task may use up the next one, too.
            await asyncio.sleep(0)
            self._iteration.enter()
            if self.refusal is not None:
                raise Closed(self.refusal)
        view = self._reader_view if self._is_writing or self.wal.is_checkpointing else self._writer_view
        try:
            if len(asks) == 1 and type(asks[0]) is Get:
                # The hot path: one entry, and the time is read only if it expires.
                record = point(view.cursor(), asks[0].space, asks[0].key)
                if record is None or record.expires_at is None:
                    return [record]
            others = [ask for ask in asks if type(ask) is not Get]
            if others and any([_is_long(ask) for ask in others]) and not self._file.in_memory:
                return await self._read_on_thread(asks)
            cursor, now = view.cursor(), self._clock.now()
            if not others:
                return points(cursor, cast("Sequence[Get]", asks), now)
            return [answer(cursor, ask, now) for ask in asks]
        except apsw.Error as error:
            raise self._file.explain(error, view.connection) from error

    async def commit(self, batch: Batch) -> Committed | Conflict:
        if self.refusal is not None:
            raise Closed(self.refusal)
        return await self._groups.commit(batch)

    def watch(self, *asks: Get | Scan) -> Watch:
        self.check_usable()
        watch = self._notifier.watch(asks, self._read_version)
        if not self._file.in_memory and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll())
        return watch

    def _start(self, group: list[Batch]) -> None:
        if self._file.read_only:
            self._groups.finished([opened_read_only(self._file.path) for _ in group])
            return
        if self._file.in_memory:
            self._finished(self._writer.commit(group))
            return
        begun: UncommittedGroup | None = None
        syncs = self._file.durability == "full"
        try:
            self._end_views()  # both: the WAL can't restart while either of them reads it
            # On a thread, each statement would wait for the interpreter, which a busy event loop holds.
            if not self.wal.is_checkpointing and _is_small(group):
                syncs = syncs or self.wal.restarts()
                begun = self._writer.begin(group)
        finally:
            # Also if a signal's handler raised: the callers of this group wait for it.
            if begun is None or syncs:
                self._hand_to_worker(group, begun)
            else:
                self._commit_inline(begun)

    def _hand_to_worker(self, group: list[Batch], begun: UncommittedGroup | None) -> None:
        self.before_step(CommitStep.TO_THREAD)
        job = partial(self._writer.commit, group) if begun is None else partial(self._writer.commit_begun, begun)
        self._is_writing = True
        self._worker.submit(job, self._finished)

    def _commit_inline(self, begun: UncommittedGroup) -> None:
        self.before_step(CommitStep.INLINE)
        is_refused = False
        try:
            self._writer.end(begun)
        except apsw.Error:
            is_refused = True
            self._writer.roll_back()
        finally:
            # Also if a signal's handler raised: SQLite has then committed, or the transaction is still open.
            if is_refused:
                self._hand_to_worker(begun.group, None)
            elif self._writer.connection.in_transaction:
                self._hand_to_worker(begun.group, begun)
            else:
                self._finished(self._writer.outcome(begun))

    def _finished(self, outcome: Outcome) -> None:
        self.before_step(CommitStep.FINISHED)
        self._is_writing = False
        # The callers' next reads must show what they wrote.
        self._end_views()
        self._notifier.observe(outcome.version_before, outcome.version_after)
        self._notifier.committed(outcome.touched, outcome.version_after)
        self._groups.finished(outcome.verdicts)
        self.wal.committed()

    def _end_views(self) -> None:
        self._writer_view.end()
        self._reader_view.end()

    async def _poll(self) -> None:
        """Poll the version counter while there are watches: SQLite does not announce other processes' commits."""
        while self._notifier.has_watches:
            await asyncio.sleep(limits.WATCH_POLL_SECONDS)
            if not self._groups.idle:
                continue  # a group of this process is under way, and reads the counter itself
            try:
                version = self._read_version()
            except DatabaseError as error:
                logger.warning("reading the version counter for watches failed, retrying: %s", error)
            else:
                self._notifier.observe(version, version)

    def _read_version(self) -> int:
        with self._file.explained(self._reader):
            return read_version(self._reader.cursor())

    async def _read_on_thread(self, asks: tuple[Ask, ...]) -> list[Any]:
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
        if self._reader is not self.connection:
            self._file.close(self._reader)
        self.wal.close()
        await self._worker.call(partial(self._file.close, self.connection))
        self._worker.stop()


def _is_small(group: list[Batch]) -> bool:
    """Whether it takes a fraction of a millisecond to write, up to COMMIT."""
    operations = sum([batch.operations for batch in group])
    return operations <= limits.INLINE_OPERATIONS and sum([batch.size for batch in group]) <= limits.INLINE_BYTES


def _is_long(ask: Ask) -> bool:
    if isinstance(ask, Scan) and ask.space is Space.PLUGINS and ask.limit > limits.PLUGIN_SCAN_ROWS:
        return True
    return isinstance(ask, (Count, Usage)) or (isinstance(ask, (Scan, Expired)) and ask.limit > limits.SCAN_ROWS + 1)
