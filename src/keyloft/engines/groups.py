"""Gathers batches into groups: the next group fills up while the current one is on its way to disk.

There is no timer. A lone write goes at once, and the busier the store, the larger the groups.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from keyloft import limits
from keyloft.engines.settle import Verdict
from keyloft.errors import Closed, WrongLoop
from keyloft.records import Batch, Committed, Conflict, Set


class Groups:
    """Hands groups of batches to `start`, one at a time; the engine calls `finished` after each."""

    def __init__(self, start: Callable[[list[Batch]], None]) -> None:
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Batch, asyncio.Future[Committed | Conflict], float]] = deque()
        self._under_way: list[asyncio.Future[Committed | Conflict]] = []
        self.oldest = 0.0
        """When the first batch of the group under way came, by the event loop's time."""
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

    def finished(self, verdicts: Sequence[Verdict]) -> None:
        """The group under way is done: tell its callers, then hand over the next."""
        for future, verdict in zip(self._under_way, verdicts, strict=True):
            if future.done():
                continue  # its caller was cancelled
            if isinstance(verdict, Exception):
                future.set_exception(verdict)
            else:
                future.set_result(verdict)
        self._under_way = []
        # After the callers that were just woken: what they write next still joins the next group.
        self._loop.call_soon(self._hand_over)

    async def close(self) -> None:
        """Refuse new batches and wait until those that were taken are decided."""
        self._closed = True
        await self._idle.wait()

    def _hand_over(self) -> None:
        group: list[Batch] = []
        operations = size = 0
        while self._waiting and operations < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            batch, future, came = self._waiting.popleft()
            if not future.done():
                if not group:
                    self.oldest = came
                group.append(batch)
                self._under_way.append(future)
                operations += len(batch.mutations) + len(batch.checks)
                size += sum([len(mutation.value) for mutation in batch.mutations if type(mutation) is Set])
        if group:
            self._start(group)
        else:
            self._idle.set()
