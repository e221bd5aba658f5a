"""How watches wait: as tasks of an event loop, or as threads. The code that waits is the same for both.

With threads, a coroutine never suspends: what it awaits blocks its thread, and returns.
"""

import _thread
import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from keyloft import limits
from keyloft.clock import Clock, SystemClock, Timer
from keyloft.core.driving import run_to_end
from keyloft.errors import AT_EXIT, Closed, ReentrantCall


class WakeEvent(Protocol):
    """What an `asyncio.Event` and a `BlockingEvent` have in common."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self) -> object: ...


class Job(Protocol):
    """Work that was started in the background."""

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class Waiting(Protocol):
    """Makes events, pauses, jobs and timers, and has the lock of what they change."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by each step that changes watches, from one wait to the next. An event loop needs none."""

    def event(self) -> WakeEvent: ...

    async def sleep(self, seconds: float) -> None: ...

    def start(self, work: Coroutine[Any, Any, None], name: str, keep: Callable[[Job], None] = lambda _: None) -> None:
        """Start work. `keep` gets the job before it runs, so that an interrupted caller does not start it twice."""

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer: ...

    def check_may_lock(self) -> None:
        """Raise ReentrantCall if this thread already has a lock that must be taken after `lock`.

        This happens in a signal's handler or in `__del__`, which run in the middle of other calls of their thread.
        """

    def check_may_wait(self) -> None:
        """Raise ReentrantCall also if this thread has `lock` itself, which the thread that would wake it needs."""


class LoopWaiting:
    """Waits in tasks of the running event loop."""

    def __init__(self) -> None:
        self.lock = nullcontext()

    def event(self) -> asyncio.Event:
        return asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def start(self, work: Coroutine[Any, Any, None], name: str, keep: Callable[[Job], None] = lambda _: None) -> None:
        keep(asyncio.create_task(work, name=name))

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer:
        return clock.call_at(moment, callback)

    def check_may_lock(self) -> None:
        pass

    def check_may_wait(self) -> None:
        pass


class ThreadLock(_thread.RLock):  # type: ignore[misc]  # typeshed calls it final, and it is not
    """A lock for code that a signal's handler may interrupt: the same thread can take it again, and does not wait.

    It is only taken by `with`, so that an exception of a handler never leaves it taken. Python 3.14 may run a handler
    between the return of a built-in `__enter__` and the beginning of the block, so there `__enter__` is written in
    Python, after which no handler runs. Earlier versions don't do so, and the built-in method is faster.
    """

    if sys.version_info >= (3, 14):

        def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool:
            try:
                return self.acquire(blocking, timeout)
            except BaseException:
                # The exception came before or after the lock was taken; no handler runs from here to the release.
                try:  # noqa: SIM105
                    self.release()
                except RuntimeError:  # it was not taken
                    pass
                raise


def refuse_reentry(lock: Any) -> None:
    """Refuse a caller that would wait for this `ThreadLock` for ever.

    Raises:
        ReentrantCall: Its thread has the lock: the caller has interrupted what the lock protects.
        Closed: The interpreter is ending, and a thread that it has stopped has the lock.
    """
    if lock._is_owned():  # as `threading.Condition` asks
        raise ReentrantCall
    if sys.is_finalizing():
        if not lock.acquire(blocking=False):
            raise Closed(AT_EXIT)
        lock.release()


class ThreadEvent:
    """Like `threading.Event`, for code that a signal's handler may interrupt and call again, on the same thread.

    `threading.Event` has a lock inside, for which such a handler would wait for ever. Here the event is a lock itself:
    the lock is free while the event is set. Each step is a single call into C, so no step can be interrupted half-way.
    """

    def __init__(self) -> None:
        self._while_unset = threading.Lock()
        self._while_unset.acquire()

    def is_set(self) -> bool:
        return not self._while_unset.locked()

    def set(self) -> None:
        with suppress(RuntimeError):  # it is set already
            self._while_unset.release()

    def clear(self) -> None:
        self._while_unset.acquire(blocking=False)

    def block(self) -> None:
        """Block this thread until the event is set. It may also return just after `clear`.

        If a signal's handler raises here, the event may become set although no caller has set it. So a thread may wake
        once too often, but none misses an event.
        """
        try:
            self._while_unset.acquire()
        finally:
            try:  # noqa: SIM105
                self._while_unset.release()
            except RuntimeError:  # `set` has released it
                pass

    def block_for(self, seconds: float) -> None:
        """Block for a limited time. Not for the main thread, which signals may interrupt."""
        if self._while_unset.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self.set()


class BlockingEvent(ThreadEvent):
    """An event whose `wait` blocks the thread of the coroutine that awaits it."""

    async def wait(self) -> None:
        self.block()


class ThreadJob:
    """A coroutine that a daemon thread runs; it ends by itself."""

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._thread = threading.Thread(target=run_to_end, args=(work,), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Do nothing: the caller sets the event that the job waits for, and the job ends."""


class ThreadWaiting:
    """Waits in threads."""

    def __init__(self, refuse_reentry: Callable[[], None] = lambda: None) -> None:
        """`refuse_reentry` raises ReentrantCall if this thread has a lock that must be taken after `lock`."""
        self.lock = ThreadLock()
        self.check_may_lock = refuse_reentry
        self._ending = ThreadEvent()

    def event(self) -> BlockingEvent:
        return BlockingEvent()

    async def sleep(self, seconds: float) -> None:
        self._ending.block_for(seconds)

    def start(self, work: Coroutine[Any, Any, None], name: str, keep: Callable[[Job], None] = lambda _: None) -> None:
        if sys.is_finalizing():
            work.close()  # it would never run, and up to Python 3.11 the start of a thread would wait for that
            return
        job = ThreadJob(work, name)
        keep(job)
        job.start()

    def call_at(self, clock: Clock, moment: int, callback: Callable[[], None]) -> Timer:
        if not isinstance(clock, SystemClock):
            return clock.call_at(moment, callback)
        delay = min(max(0.0, (moment - clock.now()) / 1000), limits.LONGEST_TIMER_SECONDS)
        timer = threading.Timer(delay, callback)
        timer.daemon = True
        timer.start()
        return timer

    def check_may_wait(self) -> None:
        refuse_reentry(self.lock)
        self.check_may_lock()

    def end(self) -> None:
        """End all pauses."""
        self._ending.set()
