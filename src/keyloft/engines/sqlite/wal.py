"""Checkpoints the write-ahead log (WAL) of an SQLite file: copies its pages into the file, between two commits.

SQLite itself would checkpoint within a commit, whose callers would wait for it.
"""

import asyncio
import logging

import apsw

from keyloft import limits
from keyloft.engines.sqlite.connection import WritingConnection
from keyloft.engines.sqlite.file import SqliteFile

logger = logging.getLogger(__name__)


def restarts_log(connection: apsw.Connection) -> bool:
    """Whether the next commit writes to the start of the WAL; to be called outside of a transaction.

    Such a commit syncs once more, whatever the durability, and truncates a WAL that is too long.
    """
    try:
        pages, checkpointed = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    except apsw.Error:  # the statement that comes next reports what is wrong
        return True
    return pages == checkpointed


class WriteAheadLog:
    """Decides when the WAL is checkpointed, on the event loop; the thread does it."""

    def __init__(self, file: SqliteFile, writing: WritingConnection) -> None:
        self._file = file
        self._writing = writing
        self._connection = writing.connection
        self._loop = asyncio.get_running_loop()
        self._pages_left = 0
        self._commits = 0
        """How many commits there were since the last checkpoint, complete or not."""
        self._left_over = 0
        """How many pages that checkpoint has left."""
        self._last_commit = 0.0
        self._not_before = 0.0
        self._incomplete = 0
        self._timer: asyncio.TimerHandle | None = None

    def committed(self) -> None:
        """Checkpoint if it is time, or once nothing is written for a moment."""
        self._commits += 1
        if self._writing.is_lent:
            return  # a checkpoint waits for the thread
        pages, checkpointed = self._length()
        self._pages_left = left = pages - checkpointed
        self._left_over = min(self._left_over, left)  # another process may have checkpointed since
        due, due_after_small = limits.CHECKPOINT_PAGES, limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS
        if left < min(limits.CHECKPOINT_QUIET_PAGES, due, due_after_small):
            return
        now = self._last_commit = self._loop.time()
        commits_were_small = left - self._left_over <= self._commits * limits.CHECKPOINT_SMALL_COMMIT_PAGES
        if left >= (min(due, due_after_small) if commits_were_small else due) and now >= self._not_before:
            self._start()
        else:
            self._wait(limits.CHECKPOINT_QUIET_SECONDS)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _length(self) -> tuple[int, int]:
        """How many pages the WAL has, and how many of them are checkpointed."""
        try:
            with self._writing.lock:
                return self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        except apsw.Error as error:
            logger.debug("reading the write-ahead log's length failed: %s", self._file.explain(error, self._connection))
            return 0, 0

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(seconds, self._start_if_quiet)

    def _start_if_quiet(self) -> None:
        self._timer = None
        if self._writing.is_lent or self._pages_left < limits.CHECKPOINT_QUIET_PAGES:
            return
        rest = max(self._last_commit + limits.CHECKPOINT_QUIET_SECONDS, self._not_before) - self._loop.time()
        if rest > 0:
            self._wait(rest)
        else:
            self._start()

    def _start(self) -> None:
        self._writing.lend(self._checkpoint, self._finished)

    def _checkpoint(self) -> int:
        """Make a checkpoint; returns how many pages are left: all of them if it failed."""
        try:
            # A long read has let the WAL grow beyond its limit: give the space back, now that the read has ended.
            is_oversized = self._pages_left > 2 * limits.CHECKPOINT_PAGES
            mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if is_oversized else apsw.SQLITE_CHECKPOINT_PASSIVE
            pages, checkpointed = self._connection.wal_checkpoint(mode=mode)
            return pages - checkpointed
        except apsw.Error as error:
            logger.debug("a checkpoint failed, retrying later: %s", self._file.explain(error, self._connection))
        except Exception:
            logger.exception("a checkpoint failed, retrying later")
        return max(1, self._pages_left)

    def _finished(self, left: int) -> None:
        self._commits, self._left_over = 0, left
        if not left:
            self._pages_left = self._incomplete = 0
            self._not_before = 0.0
        else:
            # A reader needs the WAL, another process checkpoints it, or the disk is full: nothing is lost. A read that
            # begins during a checkpoint needs the WAL only for a moment, so the next commit tries again.
            first, longest = limits.CHECKPOINT_RETRY_PAUSES
            pause = min(first * 2**self._incomplete, longest) if self._incomplete else 0.0
            self._incomplete += 1
            self._not_before = self._loop.time() + pause
            self._wait(max(pause, limits.CHECKPOINT_QUIET_SECONDS))
