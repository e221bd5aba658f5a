"""Connections that threads share: the writing one, lent to one thread at a time, and readers for all others."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import apsw

from keyloft import limits
from keyloft.core.records import Ask, Get
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.reads import answer, points


def answers(cursor: apsw.Cursor, asks: Sequence[Ask], now: int, *, own_transaction: bool = True) -> list[Any]:
    """Answer all asks from one view."""
    if len(asks) == 1:
        return [answer(cursor, asks[0], now)]
    try:
        if own_transaction:
            cursor.execute("BEGIN")
        if all([type(ask) is Get for ask in asks]):
            return points(cursor, cast("Sequence[Get]", asks), now)
        return [answer(cursor, ask, now) for ask in asks]
    finally:
        if own_transaction and cursor.connection.in_transaction:
            cursor.execute("ROLLBACK")


class SharedConnection:
    """The connection that writes; a thread uses it while it holds the lock.

    An exception of a signal's handler may end a use at any point. The next one begins with `clean`.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        """Taken by `with` alone: only so is it released after an exception at any point."""
        self.cursor = connection.cursor()
        """For reads."""
        self.is_in_use = False
        """Set by a read until it has ended; if it is set for the next thread that has the lock, that has to `clean`."""

    def clean(self) -> None:
        """End a statement or a view that an interrupted read has left."""
        self.cursor.close(True)
        self.cursor = self.connection.cursor()
        if self.connection.in_transaction:
            self.cursor.execute("ROLLBACK")
        self.is_in_use = False


class ReaderPool:
    """Connections that only read, each lent to one thread at a time; there are as many as threads read at once."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._idle: deque[apsw.Connection] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def read(self, asks: Sequence[Ask], now: int) -> list[Any]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._file.open_reader(cache_mib=limits.READER_CACHE_MIB)
        try:
            found = answers(connection.cursor(), asks, now)
        except apsw.Error as error:
            explained = self._file.explain(error, connection)
            self._file.close(connection)
            raise explained from error
        # After any other exception, a signal's for example, it is not lent again: a statement may be left half-way.
        self._give_back(connection)
        return found

    def _give_back(self, connection: apsw.Connection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < limits.IDLE_READERS:
                self._idle.append(connection)
                return
        self._file.close(connection)

    def close(self) -> None:
        """Close those that no thread uses; each of the others is closed after its read."""
        with self._lock:
            self._is_closed = True
        while self._idle:
            self._file.close(self._idle.pop())
