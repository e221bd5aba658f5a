"""Wall time in milliseconds since 1970: the system's clock, and a manual one for tests."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from keyloft import limits


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The current time, and calls at a given time."""

    def now(self) -> int: ...

    def call_at(self, moment: int, callback: Callable[[], None]) -> Timer:
        """Call back once `moment` may have been reached; the callback checks `now()` itself."""


class SystemClock:
    """This machine's wall clock."""

    __slots__ = ()

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def call_at(self, moment: int, callback: Callable[[], None]) -> Timer:
        delay = min(max(0.0, (moment - self.now()) / 1000), limits.LONGEST_TIMER_SECONDS)
        return asyncio.get_running_loop().call_later(delay, callback)


class ManualClock:
    """A clock that stands still until `advance` is called, for tests of expiry.

    Example:
        clock = ManualClock()
        async with keyloft.open(clock=clock) as kv:
            await kv.set(("session",), "…", expire_in=30)
            clock.advance(30)
            assert not (await kv.get(("session",))).exists
    """

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._now = now
        self._order = itertools.count()
        self._timers: list[tuple[int, int, _ManualTimer]] = []

    def now(self) -> int:
        return self._now

    def advance(self, seconds: float | timedelta) -> None:
        """Move the time forward and make the calls that became due."""
        elapsed = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        self._now += round(elapsed * 1000)
        while self._timers and self._timers[0][0] <= self._now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()

    def call_at(self, moment: int, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        if moment <= self._now:
            callback()
        else:
            heapq.heappush(self._timers, (moment, next(self._order), timer))
        return timer


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None
