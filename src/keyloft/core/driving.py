"""Synchronous objects on top of asynchronous ones: the protocol of a driver, the base class `Driven`, and lists.

All methods are written once, as coroutines. On SQLite and in memory none of them ever suspends, so that the caller's
thread can run them to their end (ADR 18).
"""

import asyncio
import inspect
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from keyloft import limits
from keyloft.core.closing import NoCopies
from keyloft.core.lazy import LazyList
from keyloft.errors import Closed, InvalidArgument

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741
P = ParamSpec("P")


_BLOCKING: Final = object()
"""What `run_to_end` sends to a coroutine that yields to other tasks; an event loop sends None."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on this thread. It may yield to other tasks (`asyncio.sleep(0)`), but not wait for one.

    Raises:
        RuntimeError: The coroutine waits for an event loop.
    """
    try:
        asked = work.send(None)
        while asked is None:
            asked = work.send(_BLOCKING)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("this coroutine waits for an event loop, and its caller has none")


def plain_function(fn: Callable[P, T]) -> Callable[P, T]:
    """A function that calls `fn` for a synchronous object, and refuses a result that would have to be awaited."""
    if not callable(fn):
        return fn  # its caller refuses it

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        result = fn(*args, **kwargs)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise InvalidArgument(
                "fn: expected a plain function, got one that returns an awaitable, which this store does not await"
            )
        return result

    return called


@types.coroutine
def _give_way() -> Generator[None, object, object]:
    return (yield)


async def pause(seconds: float) -> None:
    """Sleep. On an event loop, this task sleeps; otherwise, the thread that runs this coroutine to its end."""
    if await _give_way() is _BLOCKING:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop waits for this)
    else:
        await asyncio.sleep(seconds)


class Driver(Protocol):
    """Runs what a synchronous object wraps."""

    @property
    def is_closed(self) -> bool: ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns or raises."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns or raises; if there is an event loop, it is called there."""

    def close(self) -> None:
        """End what runs in the background. A second call does nothing."""


class Driven(NoCopies, Generic[I]):
    """The base of a synchronous object, which has an asynchronous one and runs its methods."""

    def __init__(self, inner: I, driver: Driver) -> None:
        self._inner = inner
        self._untyped: Any = inner
        self._driver = driver
        self._run = driver.run

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._inner!r}>"

    def _close_inner(self) -> None:
        """Close the asynchronous object; it may have been closed with its store."""
        with suppress(Closed):
            self._run(self._untyped.aclose())


class SyncList(Driven[LazyList[T]]):
    """A list to read, from its beginning each time: iterate it, or call `all`."""

    def __repr__(self) -> str:
        shown = repr(self._inner).removesuffix(": await it, or iterate it with async for>")
        return f"<Sync{shown.removeprefix('<')}: iterate it, or call all()>"

    def __bool__(self) -> bool:
        raise TypeError(f"this list of {self._inner.what} has not been read yet: iterate it, or call all()")

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __len__(self) -> NoReturn:
            raise TypeError(f"this list of {self._inner.what} has not been read yet: take the length of all()")

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"this list of {self._inner.what} has not been read yet: take an item of all()")

    def all(self) -> list[T]:
        """All items, read now."""
        return self._run(_awaited(self._inner))

    def __iter__(self) -> Iterator[T]:
        items, count, is_last = self._inner.__aiter__(), 1, False
        while not is_last:
            some, error, is_last = self._run(_several(items, count))
            yield from some
            if error is not None:
                raise error
            # More items at a time, because each call to an event loop in another thread takes time.
            count = min(2 * count, limits.SLICE_ITEMS)


def iterate(items: AsyncIterator[T], driver: Driver) -> Iterator[T]:
    """Iterate what an asynchronous generator yields; it is closed with the iterator."""
    try:
        while True:
            try:
                item = driver.run(next_of(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        if isinstance(items, AsyncGenerator) and not driver.is_closed:
            driver.run(_closed(items))


async def _closed(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


async def _awaited(lazy: LazyList[T]) -> list[T]:
    return await lazy


async def next_of(items: AsyncIterator[T]) -> T:
    """The next item, as a coroutine.

    Raises:
        StopAsyncIteration: There is none.
    """
    return await anext(items)


async def _several(items: AsyncIterator[T], count: int) -> tuple[list[T], Exception | None, bool]:
    """Up to this many items, the error that came after them, and whether they are the last ones."""
    some: list[T] = []
    try:
        while len(some) < count:
            some.append(await anext(items))
    except StopAsyncIteration:
        return some, None, True
    except Exception as error:
        return some, error, True
    return some, None, False
