"""Starts the watches of an engine on a database server, which must first ask the server where they begin."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from keyloft import limits
from keyloft.core.engine import LogWatch, Watch
from keyloft.core.records import Get, Scan
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.watch import EngineWatch
from keyloft.errors import Busy, Closed, DatabaseError, Unreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchStarter:
    """Makes watches, and lets reads and commits wait until new watches have started."""

    def __init__(
        self, feed: ChangeFeed, ask: Callable[[], Awaitable[Start]], follow: Callable[[], None], patience: float
    ) -> None:
        """Serve the watches of one engine.

        Args:
            feed: Wakes the watches.
            ask: Asks the server for its version counter and its time.
            follow: Begins to listen for commits of other processes, unless it has begun already.
            patience: For how many seconds a call of the engine waits for its server.
        """
        self._feed = feed
        self._ask = ask
        self._follow = follow
        self._patience = patience
        self.pending: set[asyncio.Task[None]] = set()
        """Watches that have not started yet."""

    def watch(self, asks: tuple[Get | Scan, ...], since: int | None) -> Watch:
        watch = self._feed.watch(asks, since, None)
        self._begin(watch)
        return watch

    def follow(self, asks: tuple[Get | Scan, ...], since: int | None, woken: Callable[[], None]) -> LogWatch:
        watch = self._feed.follow(asks, since, woken, None)
        self._begin(watch)
        return watch

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until new watches have started, but not for ever: the server may be silent. Returns whether they have.

        So a caller that makes a watch, and then reads or writes, misses nothing.
        """
        _, left = await asyncio.wait(self.pending, timeout=self._patience / 4 if seconds is None else seconds)
        return not left

    async def once_started(self, read: Callable[[], Awaitable[T]]) -> T:
        """The answer of a read that begins after new watches have started.

        If that takes long, it begins nevertheless: while there is no primary, standbys answer. But where the server has
        answered, the watches start as well, perhaps at a later version than the answer shows: then it is read again.
        """
        if not await self.wait():
            answer = await read()
            if self.pending and not await self.wait(limits.WATCH_CHECK_SECONDS):
                return answer
        return await read()

    async def aclose(self) -> None:
        for starting in self.pending:
            starting.cancel()
        await asyncio.gather(*self.pending, return_exceptions=True)

    def _begin(self, watch: EngineWatch[Any]) -> None:
        starting = asyncio.create_task(self._start(watch), name="keyloft watch")
        self.pending.add(starting)
        starting.add_done_callback(self.pending.discard)
        self._follow()

    async def _start(self, watch: EngineWatch[Any]) -> None:
        """Start a watch at the server's version counter, as soon as the server answers."""
        while True:
            try:
                start = await self._ask()
            except Closed:
                return
            except (Unreachable, Busy) as error:
                logger.warning("a watch can't start yet, trying again: %s", error)
                await asyncio.sleep(limits.WATCH_POLL_SECONDS)
            except DatabaseError as error:
                watch.fail(error)
                return
            else:
                self._feed.started(watch, start)
                return
