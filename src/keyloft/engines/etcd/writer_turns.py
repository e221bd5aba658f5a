"""Divides time among the processes that write, so that few of their commits lose a race.

A commit that loses costs etcd as much as one that wins. So a process with rivals commits for some milliseconds, writes
into the version counter how much of its turn is left, and then gives way. The others wait for so long. Only speed
depends on it: a process that does not wait, or that ends within its turn, harms no one.
"""

import asyncio
import math
import random

from keyloft import limits
from keyloft.engines.etcd.layout import StoreState
from keyloft.engines.etcd.views import RevisionViews


class WriterTurns:
    """The turns of one engine among all that write into a store."""

    def __init__(self, views: RevisionViews) -> None:
        self._views = views
        self._time = asyncio.get_running_loop().time
        self._rivals: dict[str, float] = {}
        """When a commit of another engine was last seen, by its name."""
        self._version: int | None = None
        """That of the last counter that was seen."""
        self._began = -math.inf
        self._is_over = False
        """Whether the last commit has ended this engine's turn."""
        self._last_commit = -math.inf
        self._ends = -math.inf
        """Until when this engine's turn lasts."""

    def left(self, counter: StoreState, arrived: float) -> int:
        """How many milliseconds of the turn are left after a commit that begins now.

        Args:
            counter: What it replaces.
            arrived: When its first batch arrived; after a longer pause it is taken for a single one.
        """
        self._saw(counter)
        time = self._time()
        if not self._count_rivals() or arrived > self._last_commit + limits.ETCD_TURN_PAUSE_SECONDS:
            self._began = time
            return 0
        if counter.writer != self._views.writer:
            self._began = time
        return max(0, round(1000 * (self._began + limits.ETCD_TURN_SECONDS - time)))

    def committed(self, left: int) -> None:
        """The commit was made, and has left so much of the turn."""
        self._last_commit = self._time()
        self._ends = self._last_commit + left / 1000
        self._is_over = left == 0 and self._last_commit > self._began + limits.ETCD_TURN_SECONDS

    async def give_way(self, arrived: float) -> None:
        """After this engine's turn, wait until another one has had its own, if there is one."""
        if self._is_over:
            await self.wait(arrived)

    async def wait(self, arrived: float) -> None:
        """Wait while it is another engine's turn, or until one has taken over after this one's turn.

        Raises:
            DatabaseError: The cluster does not answer.
        """
        handover = self._last_commit + limits.ETCD_HANDOVER_SECONDS if self._is_over else -math.inf
        self._is_over = False
        deadline, seen, is_late = self._time() + limits.ETCD_LONGEST_TURNS_SECONDS, 0, False
        while (rivals := self._count_rivals()) and self._time() < deadline:
            view, _ = await self._views.fetch(arrived=arrived)
            self._saw(view.counter)
            left = view.counter.turn_left / 1000
            if view.counter.writer == self._views.writer:
                if self._time() >= handover:
                    return
                pause = limits.ETCD_HANDOVER_POLL_SECONDS
            elif left and view.counter_revision != seen:
                is_late, pause = False, min(left, limits.ETCD_TURN_SECONDS)
            elif is_late or rivals == 1:
                return  # its turn is over, or it has nothing more to write
            else:
                is_late, pause = True, self._delay(arrived)
            seen = view.counter_revision
            await asyncio.sleep(pause)

    def _saw(self, counter: StoreState) -> None:
        # What the first counter tells may be long ago.
        if self._version not in (None, counter.version) and counter.writer not in ("", self._views.writer):
            self._rivals[counter.writer] = self._time()
        self._version = counter.version

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
