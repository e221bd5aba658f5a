"""The engine on an etcd cluster: reads, group commits, and watches."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.records import Ask, Get
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.etcd import large_values
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.following import CounterFollower
from keyloft.engines.etcd.reads import EtcdReads
from keyloft.engines.etcd.setup import make_store
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.etcd.writes import EtcdWriter
from keyloft.engines.server_engine import ServerEngine
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.starting import WatchStarter
from keyloft.errors import Closed, KeyloftError

logger = logging.getLogger(__name__)


class EtcdEngine(ServerEngine[EtcdWriter]):
    """An engine on an etcd cluster, which other processes may use at the same time."""

    @classmethod
    async def open(cls, cluster: EtcdCluster, history: KeptHistory | None = None) -> "EtcdEngine":
        """Connect to a cluster, and make the store if there is none.

        Raises:
            DatabaseError: The store can't be used; the message says why.
        """
        views = RevisionViews(cluster)
        try:
            await make_store(views)
            await cluster.learn_members()
        except BaseException:
            await cluster.aclose()
            raise
        cluster.follow_members()
        return cls(views, history or KeptHistory())

    def __init__(self, views: RevisionViews, history: KeptHistory) -> None:
        super().__init__()
        self.cluster = views.cluster
        """For tests: which members it knows."""
        self._views = views
        self.location = views.cluster.name
        self._reads = EtcdReads(views)
        # Not this engine, whose reads wait for new watches to start: the watches read, too.
        self._feed = ChangeFeed(self._reads, views.cluster.clock)
        self._follower = CounterFollower(views, self._reads, self._feed, self._batcher)
        self._starter = WatchStarter(self._feed, self._counter, self._follower.start, views.cluster.patience)
        self.writer = EtcdWriter(views, history)
        self._sweeping = asyncio.create_task(self._sweep_chunks(), name="keyloft sweeper")

    async def read(self, *asks: Ask) -> list[Any]:
        if self._starter.pending:
            self.check_usable()
            return await self._starter.once_started(lambda: self._answers(asks))
        return await self._answers(asks)

    def _answers(self, asks: Sequence[Ask]) -> Awaitable[list[Any]]:
        self.check_usable()
        if len(asks) == 1 and type(asks[0]) is Get:
            return self._reads.gets((asks[0],))  # most reads are one get, and this saves a call
        return self._reads.read(*asks)

    async def _counter(self) -> Start:
        view = await self._reads.counter()
        return Start(view.counter.version, view.now)

    async def _sweep_chunks(self) -> None:
        """Remove, now and then, chunks of processes that ended during a commit."""
        while True:
            try:
                await large_values.sweep(await self._reads.counter())
            except Closed:
                return
            except (Failure, KeyloftError):
                logger.debug("%s: sweeping chunks was interrupted", self.location, exc_info=True)
            await asyncio.sleep(limits.ETCD_ORPHAN_SECONDS)

    async def _close(self) -> None:
        await self._end_watches(limits.ETCD_LAST_REPORT_SECONDS)
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._follower.aclose()
        await self.writer.aclose()
        await self._reads.aclose()
        await self.cluster.aclose()
