"""Makes the point reads of a turn together, without a task where the entries are at hand."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Record
from keyloft.nats.requests import Owner, Request
from keyloft.nats.turns import steps


class TurnReads:
    """The reads of a service that may wait for the database."""

    def __init__(
        self,
        engine: Engine,
        answer: Callable[[Owner, Sequence[Request], Sequence[Record | None]], None],
        fail: Callable[[Sequence[Request], Exception | None], None],
    ) -> None:
        """Args:
        engine: Reads the entries.
        answer: Called with requests of an owner and the entries that they ask for.
        fail: Called with requests that could not be read, and the error; None if they were given up.
        """
        self._engine = engine
        self._answer = answer
        self._fail = fail
        self._under_way: dict[asyncio.Task[None], Sequence[Request]] = {}

    def make(self, owner: Owner, requests: Sequence[Request]) -> None:
        """Read the entries that requests of an owner are about."""
        for first in range(0, len(requests), limits.GETS_PER_READ):
            some = requests[first : first + limits.GETS_PER_READ]
            reading = self._engine.read(*[request.content for request in some])
            try:
                wanted = reading.send(None)
            except StopIteration as read:
                self._answer(owner, some, read.value)
            except Exception as error:
                self._fail(some, error)
            else:
                work = self._wait(owner, some, steps(owner, reading, wanted))
                task = asyncio.get_running_loop().create_task(work)
                self._under_way[task] = some
                task.add_done_callback(self._ended)

    async def _wait(self, owner: Owner, requests: Sequence[Request], reading: Coroutine[Any, Any, Any]) -> None:
        try:
            records = await reading
        except Exception as error:
            self._fail(requests, error)
        else:
            self._answer(owner, requests, records)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        requests = self._under_way.pop(task)
        if task.cancelled():  # perhaps before its first step
            self._fail(requests, None)

    def give_up_late(self, late: float) -> None:
        """Give up what waits for the database since before a time."""
        for task in [task for task, requests in self._under_way.items() if requests[0].arrived <= late]:
            task.cancel()
