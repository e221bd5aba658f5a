"""The engine on a PostgreSQL database: reads, group commits, and watches over connections of its own."""

from typing import Any

from keyloft import limits
from keyloft.core.health import ServerHealth
from keyloft.core.records import Ask, Get
from keyloft.core.schema import READ_STORE_ID
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.postgres import setup
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.log import READ_VERSION
from keyloft.engines.postgres.notifications import CommitListener
from keyloft.engines.postgres.reads import PostgresReads
from keyloft.engines.postgres.server import PostgresServer, ServerClock
from keyloft.engines.postgres.standbys import StandbyReads
from keyloft.engines.postgres.writes import PostgresWriter
from keyloft.engines.server_engine import ServerEngine
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.starting import WatchStarter


class PostgresEngine(ServerEngine[PostgresWriter]):
    """An engine on a PostgreSQL database, which other processes may use at the same time."""

    @classmethod
    async def open(
        cls, server: PostgresServer, history: KeptHistory | None = None, *, max_lag: float | None = None
    ) -> "PostgresEngine":
        """Connect to a database, and make its tables if there are none.

        Args:
            server: Where it is.
            history: How far back the change log reaches.
            max_lag: How many seconds a standby may be behind to answer reads; None to read from the primary alone.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        slot = Slot(server, server.table_seconds, commits=True)

        async def set_up() -> int:
            await setup.set_up_schema(server, await slot.connected())
            await setup.set_up_commits(server, await slot.connected())
            _, now = server.counter_row(await slot.fetch(READ_VERSION, None))
            # From now on, a connection to another store is refused.
            server.hosts.store = next((row[0] for row in await slot.fetch(READ_STORE_ID)), None)
            return int(now)

        try:
            server_clock = ServerClock(await slot.retry(set_up))
            if max_lag is not None:
                await server.hosts.ask_all()
        except BaseException:
            slot.abandon()
            await server.aclose()
            raise
        server.hosts.watch()
        return cls(server, server_clock, slot, history or KeptHistory(), max_lag)

    def __init__(
        self,
        server: PostgresServer,
        server_clock: ServerClock,
        slot: Slot,
        history: KeptHistory,
        max_lag: float | None,
    ) -> None:
        super().__init__()
        self.server = server
        """For tests, as `reads` and `writer`: whether there is a pooler, and what its connections do."""
        self.location = server.name
        self.reads = PostgresReads(server, shows_version=max_lag is not None)
        self._standbys = None if max_lag is None else StandbyReads(server, self.reads, max_lag)
        # Not this engine, whose reads wait for new watches to start: the watches read, too.
        self._feed = ChangeFeed(self.reads, server.clock or server_clock)
        self._listener = CommitListener(server, self._feed, self._batcher, server_clock.set)
        self._starter = WatchStarter(self._feed, self._counter, self._listener.start, server.patience)
        self.writer = PostgresWriter(server, slot, server_clock, history, lambda: self._feed.has_watches)

    async def read(self, *asks: Ask) -> list[Any]:
        self.check_usable()
        if self._starter.pending:
            await self._starter.wait()
            self.check_usable()
        if self._standbys is not None:
            return await self._standbys.read(*asks)
        if len(asks) == 1 and type(asks[0]) is Get and not asks[0].include_expired:
            return await self.reads.points.read(asks[0].space, (asks[0],))  # the hot path: one call less
        return await self.reads.read(*asks)

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
