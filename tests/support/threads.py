"""Lets tests that are written for an event loop run on what blocks: each call in a thread of its own."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast

import keyloft
from keyloft import Clock, Store, SyncAtomic, SyncList, SyncStore, SyncWatching
from keyloft.core.driving import run_to_end
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import Ask, Batch, Change, Committed, Conflict, Get, LoggedChange, Scan
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What a call returns in a thread. A test that is cancelled leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            future.set_exception(StopAsyncIteration())
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def driven(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that never suspends returns, run by a thread."""
    return await in_thread(lambda: run_to_end(work))


class EngineInThreads:
    """An engine for threads, as tests of the event loop call it."""

    reads_at_once = True

    def __init__(self, engine: BlockingSqliteEngine) -> None:
        self.engine = engine

    @property
    def location(self) -> str:
        return self.engine.location

    @property
    def is_closed(self) -> bool:
        return self.engine.is_closed

    async def read(self, *asks: Ask) -> list[Any]:
        return await driven(self.engine.read(*asks))

    async def commit(self, batch: Batch) -> Committed | Conflict:
        return await driven(self.engine.commit(batch))

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        return self.engine.submit(batch, done)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        return _WatchInThreads(self.engine.watch(*asks, since=since))

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(woken)

        return _LogInThreads(self.engine.follow(*asks, woken=wake, since=since))

    def health(self) -> None:
        pass

    async def aclose(self) -> None:
        await driven(self.engine.aclose())


class _WatchInThreads:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._step: asyncio.Task[list[Change]] | None = None

    @property
    def reported_to(self) -> int | None:
        return self._watch.reported_to

    def __aiter__(self) -> AsyncIterator[list[Change]]:
        return self

    async def __anext__(self) -> list[Change]:
        # A thread that waits can't be cancelled: what it gets is for the next caller.
        if self._step is None:
            self._step = asyncio.ensure_future(driven(self._watch.__anext__()))
            self._step.add_done_callback(lambda step: step.cancelled() or step.exception())  # no one may want it
        step = self._step
        await asyncio.wait([step])
        self._step = None
        return step.result()

    async def aclose(self) -> None:
        await driven(self._watch.aclose())


class _LogInThreads:
    def __init__(self, log: LogWatch) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    reached: Any = property(lambda self: self._log.reached)
    is_woken: Any = property(lambda self: self._log.is_woken)
    has_ended: Any = property(lambda self: self._log.has_ended)

    async def take(self) -> list[LoggedChange]:
        return await driven(self._log.take())

    async def aclose(self) -> None:
        await driven(self._log.aclose())


class StoreInThreads:
    """A synchronous store, as tests of the asynchronous one call it; each call in a thread of its own."""

    def __init__(self, store: SyncStore) -> None:
        self.sync = store
        self.engine = EngineInThreads(store.engine)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.sync, name)

        def plain(*args: Any, **kwargs: Any) -> Any:
            made = member(*args, **kwargs)
            if isinstance(made, SyncList):
                return _ListInThreads(made)
            if isinstance(made, SyncWatching):
                return _IteratorInThreads(made)
            return StoreInThreads(made) if isinstance(made, SyncStore) else _AtomicInThreads(made)

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await in_thread(lambda: member(*args, **kwargs))

        is_asynchronous = inspect.iscoroutinefunction(getattr(Store, name))
        return called if is_asynchronous else plain

    async def aclose(self) -> None:
        await in_thread(self.sync.close)


class _AtomicInThreads:
    def __init__(self, atomic: SyncAtomic) -> None:
        self._atomic = atomic

    def __getattr__(self, name: str) -> Any:
        def added(*args: Any, **kwargs: Any) -> "_AtomicInThreads":
            getattr(self._atomic, name)(*args, **kwargs)
            return self

        return added

    async def commit(self) -> Any:
        return await in_thread(self._atomic.commit)


class _IteratorInThreads:
    """The next item may take a while: a test that stops waiting for it gets it later."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._step: asyncio.Task[Any] | None = None

    def __aiter__(self) -> "_IteratorInThreads":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    async def __anext__(self) -> Any:
        if self._step is None:
            self._step = asyncio.ensure_future(in_thread(lambda: next(self._items)))
            self._step.add_done_callback(lambda step: step.cancelled() or step.exception())
        step = self._step
        await asyncio.wait([step])
        self._step = None
        return step.result()

    async def __aenter__(self) -> "_IteratorInThreads":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await in_thread(self._items.close)


class _ListInThreads:
    def __init__(self, items: SyncList[Any]) -> None:
        self._items = items

    def __await__(self) -> Any:
        return in_thread(self._items.all).__await__()

    def __aiter__(self) -> _IteratorInThreads:
        return _IteratorInThreads(iter(self._items))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    def __bool__(self) -> bool:
        return bool(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


SYNCHRONOUS: Final = ", synchronous"
"""How the name of a parameter ends that stands for a synchronous store."""


@asynccontextmanager
async def opened(name: str, url: str | None, clock: Clock) -> AsyncIterator[Store]:
    """An open store; the name of the parameter decides whether it is a synchronous one."""
    if name.endswith(SYNCHRONOUS):
        with keyloft.open_sync(url, clock=clock, sweep_every=None) as store:
            yield cast(Store, StoreInThreads(store))
    else:
        async with keyloft.open(url, clock=clock, sweep_every=None) as asynchronous:
            yield asynchronous
