"""Nothing acknowledged is lost by a power cut, at whatever write or sync it happens, and nothing is ever torn.

A store runs once on a disk that notes all requests. Then the power is cut after any of them, again and again, and each
time what is left of the files is opened as if the machine had come back.
"""

import asyncio
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import apsw
import pytest

import keyloft
from keyloft.clock import SystemClock
from keyloft.core.records import Batch, Committed, Set, Space
from keyloft.core.values import JSON
from keyloft.engines.sqlite.blocking.commits import WaitingBatch
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.errors import is_unknown_commit
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.tuples.store import Store
from tests.support.examples import TIMES

from .disk import Create, Disk, DiskWrite, Image, Remove, Sync, Truncate
from .moves import Chain, Contents, Move, after, chains, contents_of, made_in, make
from .vfs import RecordingVFS

pytestmark = pytest.mark.slow

_NAME = "power.db"
_EVERYONE = chains(3)


class RecordedRun:
    """A store on a noting disk: its moves by versionstamp, and after how many requests each was acknowledged."""

    def __init__(self, folder: Path, *, durability: str = "full", ignores_syncs: bool = False) -> None:
        folder.mkdir()
        self.vfs = RecordingVFS(ignores_syncs=ignores_syncs)
        self.history: dict[int, Move] = {}
        self._path = folder / _NAME
        self._durability = durability
        self._acknowledged: list[tuple[int, int]] = []
        self.refused = 0
        self._made = dict.fromkeys(_EVERYONE, 0)

    async def live(self, moves: Callable[[], int]) -> None:
        """Open, let every chain make so many moves at once, and close."""
        clock = SystemClock()
        kv = Store(
            await SqliteEngine.open(
                SqliteFile(str(self._path), durability=self._durability, vfs=self.vfs.vfs_name), clock
            )
        )
        async with asyncio.TaskGroup() as tasks:
            for chain in _EVERYONE:
                tasks.create_task(self._write(kv, chain, moves()))
        await kv.aclose()

    async def _write(self, kv: Store, chain: Chain, moves: int) -> None:
        for _ in range(moves):
            self._made[chain] += 1
            move = Move(chain, self._made[chain])
            while True:
                try:
                    versionstamp = await make(kv, move)
                    break
                except keyloft.DatabaseError:
                    self.refused += 1
            self.history[versionstamp] = move
            self._acknowledged.append((len(self.vfs.requests), versionstamp))

    def acknowledged_by(self, requests: int) -> int:
        """The newest versionstamp that a caller knew of after so many requests."""
        return max((versionstamp for at, versionstamp in self._acknowledged if at <= requests), default=0)

    def contents_at(self, versionstamp: int) -> Contents:
        """All that the store held when this was its newest versionstamp."""
        made: Counter[Chain] = Counter()
        for stamp, move in self.history.items():
            if stamp <= versionstamp:
                made[move.chain] = max(made[move.chain], move.number)
        return after(made)

    def disks(self, cuts: Iterable[int]) -> Iterator[tuple[int, Disk]]:
        """The disk after so many requests, for each of these numbers."""
        disk = Disk()
        taken = 0
        for cut in sorted(cuts):
            for request in self.vfs.requests[taken:cut]:
                disk.take(request)
            taken = cut
            yield cut, disk

    def count(self, kind: type, name: str) -> int:
        """How many requests of a kind there were for the files of this name."""
        files = {request.file for request in self.vfs.requests if isinstance(request, Create) and request.name == name}
        return sum(
            request.name == name if isinstance(request, Create | Remove) else request.file in files
            for request in self.vfs.requests
            if isinstance(request, kind)
        )


def put_back(image: Image, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in image.items():
        (folder / name).write_bytes(content)
    return str(folder / _NAME)


async def left_of(image: Image, folder: Path) -> tuple[int, Contents]:
    """Open what a power cut left: its newest versionstamp and contents. Fails if it is damaged or can't be written."""
    path = put_back(image, folder)
    kv = Store(await SqliteEngine.open(SqliteFile(path), SystemClock()))
    try:
        contents, stamps = await contents_of(kv)
        connection = apsw.Connection(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        [(newest,)] = connection.execute("SELECT max(version) FROM keyloft_changes").fetchall()
        assert isinstance(newest, int)
        connection.close()
        assert max(stamps.values(), default=0) <= newest
        assert await kv.set(("life", "goes", "on"), True) == newest + 1
    finally:
        await kv.aclose()
    return newest, contents


def some(count: int, run: RecordedRun, rng: random.Random) -> list[int]:
    """Moments to cut the power; always among them: before the first request, and after the last."""
    last = len(run.vfs.requests)
    return [0, last, *rng.sample(range(1, last), min(count * TIMES, last - 1))]


@pytest.fixture
def _frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES", 12)


async def lives(
    folder: Path, rng: random.Random, *, durability: str = "full", ignores_syncs: bool = False
) -> RecordedRun:
    """Three lives of a store, with groups of all sizes."""
    run = RecordedRun(folder, durability=durability, ignores_syncs=ignores_syncs)
    for longest in (3, 80, 25):
        await run.live(partial(rng.randint, 0, longest))
    return run


@pytest.mark.usefixtures("_frequent_checkpoints")
@pytest.mark.parametrize("loss", ["all-unsynced", "none", "torn-512", "torn-4096", "garbled-512"])
async def test_power_cut_loses_nothing_acknowledged_and_tears_nothing(
    loss: str, tmp_path: Path, rng: random.Random
) -> None:
    run = await lives(tmp_path / "before", rng)
    assert run.count(Sync, _NAME) > 15, "the cuts are to meet checkpoints"
    assert run.count(Remove, f"{_NAME}-wal") == 3, "the cuts are to meet closings"
    assert run.count(Truncate, _NAME) > 0
    for cut, disk in run.disks(some(30, run, rng)):
        match loss:
            case "all-unsynced":
                image = disk.synced()
            case "none":
                image = disk.written()
            case _:
                how, _, sector = loss.partition("-")
                image = disk.torn(rng, int(sector), garbled=how == "garbled")
        newest, contents = await left_of(image, tmp_path / "after")
        assert newest >= run.acknowledged_by(cut), f"acknowledged writes are gone after a cut at {cut}"
        assert contents == run.contents_at(newest), f"something is there in part after a cut at {cut}"


@pytest.mark.usefixtures("_frequent_checkpoints")
async def test_a_second_power_cut_while_recovering_from_the_first_loses_nothing(
    tmp_path: Path, rng: random.Random
) -> None:
    run = await lives(tmp_path / "before", rng)
    for cut, disk in run.disks(some(15, run, rng)):
        image = disk.torn(rng, 512, garbled=False)
        again = RecordingVFS.on(image)
        path = put_back(image, tmp_path / "between")
        kv = Store(await SqliteEngine.open(SqliteFile(path, vfs=again.vfs_name), SystemClock()))
        await kv.aclose()
        second = Disk.holding(image)
        requests = again.requests
        for at in range(len(requests) + 1):
            if rng.random() < 8 / len(requests):
                newest, contents = await left_of(second.torn(rng, 512, garbled=False), tmp_path / "after")
                assert newest >= run.acknowledged_by(cut)
                assert contents == run.contents_at(newest)
            if at < len(requests):
                second.take(requests[at])


@pytest.mark.usefixtures("_frequent_checkpoints")
async def test_relaxed_durability_may_lose_the_last_writes_and_tears_nothing(
    tmp_path: Path, rng: random.Random
) -> None:
    run = await lives(tmp_path / "before", rng, durability="relaxed")
    lost = 0
    for cut, disk in run.disks(some(60, run, rng)):
        for image in (disk.synced(), disk.torn(rng, 512, garbled=True)):
            newest, contents = await left_of(image, tmp_path / "after")
            lost += newest < run.acknowledged_by(cut)
            assert contents == run.contents_at(newest), f"something is there in part after a cut at {cut}"
    assert lost > 20, "a shim that forgets nothing proves nothing"


@pytest.mark.usefixtures("_frequent_checkpoints")
async def test_a_disk_that_is_ignores_syncs_would_be_noticed_by_these_tests(tmp_path: Path, rng: random.Random) -> None:
    run = await lives(tmp_path / "before", rng, ignores_syncs=True)
    harmed = 0
    for cut, disk in run.disks(some(30, run, rng)):
        try:
            newest, contents = await left_of(disk.torn(rng, 512, garbled=False), tmp_path / "after")
        except Exception:
            harmed += 1
        else:
            harmed += newest < run.acknowledged_by(cut) or contents != run.contents_at(newest)
    assert harmed > 15


async def test_failed_sync_refuses_the_write_and_a_power_cut_still_loses_nothing_acknowledged(
    tmp_path: Path, rng: random.Random
) -> None:
    run = RecordedRun(tmp_path / "before")
    await run.live(lambda: 3)
    run.vfs.failing_syncs = lambda: rng.random() < 0.2
    await run.live(lambda: 40)
    assert run.refused > 20
    for cut, disk in run.disks(some(50, run, rng)):
        for image in (disk.synced(), disk.torn(rng, 512, garbled=False)):
            newest, contents = await left_of(image, tmp_path / "after")
            assert newest >= run.acknowledged_by(cut), f"acknowledged writes are gone after a cut at {cut}"
            made = made_in(contents, _EVERYONE)
            assert contents == after(made), f"something is there in part after a cut at {cut}"


@pytest.mark.parametrize("sync", ["auto", "thread"])
async def test_a_write_whose_sync_failed_is_unknown_because_a_kill_may_bring_it_back(tmp_path: Path, sync: str) -> None:
    path, vfs = tmp_path / "before" / _NAME, RecordingVFS()
    path.parent.mkdir()
    kv = Store(await SqliteEngine.open(SqliteFile(str(path), sync=sync, vfs=vfs.vfs_name), SystemClock()))
    for _ in range(3):
        await kv.increment(("count",))
    vfs.failing_syncs = lambda: True
    with pytest.raises(keyloft.CommitUnknown, match=f"{path}: the disk failed"):
        await kv.increment(("count",))
    assert (await kv.get(("count",))).value == 3
    left = shutil.copytree(path.parent, tmp_path / "left", ignore=shutil.ignore_patterns("*-shm"))
    async with keyloft.open(left / _NAME) as found:
        assert (await found.get(("count",))).value == 4, "SQLite had written all of the commit"
    vfs.failing_syncs = lambda: False
    assert await kv.increment(("count",)) == 4
    await kv.aclose()


class SignalAtError(BaseException):
    """What a signal's handler raises."""


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a signal's handler raise while the error of the next COMMIT that fails is looked at."""

    def look(error: apsw.Error) -> bool:
        monkeypatch.setattr("keyloft.engines.sqlite.writes.is_unknown_commit", is_unknown_commit)
        raise SignalAtError

    monkeypatch.setattr("keyloft.engines.sqlite.writes.is_unknown_commit", look)


@pytest.mark.parametrize("interrupted", [False, True])
async def test_it_is_so_too_if_the_event_loop_waited_for_the_sync_and_the_disk_is_full_by_then(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.INLINE_SECONDS", 60)
    monkeypatch.setattr("keyloft.limits.FAST_SYNC_SECONDS", 60)
    monkeypatch.setattr("keyloft.engines.sqlite.lone_callers.devices", {})
    path, vfs = tmp_path / "before" / _NAME, RecordingVFS()
    path.parent.mkdir()
    kv = Store(await SqliteEngine.open(SqliteFile(str(path), sync="auto", vfs=vfs.vfs_name), SystemClock()))
    for _ in range(3):
        await kv.increment(("count",))
    failed_in: list[threading.Thread] = []

    def fail_and_fill() -> bool:
        failed_in.append(threading.current_thread())
        vfs.is_full = True
        return True

    vfs.failing_syncs = fail_and_fill
    if interrupted:
        interrupt_once(monkeypatch)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with pytest.raises(keyloft.CommitUnknown, match=f"{path}: the disk failed"):
        await kv.increment(("count",))
    assert failed_in == [threading.main_thread()]
    left = shutil.copytree(path.parent, tmp_path / "left", ignore=shutil.ignore_patterns("*-shm"))
    async with keyloft.open(left / _NAME) as found:
        assert (await found.get(("count",))).value == 4, "SQLite had written all of the commit"
    vfs.failing_syncs = lambda: False
    with pytest.raises(keyloft.DiskFull):
        await kv.increment(("count",))
    vfs.is_full = False
    assert await kv.increment(("count",)) == 4
    await kv.aclose()


def test_so_it_is_with_threads(tmp_path: Path) -> None:
    vfs = RecordingVFS()
    engine = BlockingSqliteEngine(SqliteFile(str(tmp_path / _NAME), vfs=vfs.vfs_name), SystemClock())
    batch = Batch((Set(Space.TUPLES, b"k", b"1", JSON),))
    assert isinstance(engine.verdict(batch), Committed)
    vfs.failing_syncs = lambda: True
    assert isinstance(engine.verdict(batch), keyloft.CommitUnknown)
    with pytest.raises(keyloft.CommitUnknown):
        engine.set_now(b"k", b"2", JSON)
    vfs.failing_syncs = lambda: False
    assert isinstance(engine.verdict(batch), Committed)
    engine.close()


def test_so_it_is_for_the_others_of_a_group_whose_thread_a_signal_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vfs = RecordingVFS()
    engine = BlockingSqliteEngine(SqliteFile(str(tmp_path / _NAME), vfs=vfs.vfs_name), SystemClock())
    batch = Batch((Set(Space.TUPLES, b"k", b"1", JSON),))
    other = WaitingBatch(batch)
    engine.queue.waiting.append(other)
    vfs.failing_syncs = lambda: True
    interrupt_once(monkeypatch)
    with pytest.raises(SignalAtError):
        engine.verdict(batch)
    assert isinstance(other.verdict, keyloft.CommitUnknown)
    vfs.failing_syncs = lambda: False
    assert isinstance(engine.verdict(batch), Committed)
    engine.close()


async def test_power_cut_in_a_checkpoint_of_32_mebibytes_loses_nothing(tmp_path: Path, rng: random.Random) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    vfs = RecordingVFS()
    kv = Store(await SqliteEngine.open(SqliteFile(str(folder / _NAME), vfs=vfs.vfs_name), SystemClock()))
    acknowledged = []
    for number in range(36):
        await kv.set_many({("large", part): number.to_bytes(1) * (512 * 1024) for part in range(2)})
        acknowledged.append(len(vfs.requests))
    [main] = [request.file for request in vfs.requests if isinstance(request, Create) and request.name == _NAME]

    def of_checkpoints() -> list[int]:
        return [
            at
            for at, request in enumerate(vfs.requests)
            if isinstance(request, DiskWrite | Sync) and request.file == main and at > acknowledged[0]
        ]

    # The first quiet moment brings a checkpoint, which ends with a sync of the file.
    async with asyncio.timeout(60):
        while not ((checkpoint := of_checkpoints()) and isinstance(vfs.requests[checkpoint[-1]], Sync)):
            await asyncio.sleep(0.02)
    assert len(checkpoint) > 100, "the write-ahead log grew past its limit"
    cuts = {*rng.sample(checkpoint, 6), checkpoint[-1], checkpoint[-1] + 1}
    disk = Disk()
    for at, request in enumerate(vfs.requests):
        disk.take(request)
        if at in cuts:
            _, contents = await left_of(disk.torn(rng, 4096, garbled=True), tmp_path / "after")
            [first, second] = [contents["large", part] for part in range(2)]
            assert first == second
            assert first[0] >= max(number for number, by in enumerate(acknowledged) if by <= at)
    await kv.aclose()
