"""Lets tests that are written for an event loop run on what blocks: each call in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

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
        log = self.engine.follow(*asks, woken=lambda: loop.call_soon_threadsafe(woken) and None, since=since)
        return _LogInThreads(log)

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
            self._step = asyncio.ensure_future(driven(self._watch.__anext__()))  # type: ignore[arg-type]
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
