"""The two drivers of synchronous objects: the caller's own thread, and an event loop in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, ParamSpec, TypeVar

from keyloft.core.driving import iterate, run_to_end
from keyloft.core.process import ProcessBound
from keyloft.core.waiting import ThreadWaiting
from keyloft.errors import CLOSED, Closed, InvalidArgument

T = TypeVar("T")
P = ParamSpec("P")


class OnThisThread:
    """Runs coroutines that never suspend, on the caller's thread."""

    def __init__(self) -> None:
        self.waiting = ThreadWaiting()
        self.run = run_to_end

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    @property
    def is_closed(self) -> bool:
        return self.waiting.is_ending

    def close(self) -> None:
        self.waiting.end()


class LoopThread(ProcessBound):
    """Runs coroutines on an event loop in a daemon thread; any thread may call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._scheduling = threading.Lock()
        """Held while a coroutine is handed over, so that none comes after the last one."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns. A caller that is interrupted cancels it.

        Raises:
            Closed: This is closed, or was opened before a fork.
            InvalidArgument: The caller is a function that this event loop has called: it would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument(
                "a function that is passed to a synchronous store can't use that store: it would wait"
            )
        future = None
        if self.refusal is None:  # after a fork, another thread may have the lock for ever
            with self._scheduling:
                if self.refusal is None:
                    future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if future is None:
            work.close()
            raise Closed(self.refusal or CLOSED)
        try:
            return future.result()
        except CancelledError:  # by `close`
            raise Closed(self.refusal or CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called())

    def close(self) -> None:
        if self.refusal is not None:
            return
        with self._scheduling:
            is_first = self.refusal is None
            self.refusal = CLOSED
            if is_first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own; an interrupted caller returns once it has cleaned up."""
    loop = LoopThread("keyloft")
    try:
        return loop.run(work)
    finally:
        loop.close()


def iterate_alone(items: AsyncIterator[T]) -> Iterator[T]:
    """The same for what an asynchronous generator yields; the loop ends with the iteration."""
    loop = LoopThread("keyloft")
    try:
        yield from iterate(items, loop)
    finally:
        loop.close()
