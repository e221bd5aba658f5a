"""Makes the point reads of a turn together, without a task where the engine answers at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.nats.requests import Owner, Request
from keyloft.nats.turns import steps


class TurnReads:
    """The reads of a service that may wait for the database."""

    def __init__(
        self,
        engine: Engine,
        answer: Callable[[Owner, Sequence[Request], Sequence[Any]], None],
        stalled: Callable[[], Exception],
    ) -> None:
        """Args:
        engine: Reads the entries.
        answer: Called with requests of an owner and the entries that they ask for, or errors.
        stalled: The error of reads that were given up: their tasks are cancelled.
        """
        self._engine = engine
        self._answer = answer
        self._stalled = stalled
        self.under_way: dict[asyncio.Task[None], Sequence[Request]] = {}
        """Those that wait for the database, by their tasks."""

    def make(self, owner: Owner, requests: Sequence[Request]) -> None:
        """Read the entries that requests of an owner are about."""
        for first in range(0, len(requests), limits.GETS_PER_READ):
            some = requests[first : first + limits.GETS_PER_READ]
            reading = self._engine.read(*[request.content for request in some])
            # The first step of the coroutine. An engine that need not wait ends with it, so no task is made.
            try:
                wanted = reading.send(None)
            except StopIteration as read:
                self._answer(owner, some, read.value)
            except Exception as error:
                self._answer(owner, some, [error] * len(some))
            else:
                work = self._wait(owner, some, steps(owner, reading, wanted))
                task = asyncio.get_running_loop().create_task(work)
                self.under_way[task] = some
                task.add_done_callback(self._ended)

    async def _wait(self, owner: Owner, requests: Sequence[Request], reading: Coroutine[Any, Any, Any]) -> None:
        try:
            records = await reading
        except Exception as error:
            records = [error] * len(requests)
        self._answer(owner, requests, records)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        requests = self.under_way.pop(task)
        if task.cancelled():  # perhaps before its first step
            self._answer(requests[0].owner, requests, [self._stalled()] * len(requests))
