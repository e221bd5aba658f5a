"""Keeps connections to PostgreSQL: each in a place of its own, from which it is used, lost, left and made anew."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from keyloft.engines.postgres.server import Connection, Failure, PostgresServer
from keyloft.errors import DatabaseError

# Firewalls forget connections that are idle for some minutes, and tell neither side.
_IDLE_SECONDS: Final = 60.0
_PING_SECONDS: Final = 2.0

PAUSE_SECONDS: Final = 0.01
"""Between two tries. Whoever has to connect anew first waits longer by himself."""

T = TypeVar("T")


class Link:
    """A place for one connection: made when it is needed, and made anew after it was lost."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._connection: Connection = None
        self._prepared: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._used = 0.0

    async def connected(self) -> Connection:
        """The connection, as soon as there is one that works."""
        now = self._loop.time()
        if self._connection is not None and now - self._used > _IDLE_SECONDS:
            await self._try_out()
        if self._connection is None or self._connection.is_closed():
            self.drop()
            self._connection = await self._server.connect()
        self._used = now
        return self._connection

    async def _try_out(self) -> None:
        """See whether a connection still leads anywhere, before something depends on it that can't be repeated."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self._connection.execute("SELECT 1")
        except (*Failure, TimeoutError):
            self.drop()

    async def fetch(self, statement: str, *bindings: Any) -> list[Any]:
        """The rows of one statement, which is a transaction of its own."""
        await self.connected()
        if not self._server.is_pooled:
            try:
                return await self.ask(statement, *bindings)
            except asyncio.CancelledError:
                self.abandon()
                raise
        async with self.transaction(self._server.begin):
            return await self.ask(statement, *bindings)

    @asynccontextmanager
    async def transaction(self, begin: str) -> AsyncIterator["Transaction"]:
        """Commits in the end, unless that was done; whatever goes wrong undoes it all."""
        connection = await self.connected()
        try:
            await connection.execute(begin)
            yield Transaction(connection.execute, self.ask)
            if connection.is_in_transaction():
                await connection.execute("COMMIT")
        except BaseException as error:
            is_undone = False
            try:
                if isinstance(error, Exception):
                    with contextlib.suppress(*Failure):
                        await connection.execute("ROLLBACK")
                    is_undone = not (connection.is_closed() or connection.is_in_transaction())
            finally:
                if not is_undone:
                    self.abandon()
            raise

    async def ask(self, statement: str, *bindings: Any) -> list[Any]:
        """The rows of one statement, in whatever transaction there is."""
        rows: list[Any]
        if self._server.is_pooled:
            rows = await self._connection.fetch(statement, *bindings)
            return rows
        prepared = self._prepared.get(statement)
        if prepared is None:
            # A name that nobody else has: should a pooler go unnoticed, no other's statement is taken for ours.
            name = f"{self._server.token}_{len(self._prepared)}"
            prepared = self._prepared[statement] = await self._connection.prepare(statement, name=name)
        rows = await prepared.fetch(*bindings)
        return rows

    def drop(self) -> None:
        """Forget the connection, at once: what it was doing is undone, or can't be known."""
        self._prepared = {}
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def abandon(self) -> None:
        """Leave a connection whose caller was cancelled: the driver stops what it was doing, then it is closed.

        It is not used again: what was cancelled may have been half done, and an answer may still come.
        """
        self._prepared = {}
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.close_aside(connection)


class Transaction(NamedTuple):
    """What can be done between the beginning and the end."""

    execute: Callable[[str], Awaitable[object]]
    """Some SQL, without bindings and without rows."""
    fetch: Callable[..., Awaitable[list[Any]]]
    """The rows of one statement."""


async def patiently(server: PostgresServer, link: Link, work: Callable[[Link], Awaitable[T]], came: float) -> T:
    """Do something that changes nothing, again if need be, until it is done or the caller has waited long enough.

    Raises:
        DatabaseError: It can't be done.
    """
    trouble: DatabaseError | None = None
    while True:
        try:
            async with asyncio.timeout_at(came + server.patience):
                try:
                    return await work(link)
                except Failure as error:
                    link.drop()
                    trouble = server.explain(error)
                    if not server.learn_from(error):
                        raise trouble from error
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            link.drop()
            raise trouble or server.unreachable() from None
