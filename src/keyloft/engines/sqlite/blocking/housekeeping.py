"""A thread that makes checkpoints, ends idle views, and finishes a commit that a signal interrupted."""

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Final
from weakref import WeakSet

import apsw

from keyloft import limits
from keyloft.core.waiting import ThreadEvent, ThreadLock
from keyloft.engines.sqlite.blocking.commits import CommitQueue
from keyloft.engines.sqlite.blocking.connections import SharedConnection
from keyloft.engines.sqlite.file import SqliteFile

logger = logging.getLogger(__name__)


class Housekeeping:
    """A daemon thread, started by the first commit or view. It sleeps while nothing is written."""

    def __init__(self, file: SqliteFile, shared: SharedConnection, queue: CommitQueue) -> None:
        self._file = file
        self._shared = shared
        self._queue = queue
        self._woken = ThreadEvent()
        self._thread: threading.Thread | None = None
        self._starting = ThreadLock()
        self._in_memory = file.in_memory
        self.is_asleep = True
        """Whether the thread sleeps until it is woken. Only itself changes this: a waking thread may be interrupted."""
        self._is_stopping = False
        self._last_use = 0.0
        """When a group was last committed, or this thread was woken."""
        self._pages_left = self._commits = 0
        """Pages of the write-ahead log that are not checkpointed, and commits since the last checkpoint."""
        self._left_over = 0
        """How many pages the last checkpoint has left."""
        self._is_measured = True
        self._incomplete = 0
        self._not_before = 0.0
        self._reads_left = 0
        """How many reads the view had left when this thread last checked it."""

    def wake(self) -> None:
        """Wake the thread, because another one is about to commit, or has opened a view."""
        if self.is_asleep and not self._in_memory:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._last_use = monotonic()
            self._woken.set()

    def _start(self) -> None:
        with self._starting:
            # If a signal interrupted the start of a thread, it may never have run, and can't be started again.
            if self._is_stopping or sys.is_finalizing():
                return
            if self._thread is None or not self._thread.is_alive():
                _running.add(self)
                name = f"keyloft housekeeping of {self._file.path}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def committed(self) -> None:
        """Note that a group was committed; the calling thread still has the connection."""
        if self._in_memory:
            return
        self._last_use = monotonic()
        self._commits += 1
        self._is_measured = self._commits % limits.COMMITS_PER_LOG_CHECK == 0
        if self._is_measured:
            self._measure()
            if self._is_due() and self._last_use >= self._not_before:
                self._woken.set()
        if self.is_asleep:  # it fell asleep while this commit waited for another process
            self.wake()

    def _measure(self) -> None:
        """Read how many pages of the write-ahead log are not checkpointed; the caller has the connection, no view."""
        with contextlib.suppress(apsw.Error):
            pages, checkpointed = self._shared.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            self._pages_left = pages - checkpointed

    def ask_to_stop(self) -> None:
        self._is_stopping = True
        self._woken.set()

    def stop(self, seconds: float | None = None) -> None:
        """End the thread, and wait for that, but no longer than this."""
        self.ask_to_stop()
        _running.discard(self)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._is_stopping:
            if self.is_asleep:
                self._woken.block()
            else:
                self._woken.block_for(self._pause())
            self._woken.clear()
            self.is_asleep = False
            try:
                self._tidy()
            except apsw.Error as error:
                logger.debug("a checkpoint failed, retrying later: %s", self._file.explain(error))
                self._not_before = monotonic() + limits.CHECKPOINT_RETRY_PAUSES[-1]
            except Exception:
                logger.exception("housekeeping failed, retrying later")

    def _pause(self) -> float:
        if self._shared.is_viewing:
            return limits.VIEW_IDLE_SECONDS
        is_long = self._pages_left >= limits.CHECKPOINT_QUIET_PAGES
        return limits.CHECKPOINT_QUIET_SECONDS if is_long else limits.LOST_GROUP_SECONDS

    def _tidy(self) -> None:
        if self._queue.group or self._shared.is_in_use:
            with self._shared.lock:
                if self._queue.group or self._shared.is_in_use:
                    self._queue.clean()
        if self._shared.is_viewing:
            self._end_idle_view()
        if not self._is_measured:
            with self._using_connection():
                self._is_measured = True
                self._measure()
        now = monotonic()
        is_quiet = now - self._last_use > limits.CHECKPOINT_QUIET_SECONDS
        is_long = self._pages_left >= limits.CHECKPOINT_QUIET_PAGES
        if now >= self._not_before and (self._is_due() or (is_long and is_quiet)):
            self._checkpoint()
        elif not is_long and self._is_idle():
            self.is_asleep = True
            if not self._is_idle():
                self.is_asleep = False  # a view or a commit began meanwhile, and did not wake this thread

    def _is_idle(self) -> bool:
        if self._shared.is_viewing or self._shared.is_in_use or self._queue.group:
            return False
        return monotonic() - self._last_use > limits.LOST_GROUP_SECONDS

    def _end_idle_view(self) -> None:
        if self._reads_left == self._shared.reads_left:
            with self._shared.lock:
                is_idle = self._reads_left == self._shared.reads_left
                if self._shared.is_viewing and is_idle and not self._shared.is_in_use:
                    self._shared.end_view()
        self._reads_left = self._shared.reads_left

    @contextlib.contextmanager
    def _using_connection(self) -> Iterator[None]:
        """Use the connection outside of a view, in which SQLite would checkpoint nothing. Readers need not wait."""
        shared = self._shared
        with shared.lock:
            if shared.is_in_use:
                self._queue.clean()
            shared.is_in_use = True
            try:
                shared.end_view()
                yield
            finally:
                shared.is_in_use = False

    def _is_due(self) -> bool:
        written = self._pages_left - min(self._left_over, self._pages_left)
        are_small = written <= self._commits * limits.CHECKPOINT_SMALL_COMMIT_PAGES
        small, large = limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS, limits.CHECKPOINT_PAGES
        return self._pages_left >= (min(small, large) if are_small else large)

    def _checkpoint(self) -> None:
        is_oversized = self._pages_left > 2 * limits.CHECKPOINT_PAGES
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if is_oversized else apsw.SQLITE_CHECKPOINT_PASSIVE
        with self._using_connection():
            pages, checkpointed = self._shared.connection.wal_checkpoint(mode=mode)
            self._pages_left = self._left_over = pages - checkpointed
            self._commits = 0
            if not self._pages_left:
                self._incomplete = 0
                return
        # A reader needs the log, or another process checkpoints it: nothing is lost.
        first, longest = limits.CHECKPOINT_RETRY_PAUSES
        self._not_before = monotonic() + min(first * 2**self._incomplete, longest)
        self._incomplete = min(self._incomplete + 1, 10)


_running: Final[WeakSet[Housekeeping]] = WeakSet()
"""Those whose thread was started."""


@atexit.register
def _stop_all() -> None:
    """End all threads before the interpreter ends, which would stop them wherever they are, with their locks taken."""
    left = [*_running]
    for one in left:
        one.ask_to_stop()
    deadline = monotonic() + limits.EXIT_SECONDS
    for one in left:
        one.stop(max(0.0, deadline - monotonic()))
