"""Learns from etcd's own watch when another process has committed: it watches one key, the version counter."""

import asyncio
import contextlib
import logging

from keyloft import limits
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.etcd import errors
from keyloft.engines.etcd.counter_watch import counters
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.reads import EtcdReads
from keyloft.engines.etcd.views import RevisionViews
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.errors import DatabaseError, KeyloftError

logger = logging.getLogger(__name__)


class CounterFollower:
    """Reports each move of the version counter to the feed, from the first watch until it is closed."""

    def __init__(self, views: RevisionViews, reads: EtcdReads, feed: ChangeFeed, batcher: Batcher) -> None:
        self._cluster = views.cluster
        self._writer = views.writer
        self._reads = reads
        self._feed = feed
        self._batcher = batcher
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow, unless that has begun."""
        if not self._tasks or any(task.done() for task in self._tasks):
            self._tasks = [
                asyncio.create_task(self._follow(), name="keyloft follower"),
                asyncio.create_task(self._poll(), name="keyloft follower"),
            ]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            member = self._cluster.member
            try:
                async with contextlib.aclosing(counters(self._cluster, member)) as moves:
                    async for move in moves:
                        if move is None:
                            # The watch does not report what was committed before it began.
                            await self._observe()
                        elif move[1].writer != self._writer:  # own commits report their outcome to the feed
                            self._feed.observe(move[1].version)
            except Failure as error:
                self._cluster.failed(member, error)
                logger.debug("following %s was interrupted: %s", self._cluster.name, errors.details(error))
            except KeyloftError as error:
                logger.warning("following %s failed, trying again: %s", self._cluster.name, error)
            await asyncio.sleep(limits.ETCD_RETRY_SECONDS)

    async def _poll(self) -> None:
        """Read the counter now and then: a member that was stopped keeps its connections, and is silent."""
        while True:
            await asyncio.sleep(limits.WATCH_CHECK_SECONDS)
            if self._feed.has_watches:
                with contextlib.suppress(DatabaseError):
                    await self._observe()

    async def _observe(self) -> None:
        """Read the counter, unless this engine is committing: then the outcome will report it."""
        if self._batcher.idle:
            version = (await self._reads.counter()).counter.version
            if self._batcher.idle:
                self._feed.observe(version)
