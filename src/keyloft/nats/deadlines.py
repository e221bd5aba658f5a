"""Looks for requests whose sender has waited long enough, in slices, so that others don't wait meanwhile."""

import asyncio
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import Protocol

from keyloft import limits
from keyloft.nats.requests import Owner


class DeadlineKeeper(Protocol):
    """Answers the requests that are late."""

    @property
    def owners(self) -> Iterable[Owner]: ...

    def give_up_late(self, late: float) -> None:
        """Give up what waits for the database since before a time."""

    def check_owner(self, owner: Owner, late: float, ends: float) -> bool:
        """Answer what arrived before a time, until this slice ends; returns whether some are left."""


class Deadlines:
    """Checks four times within a deadline, while there are requests. What was published has no deadline."""

    def __init__(self, keeper: DeadlineKeeper, seconds: float) -> None:
        """`seconds` is how long a sender waits at most."""
        self._keeper = keeper
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._unchecked: deque[Owner] = deque()

    def start(self) -> None:
        """There are requests now."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds / 4, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = perf_counter()
        late, ends = now - self._seconds, now + limits.TURNS_SECONDS
        unchecked = self._unchecked
        if not unchecked:
            self._keeper.give_up_late(late)
            unchecked.extend(self._keeper.owners)
        while unchecked and perf_counter() < ends:
            if not self._keeper.check_owner(unchecked[0], late, ends):
                unchecked.popleft()
        self._timer = None
        if unchecked:
            self._timer = self._loop.call_later(limits.TURN_SECONDS, self._check)
        elif any(owner.request_bytes for owner in self._keeper.owners):
            self.start()
