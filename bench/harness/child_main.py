"""What the serving children of the NATS benchmark share: a loop, a sign of life, and an end with their parent's.

It imports nothing but what each of them needs anyway: one of them is weighed.
"""

import asyncio
import json
import os
import sys
from contextlib import AbstractAsyncContextManager, suppress

import uvloop

from bench.harness.processes import READY


def run(serving: AbstractAsyncContextManager[None]) -> None:
    """Serve until the parent closes our standard input, as its death does too; then print which packages are loaded."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_left(serving))


async def _until_left(serving: AbstractAsyncContextManager[None]) -> None:
    left = asyncio.Event()
    async with serving:
        # Nobody writes to it: that it can be read means that it has ended.
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), left.set)
        print(READY, flush=True)
        await left.wait()
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        # A parent that has died does not listen any more.
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), f"{json.dumps(_packages())}\n".encode())


def _packages() -> list[str]:
    """The packages that are loaded and don't come with Python."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("_") and "site-packages" in (getattr(module, "__file__", None) or ""):
            found.add(name.partition(".")[0])
    return sorted(found)
