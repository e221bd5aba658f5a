"""Starts processes and ends them, so that none outlives the benchmark."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

READY = "ready"
"""The line that a process prints once it can serve."""

_READY_SECONDS = 120.0
_GRACE_SECONDS = 10.0
_LONGEST_LINE_BYTES = 256 * 1024 * 1024


async def started(*command: str, environment: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """Start a process that ends when its input is closed, which also happens if this process dies.

    Args:
        command: The program and its arguments.
        environment: Its environment, instead of this process's.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE_BYTES,
        env=environment,
        # Ctrl-C in a terminal reaches a whole session. Children must outlive their clients, so they get another one.
        start_new_session=True,
    )


async def is_ready(process: asyncio.subprocess.Process) -> bool:
    """Whether it printed the ready line, rather than ended."""
    assert process.stdout is not None
    async with asyncio.timeout(_READY_SECONDS):
        return (await process.stdout.readline()).decode().strip() == READY


@asynccontextmanager
async def ending(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Wait after this block until the process has ended; kill it if it does not end in time."""
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            yield
            await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
