"""How long a writer waits while another client of the same PostgreSQL database is stopped.

`python -m bench.probes.stopped URL` is that client: it writes, also to a key that the writer uses.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import keyloft
from bench.harness import child_main
from bench.harness.children import child
from bench.harness.figures import Figure, Row, within

_TASKS = 8
_MOST_MILLISECONDS = 1500.0


def beside_a_stopped_client(url: str, stops: int, seconds: float) -> Row:
    """Stops a client again and again, for so many seconds, in whatever it does at that moment."""
    waits = asyncio.run(_longest_waits(url, stops, seconds))
    longest = Figure(f"longest wait, {stops} stops", "ms", (max(waits),))
    each = Figure("longest wait of each stop", "ms", tuple(waits))
    title = f"a sum and a set while another client is stopped for {seconds:g} s"
    return Row(title, figures=(longest, each), verdicts=(within(longest, _MOST_MILLISECONDS),))


async def _longest_waits(url: str, stops: int, seconds: float) -> list[float]:
    chances, waits = random.Random(1), list[float]()
    async with keyloft.open(url, sweep_every=None) as kv, child(__name__, url) as client:
        for _ in range(stops):
            await asyncio.sleep(chances.uniform(0.01, 0.05))
            os.kill(client.pid, signal.SIGSTOP)
            try:
                waits.append(1000 * await _longest_wait(kv, seconds))
            finally:
                os.kill(client.pid, signal.SIGCONT)
    return waits


async def _longest_wait(kv: keyloft.Store, seconds: float) -> float:
    longest, end = 0.0, time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        await kv.atomic().sum(("own",), 1).sum(("shared",), 1).commit()
        await kv.set(("plain",), 1)
        longest = max(longest, time.monotonic() - began)
    return longest


@asynccontextmanager
async def _writing(url: str) -> AsyncIterator[None]:
    async with keyloft.open(url, sweep_every=None) as kv:

        async def write(number: int) -> None:
            while True:
                await kv.atomic().sum(("other", number), 1).sum(("shared",), 1).commit()

        tasks = [asyncio.create_task(write(number)) for number in range(_TASKS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    child_main.run(_writing(sys.argv[1]))
