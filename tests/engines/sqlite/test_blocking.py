"""The SQLite engine for threads keeps the rules, each call made by a thread of its own."""

import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from keyloft import Busy, Closed, DatabaseError, KeyloftError, ManualClock, limits
from keyloft.core import schema
from keyloft.core.driving import run_to_end
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Changes, Check, Conflict, Delete, Get, LogPosition, Now, Record, Set, Space
from keyloft.core.values import JSON
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.sqlite.blocking.commits import WaitingBatch
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.tables import LAYOUTS, READ_VERSION
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.errors import CLOSED, ClockSetBack
from tests.engines.contract import EngineContract
from tests.engines.contract.calls import put
from tests.support.threads import EngineInThreads

LONGEST_SECONDS = 60


class TestBlockingSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = EngineInThreads(BlockingSqliteEngine(SqliteFile(str(tmp_path / "app.db")), clock))
        yield engine
        await engine.aclose()

    # Each call runs in a thread of its own, and concurrent threads have no order.
    test_batches_of_one_key_keep_their_order_whether_committed_or_submitted = None  # type: ignore[assignment]


def opened(path: Path, clock: ManualClock) -> BlockingSqliteEngine:
    return BlockingSqliteEngine(SqliteFile(str(path)), clock)


def value(engine: BlockingSqliteEngine) -> bytes:
    [record] = run_to_end(engine.read(Get(Space.TUPLES, b"k")))
    assert record is not None
    return bytes(record.value)


def test_no_read_is_earlier_than_a_commit_of_another_process_that_was_read_before(
    clock: ManualClock, tmp_path: Path
) -> None:
    reader, writer = opened(tmp_path / "app.db", clock), opened(tmp_path / "app.db", ManualClock(clock.now() + 9000))
    run_to_end(writer.commit(Batch((put(b"k"),))))
    run_to_end(reader.read(Changes(LogPosition(1))))
    assert run_to_end(reader.read(Now())) == [clock.now() + 9000]
    for engine in (reader, writer):
        run_to_end(engine.aclose())


def test_reads_that_share_a_view_see_each_commit_of_another_connection(clock: ManualClock, tmp_path: Path) -> None:
    writer, reader = opened(tmp_path / "app.db", clock), opened(tmp_path / "app.db", clock)
    viewed = 0
    for number in range(300):
        run_to_end(writer.commit(Batch((put(b"k", b"%d" % number),))))
        for _ in range(number % 4 + 1):
            assert value(reader) == b"%d" % number
        viewed += reader.shared.is_viewing
    assert viewed, "no read found a view to share"
    writer.close()
    reader.close()


def test_a_writer_that_reads_no_log_notices_each_commit_of_another_connection(
    clock: ManualClock, tmp_path: Path
) -> None:
    """A lone writer knows the newest version, and reads the log only if another connection has committed."""
    path = tmp_path / "app.db"
    engines = opened(path, clock), opened(path, clock)
    chances, versions, reads_of_the_log = random.Random(1), [], 0

    def trace(_: apsw.Cursor, statement: str, __: object) -> bool:
        nonlocal reads_of_the_log
        reads_of_the_log += statement == READ_VERSION
        return True

    engines[0].connection.exec_trace = trace
    for number in range(400):
        engine = chances.choice(engines)
        match chances.randrange(4):
            case 0:
                run_to_end(engine.read(Get(Space.TUPLES, b"k")))  # may notice the other's commit first
            case 1:
                refused = Batch((put(b"k"),), (Check(Space.TUPLES, b"k", 2**50),))
                assert isinstance(run_to_end(engine.commit(refused)), Conflict)
            case 2:
                engine.shared.end_reading()
                engine.connection.execute("CREATE TABLE IF NOT EXISTS others (number); INSERT INTO others VALUES (1)")
            case _:
                clock.advance(0.001)
                versions.append(engine.commit_now(Batch((put(b"k", b"%d" % number),))).version)
    assert versions == [*range(versions[0], versions[0] + len(versions))]
    engines[0].commit_now(Batch((put(b"k"),)))
    before = reads_of_the_log
    for _ in range(10):
        engines[0].commit_now(Batch((put(b"k"),)))
    assert before
    assert reads_of_the_log == before
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("number", [1, 4, 5, 10, 16, 17, 40])
def test_many_entries_are_what_gets_find_whatever_is_stored(number: int, clock: ManualClock, tmp_path: Path) -> None:
    """The synchronous get_many reads plain entries by column, and all others as records."""
    engine = opened(tmp_path / "app.db", clock)
    keys = [b"\x02%02d\x00" % at for at in range(number)]
    unusual = {
        "plain": None,
        "absent": Delete(Space.TUPLES, keys[-1]),
        "expired": Set(Space.TUPLES, keys[-1], b"1", 0, expire_in=1),
        "expires": Set(Space.TUPLES, keys[-1], b"1", 0, expire_in=10_000),
        "bytes": Set(Space.TUPLES, keys[-1], b"1", 1),
        "large": Set(Space.TUPLES, keys[-1], b"%0600d" % 1, 0),
    }
    for mutation in unusual.values():
        engine.commit_now(Batch(tuple(put(key) for key in keys)))
        if mutation is not None:
            engine.commit_now(Batch((mutation,)))
        clock.advance(0.1)
        for asked in (keys, keys[::-1], [keys[-1]] * number):
            engine.shared.end_reading()
            for _ in range(3):  # without a view, then with one
                found = list(engine.get_many(asked))
                assert [as_get(record) for record in found] == [as_get(engine.get(key)) for key in asked]
    engine.close()


def as_get(record: Record | None) -> Record | None:
    """Without the times of creation and last change."""
    return record and Record(record.key, record.value, record.encoding, record.version, record.expires_at)


def test_an_idle_view_is_ended_so_that_the_write_ahead_log_can_restart(clock: ManualClock, tmp_path: Path) -> None:
    engine, path = opened(tmp_path / "app.db", clock), tmp_path / "app.db"
    run_to_end(engine.commit(Batch((put(b"k"),))))
    while not engine.shared.is_viewing:
        value(engine)
    other = apsw.Connection(str(path))
    other.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    waiting = threading.Event()
    for _ in range(100 * LONGEST_SECONDS):
        if not engine.shared.is_viewing:
            break
        waiting.wait(0.01)
    other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    assert Path(f"{path}-wal").stat().st_size == 0
    other.close()
    assert value(engine) == b'"v"'
    engine.close()


def test_the_write_ahead_log_is_checkpointed_without_a_loop(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 20)
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.02)
    engine, path = opened(tmp_path / "app.db", clock), tmp_path / "app.db"
    before = path.stat().st_size
    run_to_end(engine.commit(Batch(tuple(put(b"%d" % number, b"1" * 1000) for number in range(100)))))
    waiting = threading.Event()
    for _ in range(100 * LONGEST_SECONDS):
        if path.stat().st_size > before:
            break
        waiting.wait(0.01)
    else:
        pytest.fail("it was not checkpointed")
    engine.close()


def test_a_log_is_checkpointed_while_a_reader_opens_view_after_view(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 20)
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.02)
    engine, path = opened(tmp_path / "app.db", clock), tmp_path / "app.db"
    before = path.stat().st_size
    run_to_end(engine.commit(Batch((put(b"k"), *[put(b"%d" % number, b"1" * 1000) for number in range(100)]))))
    deadline = time.monotonic() + LONGEST_SECONDS
    while path.stat().st_size == before:
        value(engine)
        assert time.monotonic() < deadline, "it was not checkpointed"
    engine.close()


def test_an_interrupt_during_the_start_of_housekeeping_does_not_prevent_it(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, start = opened(tmp_path / "app.db", clock), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine.commit(Batch((put(b"k"),))))
    monkeypatch.setattr(threading.Thread, "start", start)
    run_to_end(engine.commit(Batch((put(b"k"),))))
    assert any(thread.name == f"keyloft housekeeping of {engine.location}" for thread in threading.enumerate())
    engine.close()


def test_what_reaches_a_closed_engine_late_is_refused_as_closed(clock: ManualClock, tmp_path: Path) -> None:
    """A thread may have passed the first check just before another one closes the engine."""
    engine = opened(tmp_path / "app.db", clock)
    engine.close()
    get = Get(Space.TUPLES, b"k")
    engine.refusal = None
    for late in (
        lambda: run_to_end(engine.commit(Batch((put(b"k"),)))),
        lambda: run_to_end(engine.read(get, get)),
        lambda: engine.get(get.key),
    ):
        with pytest.raises(Closed):
            late()
    engine.refusal = CLOSED
    with pytest.raises(Closed):
        value(engine)


def test_the_error_of_a_failed_read_names_its_cause(clock: ManualClock, tmp_path: Path) -> None:
    engine = opened(tmp_path / "app.db", clock)
    engine.connection.execute(f"ALTER TABLE {schema.TUPLE_TABLE} RENAME TO others")
    get = Get(Space.TUPLES, b"k")
    for read in (lambda: engine.get(get.key), lambda: run_to_end(engine.read(get, get))):
        with pytest.raises(DatabaseError) as failed:
            read()
        assert isinstance(failed.value.__cause__, apsw.Error)
    engine.close()


def test_a_watch_that_comes_while_polling_ends_is_polled_for(clock: ManualClock, tmp_path: Path) -> None:
    engine, other = opened(tmp_path / "app.db", clock), opened(tmp_path / "app.db", clock)
    run_to_end(engine.watch(Get(Space.TUPLES, b"k")).aclose())
    assert not engine.poller.goes_on()  # as its thread finds out; it may live a little longer
    watch = engine.watch(Get(Space.TUPLES, b"k"))
    assert [change.record for change in run_to_end(watch.__anext__())] == [None]
    run_to_end(other.commit(Batch((put(b"k"),))))
    assert [change.record is not None for change in run_to_end(watch.__anext__())] == [True]
    engine.close()
    other.close()


def test_one_bad_batch_of_a_group_fails_alone(clock: ManualClock, tmp_path: Path) -> None:
    engine = opened(tmp_path / "app.db", clock)
    verdicts: list[object] = []

    def commit(batch: Batch) -> None:
        try:
            verdicts.append(run_to_end(engine.commit(batch)))
        except KeyloftError as error:
            verdicts.append(error)

    # A value that is no bytes: only the write itself finds out.
    bad = Batch((Set(Space.TUPLES, b"bad", "text", 0),))  # type: ignore[arg-type]
    batches = [Batch((put(b"%d" % number),)) for number in range(4)]
    with engine.shared.lock:
        engine.shared.is_in_use = True
        threads = [threading.Thread(target=commit, args=(batch,)) for batch in [*batches[:2], bad, *batches[2:]]]
        for thread in threads:
            thread.start()
        while len(engine.queue.waiting) < len(threads):
            pass
        engine.shared.is_in_use = False
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    assert sorted(type(verdict).__name__ for verdict in verdicts) == [*["Committed"] * 4, "DatabaseError"]
    engine.close()


def test_batches_that_are_tried_one_by_one_don_t_each_wait_for_the_lock_of_another_process(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUSY_SECONDS", 0.05)
    engine = opened(tmp_path / "app.db", clock)
    rival = apsw.Connection(str(tmp_path / "app.db"))
    attempt, sizes = SqliteWriter.attempt, []

    def begin(writer: SqliteWriter, group: list[Batch]) -> Outcome:
        sizes.append(len(group))
        if len(sizes) == 1:
            rival.execute("BEGIN IMMEDIATE")
            raise apsw.CorruptError("a page of one of the batches")
        return attempt(writer, group)

    monkeypatch.setattr(SqliteWriter, "attempt", begin)
    others = [WaitingBatch(Batch((put(b"%d" % number),))) for number in range(5)]
    engine.queue.waiting.extend(others)
    assert isinstance(engine.verdict(Batch((put(b"k"),))), Busy)
    assert [type(other.verdict) for other in others] == [Busy] * 5
    assert sizes == [6, 1, 5], "one wait of the first batch, one of all others"
    rival.execute("ROLLBACK")
    rival.close()
    engine.close()


def rows_of(engine: BlockingSqliteEngine) -> list[list[tuple[Any, ...]]]:
    """All that is stored, and the change log."""
    tables = [LAYOUTS[Space.TUPLES].table, f"{LAYOUTS[Space.TUPLES].table}_large", schema.CHANGES_TABLE]
    return [engine.connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables]


def test_a_lone_set_writes_what_a_batch_with_it_writes(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRIM_EVERY", 7)
    history = KeptHistory(seconds=0.02)
    engines = [BlockingSqliteEngine(SqliteFile(str(tmp_path / name)), clock, history) for name in ("a.db", "b.db")]
    rivals = [opened(tmp_path / name, clock) for name in ("a.db", "b.db")]
    chances = random.Random(2)
    for number in range(300):
        clock.advance(chances.choice([0, 0.001, 0.01]))
        key = b"\x02%d\x00" % chances.randrange(6)
        data = b"%d" % number if chances.random() < 0.8 else b"1" * chances.choice([500, 520, 9000])
        expiry = chances.choice([None, None, 3])
        match chances.randrange(4):
            case 0:  # another connection moves the version, and leaves expired and large entries behind
                for rival in rivals:
                    rival.commit_now(Batch((Set(Space.TUPLES, key, data, JSON, expiry),)))
            case _:
                version = engines[0].set_now(key, data, JSON)
                assert version == engines[1].commit_now(Batch((Set(Space.TUPLES, key, data, JSON),))).version
        assert rows_of(engines[0]) == rows_of(engines[1])
    for engine in (*engines, *rivals):
        engine.close()


def test_a_lone_set_that_fails_leaves_nothing_behind(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUSY_SECONDS", 0.05)
    path = tmp_path / "app.db"
    engine = opened(path, clock)
    first = engine.set_now(b"k", b"1", JSON)
    rival = apsw.Connection(str(path))
    rival.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match=str(path)):
        engine.set_now(b"k", b"2", JSON)
    rival.execute("ROLLBACK")
    rival.close()
    assert value(engine) == b"1"
    assert engine.set_now(b"k", b"2", JSON) == first + 1
    (tmp_path / "app.db").rename(tmp_path / "other.db")
    with pytest.raises(DatabaseError, match="was moved, removed or replaced while it was open; nothing was written"):
        engine.set_now(b"k", b"3", JSON)
    (tmp_path / "other.db").rename(path)
    assert engine.set_now(b"k", b"4", JSON) == first + 2
    ahead = opened(path, ManualClock(clock.now() + 86_400_000))
    ahead.set_now(b"other", b"1", JSON)
    ahead.close()
    with pytest.raises(ClockSetBack):
        engine.set_now(b"k", b"5", JSON)
    assert value(engine) == b"4"
    engine.close()
    with pytest.raises(Closed):
        engine.set_now(b"k", b"5", JSON)
    only_read = BlockingSqliteEngine(SqliteFile(str(path), read_only=True), clock)
    with pytest.raises(DatabaseError, match="mode=ro, which allows no writes"):
        only_read.set_now(b"k", b"5", JSON)
    assert value(only_read) == b"4"
    only_read.close()


def groups_logged(engine: BlockingSqliteEngine) -> int:
    rows = int(engine.connection.execute(f"SELECT count(*) FROM {schema.CHANGES_TABLE}").get)
    return rows - 1  # the one of an empty store


def started(engine: BlockingSqliteEngine, count: int, commits: int = 1) -> list[threading.Thread]:
    def write(thread: int) -> None:
        for number in range(commits):
            run_to_end(engine.commit(Batch((put(b"%d" % thread, b"%d" % number),))))

    threads = [threading.Thread(target=write, args=(thread,), daemon=True) for thread in range(count)]
    for thread in threads:
        thread.start()
    return threads


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    return not any(thread.is_alive() for thread in threads)


def test_threads_that_come_before_another_one_commits_are_committed_with_it(clock: ManualClock, tmp_path: Path) -> None:
    engine, deadline = opened(tmp_path / "app.db", clock), time.monotonic() + LONGEST_SECONDS
    with engine.shared.lock:  # the first one waits for it, and has not begun to commit
        threads = started(engine, 4)
        while len(engine.queue.waiting) < len(threads) - 1:
            assert time.monotonic() < deadline, "they wait for the connection, each to commit alone"
    assert ended(threads)
    assert groups_logged(engine) == 1
    engine.close()


def test_each_thread_of_a_group_is_woken(clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMMIT_WAIT_SECONDS", 100 * LONGEST_SECONDS)  # none can look after itself
    engine = opened(tmp_path / "app.db", clock)
    assert ended(started(engine, 16, 50))
    engine.close()


def test_threads_behind_a_withdrawn_batch_of_their_group_are_woken(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COMMIT_WAIT_SECONDS", 100 * LONGEST_SECONDS)
    engine = opened(tmp_path / "app.db", clock)
    with engine.shared.lock:
        engine.shared.is_in_use = True
        threads = started(engine, 1)
        while not engine.queue.waiting:
            pass
        gone = WaitingBatch(Batch((put(b"gone"),)))  # its thread was interrupted
        engine.queue.waiting.append(gone)
        threads += started(engine, 3)
        while len(engine.queue.waiting) < len(threads) + 1:
            pass
        read_time = clock.now

        def withdraw() -> int:
            gone.is_withdrawn = True
            return read_time()

        monkeypatch.setattr(clock, "now", withdraw)
        engine.shared.is_in_use = False
    assert ended(threads)
    assert groups_logged(engine) == 1
    engine.close()
