"""A thread that makes checkpoints, ends idle views, and finishes a commit that a signal interrupted."""

import contextlib
import logging
import threading
from time import monotonic

import apsw

from keyloft import limits
from keyloft.engines.sqlite.blocking.commits import CommitQueue
from keyloft.engines.sqlite.blocking.connections import SharedConnection
from keyloft.engines.sqlite.file import SqliteFile

logger = logging.getLogger(__name__)


class Housekeeping:
    """A daemon thread, from the first commit on. It sleeps while nothing is written."""

    def __init__(self, file: SqliteFile, shared: SharedConnection, queue: CommitQueue) -> None:
        self._file = file
        self._shared = shared
        self._queue = queue
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_asleep = True
        self._is_stopping = False
        self._last_commit = 0.0
        self._pages_left = self._commits = 0
        self._is_measured = True
        self._incomplete = 0
        self._not_before = 0.0
        self._reads_left = 0
        """What the view had left when it was last looked at."""

    def wake(self) -> None:
        """A thread is about to commit, or has opened a view."""
        if self._is_asleep and not self._file.in_memory:
            self._is_asleep = False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"keyloft housekeeping of {self._file.path}", daemon=True
                )
                self._thread.start()
            self._woken.set()

    def committed(self) -> None:
        """A group was committed; its thread still has the connection."""
        if self._file.in_memory:
            return
        self._last_commit = monotonic()
        self._commits += 1
        self._is_measured = self._commits % limits.COMMITS_PER_LOG_CHECK == 0
        if self._is_measured:
            self._measure()
            if self._is_due() and self._last_commit >= self._not_before:
                self._woken.set()

    def _measure(self) -> None:
        """Read how many pages of the write-ahead log are not checkpointed; this thread has the connection."""
        with contextlib.suppress(apsw.Error):
            pages, checkpointed = self._shared.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            self._pages_left = pages - checkpointed

    def stop(self) -> None:
        self._is_stopping = True
        self._woken.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            self._woken.wait(None if self._is_asleep else self._pause())
            self._woken.clear()
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
        if self._queue.group:
            with self._shared.lock:
                if self._queue.group:
                    self._queue.clean()
        if self._shared.is_viewing:
            self._end_idle_view()
        if not self._is_measured:
            with self._shared.lock:
                self._is_measured = True
                self._measure()
        now = monotonic()
        is_quiet = now - self._last_commit > limits.CHECKPOINT_QUIET_SECONDS
        is_long = self._pages_left >= limits.CHECKPOINT_QUIET_PAGES
        if now >= self._not_before and (self._is_due() or (is_long and is_quiet)):
            self._checkpoint()
        elif not is_long and not self._shared.is_viewing and now - self._last_commit > limits.LOST_GROUP_SECONDS:
            self._is_asleep = True
            if self._shared.is_viewing or monotonic() - self._last_commit < limits.LOST_GROUP_SECONDS:
                self._is_asleep = False  # a view or a commit began meanwhile, and did not wake this thread

    def _end_idle_view(self) -> None:
        if self._reads_left == self._shared.reads_left:
            with self._shared.lock:
                if self._shared.is_viewing and self._reads_left == self._shared.reads_left:
                    self._shared.end_view()
        self._reads_left = self._shared.reads_left

    def _is_due(self) -> bool:
        are_small = self._pages_left <= self._commits * limits.CHECKPOINT_SMALL_COMMIT_PAGES
        small, large = limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS, limits.CHECKPOINT_PAGES
        return self._pages_left >= (min(small, large) if are_small else large)

    def _checkpoint(self) -> None:
        is_oversized = self._pages_left > 2 * limits.CHECKPOINT_PAGES
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if is_oversized else apsw.SQLITE_CHECKPOINT_PASSIVE
        with self._shared.lock:
            self._shared.end_view()
            pages, checkpointed = self._shared.connection.wal_checkpoint(mode=mode)
            self._pages_left = pages - checkpointed
            if not self._pages_left:
                self._commits = self._incomplete = 0
                return
        # A reader needs the log, or another process checkpoints it: nothing is lost.
        first, longest = limits.CHECKPOINT_RETRY_PAUSES
        self._not_before = monotonic() + min(first * 2**self._incomplete, longest)
        self._incomplete = min(self._incomplete + 1, 10)
