"""Wall time in milliseconds since 1970: the system's clock, and a manual one for tests."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from time import time_ns
from typing import Protocol

from msgspec import Struct

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
        return time_ns() // 1_000_000

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
        self._timers: list[_ManualTimer] = []

    def now(self) -> int:
        return self._now

    def advance(self, seconds: float | timedelta) -> None:
        """Move the time forward and make the calls that became due."""
        self._now += round(1000 * (seconds.total_seconds() if isinstance(seconds, timedelta) else seconds))
        due = [timer for timer in self._timers if timer.moment <= self._now]
        self._timers = [timer for timer in self._timers if timer.moment > self._now]
        for timer in sorted(due, key=lambda timer: timer.moment):
            if not timer.is_cancelled:
                timer.callback()

    def call_at(self, moment: int, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(moment, callback)
        self._timers.append(timer)
        self.advance(0)
        return timer


class _ManualTimer(Struct):
    moment: int
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
