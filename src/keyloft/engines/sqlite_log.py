"""Keeps the write-ahead log of an SQLite file short: takes it into the file, between two commits.

SQLite would do it within a commit, and the callers of that commit would wait for it: 80 ms for 32 MiB.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import apsw

from keyloft.engines.sqlite_file import SqliteFile
from keyloft.engines.worker import Worker

logger = logging.getLogger(__name__)

# In pages of 4 KiB: it is moved when it has 8 MiB and nothing was written for a while, at 128 MiB in any case.
_WORTH_MOVING: Final = 2_000
_DUE: Final = 32_000
_QUIET_SECONDS: Final = 0.02
# After small commits, at 16 MiB: it begins anew, and a commit that writes over it takes 180 µs instead of 300 where
# it grows. Large commits gain less by that than by pages that gather, and are moved once.
_SMALL_COMMIT: Final = 16
_DUE_AFTER_SMALL_COMMITS: Final = 4_000


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
        self.begins_anew = True
        """The next commit syncs the disk, whatever the durability."""
        self._pages = 0
        self._moved_pages = 0
        self._commits = 0
        self._last_commit = 0.0
        self._waiting: asyncio.TimerHandle | None = None
        connection.set_wal_hook(self._grew)

    def look_after(self) -> None:
        """A commit is done: move the log if it is time, or wait for a quiet moment."""
        pages = self._pages - self._moved_pages
        if pages < min(_WORTH_MOVING, _DUE, _DUE_AFTER_SMALL_COMMITS):
            return
        self._last_commit = self._loop.time()
        were_small = pages <= self._commits * _SMALL_COMMIT
        if pages >= _DUE or (were_small and pages >= _DUE_AFTER_SMALL_COMMITS):
            self._move()
        elif self._waiting is None and pages >= _WORTH_MOVING:
            self._waiting = self._loop.call_later(_QUIET_SECONDS, self._move_if_quiet)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _move_if_quiet(self) -> None:
        self._waiting = None
        if self._pages - self._moved_pages < _WORTH_MOVING:
            return
        rest = self._last_commit + _QUIET_SECONDS - self._loop.time()
        if rest > 0:
            self._waiting = self._loop.call_later(rest, self._move_if_quiet)
        else:
            self._move()

    def _move(self) -> None:
        if not self.is_moving:
            self.is_moving = True
            self._moved_pages = self._pages
            self._commits = 0
            self._let_go()
            self._worker.submit(self._checkpoint, self._moved)

    def _checkpoint(self) -> None:
        try:
            self._connection.wal_checkpoint()
        except apsw.Error as error:
            # Another process is at it, or the disk is full: nothing is lost, and it is tried again later.
            logger.debug("a checkpoint has to wait: %s", self._file.explain(error, self._connection))
        except Exception:
            logger.exception("a checkpoint failed, and is tried again later")

    def _moved(self, _: None) -> None:
        self.is_moving = False
        self.begins_anew = True

    def _grew(self, connection: apsw.Connection, name: str, pages: int) -> int:
        if pages < self._pages:
            self._moved_pages = 0  # it has begun anew; while somebody reads what is in it, it can't, and grows on
        self._pages = pages
        self._commits += 1
        self.begins_anew = False
        return apsw.SQLITE_OK
