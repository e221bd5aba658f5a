"""Starts Python processes for tests that need a second one, exchanges lines with them, and ends them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_LONGEST_SECONDS = 60.0


class ChildProcess:
    """A process that the test started. Each call here waits for a minute at most."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """The next line that it prints, without the newline; empty once it has ended, or if its end cut the line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_LONGEST_SECONDS):
            line = await self._process.stdout.readline()
        return line[:-1].decode() if line.endswith(b"\n") else ""

    async def lines(self) -> AsyncIterator[str]:
        while line := await self.line():
            yield line

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def kill(self) -> None:
        """Send SIGKILL: it runs not one more instruction."""
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        assert self._process.stderr is not None
        async with asyncio.timeout(_LONGEST_SECONDS):
            errors = await self._process.stderr.read()
            return await self._process.wait(), errors.decode()


@asynccontextmanager
async def child(module: str, *arguments: str | Path) -> AsyncIterator[ChildProcess]:
    """Run a module of this package in an interpreter of its own; it is killed if it outlives the block."""
    command = [sys.executable, "-W", "error", "-m", f"{__package__}.{module}", *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield ChildProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        # Reads the pipes to their end, too: a transport left open would warn when it is collected.
        await process.communicate()
