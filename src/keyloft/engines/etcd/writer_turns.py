"""Divides time among the processes that write, so that few of their commits lose a race.

A commit that loses costs etcd as much as one that wins. So a process with rivals commits for some milliseconds, writes
into the version counter how much of its turn is left, and then gives way. The others watch the counter, and wait for so
long, or until it has not committed for a while. A process that wins all races does not notice its rivals: a commit that
loses asks for a turn, under a key that each commit reads. Only speed depends on all this: a process that does not wait,
or that ends within its turn, harms no one.
"""

import asyncio
import math
import random
from typing import Any

from keyloft import limits
from keyloft.engines.etcd import transactions
from keyloft.engines.etcd.counter_watch import SeenCounter
from keyloft.engines.etcd.layout import KeyLayout, StoreState
from keyloft.engines.etcd.views import RevisionViews


class WriterTurns:
    """The turns of one engine among all that write into a store."""

    def __init__(self, views: RevisionViews) -> None:
        self._views = views
        self._seen = SeenCounter(views.cluster)
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

    def left(self, counter: StoreState, arrived: float, batches: int = 1) -> int:
        """How many milliseconds of the turn are left after a commit that begins now.

        Args:
            counter: What it replaces.
            arrived: When its first batch arrived.
            batches: How many it has; a few after a longer pause are taken for all that there is to write.
        """
        self._saw(counter)
        time = self._began_commit = self._time()
        pause = limits.ETCD_TURN_PAUSE_SECONDS + self._commit_seconds  # a busy machine takes longer for both
        is_after_pause = arrived > self._last_commit + pause
        if is_after_pause or not self._count_rivals() or counter.writer != self._views.writer:
            self._began = time
        if not self._rivals:
            self._seen.stop()  # it would report each of this engine's own commits
        if not self._rivals or (is_after_pause and batches <= limits.ETCD_FEW_BATCHES):
            return 0
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
            Whether it has waited, so that others may have written.
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
        self._seen.follow()
        deadline, is_late = self._time() + limits.ETCD_LONGEST_TURNS_SECONDS, False
        while (rivals := self._count_rivals()) and self._time() < deadline:
            counter = await self._newest_counter(arrived)
            time, left = self._time(), counter.turn_left / 1000
            if counter.writer == self._views.writer:
                if time >= handover:
                    self._rivals.clear()  # none of them has anything to write now
                    return
                pause = handover - time
            elif left and time < self._seen.at + self._quiet_seconds:
                is_late, pause = False, self._seen.at + self._quiet_seconds - time
            elif is_late or rivals == 1:
                return  # its turn is over, or it has nothing more to write
            else:
                is_late, pause = True, self._delay(arrived)
            await self._seen.moves(pause if self._seen.is_live else min(pause, limits.ETCD_HANDOVER_POLL_SECONDS))

    async def _newest_counter(self, arrived: float) -> StoreState:
        """The counter as the watch has reported it, or as it is read until the watch has begun."""
        counter = self._seen.counter
        if counter is None or not self._seen.is_live:
            # What the member has not heard of yet, the comparison of the next commit finds.
            view, _ = await self._views.fetch(arrived=arrived, serializable=True)
            self._seen.saw(view.counter_revision, view.counter)
            counter = self._seen.counter or view.counter
        self._saw(counter)
        return counter

    async def aclose(self) -> None:
        await self._seen.aclose()

    def ask(self, keys: KeyLayout) -> Any:
        """What a commit that loses writes, so that the engine that wins all races notices this one."""
        return transactions.put(keys.waiting, self._views.writer.encode())

    def saw_waiting(self, waiting: Any, since: int) -> None:
        """A commit has met the key of an engine that asks for a turn; older than the last commit, it says nothing."""
        name = waiting.value.decode()
        if waiting.mod_revision > since and name != self._views.writer:
            # One that is new has waited while this engine wrote alone: it goes next.
            self._is_over = self._is_over or name not in self._rivals
            self._rivals[name] = self._last_rival = self._time()

    def _saw(self, counter: StoreState) -> None:
        if self._version != counter.version and counter.writer not in ("", self._views.writer):
            if self._version is not None:
                self._rivals[counter.writer] = self._last_rival = self._time()
            # The first counter seen may be old. If it is recent, another engine writes, too: leave notes for it.
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
