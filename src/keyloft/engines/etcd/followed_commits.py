"""Follows what other processes commit, while this one takes turns with them, and so keeps its row cache up to date."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from keyloft import limits
from keyloft.engines.etcd.cluster import EtcdMember
from keyloft.engines.etcd.counter_watch import puts
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import KeyLayout, StoreState, unpack_state
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.views import RevisionViews
from keyloft.errors import KeyloftError

logger = logging.getLogger(__name__)


class FollowedCommits:
    """The newest counter that was seen; while it is watched, a process that waits for its turn need not read it."""

    def __init__(self, views: RevisionViews, cache: RowCache) -> None:
        self._views = views
        self._cluster = views.cluster
        self._cache = cache
        self._loop = asyncio.get_running_loop()
        self._member: EtcdMember | None = None
        self._keys = views.keys
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._used_at = 0.0
        self._moved = asyncio.Event()
        self.is_live = False
        """Whether the watch reports each commit."""
        self.counter: StoreState | None = None
        self.revision = 0
        self.at = 0.0
        """When this counter was first seen, by the event loop's time."""

    def follow(self) -> None:
        """Begin to watch, unless that has begun; the watch ends if this is not called for a while."""
        self._used_at = self._loop.time()
        member, keys = self._cluster.member, self._views.keys
        if self._task is None or self._task.done() or self._member is not member or self._keys is not keys:
            self.stop()
            self._member, self._keys = member, keys
            self._task = self._loop.create_task(self._follow(member, keys), name="keyloft turns")
            self._timer = self._loop.call_later(limits.ETCD_RIVAL_SECONDS, self._stop_unused)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._timer, self._task, self.is_live = None, None, False

    def _stop_unused(self) -> None:
        """End a watch that was not used for a while: an idle process need not follow each commit of the others."""
        left = self._used_at + limits.ETCD_RIVAL_SECONDS - self._loop.time()
        if left <= 0:
            self.stop()
        else:
            self._timer = self._loop.call_later(left, self._stop_unused)

    def saw(self, revision: int, counter: StoreState) -> None:
        """Note a counter that was read, reported, or written by this engine."""
        if revision > self.revision:
            self.counter, self.revision, self.at = counter, revision, self._loop.time()
            self._moved.set()

    async def moves(self, seconds: float) -> None:
        """Wait for the next report, this many seconds at most."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()

    @property
    def is_cached(self) -> bool:
        """Whether the cache shows the store as of the newest commit that was seen."""
        return self._cache.counter_revision >= self.revision

    async def _follow(self, member: EtcdMember, keys: KeyLayout) -> None:
        try:
            async with contextlib.aclosing(puts(self._cluster, member, *keys.commit_range)) as found:
                async for written in found:
                    if written is None:
                        # What was committed before the watch began is not reported by it.
                        view, news = await self._views.fetch(self._cache.news)
                        self._cache.catch_up(view, news)
                        self.saw(view.counter_revision, view.counter)
                        self.is_live = True
                        self._moved.set()
                    else:
                        self._take(written, keys)
        except (Failure, KeyloftError) as error:
            logger.debug("%s: a watch of the counter was interrupted: %s", self._cluster.name, type(error).__name__)
        finally:
            if self._task is asyncio.current_task():
                self.is_live = False
                self._moved.set()

    def _take(self, written: Sequence[Any], keys: KeyLayout) -> None:
        """Take over some reported commits: each has written the counter, and most of them a note."""
        notes = {kv.mod_revision: kv.value for kv in written if kv.key != keys.counter}
        for kv in written:
            if kv.key == keys.counter:
                revision, counter = kv.mod_revision, unpack_state(self._cluster.name, kv.value)
                self._cache.follow(revision, counter, notes.get(revision))
                self.saw(revision, counter)

    async def aclose(self) -> None:
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
