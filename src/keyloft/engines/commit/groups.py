"""Gathers batches into groups: the next group fills up while the current one is on its way to disk.

There is no timer. A lone write goes at once, and the busier the store, the larger the groups.
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
"""A batch, who waits for the verdict on it, and since when."""


_INTERRUPTED: Final = "this was interrupted while it was written: it was carried out, or not; read to find out"


class Rest(Protocol):
    """Knows whether anybody is at a group."""

    async def after_all(self) -> None:
        """Return after all that has been begun."""

    async def give_up(self) -> None:
        """Leave nothing of a group that nobody is at."""


class Groups:
    """Hands groups of batches to `start`, one at a time; the engine calls `finished` after each."""

    def __init__(self, start: Callable[[list[Batch]], None]) -> None:
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._under_way: list[_Waiting] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def idle(self) -> bool:
        return self._idle.is_set()

    async def commit(self, batch: Batch) -> Committed | Conflict:
        """Wait for the verdict on a batch. A caller that is cancelled while its batch waits takes it back."""
        if self._closed:
            raise Closed
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        future: asyncio.Future[Committed | Conflict] = self._loop.create_future()
        self._waiting.append((batch, future, self._loop.time()))
        if self._idle.is_set():
            self._idle.clear()
            # Not at once: whatever else is ready to run in this turn of the loop may join.
            self._loop.call_soon(self._hand_over)
        return await future

    @property
    def came(self) -> list[float]:
        """When the batches of the group under way came, by the event loop's time: the first one first."""
        return [came for _, _, came in self._under_way]

    def finished(self, verdicts: Sequence[Verdict | None]) -> None:
        """The group under way is done: tell its callers, then hand over the next. None: this batch is to go with it."""
        again: list[_Waiting] = []
        for waiting, verdict in zip(self._under_way, verdicts, strict=True):
            _, future, _ = waiting
            if future.done():
                continue  # its caller was cancelled
            if verdict is None:
                again.append(waiting)
            elif isinstance(verdict, Exception):
                future.set_exception(verdict)
            else:
                future.set_result(verdict)
        self._under_way = []
        self._waiting.extendleft(reversed(again))
        # After the callers that were just woken: what they write next still joins the next group.
        self._loop.call_soon(self._hand_over)

    async def close(self, rest: Rest | None = None) -> None:
        """Refuse new batches and wait until those that were taken are decided.

        With `rest`, also if a signal's exception took one of the steps between: then nobody is at the group under way.
        """
        self._closed = True
        while rest is not None and not self.idle:
            group, waiting = self._under_way, len(self._waiting)
            await rest.after_all()
            # All that was reported has been heard, and the next group would have been handed over.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not self.idle and self._under_way is group and len(self._waiting) == waiting:
                await rest.give_up()
                self.finished([CommitUnknown(_INTERRUPTED) for _ in group])
        await self._idle.wait()

    def _hand_over(self) -> None:
        if self._under_way:
            return  # called once too often, because a call before seemed lost
        group: list[Batch] = []
        operations = size = 0
        while self._waiting and operations < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            waiting = self._waiting.popleft()
            batch, future, _ = waiting
            if not future.done():
                group.append(batch)
                self._under_way.append(waiting)
                operations += batch.operations
                size += batch.size
        if group:
            self._start(group)
        else:
            self._idle.set()
