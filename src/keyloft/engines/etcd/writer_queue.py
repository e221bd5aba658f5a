"""Lets the processes that write commit one after the other, so that few of their commits lose a race.

A commit that loses costs etcd as much as one that wins. So each commit writes into the version counter which processes
have something to write, in the order in which they go: itself last, if more is likely to follow. Each of them follows
the counter, and prepares its next commit while the others commit. A process that is next and does not begin is passed
over after a while, by the process behind it. A process that is not in the queue tries at once; if it loses, it
asks for a place, under keys that each commit reads. Only speed depends on all this: a process that does not wait, or
that ends while it is next, harms no one.
"""

import asyncio
import math
from collections.abc import Iterable
from typing import Any

from keyloft import limits
from keyloft.engines.etcd import transactions
from keyloft.engines.etcd.followed_commits import FollowedCommits
from keyloft.engines.etcd.layout import KeyLayout, StoreState
from keyloft.engines.etcd.views import RevisionViews


class WriterQueue:
    """The place of one engine among all that write into a store."""

    def __init__(self, views: RevisionViews, followed: FollowedCommits) -> None:
        self._views = views
        self._name = views.writer
        self._followed = followed
        self._time = asyncio.get_running_loop().time
        self._asking: dict[str, None] = {}
        """Other engines that have asked for a place and have none yet, in the order in which they asked."""
        self._silent: frozenset[str] = frozenset()
        """The engines that were next and did not begin."""
        self._has_asked = False
        """Whether this engine asks for a place."""
        self._last_rival = -math.inf
        """When a commit of another engine was last seen."""
        self._last_news = -math.inf
        """When a commit of another engine was last seen, or found to have been made earlier."""
        self._version: int | None = None
        """The version of the last counter that was seen."""
        self._last_commit = -math.inf
        self._began_commit = -math.inf
        self._commit_seconds = 0.0
        """How long a commit takes, on average."""

    def after(self, counter: StoreState, arrived: float, batches: int = 1) -> tuple[str, ...]:
        """The queue behind a commit that begins now.

        Args:
            counter: The counter that the commit replaces.
            arrived: When its first batch arrived.
            batches: How many batches the commit has; a few after a longer pause are taken for all there is to write.
        """
        self._saw(counter)
        self._began_commit = self._time()
        others = [name for name in self._waiting(counter) if name != self._name and name not in self._silent]
        pause = limits.ETCD_TURN_PAUSE_SECONDS + self._commit_seconds  # both are longer on a busy machine
        is_all = arrived > self._last_commit + pause and batches <= limits.ETCD_FEW_BATCHES
        own = () if is_all or (not others and self._is_alone) else (self._name,)
        return (*others[: limits.ETCD_QUEUED_WRITERS], *own)

    def committed(self, revision: int, counter: StoreState) -> None:
        """Note that the commit was made, with the counter that it wrote."""
        self._last_commit = self._time()
        self._commit_seconds += (self._last_commit - self._began_commit - self._commit_seconds) / 4
        self._asking, self._silent, self._has_asked = {}, frozenset(), False
        self._followed.saw(revision, counter)
        self._version = counter.version

    def lost(self, counter: StoreState) -> None:
        """Note that the commit has lost a race to this counter, and has asked for a place."""
        self._has_asked, self._silent = True, frozenset()
        self._saw(counter)

    @property
    def has_to_wait(self) -> bool:
        """Whether others are to commit before this engine, as far as it knows."""
        counter = self._followed.counter
        return counter is not None and bool(self._ahead(counter)) and self._time() < self._patience(counter)

    async def wait(self, arrived: float) -> None:
        """Wait until this engine is next, or the engines before it are silent.

        Raises:
            DatabaseError: The cluster does not answer.
        """
        self._followed.follow()
        deadline = self._time() + limits.ETCD_LONGEST_TURNS_SECONDS
        while self._time() < deadline:
            counter = await self._newest_counter(arrived)
            ahead = self._ahead(counter)
            pause = self._patience(counter) - self._time()
            if not ahead:
                return
            if pause <= 0:
                self._silent = frozenset(ahead)
                return
            live = self._followed.is_live
            await self._followed.moves(pause if live else min(pause, limits.ETCD_HANDOVER_POLL_SECONDS))

    async def _newest_counter(self, arrived: float) -> StoreState:
        """The counter as the watch has reported it, or as it is read until the watch has begun."""
        counter = self._followed.counter
        if counter is None or not self._followed.is_live:
            # If the member lacks the newest commit, the comparison of the next commit fails.
            view, _ = await self._views.fetch(arrived=arrived, serializable=True)
            self._followed.saw(view.counter_revision, view.counter)
            counter = self._followed.counter or view.counter
        self._saw(counter)
        return counter

    def ask(self, keys: KeyLayout) -> Any:
        """The write of a losing commit, so that the engine that wins all races gives this one a place."""
        return transactions.put(keys.waiting(self._name), self._name.encode())

    @staticmethod
    def asking(keys: KeyLayout, since: int) -> Any:
        """The read of each commit: which engines have asked since the revision of the commit before."""
        return transactions.read(*keys.waiting_range, min_mod_revision=since + 1)

    def saw_asking(self, found: Iterable[Any]) -> None:
        """Take note of the engines that ask for a place, as a commit has read them."""
        for kv in found:
            if (name := kv.value.decode()) != self._name:
                self._asking[name] = None
                self._last_rival = self._last_news = self._time()

    def _saw(self, counter: StoreState) -> None:
        if self._version != counter.version and counter.writer not in ("", self._name):
            self._asking.pop(counter.writer, None)
            if self._version is not None:
                self._last_rival = self._last_news = self._time()
            # The first counter seen may be old. If it is recent, another engine writes, too: leave notes for it.
            elif self._views.cluster.clock.now() < counter.at + 1000 * limits.ETCD_NOTING_SECONDS:
                self._last_news = self._time()
        self._version = counter.version

    def _waiting(self, counter: StoreState) -> list[str]:
        return [*counter.queue, *[name for name in self._asking if name not in counter.queue]]

    def _ahead(self, counter: StoreState) -> list[str]:
        """The engines that are to commit before this one."""
        waiting = self._waiting(counter)
        if self._name in waiting:
            return waiting[: waiting.index(self._name)]
        return waiting if self._has_asked else list(self._asking)

    def _patience(self, counter: StoreState) -> float:
        """Until when the engines before this one may begin, one after the other."""
        quiet = max(limits.ETCD_QUIET_SECONDS, limits.ETCD_QUIET_COMMITS * self._commit_seconds)
        return self._followed.at + quiet * len(self._ahead(counter))

    @property
    def others_write(self) -> bool:
        """Whether other engines write into the store now and then, so that they need notes of what is written."""
        return self._time() < self._last_news + limits.ETCD_NOTING_SECONDS

    @property
    def _is_alone(self) -> bool:
        return self._time() >= self._last_rival + limits.ETCD_RIVAL_SECONDS

    @property
    def knows_newest(self) -> bool:
        """Whether the cache probably shows the newest commit: each commit is reported, or no other engine writes."""
        return self._followed.is_cached and (self._followed.is_live or self._is_alone)
