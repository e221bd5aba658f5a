"""How long a sweep takes in a large store, and how long concurrent writers of a file wait meanwhile."""

import asyncio
import random
import tempfile
import time
from pathlib import Path

import keyloft
from bench.arms.keyloft_file import fill
from bench.harness.contest import same
from bench.harness.data import fresh_pair, key_of, value_of
from bench.harness.figures import Figure, Row, percentile, within
from keyloft.plugins import BotDatabase
from tools import postgres

WRITERS = 16
_EXPIRED_ROWS = """
INSERT INTO plugin_kv_storage (plugin_name, key, value_json, expires_at)
SELECT 'expired', md5('{round} ' || key), '"' || repeat('x', 98) || '"', now() - interval '1 minute'
FROM generate_series(1, {count}) AS key
"""
"""In no order, as keys of people, sessions and messages are."""
_CHUNK = 2000
_A_WHILE = 1.0


def sweeping(folder: Path, stored: int, expired: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return asyncio.run(_sweeping(Path(own), stored, expired, rounds))


def cleaning_up(url: str, expired: int, rounds: int) -> Row:
    """The clean-up of plugins' entries in a database on PostgreSQL without other writers."""
    found = Figure("clean-up, nothing else going on", "s", tuple(asyncio.run(_cleaning_up(url, expired, rounds))))
    return Row(f"clean-up of {expired:,} expired entries of plugins", figures=(found,), verdicts=(within(found, 0.2),))


async def _cleaning_up(url: str, expired: int, rounds: int) -> list[float]:
    seconds = []
    db = BotDatabase(url)
    for number in range(rounds + 1):  # the first one warms up
        postgres.query(url, _EXPIRED_ROWS.format(round=number, count=expired))
        postgres.query(url, "CHECKPOINT")  # its work is not the clean-up's
        began = time.perf_counter()
        same(await db.kv_cleanup_expired(), expired)
        seconds.append(time.perf_counter() - began)
    await db.close()
    return seconds[1:]


async def _sweeping(folder: Path, stored: int, expired: int, rounds: int) -> Row:
    clock = keyloft.ManualClock()
    async with keyloft.open(folder / "sweep.db", clock=clock, sweep_every=None) as kv:
        await fill(kv, stored)
        trial = _Trial(kv, clock, stored, expired)
        alone, busy, calm_p99, busy_p99, calm_longest, busy_longest = [], [], [], [], [], []
        for _ in range(rounds + 1):
            alone.append(await trial.swept_alone())
            before = await trial.writes_for(samples=2000)
            seconds, meanwhile = await trial.swept_while_writing()
            # At least as many samples without a sweep: half of them before it, half after it.
            after = await trial.writes_for(samples=max(2000, len(meanwhile) - len(before)))
            busy.append(seconds)
            busy_p99.append(percentile(meanwhile, 99) * 1000)
            calm_p99.append(percentile(before + after, 99) * 1000)
            busy_longest.append(max(meanwhile) * 1000)
            calm_longest.append(max(before + after) * 1000)
    seconds_alone = Figure("sweep, nothing else going on", "s", tuple(alone[1:]))
    seconds_busy = Figure(f"sweep, {WRITERS} writers meanwhile", "s", tuple(busy[1:]))
    calm = Figure(f"p99 of a set, {WRITERS} writers, no sweep", "ms", tuple(calm_p99[1:]))
    stirred = Figure(f"p99 of a set, {WRITERS} writers, sweep", "ms", tuple(busy_p99[1:]))
    # A stall that is too rare for the p99 shows here.
    longest = (
        Figure("longest set, no sweep", "ms", tuple(calm_longest[1:])),
        Figure("longest set, sweep", "ms", tuple(busy_longest[1:])),
    )
    ratios = tuple(one / other for one, other in zip(stirred.rounds, calm.rounds, strict=True))
    return Row(
        f"sweep of {expired:,} expired entries among {stored:,}",
        figures=(seconds_alone, seconds_busy, calm, stirred, *longest),
        verdicts=(
            within(seconds_alone, 0.2),
            within(seconds_busy, 0.5),
            within(Figure("p99 with : without a sweep", "x", ratios), 3),
        ),
    )


class _Trial:
    def __init__(self, kv: keyloft.Store, clock: keyloft.ManualClock, stored: int, expired: int) -> None:
        self._kv = kv
        self._clock = clock
        self._stored = stored
        self._expired = expired
        self._chances = random.Random(3)
        self._due: set[int] = set()

    async def swept_alone(self) -> float:
        await self._let_expire()
        began = time.perf_counter()
        same(await self._kv.sweep(), self._expired)
        seconds = time.perf_counter() - began
        await self._restore()
        return seconds

    async def swept_while_writing(self) -> tuple[float, list[float]]:
        await self._let_expire()
        latencies: list[float] = []
        over = asyncio.Event()
        writers = [asyncio.create_task(self._write(latencies, over)) for _ in range(WRITERS)]
        await asyncio.sleep(0.05)
        latencies.clear()
        began = time.perf_counter()
        same(await self._kv.sweep(), self._expired)
        seconds = time.perf_counter() - began
        over.set()
        await asyncio.gather(*writers)
        await self._restore()
        return seconds, latencies

    async def writes_for(self, samples: int) -> list[float]:
        latencies: list[float] = []
        over = asyncio.Event()
        await asyncio.gather(*[self._write(latencies, over, samples) for _ in range(WRITERS)])
        return latencies

    async def _write(self, latencies: list[float], over: asyncio.Event, samples: int | None = None) -> None:
        while not over.is_set() and (samples is None or len(latencies) < samples):
            index = self._chances.randrange(self._stored)
            if index in self._due:
                continue  # a write would bring it back
            key, value = fresh_pair(index)
            began = time.perf_counter()
            await self._kv.set(key, value)
            latencies.append(time.perf_counter() - began)

    async def _let_expire(self) -> None:
        """Let entries expire that are spread at random over the keys and over the pages of the file."""
        self._due = set(self._chances.sample(range(self._stored), self._expired))
        due = list(self._due)
        for first in range(0, len(due), _CHUNK):
            pairs = [fresh_pair(index) for index in due[first : first + _CHUNK]]
            await self._kv.set_many(pairs, expire_in=1)
        self._clock.advance(2)
        # Let the background work of these writes end, a checkpoint of the write-ahead log: it is not the sweep's.
        await asyncio.sleep(_A_WHILE)

    async def _restore(self) -> None:
        due = list(self._due)
        for first in range(0, len(due), _CHUNK):
            await self._kv.set_many([(key_of(index), value_of(index)) for index in due[first : first + _CHUNK]])
        self._due = set()
