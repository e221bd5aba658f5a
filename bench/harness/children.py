"""Starts the processes that serve, and reads off what they cost."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bench.harness import processes


class Child:
    """A process that serves."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.packages: list[str] = []
        """What it had loaded; known once it was told to end."""

    def cpu_seconds(self) -> float:
        """What all its threads have used up, to the nanosecond: clock ticks are too coarse for short rounds."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def resident_megabytes(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024

    async def end(self) -> None:
        """Close its input, which ends it in good order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        async with processes.ending(self._process):
            told = (await self._process.stdout.read()).decode().splitlines()
            # One that is told to end before it was ready says so only now.
            if told and told[-1] != processes.READY:
                self.packages = msgspec.json.decode(told[-1], type=list[str])


@asynccontextmanager
async def child(module: str, *arguments: object) -> AsyncIterator[Child]:
    """A module run as a process of its own, for as long as the block lasts and no longer than we live."""
    process = await processes.started(sys.executable, "-m", module, *map(str, arguments))
    served = Child(process)
    try:
        if not await processes.is_ready(process):
            raise RuntimeError(f"{module} did not start")
        yield served
    finally:
        await served.end()
