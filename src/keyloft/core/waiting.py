"""How watches wait: as tasks of an event loop, or as threads. The code that waits is the same for both.

With threads, a coroutine never suspends: what it awaits blocks its thread, and returns.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from keyloft import limits
from keyloft.clock import Clock, SystemClock, Timer
from keyloft.core.driving import run_to_end


class WakeEvent(Protocol):
    """What an `asyncio.Event` and a `BlockingEvent` have in common."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self) -> object: ...


class Job(Protocol):
    """Work that was started."""

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class Waiting(Protocol):
    """Events, pauses, jobs and timers, and the lock of what several of them change."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by each step that changes watches, from one wait to the next. An event loop needs none."""

    def event(self) -> WakeEvent: ...

    async def sleep(self, seconds: float) -> None: ...

    def start(self, work: Coroutine[Any, Any, None], name: str) -> Job: ...

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer: ...


class LoopWaiting:
    """In tasks of the running event loop."""

    def __init__(self) -> None:
        self.lock = nullcontext()

    def event(self) -> asyncio.Event:
        return asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        return asyncio.create_task(work, name=name)

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer:
        return clock.call_at(moment, callback)


class BlockingEvent(threading.Event):
    """An event whose `wait` blocks the thread of the coroutine that awaits it."""

    async def wait(self) -> bool:  # type: ignore[override]
        return super().wait()


class ThreadJob:
    """A coroutine that a daemon thread runs; it ends by itself."""

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._thread = threading.Thread(target=run_to_end, args=(work,), name=name, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """What it waits for is set by the one that calls this."""


class ThreadWaiting:
    """In threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ending = threading.Event()

    def event(self) -> BlockingEvent:
        return BlockingEvent()

    async def sleep(self, seconds: float) -> None:
        self._ending.wait(seconds)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> ThreadJob:
        return ThreadJob(work, name)

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer:
        if not isinstance(clock, SystemClock):
            return clock.call_at(moment, callback)
        delay = min(max(0.0, (moment - clock.now()) / 1000), limits.LONGEST_TIMER_SECONDS)
        timer = threading.Timer(delay, callback)
        timer.daemon = True
        timer.start()
        return timer

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def end(self) -> None:
        """End all pauses."""
        self._ending.set()
