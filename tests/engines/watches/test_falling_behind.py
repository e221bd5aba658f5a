"""A watch that is slow, cancelled and overtaken by the trimming of the log still ends with the current state."""

import asyncio
import random
from pathlib import Path

import pytest

import keyloft
from keyloft import HistoryGone, ManualClock, Store, limits
from keyloft.core.keys import TupleKey

pytestmark = pytest.mark.slow

_KEYS = 60
_STEPS = 150


@pytest.fixture(autouse=True, params=[limits.WATCH_REPORT_BYTES, 4], ids=["whole", "in parts"])
def _small_slices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every watch falls behind, and reads the log in many slices."""
    for name, number in (
        ("WATCH_REPORT_BYTES", request.param),
        ("WATCH_PENDING_KEYS", 20),
        ("WATCH_DUE_KEYS", 5),
        ("LOG_SLICE_ROWS", 3),
        ("LOG_SLICE_BYTES", 64),
        ("MEMORY_SLICE_CHANGES", 4),
        ("TRIM_EVERY", 8),
        ("WATCHES_WOKEN_AT_ONCE", 2),
    ):
        monkeypatch.setattr(limits, name, number)


async def state_of(kv: Store) -> dict[TupleKey, int | None]:
    return {entry.key: entry.versionstamp for entry in await kv.list(prefix=("w",))}


class SlowReader:
    """Watches and lists, gives up waiting now and then, and starts again when the log has forgotten too much."""

    def __init__(self, kv: Store, chance: random.Random) -> None:
        self._kv = kv
        self._chance = chance
        self.known: dict[TupleKey, int | None] = {}
        self.restarts = 0

    async def follow(self) -> None:
        while True:
            async with self._kv.watch(prefix=("w",)) as watch:
                self.known = await state_of(self._kv)
                try:
                    while True:
                        await self._step(watch)
                except HistoryGone:
                    self.restarts += 1

    async def _step(self, watch: keyloft.Watching) -> None:
        seconds = self._chance.choice((None, None, 0, 0.0001, 0.001))
        try:
            async with asyncio.timeout(seconds):
                changed = await watch.__anext__()
        except TimeoutError:
            return
        for entry in changed:
            if entry.exists:
                self.known[entry.key] = entry.versionstamp
            else:
                self.known.pop(entry.key, None)
        if self._chance.random() < 0.2:
            await asyncio.sleep(self._chance.random() / 500)


async def churn(stores: list[Store], clock: ManualClock, chance: random.Random) -> None:
    for number in range(_STEPS):
        kv = chance.choice(stores)
        key, expire_in = ("w", chance.randrange(_KEYS)), chance.choice((None, 0.5, 1))
        match chance.randrange(8):
            case 0 | 1 | 2:
                await kv.set(key, number, expire_in=expire_in)
            case 3:
                await kv.delete(key)
            case 4:
                await kv.touch(key, expire_in=expire_in)
            case 5:
                many = {("w", chance.randrange(_KEYS)): number for _ in range(30)}
                await kv.set_many(many, expire_in=expire_in)
            case 6:
                clock.advance(chance.choice((0.1, 0.5, 1)))
            case _:
                await kv.sweep()
        if chance.random() < 0.3:
            await asyncio.sleep(0)


async def follow_and_compare(paths: list[Path | None], seed: int, history_mib: float) -> int:
    """Returns how often the reader had to start again."""
    chance, clock = random.Random(seed), ManualClock()
    stores = [
        await keyloft.open(path, clock=clock, sweep_every=None, history_mib=history_mib, durability="relaxed")
        for path in paths
    ]
    reader = SlowReader(stores[0], chance)
    following = asyncio.create_task(reader.follow())
    await asyncio.sleep(0)
    await churn(stores, clock, chance)
    async with asyncio.timeout(60):
        while reader.known != await state_of(stores[0]):
            await asyncio.sleep(0.005)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for store in stores:
        await store.aclose()
    return reader.restarts


@pytest.mark.parametrize("history_mib", [limits.HISTORY_MIB, 0.001])
async def test_in_memory(history_mib: float) -> None:
    restarts = [await follow_and_compare([None], seed, history_mib) for seed in range(20)]
    assert any(restarts) == (history_mib < 1)


@pytest.mark.parametrize("history_mib", [limits.HISTORY_MIB, 0.001])
async def test_two_stores_on_a_file(tmp_path: Path, history_mib: float) -> None:
    paths = [tmp_path / f"{seed}.db" for seed in range(8)]
    restarts = [await follow_and_compare([path] * 2, seed, history_mib) for seed, path in enumerate(paths)]
    assert history_mib < 1 or not any(restarts)
