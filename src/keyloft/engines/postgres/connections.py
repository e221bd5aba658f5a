"""Keeps connections to PostgreSQL in slots: made when needed, prepared statements included, and replaced when lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from keyloft import limits
from keyloft.engines.postgres.errors import Failure, is_stale
from keyloft.engines.postgres.server import Connection, PostgresServer, timeout
from keyloft.errors import DatabaseError

T = TypeVar("T")

SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Begins a transaction in which all reads show one moment."""


class Slot:
    """Holds one connection: made when it is needed, and replaced after it was lost."""

    def __init__(self, server: PostgresServer, lock_seconds: float | None = None, *, commits: bool = False) -> None:
        """Make an empty slot.

        Args:
            server: The server to connect to.
            lock_seconds: How long a statement waits for a lock, if not as long as the server's sessions do.
            commits: Whether its connection may be the first one to commit on a new timeline.
        """
        self._server = server
        self._commits = commits
        self._lock_timeout = None if lock_seconds is None else f"lock_timeout = {timeout(lock_seconds)}"
        self._connection: Connection = None
        self._prepared: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._used = 0.0

    async def connected(self) -> Connection:
        """The connection, as soon as there is one that works."""
        now = self._loop.time()
        if now >= self._server.hosts.renew_at:
            await self._server.hosts.renew()
        if self._connection is not None and now - self._used > limits.POSTGRES_IDLE_SECONDS:
            await self._ping()
        if self._connection is None or self._connection.is_closed():
            self.drop()
            connection = await self._server.connect()
            try:
                if self._lock_timeout is not None and not self._server.is_pooled:
                    await connection.execute(f"SET SESSION {self._lock_timeout}")
                if self._commits:
                    await self._server.hosts.wait_for_readers()
            except BaseException:  # a cancelled caller must leave no session behind
                connection.terminate()
                raise
            self._connection = connection
        self._used = now
        return self._connection

    async def _ping(self) -> None:
        """Drop a dead connection before it is used for a commit, because a commit can't simply be repeated."""
        try:
            async with asyncio.timeout(limits.POSTGRES_PING_SECONDS):
                await self._connection.execute("SELECT 1")
        except (*Failure, TimeoutError):
            self.drop()

    async def fetch(self, statement: str, *bindings: Any) -> list[Any]:
        """The rows of one statement, which is a transaction of its own."""
        await self.connected()
        if not self._server.is_pooled:
            try:
                return await self._fetch(statement, *bindings)
            except asyncio.CancelledError:
                self.abandon()
                raise
        begin = self._server.begin
        if self._lock_timeout is not None:
            begin = f"{begin}; SET LOCAL {self._lock_timeout}"
        async with self.transaction(begin):
            return await self._fetch(statement, *bindings)

    async def call(self, statement: str, *bindings: Any) -> list[Any]:
        """The rows of one statement on a session of its own; behind a pooler there is none."""
        await self.connected()
        try:
            return await self._fetch(statement, *bindings)
        except asyncio.CancelledError:
            self.abandon()
            raise

    @asynccontextmanager
    async def transaction(self, begin: str) -> AsyncIterator["Transaction"]:
        """Commits at the end, unless the caller did; rolls back after an exception."""
        connection = await self.connected()
        try:
            await connection.execute(begin)
            yield Transaction(connection.execute, self._fetch)
            if connection.is_in_transaction():
                await connection.execute("COMMIT")
        except BaseException as error:
            is_rolled_back = False
            try:
                if isinstance(error, Exception):
                    with contextlib.suppress(*Failure):
                        await connection.execute("ROLLBACK")
                    is_rolled_back = not (connection.is_closed() or connection.is_in_transaction())
            finally:
                if not is_rolled_back:
                    self.abandon()
            raise

    async def _fetch(self, statement: str, *bindings: Any) -> list[Any]:
        """The rows of one statement, within the current transaction if there is one."""
        rows: list[Any]
        if self._server.is_pooled:
            rows = await self._connection.fetch(statement, *bindings)
            return rows
        prepared = self._prepared.get(statement)
        if prepared is None:
            prepared = await self._prepare(statement)
        rows = await prepared.fetch(*bindings)
        return rows

    async def prepare(self, statements: Iterable[str]) -> None:
        """Prepare statements before a transaction that locks something.

        While the driver prepares one, the server waits for its next message without a time limit.
        """
        await self.connected()
        if not self._server.is_pooled:
            for statement in statements:
                if statement not in self._prepared:
                    await self._prepare(statement)

    async def _prepare(self, statement: str) -> Any:
        # A name that no other process uses: behind an unnoticed pooler, two processes may share a session.
        name = f"{self._server.token}_{len(self._prepared)}"
        prepared = self._prepared[statement] = await self._connection.prepare(statement, name=name)
        return prepared

    async def retry(self, work: Callable[[], Awaitable[T]], arrived: float | None = None) -> T:
        """Do something that changes nothing, again after a failure, until the caller has waited for `patience` seconds.

        Args:
            work: What to do with this connection.
            arrived: When the caller began to wait, by the event loop's time; now if not given.

        Raises:
            DatabaseError: It failed for a reason that waiting does not cure, or the time is up.
        """
        server = self._server
        arrived = self._loop.time() if arrived is None else arrived
        deadline = server.patience + arrived
        failure: DatabaseError | None = None
        was_stale = False
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        return await work()
                    except Failure as error:
                        self.drop()
                        failure = server.explain(error)
                        if not server.may_succeed_after(error) and (was_stale or not is_stale(error)):
                            raise failure from error
                        was_stale = was_stale or is_stale(error)
                        await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)
        except TimeoutError:
            self.drop()
            raise server.unreachable(self._loop.time() - arrived, failure) from None

    def drop(self) -> None:
        """Close the connection at once; the server rolls back, or has committed, what was under way."""
        self._prepared = {}
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def abandon(self) -> None:
        """Give up a connection whose caller was cancelled: the driver cancels the statement, then closes it.

        It is not used again: the statement may be half done, and its answer may still arrive.
        """
        self._prepared = {}
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.close_later(connection)


class Transaction(NamedTuple):
    """The statements of an open transaction."""

    execute: Callable[[str], Awaitable[object]]
    """Runs SQL without bindings, and returns no rows."""
    fetch: Callable[..., Awaitable[list[Any]]]
    """Returns the rows of one statement."""
