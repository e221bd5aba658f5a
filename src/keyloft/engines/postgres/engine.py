"""The engine on a PostgreSQL database: reads, group commits, and watches over connections of its own."""

from collections.abc import Awaitable, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.health import ServerHealth
from keyloft.core.records import Ask, Get
from keyloft.core.schema import READ_STORE_ID
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.postgres import setup
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.host_state import HostState
from keyloft.engines.postgres.log import READ_VERSION
from keyloft.engines.postgres.notifications import CommitListener
from keyloft.engines.postgres.reads import PostgresReads
from keyloft.engines.postgres.server import PostgresServer, ServerClock
from keyloft.engines.postgres.standbys import StandbyReads
from keyloft.engines.postgres.writes import PostgresWriter
from keyloft.engines.server_engine import ServerEngine
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.starting import WatchStarter
from keyloft.errors import Busy, Unreachable


class PostgresEngine(ServerEngine[PostgresWriter]):
    """An engine on a PostgreSQL database, which other processes may use at the same time."""

    @classmethod
    async def open(
        cls, server: PostgresServer, history: KeptHistory | None = None, *, max_lag: float | None = None
    ) -> "PostgresEngine":
        """Connect to a database, and make its tables if there are none.

        If standbys may answer reads, and there is no primary, a standby is enough; the first commit then waits for one.

        Args:
            server: Where it is.
            history: How far back the change log reaches.
            max_lag: How many seconds a standby may be behind to answer reads; None to read from the primary alone.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        if not server.hosts.several:
            max_lag = None  # there is no choice: the only host answers, also if it is a standby
        slot = Slot(server, server.table_seconds, commits=True)

        async def set_up() -> int:
            await setup.set_up_schema(server, await slot.connected())
            await setup.set_up_commits(server, await slot.connected())
            _, now = server.counter_row(await slot.fetch(READ_VERSION, None))
            # From now on, a connection to another store is refused.
            server.hosts.store = next((row[0] for row in await slot.fetch(READ_STORE_ID)), None)
            return int(now)

        standby: HostState | None = None
        try:
            if max_lag is not None:
                await server.hosts.ask_all()
                standby = server.hosts.standby_without_primary()
            now = None if standby is None else await _look_at(server, standby)
            if now is None:
                standby, now = None, await slot.retry(set_up)
                if max_lag is not None:
                    await server.hosts.ask_all()  # standbys answer from the first read on
            server_clock = ServerClock(now)
        except BaseException:
            slot.abandon()
            await server.aclose()
            raise
        server.hosts.watch()
        engine = cls(server, server_clock, slot, history or KeptHistory(), max_lag, standby)
        if standby is not None:
            engine.writer.set_up = set_up
        return engine

    def __init__(
        self,
        server: PostgresServer,
        server_clock: ServerClock,
        slot: Slot,
        history: KeptHistory,
        max_lag: float | None,
        opened_on: HostState | None = None,
    ) -> None:
        super().__init__()
        self.server = server
        """For tests, as `reads` and `writer`: whether there is a pooler, and what its connections do."""
        self.location = server.name
        self.reads = PostgresReads(server, shows_version=max_lag is not None)
        self._standbys = None if max_lag is None else StandbyReads(server, self.reads, max_lag, opened_on)
        # Not this engine, whose reads wait for new watches to start: the watches read, too.
        reader = self.reads if self._standbys is None else self._standbys.of_primary
        self._feed = ChangeFeed(reader, server.clock or server_clock)
        self._listener = CommitListener(server, self._feed, self._batcher, server_clock.set)
        self._starter = WatchStarter(self._feed, self._counter, self._listener.start, server.patience)
        self.writer = PostgresWriter(server, slot, server_clock, history, lambda: self._feed.has_watches)

    async def read(self, *asks: Ask) -> list[Any]:
        if self._starter.pending:
            self.check_usable()
            return await self._starter.once_started(lambda: self._answers(asks))
        return await self._answers(asks)

    def _answers(self, asks: Sequence[Ask]) -> Awaitable[list[Any]]:
        self.check_usable()
        if self._standbys is not None:
            return self._standbys.read(*asks)
        if len(asks) == 1 and type(asks[0]) is Get and not asks[0].include_expired:
            return self.reads.points.read(asks[0].space, (asks[0],))  # the hot path: one call less
        return self.reads.read(*asks)

    def health(self) -> ServerHealth:
        answered = {} if self._standbys is None else self._standbys.answered
        return self.server.hosts.health(answered, self.writer.unknown)

    async def _counter(self) -> Start:
        return Start(*await (self._standbys or self.reads).counter())

    def _committed(self, outcome: Outcome) -> None:
        if self._standbys is not None:
            self._standbys.saw(outcome.version_after)
        super()._committed(outcome)

    async def _close(self) -> None:
        await self._end_watches(limits.POSTGRES_LAST_REPORT_SECONDS)
        await self._listener.aclose()
        await self.reads.aclose()
        if self._standbys is not None:
            await self._standbys.aclose()
        self.writer.slot.abandon()
        await self.server.aclose()


async def _look_at(server: PostgresServer, host: HostState) -> int | None:
    """Check the store on a standby, and return the time there; None if it does not answer.

    Raises:
        DatabaseError: The store can't be used; the message says why.
    """
    standby = server.of_standby(host.name, limits.POSTGRES_STANDBY_SECONDS)
    slot = Slot(standby)

    async def check() -> int:
        await setup.check_schema(standby, await slot.connected())
        _, now = standby.counter_row(await slot.fetch(READ_VERSION, None))
        return int(now)

    try:
        now = await slot.retry(check)
    except (Unreachable, Busy):
        return None
    finally:
        slot.abandon()
        await standby.aclose()
    server.hosts.begin_with(host)
    return now
