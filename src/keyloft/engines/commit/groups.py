"""Gathers batches into groups: the next group fills while the current one is being committed.

There is no timer. A lone write starts at once, and the busier the store, the larger the groups.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from keyloft import limits
from keyloft.core.records import Batch, Committed, Conflict
from keyloft.engines.commit.settle import Verdict
from keyloft.errors import Closed, CommitUnknown, WrongLoop

_Waiting: TypeAlias = tuple[Batch, asyncio.Future[Committed | Conflict], float]
"""A batch, the future of its caller, and when it arrived by the event loop's time."""

_INTERRUPTED: Final = (
    "an exception in the event loop interrupted this write: it was committed or not; read the entry to find out"
)


class Recovery(Protocol):
    """How an engine recovers from a group that an exception in the event loop has lost."""

    async def wait_for_jobs(self) -> None:
        """Return once every job that was handed to a thread is done."""

    async def abandon_group(self) -> None:
        """Roll back a group that no job works on any more."""


class Groups:
    """Hands groups of batches to `start`, one at a time; the engine calls `finished` after each."""

    def __init__(self, start: Callable[[list[Batch]], None]) -> None:
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._current: list[_Waiting] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def idle(self) -> bool:
        return self._idle.is_set()

    async def commit(self, batch: Batch) -> Committed | Conflict:
        """Wait for the verdict on a batch. Cancelling a caller whose batch is not yet in a group withdraws it."""
        if self._closed:
            raise Closed
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        future: asyncio.Future[Committed | Conflict] = self._loop.create_future()
        self._waiting.append((batch, future, self._loop.time()))
        if self._idle.is_set():
            self._idle.clear()
            # Not at once: other tasks of this iteration of the event loop may add their batches.
            self._loop.call_soon(self._hand_over)
        return await future

    @property
    def arrived_at(self) -> list[float]:
        """When the batches of the current group arrived, by the event loop's time, in order."""
        return [arrived for _, _, arrived in self._current]

    def finished(self, verdicts: Sequence[Verdict | None]) -> None:
        """Give the callers of the current group their verdicts, then start the next one.

        A batch whose verdict is None joins the next group.
        """
        again: list[_Waiting] = []
        for waiting, verdict in zip(self._current, verdicts, strict=True):
            _, future, _ = waiting
            if future.done():
                continue  # the caller was cancelled
            if verdict is None:
                again.append(waiting)
            elif isinstance(verdict, Exception):
                future.set_exception(verdict)
            else:
                future.set_result(verdict)
        self._current = []
        self._waiting.extendleft(reversed(again))
        # After the callers that were just woken, so that what they write next is in the next group.
        self._loop.call_soon(self._hand_over)

    async def close(self, recovery: Recovery | None = None) -> None:
        """Refuse new batches and wait until those that were accepted are decided.

        An exception that a signal's handler raises can end a step of the event loop that would have started or
        finished a group. With `recovery` such a group is found and rolled back, and its callers get CommitUnknown.
        """
        self._closed = True
        while recovery is not None and not self.idle:
            group, waiting = self._current, len(self._waiting)
            await recovery.wait_for_jobs()
            # Two iterations: in the first the job's result arrives, in the second the next group starts.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not self.idle and self._current is group and len(self._waiting) == waiting:
                await recovery.abandon_group()
                self.finished([CommitUnknown(_INTERRUPTED) for _ in group])
        await self._idle.wait()

    def _hand_over(self) -> None:
        if self._current:
            return  # `close` called `finished` for a group that was only late
        group: list[Batch] = []
        operations = size = 0
        while self._waiting and operations < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            waiting = self._waiting.popleft()
            batch, future, _ = waiting
            if not future.done():
                group.append(batch)
                self._current.append(waiting)
                operations += batch.operations
                size += batch.size
        if group:
            self._start(group)
        else:
            self._idle.set()
