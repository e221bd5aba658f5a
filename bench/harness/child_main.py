"""Runs a service in a child process until the parent closes its input.

It imports nothing but what each child needs anyway, because the memory of one of them is measured.
"""

import asyncio
import json
import os
import sys
from contextlib import AbstractAsyncContextManager, suppress

import uvloop

from bench.harness.processes import READY


def run(serving: AbstractAsyncContextManager[None]) -> None:
    """Serve until standard input is closed, which also happens if the parent dies; then print the imported packages."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_left(serving))


async def _until_left(serving: AbstractAsyncContextManager[None]) -> None:
    left = asyncio.Event()
    async with serving:
        # The parent never writes to it, so it becomes readable only when it is closed.
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), left.set)
        print(READY, flush=True)
        await left.wait()
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        # A parent that has died reads no more.
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), f"{json.dumps(_packages())}\n".encode())


def _packages() -> list[str]:
    """Imported packages that are not part of Python."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("_") and "site-packages" in (getattr(module, "__file__", None) or ""):
            found.add(name.partition(".")[0])
    return sorted(found)
