"""Connections that threads share: the writing one, lent to one thread at a time, and readers for all others."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, cast

import apsw

from keyloft import limits
from keyloft.core.records import Ask, Get
from keyloft.core.waiting import ThreadLock, refuse_reentry
from keyloft.engines.sqlite.blocking.wal_header import wal_header
from keyloft.engines.sqlite.errors import OF_SQLITE
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.inherited import lock_of
from keyloft.engines.sqlite.reads import answer, points
from keyloft.errors import Closed


def answers(cursor: apsw.Cursor, asks: Sequence[Ask], now: int, *, only_gets: bool) -> list[Any]:
    """Answer all asks from one view: the open one, or a new one."""
    if len(asks) == 1:
        return [answer(cursor, asks[0], now)]
    own_transaction = not cursor.connection.in_transaction
    try:
        if own_transaction:
            cursor.execute("BEGIN")
        if only_gets:
            return points(cursor, cast("Sequence[Get]", asks), now)
        return [answer(cursor, ask, now) for ask in asks]
    finally:
        if own_transaction and cursor.connection.in_transaction:
            cursor.execute("ROLLBACK")


class SharedConnection:
    """The connection that writes; a thread uses it while it holds the lock.

    An exception of a signal's handler may end a use at any point. The next use then begins with `clean`.
    """

    def __init__(self, connection: apsw.Connection, file: SqliteFile) -> None:
        self.connection = connection
        self.lock = lock_of(connection)
        """Only taken by `with`, so that it is released after an exception at any point; but for the thread that polls
        for watches, which no signal interrupts. A thread that finds `is_in_use` set calls `refuse_reentry` before it
        takes the lock."""
        self.cursor = connection.cursor()
        """For reads."""
        self.is_in_use = False
        """Set by the thread that has the lock, until its read or commit has ended. A thread that takes the lock and
        finds this set has to call `clean` first."""
        # With a VFS for tests, the file may be something else than it seems.
        with self.lock:
            self.header = wal_header(connection) if file.vfs is None and not file.in_memory else None
        self.seen = b""
        """The header of the WAL index that the view shows."""
        self.is_viewing = False
        """Whether a view is open, which reads share."""
        self.reads_left = 0
        """How many reads the view still serves; it changes with each."""
        self._last_read = 0.0
        self.view_began: Callable[[], None] = lambda: None
        """Called for each view: another thread ends the view if no read or commit does."""

    def refuse_reentry(self) -> None:
        """Refuse a signal's handler that interrupts a call of its thread in the middle.

        Raises:
            ReentrantCall: This thread has the lock.
        """
        refuse_reentry(self.lock)

    def reading(self) -> apsw.Cursor:
        """A cursor that shows every commit, of any process, that was made before this call.

        Beginning and ending a read transaction takes longer than reading an entry. So reads that follow each other
        closely share one, a view, as long as the header of the WAL index shows that no process has committed since. A
        view serves a limited number of reads: while it is open, the write-ahead log can't be overwritten.
        """
        if self.is_viewing:
            self.reads_left -= 1
            if self.reads_left and self.header.raw == self.seen:  # type: ignore[union-attr]
                return self.cursor
            self.end_view()
        elif self.header is None:
            return self.cursor
        now = monotonic()
        before, self._last_read = self._last_read, now
        if now - before < limits.VIEW_READS_SECONDS and self.header is not None:
            self.seen, self.reads_left, self.is_viewing = self.header.raw, limits.VIEW_READS, True
            self.cursor.execute("BEGIN")
            self.view_began()
        return self.cursor

    def end_reading(self) -> None:
        """End the view, because a commit begins. The next read opens no view, because another commit may follow."""
        if self.is_viewing:
            self.end_view()
        self._last_read = 0.0

    def end_view(self) -> None:
        if self.connection.in_transaction:
            self.cursor.execute("ROLLBACK")
        self.is_viewing = False

    def clean(self) -> None:
        """End a statement or a view that an interrupted read has left."""
        self.cursor.close(True)
        self.cursor = self.connection.cursor()
        self.end_view()
        self.is_in_use = False


class ReaderPool:
    """Connections that only read, each lent to one thread at a time; there are as many as threads read at once."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._open_reader = file.opener()
        self._idle: deque[apsw.Connection] = deque()
        self._lock = ThreadLock()
        self._is_closed = False

    def read(self, asks: Sequence[Ask], now: int, *, only_gets: bool) -> list[Any]:
        """Answers from one view.

        Raises:
            Closed: The pool is closed.
        """
        if self._is_closed:
            raise Closed
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open_reader(limits.READER_CACHE_MIB)
        try:
            found = answers(connection.cursor(), asks, now, only_gets=only_gets)
        except OF_SQLITE as error:
            explained = self._file.explain(error, connection)
            self._file.close(connection)
            raise explained from error
        # After any other exception, such as a signal's, this is not reached: a statement may be left half-way.
        self._give_back(connection)
        return found

    def _give_back(self, connection: apsw.Connection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < limits.IDLE_READERS:
                self._idle.append(connection)
                return
        self._file.close(connection)

    def close(self) -> None:
        """Close the connections that no thread uses; each of the others is closed after its read."""
        with self._lock:
            self._is_closed = True
        with suppress(IndexError):  # a thread may have taken the last one
            while True:
                self._file.close(self._idle.pop())
