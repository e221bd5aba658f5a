"""Starts Python modules as serving processes, and reads their CPU time and memory."""

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
        """Packages that it had imported; known once it has ended."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time of all its threads in nanosecond resolution: clock ticks are too coarse for short rounds."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def resident_megabytes(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024

    async def end(self) -> None:
        """Close its input, upon which it shuts down."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        async with processes.ending(self._process):
            printed = (await self._process.stdout.read()).decode().splitlines()
            # A process that ends before it was ready prints the ready line last.
            if printed and printed[-1] != processes.READY:
                self.packages = msgspec.json.decode(printed[-1], type=list[str])


@asynccontextmanager
async def child(module: str, *arguments: object) -> AsyncIterator[Child]:
    """Run a module as a process for as long as the block lasts; it ends with this process, too."""
    process = await processes.started(sys.executable, "-m", module, *map(str, arguments))
    served = Child(process)
    try:
        if not await processes.is_ready(process):
            raise RuntimeError(f"{module} did not start")
        yield served
    finally:
        await served.end()
