"""Stores records in an SQLite file for threads: the coroutines never suspend, so that a thread can run them to the end.

A read uses the writing connection, whose cache is warm, unless another thread has it. Of the threads that wait for a
commit, the first one commits for all of them.
"""

import sys
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, NoReturn, TypeVar, cast

import apsw

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.driving import run_to_end
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.forks import ProcessBound
from keyloft.core.records import (
    Ask,
    Batch,
    Committed,
    Conflict,
    Get,
    Key,
    Latest,
    LogSlice,
    Page,
    Record,
    Scan,
    Set,
    Space,
)
from keyloft.core.waiting import ThreadWaiting
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.submitted import WRITTEN, report
from keyloft.engines.sqlite.blocking.commits import CommitQueue
from keyloft.engines.sqlite.blocking.connections import ReaderPool, SharedConnection, answers
from keyloft.engines.sqlite.blocking.housekeeping import Housekeeping
from keyloft.engines.sqlite.engine import is_long_read
from keyloft.engines.sqlite.errors import OF_SQLITE, opened_read_only
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.plain_sets import outcome_of_set
from keyloft.engines.sqlite.reads import point, point_without_times, points_by_column
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.polling import Poller
from keyloft.errors import CLOSED, Closed, KeyloftError

T = TypeVar("T")
_TUPLES = Space.TUPLES  # a shorter way: on Python 3.11, looking up a member of an enum is slow


class BlockingSqliteEngine(ProcessBound):
    """An engine on one SQLite file, or on a private database in memory, that any thread may call."""

    reads_at_once = True
    """As `Engine` describes it."""

    def __init__(self, file: SqliteFile, clock: Clock, history: KeptHistory | None = None) -> None:
        """Open a file, making it if it is not there; the clock decides what has expired.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        super().__init__()
        self._file = file
        self.location = "memory" if file.in_memory else file.path
        self._now = clock.now
        self._nanoseconds = time_ns if type(clock) is SystemClock else lambda: clock.now() * 1_000_000
        if file.read_only:
            file.check_schema()
        self.connection = file.open_reader(mutex=False) if file.read_only else file.open_writer(mutex=False)
        """For tests, as are `shared`, `queue`, `feed` and `poller`: the writing connection."""
        self.shared = SharedConnection(self.connection, file)
        self.fork_lock = self.shared.lock
        self._readers = ReaderPool(file)
        self._has_readers = not file.in_memory
        with self.shared.lock:
            self._writer = SqliteWriter(file, clock, self.connection, history or KeptHistory())
            # The callers of this engine may wait: for other processes' locks, and for a large transaction's pages.
            self._writer.allow_spill(True)
        self.connection.set_busy_handler(self._writer.wait_for_lock)
        self._waiting = ThreadWaiting(self.shared.refuse_reentry)
        self.feed = ChangeFeed(self, clock, self._waiting)
        self._check_file = file.place_check(self.connection, "watches end")
        self.poller = Poller(self.feed, self._read_version, self._read_time, self._check_place)
        self.queue = CommitQueue(self._writer, self.shared, self.feed.committed)
        self._housekeeping = Housekeeping(file, self.shared, self.queue)
        self.queue.finished = self._housekeeping.committed
        self.shared.view_began = self._housekeeping.wake
        self._is_closed = False

    async def read(self, *asks: Ask) -> list[Any]:
        if self.refusal is not None:
            raise Closed(self.refusal)
        if len(asks) == 1 and type(get := asks[0]) is Get:
            return [self.get(get.key, get.space, point, include_expired=get.include_expired)]
        return self._answers(asks)

    def get_many(self, keys: Sequence[bytes]) -> Page | list[Record | None]:
        """The entries at several keys of the tuple store, as of one moment, without a coroutine.

        As a page, if each key has an intact entry of small JSON that never expires.
        """
        if self.refusal is not None:
            raise Closed(self.refusal)
        shared = self.shared
        if shared.is_in_use and self._has_readers:
            asks = [Get(_TUPLES, key) for key in keys]
            return self._readers.read(asks, self._read_time(), only_gets=True)
        return self._read_shared(lambda: points_by_column(shared.reading(), keys, self._read_time))

    def _answers(self, asks: Sequence[Ask]) -> list[Any]:
        """Answer all asks from one view."""
        others = [ask for ask in asks if type(ask) is not Get]
        found = self._answers_of(asks, others)
        if found and isinstance(first := found[0], LogSlice) and first.ended > self._writer.last_commit_at:
            # From now on, no read is earlier than what the caller has seen.
            self._writer.last_commit_at = first.ended
        return found

    def _answers_of(self, asks: Sequence[Ask], others: Sequence[Ask]) -> list[Any]:
        shared = self.shared
        if self._has_readers and (shared.is_in_use or any(map(is_long_read, others))):
            return self._readers.read(asks, self._read_time(), only_gets=not others)
        return self._read_shared(lambda: answers(shared.reading(), asks, self._read_time(), only_gets=not others))

    def _read_shared(self, read: Callable[[], T]) -> T:
        """Read with the writing connection."""
        shared = self.shared
        shared.refuse_reentry()
        with shared.lock:
            if shared.is_in_use:
                self._clean()
            shared.is_in_use = True
            try:
                found = read()
            except BaseException as error:
                self._fail_read(error)
            shared.is_in_use = False
        return found

    def get(
        self,
        key: Key,
        space: Space = _TUPLES,
        find: Callable[[apsw.Cursor, Space, Key], Record | None] = point_without_times,
        *,
        include_expired: bool = False,
    ) -> Record | None:
        """The entry at a key, as `read` would answer it, but without a coroutine, which would take a third of the time.

        The default `find` leaves out the times of creation and last change.
        """
        if self.refusal is not None:
            raise Closed(self.refusal)
        shared = self.shared
        if shared.is_in_use:
            if self._has_readers:
                asks = (Get(space, key, include_expired),)
                [record] = self._readers.read(asks, self._read_time(), only_gets=True)
                return cast("Record | None", record)
            shared.refuse_reentry()
        with shared.lock:
            if shared.is_in_use:
                self._clean()
            shared.is_in_use = True
            try:
                # The common case of `reading`, without the call.
                if shared.is_viewing and (left := shared.reads_left - 1) and shared.header.raw == shared.seen:  # type: ignore[union-attr]
                    shared.reads_left, cursor = left, shared.cursor
                else:
                    cursor = shared.reading()
                record = find(cursor, space, key)
            except BaseException as error:
                self._fail_read(error)
            shared.is_in_use = False
        # The time is read only if the entry expires.
        if record is None or (expiry := record.expires_at) is None:
            return record
        if self._writer.last_commit_at < expiry and self._nanoseconds() < expiry * 1_000_000:
            return record
        return record if include_expired else None

    def _clean(self) -> None:
        """Finish what an interrupted thread has left; this thread has the lock."""
        if self.refusal is not None:
            raise Closed(self.refusal)
        self.queue.clean()

    def _fail_read(self, error: BaseException) -> NoReturn:
        """End a read that raised an exception, perhaps a signal handler's, and raise what its caller gets."""
        explained = self._file.explain(error, self.connection) if isinstance(error, OF_SQLITE) else None
        self.shared.clean()
        if explained is not None:
            raise explained from error
        raise error

    async def commit(self, batch: Batch) -> Committed | Conflict:
        verdict = self.verdict(batch)
        if isinstance(verdict, KeyloftError):
            raise verdict
        return verdict

    def commit_now(self, batch: Batch) -> Committed:
        """Commit a batch that has no checks, without a coroutine."""
        verdict = self.verdict(batch)
        if type(verdict) is Committed:
            return verdict
        assert isinstance(verdict, KeyloftError), "a batch without checks has nothing to conflict with"
        raise verdict

    def set_now(self, key: bytes, value: bytes, encoding: int) -> int:
        """Store a value that never expires in the tuple store, and return its version."""
        if self.refusal is not None:
            raise Closed(self.refusal)
        if len(key) + len(value) <= limits.ROW_BYTES and not self._file.read_only:
            if self._housekeeping.is_asleep:
                self._housekeeping.wake()
            if (committed := self.queue.try_set(key, value, encoding)) is not None:
                version, now = committed
                if self.feed.position is not None:
                    self.feed.committed(outcome_of_set(_TUPLES, key, version, now))
                return version
        return self.commit_now(Batch((Set(_TUPLES, key, value, encoding),))).version

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        report(done, self.verdict(batch))
        return WRITTEN

    def verdict(self, batch: Batch) -> Verdict:
        """Commit a batch, and return its verdict. An error is returned, not raised, unless the engine is closed."""
        if self.refusal is not None:
            raise Closed(self.refusal)
        if self._file.read_only:
            return opened_read_only(self._file.path)
        if self._housekeeping.is_asleep:
            self._housekeeping.wake()
        return self.queue.commit(batch)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        self._check_may_watch()
        # With the lock, so that no commit is dispatched between the start of the watch and its registration.
        with self.feed.lock:
            watch = self.feed.watch(asks, since, self._start())
        self.poller.start()
        return watch

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        self._check_may_watch()
        with self.feed.lock:
            watch = self.feed.follow(asks, since, woken, self._start())
        self.poller.start()
        return watch

    def _check_may_watch(self) -> None:
        if self.refusal is not None:  # in a forked child, the lock may be taken by a thread that does not exist there
            raise Closed(self.refusal)
        self._waiting.check_may_lock()

    def health(self) -> None:
        """There are no servers."""

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Finish the writes under way, end the watches, close the file. An interrupted call can be repeated.

        Raises:
            ReentrantCall: A signal's handler has interrupted a call of this thread; the engine stays open.
        """
        if self._is_closed or self.refusal not in (None, CLOSED):
            return  # after a fork: only the parent may close it
        if sys.is_finalizing():
            # Other threads have stopped where they were, perhaps with a lock. The end of the process closes the file.
            self.refusal = CLOSED
            return
        self.shared.refuse_reentry()
        self.refusal = CLOSED
        self._writer.give_up_soon()
        with self.shared.lock:
            self.queue.close()
        self._waiting.end()
        self.feed.close()
        self._housekeeping.stop()
        self._readers.close()
        with self.shared.lock:
            if not self._is_closed:
                self.shared.end_view()
                self.shared.is_in_use = True  # for ever
                self._file.close(self.connection)
                self._is_closed = True

    def _check_place(self) -> None:
        """Check that the path still names the file, unless a thread commits: a commit checks that, too.

        A commit may wait for another process's lock, and watches must not wait for it. The thread that polls for them
        may take the lock without `with`: no signal interrupts it.
        """
        lock = self.shared.lock
        if lock.acquire(blocking=False):
            try:
                if not self._is_closed and self.refusal is None:
                    self._check_file()
            finally:
                lock.release()

    def _start(self) -> Start:
        return Start(self._read_version(), self._read_time())

    def _read_version(self) -> int:
        [version] = run_to_end(self.read(Latest()))
        return int(version)

    def _read_time(self) -> int:
        """The time of a read: never before a commit that this engine knows about, even if the clock was set back."""
        return max(self._now(), self._writer.last_commit_at)
