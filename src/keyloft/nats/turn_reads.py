"""Makes the point reads of a turn together, without a task where the engine answers at once."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.nats.requests import Owner, Request
from keyloft.nats.scheduler import steps


class PendingReads(list[Request]):
    """The point reads that a turn has begun, and that are made at its end."""

    # Attributes of the class, not set for each instance: most turns have no write that needs them.
    _keys: set[Hashable] | None = None
    _known = 0
    """How many reads have their keys in `_keys`: the first write of a turn adds the keys of the reads before it."""

    def concern(self, keys: Collection[Hashable] | None) -> bool:
        """Whether a write of these keys, or of any key if there are none given, concerns one of the reads."""
        if keys is None:
            return bool(self)
        if self._keys is None:
            self._keys = set()
        self._keys.update([request.content.key for request in self[self._known :]])
        self._known = len(self)
        return not self._keys.isdisjoint(keys)

    def clear(self) -> None:
        super().clear()
        self._keys = None
        self._known = 0


class TurnReads:
    """The reads of a service that may wait for the database."""

    def __init__(
        self,
        engine: Engine,
        answer: Callable[[Sequence[Request], Sequence[Any]], None],
        stalled: Callable[[], Exception],
    ) -> None:
        """Args:
        engine: Reads the entries.
        answer: Called with requests and the entries that they ask for, or errors.
        stalled: The error of reads that were given up: their tasks are cancelled.
        """
        self._engine = engine
        self._answer = answer
        self._stalled = stalled
        self.under_way: dict[asyncio.Task[None], Sequence[Request]] = {}
        """The reads that wait for the database, by their tasks."""

    def make(self, owner: Owner, requests: Sequence[Request]) -> None:
        """Read the entries that requests of an owner are about."""
        for first in range(0, len(requests), limits.GETS_PER_READ):
            some = requests[first : first + limits.GETS_PER_READ]
            reading, wanted = self._engine.read(*[request.content for request in some]), None
            if self._engine.reads_at_once:
                # The first step of the coroutine. An engine that need not wait ends with it, so no task is made. Others
                # may use what works in a task alone, such as `asyncio.timeout`.
                try:
                    wanted = reading.send(None)
                except StopIteration as read:
                    self._answer(some, read.value)
                    continue
                except Exception as error:
                    self._answer(some, [error] * len(some))
                    continue
            for request in some:
                if request.read is None:
                    owner.begin_read(request, (request.content.key,))
            work = self._wait(some, steps(owner, reading, wanted))
            task = asyncio.get_running_loop().create_task(work)
            self.under_way[task] = some
            task.add_done_callback(self._ended)

    def make_before(self, owner: Owner, reads: PendingReads, keys: Collection[Hashable] | None) -> None:
        """Make the reads of this turn now, if a write is about to change their keys."""
        if reads and reads.concern(keys):
            self.make(owner, list(reads))
            reads.clear()

    async def _wait(self, requests: Sequence[Request], reading: Coroutine[Any, Any, Any]) -> None:
        try:
            records = await reading
        except Exception as error:
            records = [error] * len(requests)
        self._answer(requests, records)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        requests = self.under_way.pop(task)
        if task.cancelled():  # perhaps before its first step
            self._answer(requests, [self._stalled()] * len(requests))
