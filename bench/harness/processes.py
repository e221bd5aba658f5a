"""Starts the processes that take part, and sees to it that none outlives the benchmark."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

READY = "ready"
"""What a process says once it can be asked."""

_READY_SECONDS = 120.0
_GRACE_SECONDS = 10.0
_LONGEST_LINE_BYTES = 256 * 1024 * 1024


async def started(*command: str) -> asyncio.subprocess.Process:
    """A process that ends when its input is closed, as our death does too."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE_BYTES,
        # Ctrl-C in a terminal reaches a whole session: the children's turn comes after the clients'.
        start_new_session=True,
    )


async def is_ready(process: asyncio.subprocess.Process) -> bool:
    """Whether it says so, rather than end."""
    assert process.stdout is not None
    async with asyncio.timeout(_READY_SECONDS):
        return (await process.stdout.readline()).decode().strip() == READY


@asynccontextmanager
async def ending(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """A process that was told to end has ended after this block; one that does not heed it is killed."""
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            yield
            await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
