"""The engine on a PostgreSQL database: reads, group commits, and watches over connections of its own."""

import asyncio
import time
from functools import partial
from typing import Any

from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.core.engine import Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Get, Scan
from keyloft.engines.commit.groups import Groups
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.notifications import CommitListener
from keyloft.engines.postgres.reads import PostgresReads
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import READ_VERSION
from keyloft.engines.postgres.writes import PostgresWriter
from keyloft.engines.watches import Notifier, RangeWatch


class ServerClock(SystemClock):
    """This machine's estimate of the server's time, for timers only: the server decides what has expired."""

    __slots__ = ("_began",)

    def __init__(self, now: int) -> None:
        self.set(now)

    def now(self) -> int:
        return self._began + time.monotonic_ns() // 1_000_000

    def set(self, now: int) -> None:
        """Set it to the time that the server has just reported; so it is never ahead of the server."""
        # Counted from there by the monotonic clock: this machine's wall clock may be wrong, and may be set.
        self._began = now - time.monotonic_ns() // 1_000_000


class PostgresEngine(ClosableEngine):
    """An engine on a PostgreSQL database, which other processes may use at the same time."""

    @classmethod
    async def open(cls, server: PostgresServer) -> "PostgresEngine":
        """Connect to a database, and make its tables if there are none.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        slot = Slot(server)

        async def set_up() -> int:
            await server.set_up_schema(await slot.connected())
            _, now = server.counter_row(await slot.fetch(READ_VERSION, None))
            return int(now)

        try:
            server_clock = ServerClock(await slot.retry(set_up))
        except BaseException:
            slot.abandon()
            await server.aclose()
            raise
        return cls(server, server_clock, slot)

    def __init__(self, server: PostgresServer, server_clock: ServerClock, slot: Slot) -> None:
        super().__init__()
        self.server = server
        """Tests read from it whether there is a pooler."""
        self.location = server.name
        self._groups = Groups(self._start)
        self._reads = PostgresReads(server)
        # Not this engine, whose reads wait for new watches to begin: the watches read, too.
        self._notifier = Notifier(self._reads, server.clock or server_clock)
        self._listener = CommitListener(server, self._notifier, self._groups, server_clock.set)
        self._writer = PostgresWriter(server, slot)
        self._writing: asyncio.Task[Outcome] | None = None
        self._first_reads: set[asyncio.Future[Any]] = set()
        """What watches have yet to read before they have begun."""

    async def read(self, *asks: Ask) -> list[Any]:
        self.check_usable()
        if self._first_reads:
            await self._wait_for_watches()
        if len(asks) == 1 and type(asks[0]) is Get and not asks[0].include_expired:
            return await self._reads.points.read(asks[0].space, (asks[0],))  # the hot path: one call less
        return await self._reads.read(*asks)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self.check_usable()
        if self._first_reads:
            await self._wait_for_watches()
        return await self._groups.commit(batch)

    def watch(self, *asks: Get | Scan) -> Watch:
        self.check_usable()
        watch = self._notifier.watch(asks)
        if isinstance(watch, RangeWatch) and watch.first_read is not None:
            self._first_reads.add(watch.first_read)
            watch.first_read.add_done_callback(self._first_reads.discard)
        self._listener.start()
        return watch

    async def _wait_for_watches(self) -> None:
        """Wait until new watches have begun: a caller that makes a watch, and then reads or writes, misses nothing.

        Not for ever: a range may be large, and the network slow.
        """
        await asyncio.wait(self._first_reads, timeout=self.server.patience / 4)
        self.check_usable()

    def _start(self, group: list[Batch]) -> None:
        self._writing = asyncio.create_task(self._writer.commit(group, self._groups.arrived_at), name="keyloft writer")
        self._writing.add_done_callback(partial(self._finished, group))

    def _finished(self, group: list[Batch], writing: asyncio.Task[Outcome]) -> None:
        # asyncio.run cancels all tasks at its end, this one included; callers and `aclose` still wait for a verdict.
        outcome = self._writer.cancelled(group) if writing.cancelled() else writing.result()
        self._notifier.observe(outcome.version_before, outcome.version_after)
        self._notifier.committed(outcome.touched, outcome.version_after)
        self._groups.finished(outcome.verdicts)

    async def _close(self) -> None:
        await self._groups.close()
        await self._notifier.wait_until_reported(limits.POSTGRES_LAST_REPORT_SECONDS)
        self._notifier.close()
        await self._listener.aclose()
        await self._reads.aclose()
        self._writer.slot.abandon()
        await self.server.aclose()
