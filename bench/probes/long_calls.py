"""How long calls of very many keys hold the event loop: other tasks wait for that time."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import keyloft
from bench.arms.keyloft_file import fill
from bench.harness.data import key_of
from bench.harness.figures import Figure, Row, within


def holding_the_loop(folder: Path, stored: int, rounds: int) -> Row:
    """One call for all the keys, with Python's garbage collector on."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_holding(Path(own), stored, rounds))


async def _holding(folder: Path, stored: int, rounds: int) -> Row:
    gets, deletes = list[float](), list[float]()
    async with keyloft.open(folder / "long.db", durability="relaxed", sweep_every=None) as kv:
        keys = [key_of(number) for number in range(stored)]
        for _ in range(rounds):
            await fill(kv, stored)
            gets.append(await _longest_step(kv.get_many(keys)))
            deletes.append(await _longest_step(kv.delete_many(keys)))
    figures = tuple(
        Figure(f"{call} of {stored:,} keys, longest step of the event loop, its processor time", "ms", tuple(found))
        for call, found in (("get_many", gets), ("delete_many", deletes))
    )
    return Row("calls of very many keys", figures=figures, verdicts=tuple(within(figure, 10) for figure in figures))


async def _longest_step(call: Awaitable[object]) -> float:
    """In milliseconds. Processor time of this thread, so that other programs don't count."""
    calling = asyncio.ensure_future(call)
    longest = 0.0
    while not calling.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    await calling
    return 1000 * longest
