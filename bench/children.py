"""Starts the processes that serve, and reads off what they cost."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from bench.nats_child import READY

_READY_SECONDS = 120.0
_GRACE_SECONDS = 10.0


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
        """Close its input, which ends it in good order; one that does not heed this is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                told = (await self._process.stdout.read()).decode().splitlines()
                # One that is told to end before it was ready says so only now.
                if told and told[-1] != READY:
                    self.packages = msgspec.json.decode(told[-1], type=list[str])
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()


@asynccontextmanager
async def child(module: str, *arguments: object) -> AsyncIterator[Child]:
    """A module run as a process of its own, for as long as the block lasts and no longer than we live."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C in a terminal reaches a whole session: the children's turn comes after the clients'.
        start_new_session=True,
    )
    assert process.stdout is not None
    started = Child(process)
    try:
        async with asyncio.timeout(_READY_SECONDS):
            said = await process.stdout.readline()
        if said.decode().strip() != READY:
            raise RuntimeError(f"{module} did not start")
        yield started
    finally:
        await started.end()
