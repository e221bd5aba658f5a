"""Starts Python processes for tests that need a second one, exchanges lines with them, and ends them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from tests.support.fork_server import ForkedProcess

_ROOT = Path(__file__).parents[3]
_LONGEST_SECONDS = 60.0


class ChildProcess:
    """A process that the test started. Each call here waits for a minute at most."""

    def __init__(
        self, process: ForkedProcess, its_input: int, printed: asyncio.StreamReader, errors: asyncio.StreamReader
    ) -> None:
        self._process = process
        self._its_input, self._printed, self._errors = its_input, printed, errors

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """The next line that it prints, without the newline; empty once it has ended, or if its end cut the line."""
        async with asyncio.timeout(_LONGEST_SECONDS):
            line = await self._printed.readline()
        return line[:-1].decode() if line.endswith(b"\n") else ""

    async def lines(self) -> AsyncIterator[str]:
        while line := await self.line():
            yield line

    def tell(self, line: str) -> None:
        os.write(self._its_input, line.encode() + b"\n")

    def kill(self) -> None:
        """Send SIGKILL: it runs not one more instruction."""
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        async with asyncio.timeout(_LONGEST_SECONDS):
            errors = await self._errors.read()
            return await asyncio.to_thread(self._process.wait, _LONGEST_SECONDS), errors.decode()


@asynccontextmanager
async def child(module: str, *arguments: str | Path) -> AsyncIterator[ChildProcess]:
    """Run a module of this package in a process of its own; it is killed if it outlives the block."""
    with ExitStack() as ends:
        pipes = [os.pipe() for _ in range(3)]
        (stdin, its_input), (printed, stdout), (errors, stderr) = pipes
        process = ForkedProcess(
            ["-m", f"{__package__}.{module}", *map(str, arguments)],
            cwd=_ROOT,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            finalizes=True,
        )
        ends.callback(os.close, its_input)
        for end in (stdin, stdout, stderr):
            os.close(end)
        readers = []
        for end in (printed, errors):
            readers.append(asyncio.StreamReader())
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(readers[-1]), os.fdopen(end, "rb", buffering=0)
            )
            ends.callback(transport.close)
        try:
            yield ChildProcess(process, its_input, *readers)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, _LONGEST_SECONDS)
