"""What follows the change log misses nothing while writers are killed, stopped and continued."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

import keyloft
from keyloft import ClockSetBack, ManualClock, Store

from .children import ChildProcess, child

pytestmark = pytest.mark.slow


class LogFollower:
    """Collects what a watch reports from the beginning on."""

    def __init__(self, kv: Store) -> None:
        self.stamps: dict[tuple[int, int], int] = {}
        """By writer and number."""
        self._last: dict[int, int] = {}
        self._task = asyncio.create_task(self._follow(kv))

    async def _follow(self, kv: Store) -> None:
        async for entries in kv.watch(prefix=("log",), since=0):
            for entry in sorted(entries, key=lambda entry: entry.versionstamp or 0):
                _, writer, number = entry.key
                assert isinstance(writer, int)
                assert isinstance(number, int)
                assert number == self._last.get(writer, 0) + 1, "each change, in order"
                assert entry.versionstamp is not None
                self._last[writer] = number
                self.stamps[writer, number] = entry.versionstamp

    async def caught_up(self, stored: int) -> None:
        async with asyncio.timeout(60):
            while len(self.stamps) < stored and not self._task.done():
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        [result] = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result


async def acknowledged(process: ChildProcess, count: int) -> list[int]:
    return [int(await process.line()) for _ in range(count)]


async def test_a_follower_misses_nothing_when_one_of_two_writers_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path, sweep_every=None) as kv:
        follower = LogFollower(kv)
        async with child("appender", path, "0") as survivor:
            stamps = await acknowledged(survivor, 20)
            for writer in range(1, 9):
                async with child("appender", path, str(writer)) as victim:
                    stamps += await acknowledged(victim, 5 * writer)
                    victim.kill()
                    stamps += [int(line) async for line in victim.lines()]
                stamps += await acknowledged(survivor, 20)
            survivor.kill()
            stamps += [int(line) async for line in survivor.lines()]
        assert len(set(stamps)) == len(stamps), "a versionstamp was given twice"
        stored = {entry.key[1:]: entry.versionstamp async for entry in kv.list(prefix=("log",))}
        await follower.caught_up(len(stored))
        assert follower.stamps == stored
        assert set(stamps) <= set(follower.stamps.values()), "an acknowledged write is missing"
        await follower.stop()


async def test_a_stopped_writer_goes_on_and_a_follower_misses_nothing(tmp_path: Path) -> None:
    """A process that is stopped within a commit holds the file: the others wait until it goes on."""
    path = tmp_path / "app.db"
    async with keyloft.open(path, sweep_every=None) as kv:
        follower = LogFollower(kv)
        async with child("appender", path, "0") as stopped, child("appender", path, "1") as other:
            stamps = await acknowledged(stopped, 10) + await acknowledged(other, 10)
            for _ in range(10):
                os.kill(stopped.pid, signal.SIGSTOP)
                await asyncio.sleep(0.05)
                assert (await kv.get(("log", 0, 1))).exists, "reads go on"
                os.kill(stopped.pid, signal.SIGCONT)
                stamps += await acknowledged(stopped, 10) + await acknowledged(other, 10)
            for process in (stopped, other):
                process.kill()
                stamps += [int(line) async for line in process.lines()]
        assert len(set(stamps)) == len(stamps)
        stored = {entry.key[1:]: entry.versionstamp async for entry in kv.list(prefix=("log",))}
        await follower.caught_up(len(stored))
        assert follower.stamps == stored
        assert set(stamps) <= set(stored.values())
        await follower.stop()


async def test_a_clock_that_was_set_far_back_refuses_writes_by_name(tmp_path: Path) -> None:
    clock = ManualClock()
    async with keyloft.open(tmp_path / "app.db", clock=clock, sweep_every=None) as kv:
        await kv.set(("k",), 1)
        clock.advance(-200)
        await kv.set(("k",), 2)  # a little: the commit has the time of the last one
        clock.advance(-200)
        with pytest.raises(
            ClockSetBack,
            match=r"the time of the last commit is 400 s ahead of this machine.s clock; .* set the clock right",
        ):
            await kv.set(("k",), 3)
        assert (await kv.get(("k",))).value == 2
        clock.advance(400)
        await kv.set(("k",), 4)


async def test_a_batch_of_many_thousand_keys_reaches_watches_in_slices(tmp_path: Path) -> None:
    count = 30_000
    async with keyloft.open(tmp_path / "app.db", sweep_every=None) as kv:
        watch = kv.watch(prefix=("huge",))
        stamp = await kv.set_many({("huge", number): number for number in range(count)})
        seen: set[object] = set()
        async with asyncio.timeout(60):
            while len(seen) < count:
                entries = await anext(watch)
                assert all([entry.versionstamp == stamp for entry in entries])
                seen |= {entry.key[1] for entry in entries}
        assert await kv.delete_many([("huge", number) for number in range(count)]) == count
        async with asyncio.timeout(60):
            while seen:
                entries = await anext(watch)
                assert not any(entries)
                seen -= {entry.key[1] for entry in entries}
