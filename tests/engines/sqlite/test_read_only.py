"""A file that is opened with ?mode=ro is read, while other processes write it, and never written."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keyloft
from keyloft import ManualClock
from keyloft.core.maintenance import Existing, Range
from keyloft.core.records import Count, Get, Latest, Scan, Space
from keyloft.engines import open_maintenance
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from tests.engines.contract.calls import next_of, put, values_of, write

EVERY = Scan(Space.TUPLES, b"\x00", b"\xff", 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
async def writer(path: Path, clock: ManualClock) -> AsyncIterator[SqliteEngine]:
    engine = await SqliteEngine.open(SqliteFile(str(path)), clock)
    await write(engine, put(b"a", b"1"), put(b"b", b"2" * 5000))
    yield engine
    await engine.aclose()


@pytest.fixture
async def reader(path: Path, clock: ManualClock, writer: SqliteEngine) -> AsyncIterator[SqliteEngine]:
    engine = await SqliteEngine.open(SqliteFile(str(path), read_only=True), clock)
    yield engine
    await engine.aclose()


async def test_reads_show_what_another_process_writes(writer: SqliteEngine, reader: SqliteEngine) -> None:
    [record] = await reader.read(Get(Space.TUPLES, b"b"))
    assert record is not None
    assert record.value == b"2" * 5000
    done = await write(writer, put(b"c", b"3"))
    await asyncio.sleep(0)
    page, count, latest = await reader.read(EVERY, Count(Space.TUPLES, b"\x00", b"\xff"), Latest())
    assert ([one.key for one in page], count, latest) == ([b"a", b"b", b"c"], 3, done.version)


async def test_watches_report_what_another_process_writes(writer: SqliteEngine, reader: SqliteEngine) -> None:
    watch = reader.watch(EVERY)
    await write(writer, put(b"c", b"3"))
    assert values_of(await next_of(watch)) == {b"c": b"3"}


async def test_writes_are_refused_and_the_message_says_how_the_file_was_opened(
    path: Path, writer: SqliteEngine, reader: SqliteEngine
) -> None:
    for _ in range(2):
        with pytest.raises(keyloft.ReadOnly, match=rf"{path} was opened with \?mode=ro"):
            await write(reader, put(b"a", b"9"))
    assert (await reader.read(Get(Space.TUPLES, b"a")))[0] == (await writer.read(Get(Space.TUPLES, b"a")))[0]
    await write(writer, put(b"a", b"9"))


async def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(keyloft.CannotOpen, match=r"there is no file .*app\.db"):
        await keyloft.open(f"sqlite:///{tmp_path}/app.db?mode=ro")
    assert list(tmp_path.iterdir()) == []


async def test_an_empty_file_is_not_made_into_a_database(path: Path) -> None:
    path.touch()
    with pytest.raises(keyloft.NotADatabase):
        await keyloft.open(f"sqlite:///{path}?mode=ro")
    assert path.stat().st_size == 0


async def test_expired_entries_are_left_to_the_writers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    async with keyloft.open(path, clock=clock) as kv:
        await kv.set(("k",), 1, expire_in=1)
        clock.advance(1)
    before = path.read_bytes()
    with caplog.at_level(logging.DEBUG, "keyloft"):
        async with keyloft.open(f"sqlite:///{path}?mode=ro", clock=clock, sweep_every=0.001) as kv:
            await asyncio.sleep(0.05)
            assert not (await kv.get(("k",))).exists
    assert path.read_bytes() == before
    assert caplog.text == ""


async def test_a_whole_database_is_read_and_not_changed(path: Path, writer: SqliteEngine) -> None:
    maintenance = await open_maintenance(f"sqlite:///{path}?mode=ro")
    async with maintenance.snapshot() as snapshot:
        rows = [(Space.TUPLES, row) async for page in snapshot.rows(Range(Space.TUPLES)) for row in page]
    assert len(rows) == 2
    assert await maintenance.damage() == []
    with pytest.raises(keyloft.ReadOnly, match="mode=ro"):
        await maintenance.load(rows, 1, Existing.KEEP)
    with pytest.raises(keyloft.ReadOnly, match="mode=ro"):
        await maintenance.compact()
    await maintenance.aclose()


async def test_an_immutable_file_is_read_without_a_file_beside_it(path: Path) -> None:
    async with keyloft.open(path) as kv:
        await kv.set(("k",), "v" * 5000)
    url = f"sqlite:///{path}?mode=ro&immutable=1"
    async with keyloft.open(url) as kv:
        assert (await kv.get(("k",))).value == "v" * 5000
        async with kv.watch(prefix=()):
            assert [entry.key async for entry in kv.list(prefix=())] == [("k",)]
        with pytest.raises(keyloft.ReadOnly):
            await kv.set(("k",), 1)
        assert list(path.parent.iterdir()) == [path]
    with keyloft.open_sync(url) as store:
        assert store.get(("k",)).value == "v" * 5000
        assert list(path.parent.iterdir()) == [path]


async def test_a_file_whose_last_commits_are_in_its_log_is_not_read_as_immutable(
    path: Path, writer: SqliteEngine
) -> None:
    link = path.parent / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)
    for name in (path, link, f"/{path}"):
        url = f"sqlite:///{name}?mode=ro&immutable=1"
        with pytest.raises(keyloft.CannotOpen, match=r"immutable=1: app\.db-wal belongs to its state"):
            await keyloft.open(url)
        with pytest.raises(keyloft.CannotOpen, match="immutable=1"):
            keyloft.open_sync(url)


async def test_a_file_with_a_journal_is_not_read_as_immutable(path: Path) -> None:
    async with keyloft.open(path) as kv:
        await kv.set(("k",), "v")
    Path(f"{path}-journal").write_bytes(b"pages as they were before")
    with pytest.raises(keyloft.CannotOpen, match=r"immutable=1: app\.db-journal belongs to its state"):
        await keyloft.open(f"sqlite:///{path}?mode=ro&immutable=1")


async def test_an_immutable_file_may_be_named_with_two_slashes_or_by_a_link(path: Path) -> None:
    async with keyloft.open(path) as kv:
        await kv.set(("k",), "v")
    link = path.parent / "link 100%.db"
    link.symlink_to(path)
    for name in (link, f"/{path}"):
        async with keyloft.open(f"sqlite:///{name}?mode=ro&immutable=1") as kv:
            assert (await kv.get(("k",))).value == "v"
