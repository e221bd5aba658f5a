"""A store in a process of its own, which reads laps of operations as lines and times them itself.

So no traffic between processes counts.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bench.harness import processes
from bench.harness.contest import Contestant, Operation, StoreSetup, same
from bench.harness.data import Pair
from bench.harness.race import Timed, Unavailable


class _Lap(Struct, frozen=True):
    """The process's answer."""

    took: float
    seconds: list[float]
    answers: list[Any]


class StoreProcess(Contestant):
    """A process with an open store."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def lap(self, operation: Operation, planned: list[Any], workers: int) -> Timed[Any]:
        done = await self._ask(operation, self.asks(operation, planned), workers)
        return Timed(done.answers, done.seconds, done.took)

    def seen(self, operation: Operation, answer: Any) -> Any:
        return [(tuple(key), value) for key, value in answer] if operation == "list" else answer

    async def check(self, operation: Operation, plan: Any, done: Timed[Any]) -> None:
        same([answer for answer in done.answers if answer is False], [])
        await super().check(operation, plan, done)

    async def fill(self, pairs: list[Pair]) -> None:
        done = await self._ask("fill", [pairs], 1)
        same([answer for answer in done.answers if answer is False], [])

    async def _ask(self, operation: str, asks: list[Any], workers: int) -> _Lap:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = msgspec.json.encode({"operation": operation, "asks": asks, "workers": workers})
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process ended during {operation}")
        return msgspec.json.decode(answer, type=_Lap)

    async def close(self) -> None:
        """Close its input, upon which it shuts down."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with processes.ending(self._process):
            pass


async def entered(setup: StoreSetup, *command: str, environment: Mapping[str, str] | None = None) -> StoreProcess:
    """Start a process with an empty store, and fill it."""
    process = await processes.started(*command, environment=environment)
    store = StoreProcess(process)
    try:
        if not await processes.is_ready(process):
            raise Unavailable(f"{Path(command[0]).name} did not start")
        # Deno KV takes 800 KiB per atomic write at the most.
        for pairs in setup.chunks(10 if setup.task.large else 500):
            await store.fill(pairs)
    except BaseException:
        await store.close()
        raise
    return store
