"""The SQLite engine keeps the rules, on a file and in memory."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import keyloft
from keyloft import Busy, DatabaseError, ManualClock
from keyloft.clock import SystemClock
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Batch,
    ChangeKind,
    Changes,
    Delete,
    Get,
    LogPosition,
    Now,
    Scan,
    Set,
    Space,
    Touch,
)
from keyloft.core.values import Encoding
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.writes import SqliteWriter
from tests.engines.contract import EngineContract
from tests.engines.contract.calls import (
    END,
    START,
    A,
    next_of,
    put,
    read_the_log_in_small_slices,
    taken,
    values_of,
    write,
)


class TestSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
        yield engine
        await engine.aclose()


class TestSqliteInMemory(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        engine = await SqliteEngine.open(SqliteFile(":memory:"), clock)
        yield engine
        await engine.aclose()


async def test_an_entry_expires_to_the_millisecond_by_the_system_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gets of one iteration of the event loop read the clock once, but for what expires soon."""
    now = 1_700_000_000_000
    monkeypatch.setattr("keyloft.clock.time_ns", lambda: now * 1_000_000)
    # A busy machine must not end the iteration between two gets.
    monkeypatch.setattr("keyloft.limits.LOOP_ITERATION_SECONDS", 60)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), SystemClock())
    await write(engine, put(b"k", expire_in=10_000))

    async def exists() -> bool:
        [record] = await engine.read(Get(Space.TUPLES, b"k"))
        return record is not None

    assert await exists()
    assert await exists()
    await asyncio.sleep(0)
    now += 9_500
    assert await exists()
    now += 499
    assert await exists()
    now += 1
    assert not await exists(), "within the iteration in which it still existed"
    now -= 1_000
    await asyncio.sleep(0)
    assert await exists()
    # A commit at a later time, as of a process whose clock is ahead, counts for reads of the same iteration.
    now += 1_000
    await write(engine, put(b"other"))
    now -= 1_000
    assert not await exists()
    await engine.aclose()


PAGE = 4096 + 24


async def test_the_write_ahead_log_is_checkpointed_in_a_quiet_moment(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 20)
    path = tmp_path / "app.db"
    engine = await SqliteEngine.open(SqliteFile(str(path)), clock)
    before = path.stat().st_size
    await write(engine, *[put(b"%d" % number, b"1" * 1000) for number in range(100)])
    async with asyncio.timeout(60):
        while path.stat().st_size == before:
            await asyncio.sleep(0.005)
    await engine.aclose()


@pytest.mark.parametrize("reading", [False, True], ids=["writing", "writing and reading"])
async def test_the_write_ahead_log_does_not_outgrow_its_limit_without_a_quiet_moment(
    reading: bool, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that outlived its iteration of the event loop would keep the write-ahead log from being overwritten."""
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES", 50)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
        if reading:
            await engine.read(Get(Space.TUPLES, b"k"), Get(Space.TUPLES, b"other"))
    assert (tmp_path / "app.db-wal").stat().st_size < 120 * PAGE
    await engine.aclose()


async def test_small_commits_overwrite_a_short_write_ahead_log_and_large_ones_let_it_grow(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS", 50)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    log = tmp_path / "app.db-wal"
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
    assert log.stat().st_size < 120 * PAGE
    for number in range(10):
        await write(engine, *[put(b"%d" % key, b"%d" % number * 2000) for key in range(100)])
    assert log.stat().st_size > 300 * PAGE
    await engine.aclose()


class _Counting(apsw.Connection):
    """Counts checkpoints, and the waits for a lock; `fails` makes checkpoints fail, `stops_short` one of them."""

    checkpoints = 0
    fails = False
    stops_short = False
    waits = 0

    def set_busy_handler(self, handler: Callable[[int], bool] | None) -> None:
        def counting(calls: int) -> bool:
            assert handler is not None
            self.waits = max(self.waits, calls)
            return handler(calls)

        super().set_busy_handler(None if handler is None else counting)

    def wal_checkpoint(self, *args: Any, **options: Any) -> tuple[int, int]:
        if options.get("mode") == apsw.SQLITE_CHECKPOINT_NOOP:
            return super().wal_checkpoint(*args, **options)
        self.checkpoints += 1
        if self.fails:
            raise RuntimeError("not now")
        if self.stops_short:
            self.stops_short = False
            return 50, 49
        return super().wal_checkpoint(*args, **options)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apsw.Connection", _Counting)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 50)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS", 50)


def counting_connection(engine: SqliteEngine) -> _Counting:
    assert isinstance(engine.connection, _Counting)
    return engine.connection


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("durability", ["full", "relaxed"])
async def test_a_checkpoint_that_a_reader_prevents_is_not_tried_at_each_commit(
    durability: str, clock: ManualClock, tmp_path: Path
) -> None:
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db"), durability=durability), clock)
    connection = counting_connection(engine)

    async def checkpoints_in(commits: int) -> int:
        before = connection.checkpoints
        for number in range(commits):
            await write(engine, put(b"k", b"%d" % number))
        return connection.checkpoints - before

    await checkpoints_in(10)
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN")
    reader.execute("SELECT 1 FROM keyloft_changes").fetchall()
    assert 1 <= await checkpoints_in(200) <= 200 * 3 // 50
    reader.execute("ROLLBACK")
    tries = connection.checkpoints
    async with asyncio.timeout(60):
        while connection.checkpoints == tries or engine.writing.is_lent:
            await asyncio.sleep(0.01)
    await checkpoints_in(200)  # which overwrite it from the start
    size = (tmp_path / "app.db-wal").stat().st_size
    assert 2 <= await checkpoints_in(200) <= 200 * 3 // 50
    assert (tmp_path / "app.db-wal").stat().st_size == size
    reader.close()
    await engine.aclose()


@pytest.mark.usefixtures("counting")
async def test_commits_before_an_incomplete_checkpoint_do_not_make_later_ones_count_as_small(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise writers wait for a checkpoint, half-way through a sweep for example."""
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_SECONDS", 60.0)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    connection = counting_connection(engine)
    for number in range(15):
        await write(engine, put(b"k", b"%d" % number))
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN")
    reader.execute("SELECT 1 FROM keyloft_changes").fetchall()
    while not connection.checkpoints:
        await write(engine, put(b"k"))
    await engine.wait_for_jobs()
    reader.execute("ROLLBACK")
    checkpoints = connection.checkpoints
    for number in range(10):
        await write(engine, *[put(b"%d" % key, b"%d" % number * 2000) for key in range(100)])
    await engine.wait_for_jobs()
    assert connection.checkpoints == checkpoints
    reader.close()
    await engine.aclose()


@pytest.mark.usefixtures("counting")
async def test_a_checkpoint_that_fails_delays_no_writer(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_RETRY_PAUSES", (60.0, 60.0))
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    connection = counting_connection(engine)
    connection.fails = True
    for number in range(100):
        await write(engine, put(b"k", b"%d" % number))
    assert connection.checkpoints == 2, "it is tried again once, not at each commit"
    assert "a checkpoint failed" in caplog.text
    await engine.aclose()


@pytest.mark.usefixtures("counting")
async def test_a_read_that_begins_within_a_checkpoint_does_not_let_the_write_ahead_log_grow(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite then stops short of the newest pages, about once in ten thousand checkpoints."""
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_RETRY_PAUSES", (60.0, 60.0))
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    counting_connection(engine).stops_short = True
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
    assert (tmp_path / "app.db-wal").stat().st_size < 120 * PAGE
    await engine.aclose()


@pytest.mark.usefixtures("counting")
async def test_a_checkpoint_that_a_reader_prevented_is_made_later_without_a_further_commit(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 10)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_RETRY_PAUSES", (0.01, 0.01))
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    await write(engine, put(b"k", b"before"))
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN")
    reader.execute("SELECT 1 FROM keyloft_changes").fetchall()
    for number in range(100):
        await write(engine, put(b"k", b"%d" % number))

    def left() -> int:
        pages, checkpointed = reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        return pages - checkpointed

    reader.execute("ROLLBACK")
    assert left() > 100
    async with asyncio.timeout(60):
        while left():
            await asyncio.sleep(0.005)
    reader.close()
    await engine.aclose()


class ThreadNotingClock(ManualClock):
    """Notes in which threads the time is read: a group reads it once it has loaded what decides it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def now(self) -> int:
        self.threads.append(threading.current_thread())
        return super().now()


async def test_what_takes_long_on_the_event_loop_is_done_on_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small write may meet large values."""
    clock = ThreadNotingClock()
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    committing: list[threading.Thread] = []

    def note(connection: apsw.Connection, name: str, pages: int) -> int:
        committing.append(threading.current_thread())
        return apsw.SQLITE_OK

    engine.connection.set_wal_hook(note)
    monkeypatch.setattr("keyloft.limits.INLINE_SECONDS", 0)
    for mutation in (put(b"k", b"1"), Delete(Space.TUPLES, b"k")):
        await write(engine, mutation)
        assert clock.threads[-1] is not threading.main_thread(), "the group was decided again on the thread"
    assert len(committing) == 2
    assert threading.main_thread() not in committing
    assert await engine.read(Get(Space.TUPLES, b"k")) == [None]
    await engine.aclose()


@pytest.mark.usefixtures("counting")
async def test_a_lock_of_another_process_is_tried_often(clock: ManualClock, tmp_path: Path) -> None:
    """SQLite itself would sleep up to 100 ms at a time, and rarely get the lock beside a busy process."""
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    connection = counting_connection(engine)
    rival = apsw.Connection(str(tmp_path / "app.db"))
    for _ in range(2):  # the second commit must wait in the same way
        connection.waits = 0
        rival.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(write(engine, put(b"k")))
        async with asyncio.timeout(60):
            while connection.waits < 30:
                await asyncio.sleep(0.001)
        rival.execute("ROLLBACK")
        await waiting
    rival.close()
    await engine.aclose()


async def test_changes_by_another_process_between_watch_and_its_first_step_are_reported(
    clock: ManualClock, tmp_path: Path
) -> None:
    here = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    there = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    await write(here, put(b"old"))
    watch = here.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1))
    for _ in range(20):
        await asyncio.sleep(0)
    await write(there, Delete(Space.TUPLES, b"old"), put(b"new", b"1"))
    seen = values_of(await next_of(watch))
    while len(seen) < 2:
        seen.update(values_of(await next_of(watch)))
    assert seen == {b"old": None, b"new": b"1"}
    await there.aclose()
    await here.aclose()


async def test_an_entry_that_expires_while_another_process_commits_it_is_reported_as_expired(
    clock: ManualClock, tmp_path: Path
) -> None:
    """A process may be stopped between the time of its commit and COMMIT, while others notice later expiries."""
    file, stopped = SqliteFile(str(tmp_path / "app.db")), ManualClock(clock.now())
    engine, other = await SqliteEngine.open(file, clock), await SqliteEngine.open(file, stopped)
    woken = asyncio.Event()
    log = engine.follow(Scan(A, START, END, 1), woken=woken.set)
    await write(engine, put(b"first", expire_in=5000), put(b"touched"))
    await taken(log, woken, 2)
    clock.advance(10)
    assert [(change.key, change.kind) for change in await taken(log, woken, 1)] == [(b"first", ChangeKind.EXPIRED)]
    await write(other, put(b"put", expire_in=1000), Touch(A, b"touched", 1000))
    expired = {change.key for change in await taken(log, woken, 3) if change.kind is ChangeKind.EXPIRED}
    assert expired == {b"put", b"touched"}
    await other.aclose()
    await engine.aclose()


async def test_no_read_is_earlier_than_a_commit_of_another_process_that_was_read_before(
    clock: ManualClock, tmp_path: Path
) -> None:
    file = SqliteFile(str(tmp_path / "app.db"))
    engine, other = await SqliteEngine.open(file, clock), await SqliteEngine.open(file, ManualClock(clock.now() + 9000))
    await write(other, put(b"k"))
    [piece] = await engine.read(Changes(LogPosition(1)))
    assert await engine.read(Now()) == [piece.ended] == [clock.now() + 9000]
    await other.aclose()
    await engine.aclose()


async def test_an_entry_that_expired_within_its_commit_is_reported_by_a_follower_that_catches_up(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_the_log_in_small_slices(monkeypatch)
    file, stopped = SqliteFile(str(tmp_path / "app.db")), ManualClock(clock.now())
    engine, other = await SqliteEngine.open(file, clock), await SqliteEngine.open(file, stopped)
    since = (await write(engine, put(b"touched"))).version
    for clock_ in (clock, stopped):
        clock_.advance(1)
    for _ in range(20):
        await write(engine, put(b"other"))
    clock.advance(10)
    watch = engine.watch(Scan(A, START, END, 1))
    log = engine.follow(Scan(A, START, END, 1), woken=lambda: None, since=since)
    assert not await log.take()  # reads the expiries up to now
    assert await log.take()  # reports the first slice of the log
    await write(other, put(b"put", expire_in=1000), Touch(A, b"touched", 1000))
    await next_of(watch)  # the commit was noticed
    changes = []
    while log.is_woken:
        changes += [(change.key, change.kind) for change in await log.take() if change.key != b"other"]
    assert changes == [
        (b"put", ChangeKind.PUT),
        (b"touched", ChangeKind.PUT),
        (b"put", ChangeKind.EXPIRED),
        (b"touched", ChangeKind.EXPIRED),
    ]
    await other.aclose()
    await engine.aclose()


async def test_a_commit_of_another_process_between_retried_batches_is_noticed(
    clock: ManualClock, tmp_path: Path
) -> None:
    """A group that the database refuses is tried again batch by batch, and another process may commit in between."""
    path = str(tmp_path / "app.db")
    here = await SqliteEngine.open(SqliteFile(path), clock)
    file = SqliteFile(path)
    rival = SqliteWriter(file, clock, file.open_writer(), KeptHistory())
    rival.connection.execute(
        "CREATE TRIGGER refuses BEFORE INSERT ON keyloft_tuples WHEN NEW.key = x'62' "
        "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )
    watch = here.watch(Get(Space.TUPLES, b"k"))
    await next_of(watch)
    commits = 0

    def commit_as_well(connection: apsw.Connection, name: str, pages: int) -> int:
        nonlocal commits
        commits += 1
        if commits == 1:
            rival.commit([Batch((put(b"k", b"9"),))])
        return apsw.SQLITE_OK

    here.connection.set_wal_hook(commit_as_well)
    writes = [write(here, put(key)) for key in (b"a", b"b", b"c")]
    _, refused, _ = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(refused, DatabaseError)
    assert commits == 2, "batch by batch"
    assert values_of(await next_of(watch)) == {b"k": b"9"}
    await here.aclose()
    rival.connection.close()


async def test_a_lost_version_counter_is_named(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db", sweep_every=None) as kv:
        rival = apsw.Connection(str(tmp_path / "app.db"))
        rival.execute("DELETE FROM keyloft_changes")
        rival.close()
        for call in (lambda: kv.set(("k",), 1), lambda: kv.delete(("k",)), lambda: anext(kv.watch(prefix=("a",)))):
            with pytest.raises(DatabaseError, match="keyloft_changes"):
                await call()


async def test_an_expired_entry_does_not_come_back_if_the_clock_is_set_back(clock: ManualClock, tmp_path: Path) -> None:
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    await write(engine, put(b"k", expire_in=5000))
    clock.advance(6)
    await write(engine, put(b"other"))
    clock.advance(-6)
    every = Scan(Space.TUPLES, b"\x00", b"\xff", 10)
    assert await engine.read(Get(Space.TUPLES, b"k")) == [None]
    assert (await engine.read(Get(Space.TUPLES, b"k"), Get(Space.TUPLES, b"other")))[0] is None
    [page] = await engine.read(every)
    assert list(page.keys) == [b"other"]
    await engine.aclose()
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    assert await engine.read(Get(Space.TUPLES, b"k")) == [None], "a new engine knows the last commit"
    await engine.aclose()


class SlowOpeningVFS(apsw.VFS):
    """Files open only while `may_open` is set."""

    def __init__(self) -> None:
        self.may_open, self.is_opening = threading.Event(), threading.Event()
        self.may_open.set()
        super().__init__("slow-opening", "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        self.is_opening.set()
        assert self.may_open.wait(60)
        return apsw.VFSFile("", name, flags)


async def test_what_expires_while_a_long_read_waits_is_not_read(clock: ManualClock, tmp_path: Path) -> None:
    vfs = SlowOpeningVFS()
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db"), vfs="slow-opening"), clock)
    await write(engine, put(b"k", expire_in=1000), put(b"l"))
    vfs.may_open.clear()
    vfs.is_opening.clear()
    reading = asyncio.create_task(engine.read(Scan(A, START, END, 100_000)))
    await asyncio.to_thread(vfs.is_opening.wait, 60)
    clock.advance(1)
    vfs.may_open.set()
    [page] = await reading
    assert [record.key for record in page] == [b"l"]
    await engine.aclose()
    vfs.unregister()


async def test_the_write_ahead_log_shrinks_again_after_a_long_reader_has_left(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 10)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES", 50)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_RETRY_PAUSES", (0.01, 0.01))
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    log = tmp_path / "app.db-wal"
    await write(engine, put(b"k", b"before"))
    reader = apsw.Connection(str(tmp_path / "app.db"))
    reader.execute("BEGIN; SELECT 1 FROM keyloft_changes").fetchall()
    for number in range(300):
        await write(engine, put(b"k", b"%d" % number))
    assert log.stat().st_size > 300 * PAGE
    reader.execute("ROLLBACK")
    async with asyncio.timeout(60):
        while log.stat().st_size > 100 * PAGE:
            await asyncio.sleep(0.005)
    reader.close()
    await engine.aclose()


async def test_a_batch_is_let_go_once_it_is_committed(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db") as kv:
        batch = Batch((Set(Space.TUPLES, b"k", b"1", Encoding.JSON),))
        references = sys.getrefcount(batch)
        await kv.engine.commit(batch)
        # The thread that wrote it lets go of it after the event loop knows; the next commit must not be needed.
        async with asyncio.timeout(60):
            while sys.getrefcount(batch) != references:
                await asyncio.sleep(0.001)


def test_a_group_that_is_tried_batch_by_batch_waits_once_for_the_lock_of_another_process(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.BUSY_SECONDS", 0.05)
    file = SqliteFile(str(tmp_path / "app.db"))
    connection = file.open_writer()
    writer = SqliteWriter(file, clock, connection, KeptHistory())
    rival = apsw.Connection(file.path)
    waits, wait = 0, writer.wait_for_lock

    def fail_once(_: apsw.Connection) -> bool:
        if rival.in_transaction:
            return False
        rival.execute("BEGIN IMMEDIATE")
        raise apsw.CorruptError("a page of one of the batches")

    def count(calls: int) -> bool:
        nonlocal waits
        waits += calls == 0
        return wait(calls)

    monkeypatch.setattr("keyloft.engines.sqlite.writes.restarts_log", fail_once)
    monkeypatch.setattr(writer, "wait_for_lock", count)
    group = [Batch((put(b"%d" % number),)) for number in range(5)]
    verdicts = writer.commit(group).verdicts
    assert [type(verdict) for verdict in verdicts] == [Busy] * 5
    assert len({id(verdict) for verdict in verdicts}) == 5
    assert waits == 1
    rival.execute("ROLLBACK")
    rival.close()
    connection.close()
