"""The SQLite engine keeps the rules, on a file and in memory."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Delete, Get, Scan, Space
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.writes import Begun, SqliteWriter
from tests.engines.contract import EngineContract, next_of, put, values_of, write


class TestSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
        yield engine
        await engine.aclose()


class TestSqliteInMemory(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(":memory:", clock)
        yield engine
        await engine.aclose()


PAGE = 4096 + 24


async def test_the_log_goes_into_the_file_in_a_quiet_moment(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.engines.sqlite.wal._WORTH_MOVING", 20)
    path = tmp_path / "app.db"
    engine = await SqliteEngine.open(str(path), clock)
    before = path.stat().st_size
    await write(engine, *[put(b"%d" % number, b"1" * 1000) for number in range(100)])
    async with asyncio.timeout(10):
        while path.stat().st_size == before:
            await asyncio.sleep(0.005)
    await engine.aclose()


@pytest.mark.parametrize("reading", [False, True], ids=["writing", "writing and reading"])
async def test_the_log_does_not_outgrow_its_limit_without_a_quiet_moment(
    reading: bool, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that outlived its turn would keep the log from being reused."""
    monkeypatch.setattr("keyloft.engines.sqlite.wal._DUE", 50)
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
        if reading:
            await engine.read(Get(Space.TUPLES, b"k"), Get(Space.TUPLES, b"other"))
    assert (tmp_path / "app.db-wal").stat().st_size < 120 * PAGE
    await engine.aclose()


async def test_small_commits_write_over_a_short_log_and_large_ones_gather(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.engines.sqlite.wal._DUE_AFTER_SMALL_COMMITS", 50)
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    log = tmp_path / "app.db-wal"
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
    assert log.stat().st_size < 120 * PAGE
    for number in range(10):
        await write(engine, *[put(b"%d" % key, b"%d" % number * 2000) for key in range(100)])
    assert log.stat().st_size > 300 * PAGE
    await engine.aclose()


class _Watched(apsw.Connection):
    """Counts how often the log is moved; `fails` makes that fail."""

    moved = 0
    fails = False

    def wal_checkpoint(self, *args: Any, **options: Any) -> tuple[int, int]:
        if options.get("mode") == apsw.SQLITE_CHECKPOINT_NOOP:
            return super().wal_checkpoint(*args, **options)
        self.moved += 1
        if self.fails:
            raise RuntimeError("not now")
        return super().wal_checkpoint(*args, **options)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyloft.engines.sqlite.file.apsw.Connection", _Watched)
    monkeypatch.setattr("keyloft.engines.sqlite.wal._WORTH_MOVING", 50)
    monkeypatch.setattr("keyloft.engines.sqlite.wal._DUE_AFTER_SMALL_COMMITS", 50)


def watched_connection(engine: SqliteEngine) -> _Watched:
    assert isinstance(engine._writer.connection, _Watched)
    return engine._writer.connection


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("durability", ["full", "relaxed"])
async def test_a_log_that_somebody_reads_is_not_moved_at_each_commit(
    durability: str, clock: ManualClock, tmp_path: Path
) -> None:
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock, durability=durability)
    connection = watched_connection(engine)

    async def moved_in(commits: int) -> int:
        before = connection.moved
        for number in range(commits):
            await write(engine, put(b"k", b"%d" % number))
        return connection.moved - before

    await moved_in(10)
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN")
    reader.execute("SELECT 1 FROM keyloft_version_counter").fetchall()
    assert 1 <= await moved_in(200) <= 200 * 3 // 50
    reader.execute("ROLLBACK")
    tries = connection.moved
    async with asyncio.timeout(10):
        while connection.moved == tries or engine._log.is_moving:
            await asyncio.sleep(0.01)
    await moved_in(200)  # which begin it anew
    size = (tmp_path / "app.db-wal").stat().st_size
    assert 2 <= await moved_in(200) <= 200 * 3 // 50
    assert (tmp_path / "app.db-wal").stat().st_size == size
    reader.close()
    await engine.aclose()


@pytest.mark.usefixtures("watched")
async def test_a_log_that_can_not_be_moved_holds_up_nobody(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    connection = watched_connection(engine)
    connection.fails = True
    for number in range(100):
        await write(engine, put(b"k", b"%d" % number))
    assert connection.moved == 1, "it is not tried at each commit"
    assert "a checkpoint failed" in caplog.text
    await engine.aclose()


@pytest.mark.usefixtures("watched")
async def test_a_log_that_could_not_be_moved_is_moved_later_without_a_further_commit(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.engines.sqlite.wal._WORTH_MOVING", 10)
    monkeypatch.setattr("keyloft.engines.sqlite.wal._AGAIN_SECONDS", 0.01)
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    await write(engine, put(b"k", b"before"))
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN")
    reader.execute("SELECT 1 FROM keyloft_version_counter").fetchall()
    for number in range(100):
        await write(engine, put(b"k", b"%d" % number))

    def left() -> int:
        pages, moved = reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        return pages - moved

    reader.execute("ROLLBACK")
    assert left() > 100
    async with asyncio.timeout(10):
        while left():
            await asyncio.sleep(0.005)
    reader.close()
    await engine.aclose()


async def test_what_takes_long_on_the_event_loop_is_done_on_the_thread(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small write may meet large values."""
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    threads: set[threading.Thread] = set()
    end = SqliteWriter._end

    def noting(writer: SqliteWriter, begun: Begun) -> None:
        threads.add(threading.current_thread())
        end(writer, begun)

    monkeypatch.setattr(SqliteWriter, "_end", noting)
    monkeypatch.setattr("keyloft.limits.INLINE_SECONDS", 0)
    begin = SqliteWriter.begin
    given_up = []

    def giving_up(writer: SqliteWriter, group: list[Batch]) -> Begun | None:
        begun = begin(writer, group)
        assert not writer.connection.in_transaction
        given_up.append(begun is None)
        return begun

    monkeypatch.setattr(SqliteWriter, "begin", giving_up)
    await write(engine, put(b"k", b"1"))
    await write(engine, Delete(Space.TUPLES, b"k"))
    assert given_up == [True, True]
    assert threading.main_thread() not in threads
    assert await engine.read(Get(Space.TUPLES, b"k")) == [None]
    await engine.aclose()


async def test_a_file_that_others_hold_is_asked_for_often(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself would sleep up to 100 ms at a time, and rarely get its turn beside a busy process."""
    engine = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    rival = apsw.Connection(str(tmp_path / "app.db"))
    asked = 0
    patient = engine._writer._be_patient

    def counting(calls: int) -> bool:
        nonlocal asked
        asked = max(asked, calls)
        return patient(calls)

    monkeypatch.setattr(engine._writer, "_be_patient", counting)
    for _ in range(2):  # the second time, it must not have been forgotten
        asked = 0
        rival.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(write(engine, put(b"k")))
        async with asyncio.timeout(10):
            while asked < 30:
                await asyncio.sleep(0.001)
        rival.execute("ROLLBACK")
        await waiting
    rival.close()
    await engine.aclose()


async def test_changes_of_others_between_watch_and_first_step_are_seen(clock: ManualClock, tmp_path: Path) -> None:
    here = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    there = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    await write(here, put(b"old"))
    watch = here.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1))
    poller = here._poller
    assert poller is not None
    for _ in range(20):
        await asyncio.sleep(0)
    await write(there, Delete(Space.TUPLES, b"old"), put(b"new", b"1"))
    seen = values_of(await next_of(watch))
    while len(seen) < 2:
        seen.update(values_of(await next_of(watch)))
    assert seen == {b"old": None, b"new": b"1"}
    await there.aclose()
    await here.aclose()


async def test_a_commit_of_another_process_between_retried_batches_is_noticed(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that the database refuses goes again batch by batch, and others may come between."""
    here = await SqliteEngine.open(str(tmp_path / "app.db"), clock)
    there = SqliteFile(str(tmp_path / "app.db"), "full")
    rival = SqliteWriter(there, clock, there.open_writer())
    watch = here.watch(Get(Space.TUPLES, b"k"))
    await next_of(watch)
    begin, commit = SqliteWriter._begin, SqliteWriter.commit

    def refusing(writer: SqliteWriter, group: list[Batch]) -> Begun:
        if len(group) > 1:
            raise apsw.SQLError("refused")
        return begin(writer, group)

    def rivalled(writer: SqliteWriter, group: list[Batch]) -> Outcome:
        outcome = commit(writer, group)
        if len(group) == 1 and writer is not rival and rival._last_clock == 0:
            rival.commit([Batch((put(b"k", b"9"),))])
        return outcome

    monkeypatch.setattr(SqliteWriter, "_begin", refusing)
    monkeypatch.setattr(SqliteWriter, "commit", rivalled)
    await asyncio.gather(write(here, put(b"a")), write(here, put(b"b")))
    assert values_of(await next_of(watch)) == {b"k": b"9"}
    await here.aclose()
    rival.connection.close()
