"""A full disk refuses writes by name, harms nothing, and is forgotten once there is space again."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import keyloft
from keyloft.clock import SystemClock
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.tuples.store import Store

from .children import child
from .moves import contents_of
from .vfs import QuotaVFS

pytestmark = pytest.mark.slow

_PLENTY = 2**40


async def fill(kv: Store, after: int = 0) -> tuple[int, keyloft.DiskFull]:
    """Write batches, several callers at once, until the disk is full; how many of each caller's were acknowledged."""
    acknowledged = dict.fromkeys(range(8), after)
    errors: list[keyloft.DiskFull] = []

    async def caller(number: int) -> None:
        while not errors:
            number_of_round = acknowledged[number]
            try:
                await kv.set_many([(("filling", number, number_of_round, part), bytes(1500)) for part in range(3)])
            except keyloft.DiskFull as error:
                errors.append(error)
            else:
                acknowledged[number] += 1

    await asyncio.gather(*[caller(number) for number in acknowledged])
    contents, _ = await contents_of(kv)
    expected = {
        ("filling", number, number_of_round, part): bytes(1500)
        for number, rounds in acknowledged.items()
        for number_of_round in range(rounds)
        for part in range(3)
    }
    assert {key: value for key, value in contents.items() if key[0] == "filling"} == expected
    return min(acknowledged.values()), errors[0]


async def test_full_disk_is_named_and_writes_work_again_on_the_same_store_once_there_is_space(tmp_path: Path) -> None:
    path = str(tmp_path / "full.db")
    vfs = QuotaVFS(left=400_000)
    kv = Store(await SqliteEngine.open(SqliteFile(path, vfs=vfs.vfs_name), SystemClock()))
    await kv.set(("before",), 1)
    rounds, error = await fill(kv)
    assert rounds > 3
    assert path in str(error)
    assert error.code == "DISK_FULL"
    for _ in range(3):
        with pytest.raises(keyloft.DiskFull):
            await kv.set(("large",), bytes(500_000))
    assert (await kv.get(("before",))).value == 1
    assert not (await kv.get(("large",))).exists
    assert await kv.count(("filling",)) > 0
    vfs.left = _PLENTY
    await kv.set(("large",), bytes(500_000))
    await kv.aclose()
    async with keyloft.open(path) as kv:
        assert (await kv.get(("large",))).value == bytes(500_000)
        assert (await kv.get(("before",))).value == 1


async def test_a_write_that_does_not_fit_harms_no_other_write_of_its_group(tmp_path: Path) -> None:
    vfs = QuotaVFS(left=_PLENTY)
    kv = Store(await SqliteEngine.open(SqliteFile(str(tmp_path / "full.db"), vfs=vfs.vfs_name), SystemClock()))
    await kv.set(("before",), 1)
    vfs.left = 200_000
    for number in range(3):
        writes = [kv.set(("large",), bytes(300_000)), kv.set(("small", number), 1), kv.increment(("count",))]
        large, *small = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(large, keyloft.DiskFull)
        assert [type(one) for one in small] == [int, int]
    assert (await kv.get(("count",))).value == 3
    await kv.aclose()


async def test_store_on_a_full_disk_closes_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    path = str(tmp_path / "full.db")
    vfs = QuotaVFS(left=200_000)
    kv = Store(await SqliteEngine.open(SqliteFile(path, vfs=vfs.vfs_name), SystemClock()))
    await kv.set(("before",), 1)
    await fill(kv)
    vfs.left = 0
    contents, _ = await contents_of(kv)
    async with asyncio.timeout(60):
        await kv.aclose()
    async with keyloft.open(path) as kv:
        assert (await contents_of(kv))[0] == contents
        await kv.set(("after",), 1)


@pytest.mark.parametrize("left", [0, 100, 600, 5_000, 20_000, 40_000])
async def test_opening_on_a_full_disk_says_so_and_succeeds_once_there_is_space(left: int, tmp_path: Path) -> None:
    path = str(tmp_path / "full.db")
    vfs = QuotaVFS(left)
    with pytest.raises(keyloft.DiskFull, match=path):
        await SqliteEngine.open(SqliteFile(path, vfs=vfs.vfs_name), SystemClock())
    vfs.left = _PLENTY
    kv = Store(await SqliteEngine.open(SqliteFile(path, vfs=vfs.vfs_name), SystemClock()))
    assert await kv.set(("k",), 1) == 2
    await kv.aclose()


async def test_limit_on_the_size_of_files_is_a_full_disk_too(tmp_path: Path) -> None:
    path = tmp_path / "limited.db"
    async with child("limited", path, str(700_000)) as process:
        line = await process.line()
        assert await process.ended() == (0, "")
    outcome = json.loads(line)
    for kind, message in outcome["failures"]:
        assert kind == "DiskFull"
        assert str(path) in message
    assert outcome["acknowledged"] > 10
    assert outcome["readable"] == 4 * outcome["acknowledged"]
    async with keyloft.open(path) as kv:
        assert await kv.count(("filling",)) == 4 * outcome["acknowledged"]
        assert (await kv.get(("later",))).value == 1


async def test_opening_under_a_limit_on_the_size_of_files_is_a_full_disk_too(tmp_path: Path) -> None:
    for limit in (0, 1_000, 10_000, 34_000):
        path = tmp_path / f"{limit}.db"
        async with child("limited", path, str(limit)) as process:
            line = await process.line()
            assert await process.ended() == (0, ""), limit
        outcome = json.loads(line)
        kind, message = outcome["opening"]
        assert (kind, str(path) in message) == ("DiskFull", True), (limit, message)
        assert outcome["written_then"] == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"this user may not mount a small disk: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def ballast(small_disk: Path) -> Callable[[], None]:
    """Takes a part of the small disk; the call gives it back."""
    file = small_disk / "ballast"
    file.write_bytes(bytes(2 * 1024 * 1024))
    return file.unlink


@pytest.mark.parametrize("checkpoint_pages", [20, 8000])
async def test_real_full_disk_is_named_and_writes_work_again_once_there_is_space(
    checkpoint_pages: int, small_disk: Path, ballast: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With few pages it is often the checkpoint that finds no space, after the commit that it follows was made.
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES", checkpoint_pages)
    path = small_disk / "full.db"
    async with keyloft.open(path) as kv:
        await kv.set(("before",), 1)
        rounds, error = await fill(kv)
        assert rounds > 3
        assert str(path) in str(error)
        with pytest.raises(keyloft.DiskFull):
            await kv.set(("large",), bytes(500_000))
        assert (await kv.get(("before",))).value == 1
        ballast()
        await kv.set(("large",), bytes(500_000))
        contents, _ = await contents_of(kv)
        (small_disk / "ballast").write_bytes(bytes(128))
    async with keyloft.open(path) as kv:
        assert (await contents_of(kv))[0] == contents


async def test_opening_on_a_real_full_disk_says_so_and_succeeds_once_there_is_space(
    small_disk: Path, ballast: Callable[[], None]
) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(bytes(2 * 1024 * 1024))
    path = small_disk / "full.db"
    with pytest.raises(keyloft.DiskFull, match=str(path)):
        await keyloft.open(path)
    ballast()
    async with keyloft.open(path) as kv:
        assert await kv.set(("k",), 1) == 2
