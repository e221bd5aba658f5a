"""What watches cost: sets beside many of them, the event loop while another process writes, a watch of many keys."""

import asyncio
import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import keyloft
from bench.arms.keyloft_file import fill
from bench.harness.figures import Figure, Row, compare, within
from bench.harness.processes import ending, is_ready, started

_SETS = 1000
_SECONDS = 2.0


def beside_watches(folder: Path, keys: int, prefixes: int, rounds: int) -> Row:
    """Durable sets one by one in two stores; one of them has watches of other keys."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_beside_watches(Path(own), keys, prefixes, rounds))


def stalled_by_another_process(folder: Path, keys: int, rounds: int) -> Row:
    """Another process writes at full speed, one change in fifty to a watched key."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_stalled(Path(own), keys, rounds))


def large_prefix(folder: Path, stored: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_large_prefix(Path(own), stored, rounds))


@asynccontextmanager
async def _watching(kv: keyloft.Store, keys: int, prefixes: int) -> AsyncIterator[None]:
    watches = [kv.watch(("watched", number)) for number in range(keys)]
    watches += [kv.watch(prefix=("below", number)) for number in range(prefixes)]
    tasks = [asyncio.create_task(_follow(watch)) for watch in watches]
    await asyncio.sleep(0.5)  # the first states are reported
    # A collection of all that belongs to the watches would count as a stall of whichever step it meets.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(watch: keyloft.Watching) -> None:
    async for _ in watch:
        pass


async def _sets(kv: keyloft.Store) -> float:
    began = time.perf_counter()
    for number in range(_SETS):
        await kv.set(("other", number % 100), number)
    return _SETS / (time.perf_counter() - began)


async def _beside_watches(folder: Path, keys: int, prefixes: int, rounds: int) -> Row:
    async with (
        keyloft.open(folder / "with.db") as watched,
        keyloft.open(folder / "without.db") as plain,
        _watching(watched, keys, prefixes),
    ):
        pairs = [(await _sets(watched), await _sets(plain)) for _ in range(rounds + 1)][1:]
    some = Figure(f"with {keys:,} key watches and {prefixes:,} prefix watches", "/s", tuple(one for one, _ in pairs))
    none = Figure("without watches", "/s", tuple(other for _, other in pairs))
    return Row("durable sets beside unrelated watches", figures=(some, none), verdicts=(compare(some, none, 0.9),))


async def _stalled(folder: Path, keys: int, rounds: int) -> Row:
    longest: list[float] = []
    path = folder / "shared.db"
    async with keyloft.open(path) as kv, _watching(kv, keys, 0):
        for _ in range(rounds):
            process = await started(sys.executable, "-m", __name__, str(path), str(_SECONDS))
            async with ending(process):
                assert await is_ready(process)
                longest.append(await _longest_step(_SECONDS))
    stall = Figure("longest step of the event loop, its processor time", "ms", tuple(longest))
    return Row(f"{keys:,} key watches, another process writes", figures=(stall,), verdicts=(within(stall, 10),))


async def _longest_step(seconds: float) -> float:
    """In milliseconds. Processor time of this thread, so that other programs don't count."""
    end = time.monotonic() + seconds
    longest = 0.0
    while time.monotonic() < end:
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    return 1000 * longest


async def _large_prefix(folder: Path, stored: int, rounds: int) -> Row:
    seconds, memory = list[float](), list[float]()
    async with keyloft.open(folder / "large.db", durability="relaxed", sweep_every=None) as kv:
        await fill(kv, stored)
        for _ in range(rounds):
            gc.collect()
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            began = time.perf_counter()
            watch = kv.watch(prefix=())
            waiting = asyncio.ensure_future(anext(watch))
            await kv.set(("new",), 1)
            [entry] = await waiting
            seconds.append(1000 * (time.perf_counter() - began))
            assert entry.key == ("new",)
            memory.append((tracemalloc.get_traced_memory()[0] - before) / 1e6)
            tracemalloc.stop()
            await watch.aclose()
    opened = Figure("opened, and a first change reported", "ms", tuple(seconds))
    held = Figure("memory of the watch", "MB", tuple(memory))
    return Row(
        f"a prefix watch on {stored:,} entries", figures=(opened, held), verdicts=(within(opened, 50), within(held, 1))
    )


async def _write(path: str, seconds: float) -> None:
    async with keyloft.open(path, durability="relaxed") as kv:
        print("ready", flush=True)
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            number += 1
            await kv.set_many({("other", other): number for other in range(49)} | {("watched", number % 1000): number})


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], float(sys.argv[2])))
