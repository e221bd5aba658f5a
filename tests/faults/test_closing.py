"""Closing decides every write, ends every watch and lets go of the file; a process that forgets it loses nothing."""

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import keyloft

from .children import child
from .open_files import files_open_in


async def test_writes_in_flight_at_aclose_are_kept_or_refused(tmp_path: Path, rng: random.Random) -> None:
    for attempt in range(20):
        path = tmp_path / f"{attempt}.db"
        kv = await keyloft.open(path)
        writing = Writing(kv, enough_after=rng.randrange(1, 300))
        tasks = [asyncio.create_task(writing.until_refused(number)) for number in range(30)]
        await writing.enough.wait()
        await kv.aclose()
        async with asyncio.timeout(60):
            refused = set(enumerate(await asyncio.gather(*tasks)))
        async with keyloft.open(path) as kv:
            kept = [{entry.key[1:] async for entry in kv.list(prefix=(side,))} for side in ("a", "b")]
        assert kept == [writing.acknowledged, writing.acknowledged]
        assert refused.isdisjoint(writing.acknowledged)


class Writing:
    """Several callers that write pairs, and what was acknowledged to them."""

    def __init__(self, kv: keyloft.Store, enough_after: int) -> None:
        self.acknowledged: set[tuple[int, int]] = set()
        self.enough = asyncio.Event()
        self._kv = kv
        self._enough_after = enough_after

    async def until_refused(self, caller: int) -> int:
        """Write on and on; returns which write was refused because the store is closed."""
        for again in itertools.count():
            try:
                await self._kv.atomic().set(("a", caller, again), 1).set(("b", caller, again), 1).commit()
            except keyloft.Closed:
                break
            self.acknowledged.add((caller, again))
            if len(self.acknowledged) >= self._enough_after:
                self.enough.set()
        return again


_USES: dict[str, Callable[[keyloft.Store], Awaitable[object]]] = {
    "get": lambda kv: kv.get(("k",)),
    "get_many": lambda kv: kv.get_many([("k",), ("l",)]),
    "set": lambda kv: kv.set(("k",), 1),
    "set_many": lambda kv: kv.set_many([(("k",), 1)]),
    "delete": lambda kv: kv.delete(("k",)),
    "touch": lambda kv: kv.touch(("k",), expire_in=1),
    "list": lambda kv: kv.list(prefix=()),
    "keys": lambda kv: kv.keys(prefix=()),
    "count": lambda kv: kv.count(()),
    "delete_range": lambda kv: kv.delete_range(()),
    "sweep": lambda kv: kv.sweep(),
    "atomic": lambda kv: kv.atomic().set(("k",), 1).commit(),
}


@pytest.mark.parametrize("use", _USES)
async def test_use_after_close_is_refused(use: str, tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "closed.db") as kv:
        await kv.set(("k",), 1)
    with pytest.raises(keyloft.Closed):
        await _USES[use](kv)


async def test_watch_after_close_is_refused(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "closed.db") as kv:
        pass
    with pytest.raises(keyloft.Closed):
        kv.watch(("k",))
    with pytest.raises(keyloft.Closed):
        kv.watch(prefix=())


async def test_list_begun_before_close_is_refused_after_it(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "closed.db") as kv:
        await kv.set_many({("k", number): number for number in range(500)})
        listing = kv.list(prefix=())
        await anext(aiter(listing))
    with pytest.raises(keyloft.Closed):
        async for _ in listing:
            pass


async def test_second_aclose_is_harmless_one_after_another_and_at_once(tmp_path: Path) -> None:
    kv = await keyloft.open(tmp_path / "closed.db")
    await kv.set(("k",), 1)
    await asyncio.gather(kv.aclose(), kv.aclose())
    await kv.aclose()
    assert not files_open_in(tmp_path)


async def watched(watch: keyloft.Watching) -> int:
    """How many changes a watch gave before it ended by itself."""
    return len([changes async for changes in watch])


async def test_aclose_ends_idle_watches(tmp_path: Path) -> None:
    kv = await keyloft.open(tmp_path / "watched.db")
    tasks = [asyncio.create_task(watched(watch)) for watch in (kv.watch(("k",)), kv.watch(prefix=("p",)))]
    await kv.set(("k",), 1)
    await kv.set(("p", 1), 1)
    await kv.aclose()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("engine", ["file", "memory"])
@pytest.mark.parametrize("on", ["key", "prefix"])
async def test_aclose_ends_watches_of_what_is_being_written(
    on: str, engine: str, tmp_path: Path, rng: random.Random
) -> None:
    for attempt in range(20):
        kv = await keyloft.open(tmp_path / f"{attempt}.db" if engine == "file" else None)
        await kv.set_many({("k", number): 0 for number in range(200)})
        watch = kv.watch(("k", 0)) if on == "key" else kv.watch(prefix=("k",))
        task = asyncio.create_task(watched(watch))
        writes = [asyncio.create_task(kv.set(("k", number), 1)) for number in range(20)]
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        await kv.aclose()
        await asyncio.gather(*writes, return_exceptions=True)
        async with asyncio.timeout(60):
            await task


async def test_failed_opening_lets_go_of_the_file(tmp_path: Path) -> None:
    """At once, not when the garbage collector runs."""
    path = tmp_path / "no.db"
    path.write_bytes(b"no database" * 1000)
    gc.disable()
    try:
        for url in (str(path), f"sqlite:///{path}?mode=ro"):
            with pytest.raises(keyloft.NotADatabase) as failed:
                await keyloft.open(url)
            assert files_open_in(tmp_path) == [], failed.value
            with pytest.raises(keyloft.NotADatabase) as failed:
                await asyncio.to_thread(keyloft.open_sync, url)
            assert files_open_in(tmp_path) == [], failed.value
    finally:
        gc.enable()


async def test_aclose_with_a_long_read_under_way_lets_go_of_the_file(tmp_path: Path) -> None:
    for attempt in range(20):
        kv = await keyloft.open(tmp_path / f"{attempt}.db")
        await kv.set_many({("k", number): number for number in range(2000)})
        reading = asyncio.create_task(kv.count(()))
        for _ in range(attempt % 4):
            await asyncio.sleep(0)
        await kv.aclose()
        [counted] = await asyncio.gather(reading, return_exceptions=True)
        assert counted == 2000 or isinstance(counted, keyloft.Closed)
        assert not files_open_in(tmp_path)


@pytest.mark.parametrize("how", ["quiet", "writing", "reading", "watching"])
@pytest.mark.slow
async def test_process_that_forgets_to_close_ends_promptly_and_loses_nothing_acknowledged(
    how: str, tmp_path: Path
) -> None:
    for attempt in range(3):
        path = tmp_path / f"{attempt}.db"
        began = time.monotonic()
        async with child("forgetful", path, how) as process:
            acknowledged = {int(line) async for line in process.lines()}
            assert await process.ended() == (0, "")
        assert time.monotonic() - began < 10
        assert len(acknowledged) >= 100
        async with keyloft.open(path) as kv:
            kept = {entry.value async for entry in kv.list(prefix=("k",))}
        assert acknowledged <= kept


async def test_finalizers_that_use_and_close_stores_while_the_interpreter_ends_wait_for_no_thread_it_has_stopped(
    tmp_path: Path,
) -> None:
    async with child("finalized", tmp_path / "a.db") as process:
        printed = [line async for line in process.lines()]
        assert await process.ended() == (0, "")
    assert printed == [
        "get 1",
        "set True",
        "first write True",
        "list [3]",
        "event loop CLOSED",
        *["close None"] * 6,
        "closed CLOSED",
        "warns False",
    ]
