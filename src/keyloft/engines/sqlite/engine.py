"""Stores records in an SQLite file: reads run on the event loop, a thread does what takes long.

A read from SQLite's page cache takes a few microseconds, less than a hand-over to a thread (ADR 2). Commits wait for
the disk, on the thread unless no other task has to wait (ADR 6).
"""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, cast

import apsw

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.engine import LogWatch, SeveralSubmitted, Submission, Verdict, Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Count, Expired, Get, LogSlice, Scan, Space, Usage
from keyloft.core.schema import NEVER
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.sqlite.commits import SqliteCommits
from keyloft.engines.sqlite.connection import WritingConnection
from keyloft.engines.sqlite.errors import OF_SQLITE, opened_read_only
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.inherited import close_locked
from keyloft.engines.sqlite.log import read_version
from keyloft.engines.sqlite.lone_callers import LoneCallers
from keyloft.engines.sqlite.reads import LongReader, View, answer, point, points
from keyloft.engines.sqlite.wal import WriteAheadLog
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.polling import Poller
from keyloft.errors import Closed


class SqliteEngine(ClosableEngine):
    """An engine on one SQLite file, or on a private database in memory (`:memory:`)."""

    reads_at_once = True

    @classmethod
    async def open(cls, file: SqliteFile, clock: Clock, history: KeptHistory | None = None) -> "SqliteEngine":
        """Open a file, making it if it is not there; the clock decides what has expired.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        worker = Worker(f"keyloft writer of {file.path}")
        opened: list[apsw.Connection] = []
        try:
            if file.read_only:
                await worker.call(file.check_schema)
                reader = writer = file.open_reader(mutex=False)
            else:
                await worker.call(lambda: opened.append(file.open_writer(mutex=False)))
                [writer] = opened
                # Half the cache: this connection is used only during commits, and each commit empties its cache.
                cache_mib = (file.cache_mib + 1) // 2
                reader = writer if file.in_memory else file.open_reader(cache_mib=cache_mib, mutex=False)
        except BaseException:
            if opened:
                await worker.call(lambda: close_locked(opened[0]))
            # If the caller was cancelled, the thread may still be opening a connection.
            worker.stop(lambda: _close(opened))
            raise
        return cls(file, clock, worker, writer, reader, history or KeptHistory())

    def __init__(
        self,
        file: SqliteFile,
        clock: Clock,
        worker: Worker,
        writer: apsw.Connection,
        reader: apsw.Connection,
        history: KeptHistory,
    ) -> None:
        super().__init__()
        self._file = file
        self.location = file.path
        self._now = clock.now
        self._has_system_clock = type(clock) is SystemClock
        self._alive_after = NEVER
        """An entry that expires after this moment is alive for all reads of this iteration of the event loop."""
        self._worker = worker
        self._reader = reader
        # A commit empties the page cache of every other connection, so reads use the writing connection, unless the
        # worker has it. A caller that reads an entry and then writes it also finds its pages cached (ADR 2).
        self.writing = WritingConnection(writer, worker, own_transaction=not file.in_memory)
        self._reader_view = View(reader, own_transaction=not file.in_memory)
        self.fork_locks_of_loop = self._reader_view.lock, self.writing.lock
        self.wal = WriteAheadLog(file, self.writing)
        with self.writing.lock:
            self._writer = SqliteWriter(file, clock, writer, history)
        self.commits = SqliteCommits(file, self.writing, self._writer, self.wal, self._finished)
        callers = self._callers = self.commits.callers
        self._iteration = LoopIteration(at_end=self._end_views, at_start=None if callers is None else callers.note)
        self._open_reader = file.opener()
        self._long_reader: LongReader | None = None
        self._batcher = Batcher(self._start, recovery=self)
        self._feed = ChangeFeed(self, clock)
        self._group_at_poll = 0
        """How many groups were started when the version counter was last polled."""
        self._check_file = file.place_check(reader, "watches end")
        self._poller = Poller(self._feed, self._version_to_poll, self._read_time, self._check_place)
        self.connection = writer
        """For tests: the writing connection, which the thread uses while it is lent."""

    async def read(self, *asks: Ask) -> list[Any]:
        if self.refusal is not None:
            raise Closed(self.refusal)
        if self._iteration.enter():
            # Once, not until an iteration has time left: another task may use up the next one, too.
            await asyncio.sleep(0)
            self._iteration.enter()
            if self.refusal is not None:
                raise Closed(self.refusal)
        view = self._reader_view if self.writing.is_lent else self.writing.view
        try:
            if len(asks) == 1 and type(asks[0]) is Get:
                # The hot path: one entry, and the time is read only if it may have expired.
                ask = asks[0]
                record = point(view.cursor(), ask.space, ask.key)
                if record is None or (expiry := record.expires_at) is None or expiry > self._alive_after:
                    return [record]
                return [record if ask.include_expired or expiry > self._time_of_iteration() else None]
            if len(asks) > limits.SCAN_ROWS and not self._file.in_memory:
                return await self._read_on_thread(asks)
            others = [ask for ask in asks if type(ask) is not Get]
            if others and any([is_long_read(ask) for ask in others]) and not self._file.in_memory:
                return await self._read_on_thread(asks)
            cursor, now = view.cursor(), self._read_time()
            if not others:
                return points(cursor, cast("Sequence[Get]", asks), now)
            answers = [answer(cursor, ask, now) for ask in asks]
            if isinstance(first := answers[0], LogSlice) and first.ended > self._writer.last_commit_at:
                # From now on, no read is earlier than what the caller has seen.
                self._writer.last_commit_at = first.ended
            return answers
        except OF_SQLITE as error:
            raise self._file.explain(error, view.connection) from error

    async def commit(self, batch: Batch) -> Committed | Conflict:
        if self.refusal is not None:
            raise Closed(self.refusal)
        callers = self._callers
        outcome = None
        if callers is not None and self._note_caller(callers):
            outcome = self.commits.try_alone(batch, callers)
        if outcome is None:
            return await self._batcher.commit(batch)
        self._committed(outcome)
        await asyncio.sleep(0)  # between two commits of this task, others run
        [verdict] = outcome.verdicts
        return cast("Committed | Conflict", verdict)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        if self.refusal is not None:
            raise Closed(self.refusal)
        if self._callers is not None:
            self._note_caller(self._callers)
        return self._batcher.submit(batch, done)

    def submit_each(self, batches: Sequence[Batch], done: Callable[[Sequence[Verdict]], None]) -> SeveralSubmitted:
        if self.refusal is not None:
            raise Closed(self.refusal)
        if self._callers is not None:
            self._note_caller(self._callers)
        return self._batcher.submit_each(batches, done)

    def _note_caller(self, callers: LoneCallers) -> bool:
        """Note who calls; returns whether the same task called last, and no batch waits."""
        if self._batcher.is_empty:
            return callers.note(monotonic())
        callers.are_several = True  # a lone caller would wait for its last commit before it calls again
        return False

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        self.check_usable()
        # Reads after this call must not be older than the start of the watch.
        self._end_views()
        watch = self._feed.watch(asks, since, Start(self._read_version(), self._read_time()))
        self._start_polling()
        return watch

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        self.check_usable()
        self._end_views()
        watch = self._feed.follow(asks, since, woken, Start(self._read_version(), self._read_time()))
        self._start_polling()
        return watch

    def _start_polling(self) -> None:
        if not self._file.in_memory:
            self._poller.start()

    def _start(self, group: list[Batch]) -> None:
        if self._file.read_only:
            self._batcher.finished([opened_read_only(self._file.path) for _ in group])
            return
        self._reader_view.end()  # the write-ahead log can't restart while a view reads it
        self.commits.start(group, self._batcher.group_operations, self._batcher.group_bytes)

    def _finished(self, outcome: Outcome) -> None:
        self._committed(outcome)
        self._batcher.finished(outcome.verdicts)

    def _committed(self, outcome: Outcome) -> None:
        # The callers' next reads must show what they wrote.
        self._end_views()
        self._feed.committed(outcome)

    def _read_time(self) -> int:
        """The time of a read: never before a commit that this engine knows about, even if the clock was set back."""
        return max(self._now(), self._writer.last_commit_at)

    def _time_of_iteration(self) -> int:
        """The time of a read. It is read once per iteration, which is short, for entries that expire much later."""
        now = self._read_time()
        if self._has_system_clock:
            self._alive_after = now + limits.EXPIRES_MUCH_LATER_MILLISECONDS
        return now

    def _end_views(self) -> None:
        self._alive_after = NEVER
        self.writing.view.end()
        self._reader_view.end()

    def _version_to_poll(self) -> int | None:
        # A group of this process reads the counter itself. But a group may wait half a minute for another process's
        # lock, so the counter is polled if the same group was under way at the last poll.
        group, last = self._batcher.groups, self._group_at_poll
        self._group_at_poll = group
        return self._read_version() if self._batcher.idle or group == last else None

    def _read_version(self) -> int:
        with self._reader_view.lock, self._file.explained(self._reader):
            return read_version(self._reader.cursor())

    def _check_place(self) -> None:
        with self._reader_view.lock:
            self._check_file()

    async def _read_on_thread(self, asks: tuple[Ask, ...]) -> list[Any]:
        if self._long_reader is None:
            self._long_reader = LongReader(self._file, self._open_reader)
        return await self._long_reader.read(asks, self._read_time)

    async def wait_for_jobs(self) -> None:
        await self.writing.wait_for_loans()

    async def abandon_group(self) -> None:
        await self.writing.lend_and_wait(self._writer.roll_back)

    async def _close(self) -> None:
        self._writer.give_up_soon()
        await self._batcher.close()
        self._poller.stop()
        self._feed.close()
        self._end_views()
        if self._long_reader is not None:
            await self._long_reader.aclose()
        if self._reader is not self.connection:
            with self._reader_view.lock:
                self._file.close(self._reader)
        self.wal.close()
        await self.writing.close(self._file.close)
        self._worker.stop()


def is_long_read(ask: Ask) -> bool:
    """Whether the answer takes so long that no other caller should wait for the connection."""
    if isinstance(ask, Scan) and ask.space is Space.PLUGINS and ask.limit > limits.PLUGIN_SCAN_ROWS:
        return True
    return isinstance(ask, (Count, Usage)) or (isinstance(ask, (Scan, Expired)) and ask.limit > limits.SCAN_ROWS + 1)


def _close(connections: list[apsw.Connection]) -> None:
    for connection in connections:
        close_locked(connection)
