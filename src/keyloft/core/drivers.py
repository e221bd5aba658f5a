"""The two drivers that run calls of synchronous objects: on the caller's thread, or on an event loop in a thread."""

import asyncio
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar, cast

from keyloft import limits
from keyloft.core.driving import iterate, run_to_end
from keyloft.core.forks import ProcessBound
from keyloft.core.waiting import ThreadEvent, ThreadLock, ThreadWaiting
from keyloft.errors import AT_EXIT, CLOSED, Closed, ReentrantCall

T = TypeVar("T")
P = ParamSpec("P")


class OnThisThread(ProcessBound):
    """Runs coroutines that never suspend, on the caller's thread.

    All objects of a store refer to its driver. If none of them is left and the store was not closed, the driver warns,
    and closes the engine.
    """

    def __init__(self, shown: str = "", close_engine: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.waiting = ThreadWaiting()
        self.run = run_to_end
        self._shown = shown
        self._close_engine = close_engine

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    def close(self) -> None:
        self.refusal = self.refusal or CLOSED
        self.waiting.end()

    def __del__(self) -> None:
        if self.refusal is not None:
            return
        self.waiting.end()
        _warn_of_unclosed(self._shown, self)
        if sys.is_finalizing():
            return  # the start of a new thread would wait for ever; the end of the process closes the files
        # In a new thread: the garbage collector may have interrupted a thread that has locks.
        with suppress(RuntimeError):  # the interpreter ends
            threading.Thread(target=self._close_engine, name="keyloft closes", daemon=True).start()


class LoopThread(ProcessBound):
    """Runs coroutines on an event loop in a daemon thread; any thread may call."""

    closing: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Closes what runs on the loop, if its owner dropped the driver without closing it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._scheduling = ThreadLock()
        """Held while a coroutine is handed over, so that none is handed over after `close`."""
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()
        self._thread = threading.Thread(target=_serve, args=(self._loop, self._calls), name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self.refusal is not None or sys.is_finalizing()  # then its thread runs no more

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns. If the caller is interrupted, the coroutine is cancelled.

        Raises:
            Closed: The driver is closed, or was opened before a fork.
            ReentrantCall: The caller is a function that this event loop has called, and would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ReentrantCall(
                "a function that is passed to a synchronous store can't use that store, which waits for it: use the "
                "store before or after the call"
            )
        if sys.is_finalizing():
            work.close()
            raise Closed(self.refusal or AT_EXIT)
        call = None
        if self.refusal is None:  # in a forked child, the lock may be taken by a thread that does not exist there
            with self._scheduling:
                if self.refusal is None:
                    call = _Call(work, self._loop)
                    self._calls.add(call)
                    self._loop.call_soon_threadsafe(call.start)
        if call is None:
            work.close()
            raise Closed(self.refusal or CLOSED)
        try:
            return call.wait()
        except asyncio.CancelledError:  # by `close`
            raise Closed(self.refusal or CLOSED) from None
        except BaseException:
            call.cancel()
            raise
        finally:
            self._calls.discard(call)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called())

    def close(self) -> None:
        if self.refusal is not None:
            return
        if sys.is_finalizing():
            self.refusal = CLOSED
            return
        with self._scheduling:
            is_first = self.refusal is None
            self.refusal = CLOSED
            if is_first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        if self.refusal is not None:
            return
        _warn_of_unclosed(self._name, self)
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(_stop_after, self._loop, self.closing)


class _Call(Generic[T]):
    """A coroutine that an event loop runs for a thread, which waits for it.

    This is not a `concurrent.futures.Future`, whose lock would block a signal's handler that calls the store.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        """For the event loop, which can't ask the event: while its waiter wakes, a `ThreadEvent` looks unset."""
        self._done = ThreadEvent()

    def start(self) -> None:
        """Begin; called in the event loop."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda _: self.give_up())

    async def _run(self) -> None:
        try:
            self._result = await self._work
        except (
            BaseException
        ) as error:  # also one that ends a process: it is the caller's, and must not end the event loop
            self._error = error
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._done.set()

    def wait(self) -> T:
        """What the coroutine returns or raises; called in the caller's thread."""
        self._done.block()
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def cancel(self) -> None:
        """Cancel the coroutine, because the caller no longer waits."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        """Wake the caller of a coroutine that was cancelled before it began, or that can't be cancelled."""
        if not self._has_ended:
            with suppress(RuntimeError):  # it catches this, too
                self._work.close()
            self._error = asyncio.CancelledError()
            self._end()


def _serve(loop: asyncio.AbstractEventLoop, calls: "set[_Call[Any]]") -> None:
    """Run an event loop until it is stopped; then wake all callers, whatever their coroutines do."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=limits.LOOP_END_SECONDS))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            for call in calls.copy():
                call.give_up()
            loop.close()


def _stop_after(loop: asyncio.AbstractEventLoop, closing: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    if closing is None:
        loop.stop()
    else:
        loop.create_task(closing()).add_done_callback(lambda _: loop.stop())


def _warn_of_unclosed(shown: str, source: object) -> None:
    warnings.warn(f"unclosed store {shown}: call close(), or use `with`", ResourceWarning, stacklevel=3, source=source)


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own; an interrupted caller returns once the coroutine has cleaned up."""
    loop = LoopThread("keyloft")
    try:
        return loop.run(work)
    finally:
        loop.close()


def iterate_alone(items: AsyncIterator[T]) -> Iterator[T]:
    """Iterate an asynchronous generator on an event loop of its own, which ends with the iteration."""
    loop = LoopThread("keyloft")
    try:
        yield from iterate(items, loop)
    finally:
        loop.close()
