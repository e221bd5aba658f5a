"""Divides time among the processes that write, so that few of their commits lose a race.

A commit that loses costs etcd as much as one that wins. So a process with rivals commits for some milliseconds, writes
into the version counter how much of its turn is left, and then gives way. The others wait for so long, or until it has
not committed for a while, and learn meanwhile what it wrote. A process that wins all races does not notice its rivals:
these ask for a turn under a key that each commit reads. Only speed depends on all this: a process that does not wait,
or that ends within its turn, harms no one.
"""

import asyncio
import math
import random
from contextlib import suppress
from functools import partial
from typing import Any

from keyloft import limits
from keyloft.engines.etcd import transactions
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import KeyLayout, StoreState
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.views import RevisionViews


class WriterTurns:
    """The turns of one engine among all that write into a store."""

    def __init__(self, views: RevisionViews, cache: RowCache) -> None:
        """`cache` learns what others have written while this engine waits for its turn."""
        self._views = views
        self._cache = cache
        self._time = asyncio.get_running_loop().time
        self._rivals: dict[str, float] = {}
        """When a commit of another engine was last seen, by its name."""
        self._last_rival = -math.inf
        """When a commit of any other one was last seen."""
        self._version: int | None = None
        """That of the last counter that was seen."""
        self._began = -math.inf
        self._is_over = False
        """Whether the last commit has ended this engine's turn."""
        self._last_commit = -math.inf
        self._ends = -math.inf
        """Until when this engine's turn lasts."""
        self._began_commit = -math.inf
        self._commit_seconds = 0.0
        """How long a commit takes, on average."""

    def left(self, counter: StoreState, arrived: float) -> int:
        """How many milliseconds of the turn are left after a commit that begins now.

        Args:
            counter: What it replaces.
            arrived: When its first batch arrived; after a longer pause it is taken for a single one.
        """
        self._saw(counter)
        time = self._began_commit = self._time()
        pause = limits.ETCD_TURN_PAUSE_SECONDS + self._commit_seconds  # a busy machine takes longer for both
        if not self._count_rivals() or arrived > self._last_commit + pause:
            self._began = time
            return 0
        if counter.writer != self._views.writer:
            self._began = time
        left = self._began + limits.ETCD_TURN_SECONDS - time
        # The last commit of a turn says so: those that wait need not find out that no other one follows.
        return round(1000 * left) if left > self._commit_seconds else 0

    def committed(self, left: int) -> None:
        """The commit was made, and has left so much of the turn."""
        self._last_commit = self._time()
        self._commit_seconds += (self._last_commit - self._began_commit - self._commit_seconds) / 4
        self._ends = self._last_commit + left / 1000
        self._is_over = left == 0 and self._began_commit > self._began

    async def give_way(self, arrived: float) -> bool:
        """After this engine's turn, wait until another one has had its own, if there is one.

        Returns:
            Whether it has waited, so that the cache is up to date.
        """
        is_over = self._is_over
        if is_over:
            await self.wait(arrived)
        return is_over

    async def wait(self, arrived: float) -> None:
        """Wait while it is another engine's turn, or until one has taken over after this one's turn.

        Raises:
            DatabaseError: The cluster does not answer.
        """
        handover = -math.inf
        if self._is_over:
            self._is_over = False
            handover = self._last_commit + limits.ETCD_HANDOVER_SECONDS + 2 * self._commit_seconds
            # Another one has its first commit before it.
            await asyncio.sleep(min(self._commit_seconds, limits.ETCD_HANDOVER_SECONDS / 2))
        deadline, is_late = self._time() + limits.ETCD_LONGEST_TURNS_SECONDS, False
        seen, seen_at = 0, -math.inf
        while (rivals := self._count_rivals()) and self._time() < deadline:
            # What the member has not heard of yet, the comparison of the next commit finds.
            view, news = await self._views.fetch(
                partial(self._cache.news, serializable=True), arrived, serializable=True
            )
            self._cache.catch_up(view, news)
            self._saw(view.counter)
            left = view.counter.turn_left / 1000
            if view.counter_revision != seen:
                seen, seen_at = view.counter_revision, self._time()
            if view.counter.writer == self._views.writer:
                if self._time() >= handover:
                    self._rivals.clear()  # none of them has anything to write now
                    return
                pause = limits.ETCD_HANDOVER_POLL_SECONDS
            elif left and self._time() < seen_at + self._quiet_seconds:
                # Its last commit says that nothing is left: look for that one from a bit before it on.
                pause = min(left - self._commit_seconds, self._quiet_seconds)
                is_late, pause = False, max(pause, limits.ETCD_HANDOVER_POLL_SECONDS)
            elif is_late or rivals == 1:
                return  # its turn is over, or it has nothing more to write
            else:
                is_late, pause = True, self._delay(arrived)
            await asyncio.sleep(pause)

    async def ask_for(self, keys: KeyLayout) -> None:
        """Let the engine that wins all races know of this one: that one loses none, and would never notice."""
        put = transactions.put(keys.waiting, self._views.writer.encode())
        with suppress(Failure):  # the next try says what is wrong
            await self._views.cluster.call("Txn", transactions.transaction((), [put]), limits.ETCD_TRY_SECONDS)

    def saw_waiting(self, waiting: Any, since: int) -> None:
        """A commit has met the key of an engine that asks for a turn; older than the last commit, it says nothing."""
        name = waiting.value.decode()
        if waiting.mod_revision > since and name != self._views.writer:
            self._rivals[name] = self._last_rival = self._time()

    def _saw(self, counter: StoreState) -> None:
        if self._version != counter.version and counter.writer not in ("", self._views.writer):
            if self._version is not None:
                self._rivals[counter.writer] = self._last_rival = self._time()
            # What the first counter tells may be long ago; if not, the other one wants to know what is written now.
            elif self._views.cluster.clock.now() < counter.at + 1000 * limits.ETCD_NOTING_SECONDS:
                self._last_rival = self._time()
        self._version = counter.version

    @property
    def _quiet_seconds(self) -> float:
        """After so long without a commit, an engine has nothing more to write, although its turn is not over."""
        return max(limits.ETCD_QUIET_SECONDS, limits.ETCD_QUIET_COMMITS * self._commit_seconds)

    @property
    def others_write(self) -> bool:
        """Whether other engines write into the store now and then, so that they want to know what is written."""
        return self._time() < self._last_rival + limits.ETCD_NOTING_SECONDS

    @property
    def is_alone(self) -> bool:
        """Whether the last commit was probably this engine's: no other one writes, or waits for the end of its turn."""
        return self._time() < self._ends or not self._count_rivals()

    def _count_rivals(self) -> int:
        """How many other engines have committed lately."""
        earliest = self._time() - limits.ETCD_RIVAL_SECONDS
        self._rivals = {name: seen for name, seen in self._rivals.items() if seen > earliest}
        return len(self._rivals)

    def _delay(self, arrived: float) -> float:
        """How long one of several that wait lets others go first: at random, the less the longer it has waited."""
        longest = limits.ETCD_HANDOVER_SECONDS / 2 - (self._time() - arrived) / 20
        return random.uniform(0, max(0.0, longest))
