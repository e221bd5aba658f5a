"""Gathers batches into groups: the next group fills while the current one is being committed.

There is no timer. A lone write starts at once, and the busier the store, the larger the groups.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import Batch, Committed, Conflict
from keyloft.engines.commit.submitted import report
from keyloft.errors import Closed, CommitUnknown, WrongLoop

_INTERRUPTED: Final = (
    "an exception in the event loop interrupted this write: it was committed or not; read the entry to find out"
)


class Recovery(Protocol):
    """How an engine recovers from a group that an exception in the event loop has lost."""

    async def wait_for_jobs(self) -> None:
        """Return once every job that was handed to a thread is done."""

    async def abandon_group(self) -> None:
        """Roll back a group that no job works on any more."""


class QueuedBatch(Struct, eq=False):
    """A batch that waits for its group, or is in it."""

    batch: Batch
    arrived: float
    """When the batch arrived, by the event loop's time."""
    future: "asyncio.Future[Committed | Conflict] | None" = None
    """What a caller awaits, instead of `done`."""
    done: Callable[[Verdict], None] | None = None
    """None once it has returned."""
    is_in_group: bool = False
    is_withdrawn: bool = False
    was_held_back: bool = False
    """Whether an earlier group has left it undecided, because it has to wait for another client's lock."""

    def withdraw(self) -> bool:
        self.is_withdrawn = not self.is_in_group
        return self.is_withdrawn


class QueuedBatches(Struct, eq=False):
    """Batches of one sender that wait for their group, or are in it: always in the same one, each decided by itself."""

    batches: list[Batch]
    arrived: float
    done: Callable[[Sequence[Verdict]], None] | None
    """None once it has returned."""
    size: int
    """How many bytes their values have."""
    is_in_group: bool = False
    is_withdrawn: bool = False

    def withdraw(self) -> bool:
        self.is_withdrawn = not self.is_in_group
        return self.is_withdrawn

    def withdraw_one(self, position: int) -> bool:
        if not self.is_in_group:
            self.batches[position] = Batch(())
        return not self.is_in_group


class Batcher:
    """Hands groups of batches to `start`, one at a time; the engine calls `finished` after each."""

    def __init__(self, start: Callable[[list[Batch]], None], recovery: Recovery | None = None) -> None:
        """With `recovery`, a group that got lost by an exception in the event loop is found and rolled back.

        A signal's handler can raise in any callback of the event loop, also in one that starts or finishes a group. The
        callers of a lost group get CommitUnknown, and the next group starts.
        """
        self._start = start
        self._recovery = recovery
        self._timer: asyncio.TimerHandle | None = None
        self._rescue: asyncio.Task[None] | None = None
        self._group_at_tick: list[QueuedBatch | QueuedBatches] | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[QueuedBatch | QueuedBatches] = deque()
        self._current: list[QueuedBatch | QueuedBatches] = []
        self._time = self._loop.time
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.group_operations = self.group_bytes = 0
        """How many checks and mutations the current group has, and how many bytes of values."""
        self.groups = 0
        """How many groups were started."""

    @property
    def idle(self) -> bool:
        return self._idle.is_set()

    @property
    def is_empty(self) -> bool:
        """Whether no batch waits or is being committed."""
        return not self._current and not self._waiting

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> QueuedBatch:
        """Queue a batch; `done` is called with its verdict."""
        queued = QueuedBatch(batch, self._time(), None, done)
        if self._waiting and not self._closed:
            # Its group is about to start. The event loop is not checked again: asking for it takes a system call.
            self._waiting.append(queued)
        else:
            self._queue(queued)
        return queued

    def submit_each(self, batches: Sequence[Batch], done: Callable[[Sequence[Verdict]], None]) -> QueuedBatches:
        """Queue batches, none of them long; `done` is called once, with the verdict on each.

        For an engine that decides all batches of a group.
        """
        queued = QueuedBatches([*batches], self._time(), done, sum([batch.size for batch in batches]))
        self._queue(queued)
        return queued

    def commit(self, batch: Batch) -> "asyncio.Future[Committed | Conflict]":
        """Queue a batch; the future holds its verdict. Cancelling it before the batch is in a group withdraws it."""
        future: asyncio.Future[Committed | Conflict] = self._loop.create_future()
        self._queue(QueuedBatch(batch, self._time(), future))
        return future

    def _queue(self, queued: QueuedBatch | QueuedBatches) -> None:
        if self._closed:
            raise Closed
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop
        self._waiting.append(queued)
        if self._idle.is_set():
            # Later in this iteration of the event loop, so that its other tasks can add their batches.
            self._loop.call_soon(self._hand_over)
            self._idle.clear()
            if self._timer is None and self._recovery is not None:
                self._tick()

    @property
    def arrived_at(self) -> list[float]:
        """When the batches of the current group arrived, by the event loop's time, in order."""
        return [queued.arrived for queued in self._current for _ in range(_count(queued))]

    def finished(self, verdicts: Sequence[Verdict | None]) -> None:
        """Give the callers of the current group their verdicts, then start the next one.

        A batch whose verdict is None joins the next group.
        """
        again: list[QueuedBatch] = []
        first = 0
        for queued in self._current:
            if isinstance(queued, QueuedBatches):
                several = [one for one in verdicts[first : first + len(queued.batches)] if one is not None]
                assert len(several) == len(queued.batches), "this engine decides all batches of a group"
                first += len(several)
                if queued.done is not None:
                    report(queued.done, several)
                    queued.done = None
                continue
            verdict = verdicts[first]
            first += 1
            future = queued.future
            if verdict is None:
                queued.is_in_group, queued.was_held_back = False, True
                again.append(queued)
            elif future is not None and type(verdict) is Committed and not future.done():
                future.set_result(verdict)  # the common case, without a call
            elif queued.done is not None:
                report(queued.done, verdict)
                # A signal's handler may interrupt this loop. Then the group counts as lost, and gets other verdicts.
                queued.done = None
            elif future is not None and not future.done():  # else the caller was cancelled
                future.set_exception(verdict) if isinstance(verdict, Exception) else future.set_result(verdict)
        # `_tick` must not keep the group: it would free a long batch at once, while the caller frees it in slices.
        self._current, self._group_at_tick = [], None
        self._waiting.extendleft(reversed(again))
        # After the callers that were just woken, so that what they write next is in the next group.
        self._loop.call_soon(self._hand_over)

    async def close(self) -> None:
        """Refuse new batches and wait until those that were accepted are decided."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._recovery is not None:
            while not self.idle:
                await self._abandon_if_lost(self._recovery)
        await self._idle.wait()

    def _tick(self) -> None:
        """Called regularly while there are batches: look for a group that was there already the last time."""
        self._timer = None
        if self.idle or self._closed:
            return
        self._timer = self._loop.call_later(limits.LOST_GROUP_SECONDS, self._tick)
        assert self._recovery is not None
        if self._current is self._group_at_tick and (self._rescue is None or self._rescue.done()):
            self._rescue = self._loop.create_task(self._abandon_if_lost(self._recovery))
        self._group_at_tick = self._current

    async def _abandon_if_lost(self, recovery: Recovery) -> None:
        """Give up the current group if no job works on it, and start the next one."""
        group, count = self._current, len(self._current)
        await recovery.wait_for_jobs()
        # Two iterations: in the first the job's result arrives, in the second the next group starts.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not self.idle and self._current is group and len(group) == count:
            await recovery.abandon_group()
            self.finished([CommitUnknown(_INTERRUPTED) for queued in group for _ in range(_count(queued))])

    def _hand_over(self) -> None:
        if self._current:
            return  # a call that seemed lost was only late: another one has started a group meanwhile
        group: list[Batch] = []
        operations = size = 0
        has_long = has_others = False
        while self._waiting and operations < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            queued = self._waiting[0]
            if queued.is_in_group:  # a signal's handler raised before it was removed from the queue
                self._waiting.popleft()
                continue
            if isinstance(queued, QueuedBatches):
                if has_long:
                    break
                if not queued.is_withdrawn:
                    group += queued.batches
                    operations += len(queued.batches)
                    size += queued.size
                    queued.is_in_group = True
                    self._current.append(queued)
                self._waiting.popleft()
                continue
            batch = queued.batch
            more = len(batch.checks) + len(batch.mutations)
            # A long batch (`is_long`, without a call) is a group of its own. Batches that were held back are in each
            # group: they delay no others, and the engine keeps the order of those that share a key.
            was_held_back = queued.was_held_back
            if not was_held_back and (has_long or (has_others and more > limits.LONG_BATCH_OPERATIONS)):
                break
            # A cancelled future withdraws its batch, too.
            if queued.is_withdrawn or (queued.future is not None and queued.future.done()):
                self._waiting.popleft()
                continue
            group.append(batch)
            # In this order: if a signal's handler raises in between, the group is found to be lost, with this batch.
            queued.is_in_group = True
            self._current.append(queued)
            self._waiting.popleft()
            if was_held_back:
                continue
            has_others = True
            operations += more
            has_long = more > limits.LONG_BATCH_OPERATIONS
            if operations < limits.GROUP_OPERATIONS:  # else the group is full, and summing a long batch takes long
                size += batch.size
        self.group_operations, self.group_bytes = operations, size
        if group:
            self._idle.clear()  # a signal's handler may have raised before `_queue` did it
            self.groups += 1
            self._start(group)
        else:
            self._idle.set()


def _count(queued: QueuedBatch | QueuedBatches) -> int:
    return len(queued.batches) if isinstance(queued, QueuedBatches) else 1
