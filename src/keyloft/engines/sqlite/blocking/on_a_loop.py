"""Lets an event loop use an engine for threads: the database of a synchronous store in memory."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from keyloft.core.driving import next_of, run_to_end
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import Ask, Batch, Change, Committed, Conflict, Get, Scan
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine


class MemoryOnLoop:
    """An engine in memory whose reads and commits run on the event loop, because none of them waits.

    A watch waits in a thread of its own. The owner of the engine closes it.
    """

    reads_at_once = True

    def __init__(self, engine: BlockingSqliteEngine) -> None:
        self._engine = engine
        self.location = engine.location
        self._watches: weakref.WeakSet[_ThreadedWatch] = weakref.WeakSet()

    @property
    def is_closed(self) -> bool:
        return self._engine.is_closed

    async def read(self, *asks: Ask) -> list[Any]:
        return await self._engine.read(*asks)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        return await self._engine.commit(batch)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        return self._engine.submit(batch, done)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        watch = _ThreadedWatch(self._engine.watch(*asks, since=since))
        self._watches.add(watch)
        return watch

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        loop = asyncio.get_running_loop()
        return self._engine.follow(*asks, woken=lambda: _tell(loop, woken), since=since)

    def health(self) -> None:
        """There are no servers."""

    async def aclose(self) -> None:
        """End the watches; the synchronous store closes the engine."""
        for watch in [*self._watches]:
            await watch.end()


class _ThreadedWatch:
    """A watch for whose next changes a thread waits."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._next: asyncio.Future[list[Change] | None] | None = None
        """The changes that a thread waits for; if a caller is cancelled, the next caller gets them."""

    @property
    def reported_to(self) -> int | None:
        return self._watch.reported_to

    def __aiter__(self) -> AsyncIterator[list[Change]]:
        return self

    async def __anext__(self) -> list[Change]:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._wait, args=(self._next,), name="keyloft watch", daemon=True).start()
        try:
            changes = await asyncio.shield(self._next)
        finally:
            if self._next.done():
                self._next = None
        if changes is None:
            raise StopAsyncIteration
        return changes

    async def aclose(self) -> None:
        await self._watch.aclose()

    async def end(self) -> None:
        """Close the watch, and wake the task that waits for its changes."""
        await self.aclose()
        if self._next is not None:
            await asyncio.wait([self._next])

    def _wait(self, waiting: "asyncio.Future[list[Change] | None]") -> None:
        changes: list[Change] | None = None
        failure: BaseException | None = None
        try:
            changes = run_to_end(next_of(self._watch))
        except StopAsyncIteration:
            pass  # it has ended
        except BaseException as error:  # the task that waits gets it
            failure = error
        _tell(waiting.get_loop(), lambda: _decide(waiting, changes, failure))


def _decide(
    waiting: "asyncio.Future[list[Change] | None]", changes: list[Change] | None, failure: BaseException | None
) -> None:
    if waiting.cancelled():
        return
    if failure is not None:
        waiting.set_exception(failure)
    else:
        waiting.set_result(changes)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(callback)
