"""A caller that gives up never leaves half a write, never harms another caller, and never stops the store."""

import asyncio
import random
import threading
from pathlib import Path

import apsw
import pytest

import keyloft

from .open_files import files_open_in


async def pause(iterations: int) -> None:
    """Let this many iterations of the event loop pass."""
    for _ in range(iterations):
        await asyncio.sleep(0)


async def test_cancelled_writes_are_made_whole_or_not_at_all_and_the_writer_goes_on(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "cancelled.db"
    acknowledged: dict[int, int] = {}
    outcomes = {"made": 0, "cancelled": 0}

    async def write_pair(kv: keyloft.Store, number: int) -> None:
        atomic = kv.atomic().set(("left", number), number).set(("right", number), number).sum(("pairs",), 1)
        done = await atomic.commit()
        assert done.versionstamp is not None
        acknowledged[number] = done.versionstamp

    async with keyloft.open(path) as kv:
        number = 0
        for _ in range(100):
            tasks = []
            for _ in range(rng.randrange(1, 12)):
                tasks.append(asyncio.create_task(write_pair(kv, number)))
                number += 1
            # Never begun, waiting for the next group, handed over, under way on the disk, or done: as chance has it.
            await pause(rng.randrange(4))
            for task in tasks:
                if rng.random() < 0.6:
                    task.cancel()
                await pause(rng.randrange(2))
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if result is None:
                    outcomes["made"] += 1
                else:
                    assert isinstance(result, asyncio.CancelledError)
                    outcomes["cancelled"] += 1
        async with asyncio.timeout(60):
            newest = await kv.set(("later",), 1)
        assert newest > max(acknowledged.values())
    assert min(outcomes.values()) > 50, outcomes

    async with keyloft.open(path) as kv:
        left = {entry.key[1]: entry.versionstamp async for entry in kv.list(prefix=("left",))}
        right = {entry.key[1]: entry.versionstamp async for entry in kv.list(prefix=("right",))}
        pairs = (await kv.get(("pairs",))).value
    assert left == right
    assert pairs == len(left), "a write was made twice, or in part"
    assert acknowledged.items() <= left.items()


async def test_write_cancelled_before_it_is_handed_over_is_not_made(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "cancelled.db") as kv:
        task = asyncio.create_task(kv.set(("k",), 1))
        await pause(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await kv.set(("later",), 1)
        assert not (await kv.get(("k",))).exists


async def test_store_closes_even_if_its_aclose_is_cancelled(tmp_path: Path, rng: random.Random) -> None:
    for attempt in range(10):
        path = tmp_path / f"{attempt}.db"
        kv = await keyloft.open(path)
        writes = [asyncio.create_task(kv.set(("k", number), number)) for number in range(50)]
        await pause(2)
        closing = asyncio.create_task(kv.aclose())
        await pause(rng.randrange(1, 6))
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        with pytest.raises(keyloft.Closed):
            await kv.get(("k", 0))
        async with asyncio.timeout(60):
            await kv.aclose()
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert not files_open_in(tmp_path)
        async with keyloft.open(path) as kv:
            for number, result in enumerate(results):
                assert (await kv.get(("k", number))).exists == isinstance(result, int), result


async def test_cancelled_reads_of_any_length_leave_the_store_usable(tmp_path: Path, rng: random.Random) -> None:
    async with keyloft.open(tmp_path / "read.db") as kv:
        await kv.set_many({("k", number): number for number in range(3000)})

        async def listed() -> int:
            return len([entry async for entry in kv.list(prefix=())])

        for _ in range(30):
            tasks = [asyncio.create_task(listed()), asyncio.create_task(kv.count(()))]
            await pause(rng.randrange(6))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await kv.count(()) == 3000
        assert await listed() == 3000
        await kv.set(("k", 0), 1)
    assert not files_open_in(tmp_path)


async def test_cancelled_opening_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "held.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
    rival = apsw.Connection(str(path))
    rival.execute("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE").fetchall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await keyloft.open(path)
    rival.close()
    for thread in threading.enumerate():
        if thread.name == f"keyloft writer of {path}":
            await asyncio.to_thread(thread.join, 5)
    assert not files_open_in(tmp_path)
    async with asyncio.timeout(60), keyloft.open(path) as kv:
        assert (await kv.get(("k",))).value == 1
