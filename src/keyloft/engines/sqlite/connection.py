"""Owns the connection that writes to an SQLite file, and lends it to the thread."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import apsw

from keyloft.engines.sqlite.reads import View
from keyloft.engines.sqlite.worker import Worker

T = TypeVar("T")


class WritingConnection:
    """The connection that writes, and who may use it: the thread while it is lent, otherwise the event loop."""

    def __init__(self, connection: apsw.Connection, worker: Worker, *, own_transaction: bool) -> None:
        self.connection = connection
        self.view = View(connection, own_transaction=own_transaction)
        """The event loop's reads with this connection."""
        self.lock = self.view.lock
        """Held by the event loop or by the thread while it uses the connection. Neither waits for the other: `is_lent`
        says whose turn it is. A fork on a third thread finds out by the lock that the connection is in use."""
        self.is_lent = False
        """Whether the thread has the connection, or will have it: then the event loop may not use it."""
        self._worker = worker
        self._loans: set[object] = set()

    def lend(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Lend the connection to the thread for a job that doesn't raise; `done` is called when it is back.

        A second loan waits for the first.
        """
        self.view.end()
        loan = object()
        # In this order: if a signal's handler raises in between, the connection stays lent, and the thread does it all.
        self._loans.add(loan)
        self.is_lent = True
        self._worker.submit(partial(self._locked, job), partial(self._take_back, loan, done))

    async def lend_and_wait(self, job: Callable[[], object]) -> None:
        """Lend the connection to the thread for a job that doesn't raise, and wait until it is back."""
        is_back = asyncio.Event()
        self.lend(job, lambda _: is_back.set())
        await is_back.wait()

    def _locked(self, job: Callable[[], T]) -> T:
        with self.lock:
            return job()

    def _take_back(self, loan: object, done: Callable[[T], None], result: T) -> None:
        self._loans.discard(loan)
        self.is_lent = bool(self._loans)
        done(result)

    async def wait_for_loans(self) -> None:
        """Return once the thread has done every job that it was given."""
        given = self._loans.copy()
        await self._worker.call(lambda: None)
        # A signal's handler may have raised before a loan was taken back.
        self._loans -= given
        self.is_lent = bool(self._loans)

    async def close(self, close: Callable[[apsw.Connection], None]) -> None:
        """Close the connection on the thread: SQLite then checkpoints, which waits for the disk."""
        self.view.end()
        self.is_lent = True
        await self._worker.call(lambda: self._locked(lambda: close(self.connection)))
