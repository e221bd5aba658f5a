"""The engine on an etcd cluster: reads, group commits, and watches."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from keyloft import limits
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import Ask, Batch, Committed, Conflict, Get, Scan
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.etcd import large_values
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.following import CounterFollower
from keyloft.engines.etcd.reads import EtcdReads
from keyloft.engines.etcd.setup import make_store
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.etcd.writes import EtcdWriter
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.starting import WatchStarter
from keyloft.errors import Closed, KeyloftError

logger = logging.getLogger(__name__)


class EtcdEngine(ClosableEngine):
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
        self._batcher = Batcher(self._start)
        self._reads = EtcdReads(views)
        # Not this engine, whose reads wait for new watches to start: the watches read, too.
        self._feed = ChangeFeed(self._reads, views.cluster.clock)
        self._follower = CounterFollower(views, self._reads, self._feed, self._batcher)
        self._starter = WatchStarter(self._feed, self._counter, self._follower.start, views.cluster.patience)
        self._writer = EtcdWriter(views, history)
        self._writing: asyncio.Task[Outcome] | None = None
        self._sweeping = asyncio.create_task(self._sweep_chunks(), name="keyloft sweeper")

    async def read(self, *asks: Ask) -> list[Any]:
        self.check_usable()
        if self._starter.pending:
            await self._starter.wait()
            self.check_usable()
        return await self._reads.read(*asks)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self.check_usable()
        return await self._batcher.commit(batch)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        self.check_usable()
        return self._batcher.submit(batch, done)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        self.check_usable()
        return self._starter.watch(asks, since)

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        self.check_usable()
        return self._starter.follow(asks, since, woken)

    async def _counter(self) -> Start:
        view = await self._reads.counter()
        return Start(view.counter.version, view.now)

    def _start(self, group: list[Batch]) -> None:
        self._writing = asyncio.create_task(self._write(group, self._batcher.arrived_at), name="keyloft writer")
        self._writing.add_done_callback(partial(self._finished, group))

    async def _write(self, group: list[Batch], arrived: list[float]) -> Outcome:
        if self._starter.pending:  # here, and not in `commit`: so it holds for `submit`, and batches keep their order
            await self._starter.wait()
        return await self._writer.commit(group, arrived)

    def _finished(self, group: list[Batch], writing: "asyncio.Task[Outcome]") -> None:
        # asyncio.run cancels all tasks at its end, this one included; callers and `aclose` still wait for a verdict.
        outcome = self._writer.cancelled(group) if writing.cancelled() else writing.result()
        self._feed.committed(outcome)
        self._batcher.finished(outcome.verdicts)

    async def _sweep_chunks(self) -> None:
        """Remove now and then what processes have left that ended during a commit."""
        while True:
            try:
                await large_values.sweep(await self._reads.counter())
            except Closed:
                return
            except (Failure, KeyloftError):
                logger.debug("%s: sweeping chunks was interrupted", self.location, exc_info=True)
            await asyncio.sleep(limits.ETCD_ORPHAN_SECONDS)

    async def _close(self) -> None:
        await self._batcher.close()
        await self._feed.wait_until_reported(limits.ETCD_LAST_REPORT_SECONDS)
        self._feed.close()
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._starter.aclose()
        await self._follower.aclose()
        await self._writer.aclose()
        await self._reads.aclose()
        await self.cluster.aclose()
