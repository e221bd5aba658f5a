"""Stores records in PostgreSQL: gets gathered into few statements, writes into groups, over connections of its own."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.engine import Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Get, Latest, Scan, Space
from keyloft.core.urls import PostgresAddress
from keyloft.engines.commit.groups import Groups
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import Lifetime
from keyloft.engines.postgres.connections import Link, patiently
from keyloft.engines.postgres.notifications import Notices
from keyloft.engines.postgres.reads import Others, Points
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import READ_CLOCK
from keyloft.engines.postgres.writes import PostgresWriter
from keyloft.engines.watches import Notifier, RangeWatch

_LAST_LOOKS_SECONDS: Final = 1.0


class ServerClock(SystemClock):
    """This machine's idea of the server's time, for timers alone: what has expired, the server itself decides."""

    __slots__ = ("_began",)

    def __init__(self, now: int) -> None:
        self.told(now)

    def now(self) -> int:
        return self._began + time.monotonic_ns() // 1_000_000

    def told(self, now: int) -> None:
        """The server said what time it was a moment ago, so this clock is behind it rather than ahead."""
        # From there on it is counted, not looked up: this machine's own clock may be wrong, and may be set.
        self._began = now - time.monotonic_ns() // 1_000_000


class PostgresEngine:
    """An engine on a database of PostgreSQL, which other processes may use at the same time."""

    @classmethod
    async def open(
        cls,
        address: PostgresAddress,
        clock: Clock | None = None,
        *,
        durability: str = "full",
        patience: float = limits.SERVER_SECONDS,
    ) -> "PostgresEngine":
        """Connect to a database, and make its tables if there are none.

        Args:
            address: Where it is.
            clock: Another clock than the server's, for tests.
            durability: "relaxed" lets the server answer before a commit is on disk.
            patience: How many seconds a call waits for a server that is away or silent.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        server = PostgresServer(address, durability=durability, patience=patience)
        link = Link(server)

        async def set_up(link: Link) -> tuple[int, int]:
            store = await server.set_up_schema(await link.connected())
            _, now = server.clock_of(await link.fetch(READ_CLOCK, None))
            return store, int(now)

        try:
            store, now = await patiently(server, link, set_up, asyncio.get_running_loop().time())
        except BaseException:
            link.abandon()
            await server.aclose()
            raise
        return cls(server, clock, ServerClock(now), link, f"{store}.{secrets.token_hex(8)}")

    def __init__(
        self, server: PostgresServer, clock: Clock | None, server_clock: ServerClock, link: Link, name: str
    ) -> None:
        self._server = server
        self._clock = clock
        self._groups = Groups(self._start)
        self._points = Points(server, self._now)
        self._answers = _Answers(self._points, Others(server, self._now))
        self._notifier = Notifier(self._answers, clock or server_clock)
        self._notices = Notices(server, name, self._notifier, self._groups, server_clock.told)
        self._writer = PostgresWriter(server, link, self._now, name)
        self._writing: asyncio.Task[Outcome] | None = None
        self._beginnings: set[asyncio.Future[Any]] = set()
        self._lifetime = Lifetime(self._close)

    async def read(self, *asks: Ask) -> list[Any]:
        self._lifetime.check()
        if self._beginnings:
            await self._watches_begin()
        if len(asks) == 1 and type(asks[0]) is Get and not asks[0].include_expired:
            return await self._points.ask(asks[0].space, (asks[0],))  # the hot path: one call less
        return await self._answers.read(*asks)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self._lifetime.check()
        if self._beginnings:
            await self._watches_begin()
        return await self._groups.commit(batch)

    def watch(self, *asks: Get | Scan) -> Watch:
        self._lifetime.check()
        watch = self._notifier.watch(asks, self._begin)
        if isinstance(watch, RangeWatch) and watch.first_read is not None:
            self._beginnings.add(watch.first_read)
            watch.first_read.add_done_callback(self._beginnings.discard)
        self._notices.start()
        return watch

    @property
    def location(self) -> str:
        return self._server.name

    @property
    def is_closed(self) -> bool:
        return self._lifetime.refusal is not None

    async def aclose(self) -> None:
        await self._lifetime.aclose()

    async def _watches_begin(self) -> None:
        """Wait until watches have begun: what a caller reads or writes after making one comes after its beginning.

        So whoever makes a watch and then lists what there is, or tells others to go ahead, misses nothing.
        """
        # Not for ever: a range may be large, and the network bad.
        await asyncio.wait(self._beginnings, timeout=self._server.patience / 4)
        self._lifetime.check()

    def _begin(self) -> asyncio.Future[int]:
        return asyncio.ensure_future(self._answers.latest())

    def _now(self) -> int | None:
        """The time of an injected clock; None for the server's own."""
        return None if self._clock is None else self._clock.now()

    def _start(self, group: list[Batch]) -> None:
        self._writing = asyncio.create_task(self._writer.commit(group, self._groups.arrived_at), name="keyloft writer")
        self._writing.add_done_callback(partial(self._finished, group))

    def _finished(self, group: list[Batch], writing: asyncio.Task[Outcome]) -> None:
        # Whoever ends a program cancels all tasks, this one included; the callers and `aclose` wait for a verdict.
        outcome = self._writer.given_up(group) if writing.cancelled() else writing.result()
        self._notifier.observe(outcome.version_before, outcome.version_after)
        self._notifier.committed(outcome.touched, outcome.version_after)
        self._groups.finished(outcome.verdicts)

    async def _close(self) -> None:
        await self._groups.close()
        await self._notifier.wait_until_reported(_LAST_LOOKS_SECONDS)
        self._notifier.close()
        await self._notices.aclose()
        await self._answers.aclose()
        self._writer.close()
        await self._server.aclose()


class _Answers:
    """Reads, as soon as they are asked for: those of the watches themselves wait for nobody."""

    def __init__(self, points: Points, others: Others) -> None:
        self._points = points
        self._others = others

    async def read(self, *asks: Ask) -> list[Any]:
        if not asks:
            return []
        space = getattr(asks[0], "space", None)
        if all([type(ask) is Get and ask.space is space and not ask.include_expired for ask in asks]):
            return await self._points.ask(cast("Space", space), cast("Sequence[Get]", asks))
        return await self._others.read(asks)

    async def latest(self) -> int:
        [version] = await self._others.read((Latest(),))
        return int(version)

    async def aclose(self) -> None:
        await self._points.aclose()
        await self._others.aclose()
