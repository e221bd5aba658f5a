"""What the engines on servers have in common: a task commits each group, and new watches ask the server first."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import Batch, Committed, Conflict, Get, Scan
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.engines.watches.starting import WatchStarter


class GroupWriter(Protocol):
    """Commits groups on a server."""

    async def commit(self, group: list[Batch], arrived: list[float], /) -> Outcome:
        """Commit a group; `arrived` says when each of its batches did."""

    def cancelled(self, group: list[Batch]) -> Outcome:
        """The outcome of a group whose commit was cancelled."""


W = TypeVar("W", bound=GroupWriter)


class ServerEngine(ClosableEngine, Generic[W]):
    """The part of an engine that commits and watches; its engine reads, and sets these in its `__init__`."""

    writer: W
    _feed: ChangeFeed
    _starter: WatchStarter

    def __init__(self) -> None:
        super().__init__()
        self._batcher = Batcher(self._start)
        self._writing: asyncio.Task[Outcome] | None = None

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self.check_usable()
        return await self._batcher.commit(batch)

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        self.check_usable()
        return self._batcher.submit(batch, done)

    def watch(self, *asks: Get | Scan, since: int | None = None) -> Watch:
        self.check_usable()
        return self._starter.watch(asks, since)

    def follow(self, *asks: Get | Scan, woken: Callable[[], None], since: int | None = None) -> LogWatch:
        self.check_usable()
        return self._starter.follow(asks, since, woken)

    def _start(self, group: list[Batch]) -> None:
        self._writing = asyncio.create_task(self._write(group, self._batcher.arrived_at), name="keyloft writer")
        self._writing.add_done_callback(partial(self._finished, group))

    async def _write(self, group: list[Batch], arrived: list[float]) -> Outcome:
        if self._starter.pending:  # here, and not in `commit`: so it holds for `submit`, and batches keep their order
            await self._starter.wait()
        return await self.writer.commit(group, arrived)

    def _finished(self, group: list[Batch], writing: "asyncio.Task[Outcome]") -> None:
        # asyncio.run cancels all tasks at its end, this one included; callers and `aclose` still wait for a verdict.
        outcome = self.writer.cancelled(group) if writing.cancelled() else writing.result()
        self._committed(outcome)
        self._batcher.finished(outcome.verdicts)

    def _committed(self, outcome: Outcome) -> None:
        """A group was decided; its callers don't know yet."""
        self._feed.committed(outcome)

    async def _end_watches(self, seconds: float) -> None:
        """Finish the commits under way, let watches report them for so long, and end the watches."""
        await self._batcher.close()
        await self._feed.wait_until_reported(seconds)
        self._feed.close()
        await self._starter.aclose()
