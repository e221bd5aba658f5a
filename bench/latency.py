"""How long one of 64 concurrent durable sets waits."""

import asyncio
import random
import tempfile
import time
from pathlib import Path

import keyloft
from bench import ours, plans
from bench.data import Pair
from bench.harness import Figure, Row, percentile

WORKERS = 64


def waiting(folder: Path, stored: int, operations: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_waiting(Path(own), stored, operations, rounds))


async def _waiting(folder: Path, stored: int, operations: int, rounds: int) -> Row:
    kv = await ours.opened_to_write(stored)(folder)
    plan = plans.writes(stored, plans.as_tuple)
    chances = random.Random(2)
    p50, p99 = [], []
    for _ in range(rounds + 1):
        pairs = plan(chances, operations)
        versions: list[int] = []
        latencies: list[float] = []
        workers = [_work(kv, pairs[first::WORKERS], versions, latencies) for first in range(WORKERS)]
        await asyncio.gather(*workers)
        await ours.stored_now(kv, pairs, versions)
        p50.append(percentile(latencies, 50) * 1000)
        p99.append(percentile(latencies, 99) * 1000)
    await kv.aclose()
    figures = (Figure("keyloft p50", "ms", tuple(p50[1:])), Figure("keyloft p99", "ms", tuple(p99[1:])))
    return Row(f"how long a set waits, {WORKERS} concurrent, synchronous=FULL", figures)


async def _work(kv: keyloft.Store, pairs: list[Pair], versions: list[int], latencies: list[float]) -> None:
    for key, value in pairs:
        began = time.perf_counter()
        version = await kv.set(key, value)
        latencies.append(time.perf_counter() - began)
        versions.append(version)
