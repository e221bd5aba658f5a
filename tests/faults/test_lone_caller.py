"""The event loop waits for the disk only for a lone caller, and only while the disk is fast."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import keyloft
from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.engines.sqlite import lone_callers
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.lone_callers import LoneCallers, SyncTimes
from keyloft.tuples.store import Store

from .vfs import RecordingVFS


class TimedDisk(RecordingVFS):
    """A disk whose sync takes as long as a test says, by a clock of its own; it notes which thread waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.seconds = 0.0
        self.on_loop: list[bool] = []
        self.failing_syncs = self._wait

    def monotonic(self) -> float:
        return self.now

    def _wait(self) -> bool:
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        self.now += self.seconds
        return False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> TimedDisk:
    monkeypatch.setattr(lone_callers, "devices", {})
    monkeypatch.setattr("keyloft.limits.INLINE_SECONDS", 60)
    disk = TimedDisk()
    # A busy machine is not a slow disk.
    monkeypatch.setattr("keyloft.engines.loop_iteration.time", disk)
    for module in ("commits", "engine", "writes"):
        monkeypatch.setattr(f"keyloft.engines.sqlite.{module}.monotonic", disk.monotonic)
    return disk


@pytest.fixture
async def kv(disk: TimedDisk, tmp_path: Path) -> AsyncIterator[Store]:
    async with await opened(disk, tmp_path) as kv:
        yield kv


async def opened(disk: TimedDisk, folder: Path, sync: str = "auto") -> Store:
    file = SqliteFile(str(folder / "app.db"), sync=sync, vfs=disk.vfs_name)
    return Store(await SqliteEngine.open(file, SystemClock()))


async def syncs_of(disk: TimedDisk, kv: Store, writes: int) -> list[bool]:
    """For each sync of some writes, whether the event loop waited."""
    disk.on_loop.clear()
    for number in range(writes):
        await kv.set(("k",), number)
    return disk.on_loop


async def test_a_lone_caller_waits_on_the_event_loop(disk: TimedDisk, kv: Store) -> None:
    await kv.set(("k",), 0)  # shows how fast the disk is
    assert await syncs_of(disk, kv, 20) == [True] * 20


async def test_with_sync_on_the_thread_it_never_does(disk: TimedDisk, tmp_path: Path) -> None:
    async with await opened(disk, tmp_path, "thread") as kv:
        await kv.set(("k",), 0)
        assert await syncs_of(disk, kv, 20) == [False] * 20


async def test_one_slow_sync_moves_all_commits_to_the_thread(disk: TimedDisk, kv: Store) -> None:
    await syncs_of(disk, kv, 3)
    disk.seconds = 0.25
    assert await syncs_of(disk, kv, 3) == [True, False, False], "the event loop waits for the first slow one alone"
    disk.seconds = 0
    assert await syncs_of(disk, kv, 10) == [False] * 10, "and stays away for a minute"


async def test_a_conflict_says_nothing_about_the_disk(disk: TimedDisk, kv: Store) -> None:
    old = await kv.get(("k",))
    await syncs_of(disk, kv, 3)
    for _ in range(5):
        disk.now += 0.3
        assert not (await kv.atomic().check(old).set(("k",), 9).commit()).ok
    assert await syncs_of(disk, kv, 2) == [False, True], "the last sync is more than a second ago"


async def test_a_slow_disk_is_known_to_every_store_on_it(disk: TimedDisk, kv: Store, tmp_path: Path) -> None:
    await syncs_of(disk, kv, 3)
    disk.seconds = 0.25
    await syncs_of(disk, kv, 1)
    disk.seconds = 0
    (tmp_path / "other").mkdir()
    async with await opened(disk, tmp_path / "other") as other:
        await other.set(("k",), 0)
        assert await syncs_of(disk, other, 3) == [False] * 3


async def test_the_commit_that_restarts_the_write_ahead_log_runs_on_the_thread(
    disk: TimedDisk, kv: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await syncs_of(disk, kv, 3)
    engine = kv.engine
    assert isinstance(engine, SqliteEngine)
    engine.connection.wal_checkpoint()
    assert not any(await syncs_of(disk, kv, 1))
    assert all(await syncs_of(disk, kv, 3))


async def test_a_slow_restart_of_the_write_ahead_log_does_not_count_as_a_slow_disk(disk: TimedDisk, kv: Store) -> None:
    await syncs_of(disk, kv, 3)
    engine = kv.engine
    assert isinstance(engine, SqliteEngine)
    engine.connection.wal_checkpoint()
    disk.seconds = 0.25
    assert not any(await syncs_of(disk, kv, 1))
    disk.seconds = 0
    assert await syncs_of(disk, kv, 3) == [False, True, True], "the thread finds out how fast the disk is"


async def reads(kv: Store, is_over: Callable[[], bool]) -> None:
    while not is_over():
        await kv.get(("k",))
        await asyncio.sleep(0)


async def writes(kv: Store, is_over: Callable[[], bool]) -> None:
    number = 0
    while not is_over():
        await kv.set(("other",), number := number + 1)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("other", [reads, writes])
async def test_with_another_task_at_work_the_event_loop_never_waits(
    other: Callable[[Store, Callable[[], bool]], object], disk: TimedDisk, kv: Store
) -> None:
    await syncs_of(disk, kv, 5)
    is_over = False
    task: asyncio.Task[None] = asyncio.create_task(other(kv, lambda: is_over))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert await syncs_of(disk, kv, 50) == [False] * len(disk.on_loop)
    is_over = True
    await task
    assert not any(await syncs_of(disk, kv, 3)), "its calls are not yet old"
    disk.now += 2 * limits.LONE_CALLER_SECONDS
    assert all(await syncs_of(disk, kv, 3))


async def test_calls_of_one_task_after_those_of_another_are_lone_once_the_others_are_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [asyncio.create_task(asyncio.sleep(0)) for _ in range(2)]
    tasks = {"a": others[0], "b": others[1], "none": None}
    current = "a"
    monkeypatch.setattr(asyncio, "current_task", lambda: tasks[current])
    calls = LoneCallers()
    known = []
    for now, name in enumerate("aabab", 10):
        current = name
        known.append(calls.note(now / 100))
    assert known == [False, True, False, False, False]
    assert not calls.is_lone(0.15)
    assert calls.is_lone(0.24)
    current = "none"
    assert not calls.note(0.25)
    assert not calls.note(0.26)
    assert not calls.is_lone(0.27), "callbacks may belong to several callers"


def test_only_a_recent_fast_sync_promises_another() -> None:
    times = SyncTimes()
    assert not times.expect_fast(0.0)
    times.add(0.0002, 10.0)
    assert times.expect_fast(10.5)
    assert not times.expect_fast(11.5)
    times.add(0.005, 12.0)
    assert not times.expect_fast(12.0)
    times.add(0.0002, 13.0)
    assert times.expect_fast(13.0)
    times.add(0.5, 14.0)
    times.add(0.0002, 15.0)
    assert not times.expect_fast(15.0)
    times.add(0.0002, 75.0)
    assert times.expect_fast(75.0)


async def test_the_argument_is_checked() -> None:
    with pytest.raises(keyloft.InvalidArgument, match='sync: expected "auto" or "thread"'):
        await keyloft.open(sync="never")  # type: ignore[arg-type]
