"""Keeps the write-ahead log of an SQLite file short: moves it into the file, between two commits.

SQLite would do it within a commit, and the callers of that commit would wait for it: 80 ms for 32 MiB.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import apsw

from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.worker import Worker

logger = logging.getLogger(__name__)

# In pages of 4 KiB: it is moved when it has 8 MiB and nothing was written for a while, at 128 MiB in any case.
_WORTH_MOVING: Final = 2_000
_DUE: Final = 32_000
_QUIET_SECONDS: Final = 0.02
# After small commits, at 16 MiB: it begins anew, and a commit that writes over it takes 180 µs instead of 300 where
# it grows. Large commits gain less by that than by pages that gather, and are moved once.
_SMALL_COMMIT: Final = 16
_DUE_AFTER_SMALL_COMMITS: Final = 4_000
_AGAIN_SECONDS: Final = 1.0


class Log:
    """The log that a writing connection fills. Belongs to an event loop; its worker does what takes long."""

    def __init__(
        self, file: SqliteFile, connection: apsw.Connection, worker: Worker, let_go: Callable[[], None]
    ) -> None:
        """`let_go` ends whatever is read through the connection."""
        self._file = file
        self._connection = connection
        self._worker = worker
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self.is_moving = False
        """The worker has the connection for itself."""
        self._unmoved = 0
        self._commits = 0
        self._last_commit = 0.0
        self._not_before = 0.0
        self._waiting: asyncio.TimerHandle | None = None

    def begins_anew(self) -> bool:
        """Whether the next commit is the first one of the log: it syncs the disk, whatever the durability."""
        pages, moved = self._length()
        return pages == moved

    def look_after(self) -> None:
        """A commit is done: move the log if it is time, or wait for a quiet moment."""
        self._commits += 1
        if self.is_moving:
            return
        pages, moved = self._length()
        self._unmoved = unmoved = pages - moved
        if unmoved < min(_WORTH_MOVING, _DUE, _DUE_AFTER_SMALL_COMMITS):
            return
        now = self._last_commit = self._loop.time()
        were_small = unmoved <= self._commits * _SMALL_COMMIT
        is_due = unmoved >= _DUE or (were_small and unmoved >= _DUE_AFTER_SMALL_COMMITS)
        if is_due and now >= self._not_before:
            self._move()
        else:
            self._wait(_QUIET_SECONDS)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _length(self) -> tuple[int, int]:
        """How many pages the log has, and how many of them are in the file: 0.4 µs."""
        try:
            return self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        except apsw.Error as error:
            logger.debug("the log's length is not known: %s", self._file.explain(error, self._connection))
            return 0, 0

    def _wait(self, seconds: float) -> None:
        if self._waiting is None:
            self._waiting = self._loop.call_later(seconds, self._move_if_quiet)

    def _move_if_quiet(self) -> None:
        self._waiting = None
        if self.is_moving or self._unmoved < _WORTH_MOVING:
            return
        rest = max(self._last_commit + _QUIET_SECONDS, self._not_before) - self._loop.time()
        if rest > 0:
            self._wait(rest)
        else:
            self._move()

    def _move(self) -> None:
        self._let_go()
        self.is_moving = True
        self._commits = 0
        self._worker.submit(self._checkpoint, self._moved)

    def _checkpoint(self) -> bool:
        try:
            pages, moved = self._connection.wal_checkpoint()
            return pages == moved
        except apsw.Error as error:
            logger.debug("a checkpoint has to wait: %s", self._file.explain(error, self._connection))
        except Exception:
            logger.exception("a checkpoint failed, and is tried again later")
        return False

    def _moved(self, is_complete: bool) -> None:
        self.is_moving = False
        if is_complete:
            self._unmoved = 0
            self._not_before = 0.0
        else:
            # Somebody reads what is in the log, another process is at it, or the disk is full: nothing is lost.
            self._not_before = self._loop.time() + _AGAIN_SECONDS
            self._wait(_AGAIN_SECONDS)
