"""The SQLite engine for threads keeps the rules, each call made by a thread of its own."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from keyloft import KeyloftError, ManualClock
from keyloft.core.driving import run_to_end
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Get, Set, Space
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from tests.engines.contract import EngineContract, put
from tests.support.threads import EngineInThreads

LONGEST_SECONDS = 60


class TestBlockingSqliteFile(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
        engine = EngineInThreads(BlockingSqliteEngine(SqliteFile(str(tmp_path / "app.db")), clock))
        yield engine
        await engine.aclose()


def opened(path: Path, clock: ManualClock) -> BlockingSqliteEngine:
    return BlockingSqliteEngine(SqliteFile(str(path)), clock)


def value(engine: BlockingSqliteEngine) -> bytes:
    [record] = run_to_end(engine.read(Get(Space.TUPLES, b"k")))
    assert record is not None
    return bytes(record.value)


def test_reads_that_share_a_view_see_each_commit_of_another_connection(clock: ManualClock, tmp_path: Path) -> None:
    writer, reader = opened(tmp_path / "app.db", clock), opened(tmp_path / "app.db", clock)
    viewed = 0
    for number in range(300):
        run_to_end(writer.commit(Batch((put(b"k", b"%d" % number),))))
        for _ in range(number % 4 + 1):
            assert value(reader) == b"%d" % number
        viewed += reader._shared.is_viewing
    assert viewed, "no read found a view to share"
    writer.close()
    reader.close()


def test_an_idle_view_is_ended_so_that_the_write_ahead_log_can_restart(clock: ManualClock, tmp_path: Path) -> None:
    engine, path = opened(tmp_path / "app.db", clock), tmp_path / "app.db"
    run_to_end(engine.commit(Batch((put(b"k"),))))
    while not engine._shared.is_viewing:
        value(engine)
    other = apsw.Connection(str(path))
    other.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    waiting = threading.Event()
    for _ in range(100 * LONGEST_SECONDS):
        if not engine._shared.is_viewing:
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
    with engine._lock:
        threads = [threading.Thread(target=commit, args=(batch,)) for batch in [*batches[:2], bad, *batches[2:]]]
        for thread in threads:
            thread.start()
        while len(engine._queue._waiting) < len(threads):
            pass
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    assert sorted(type(verdict).__name__ for verdict in verdicts) == [*["Committed"] * 4, "DatabaseError"]
    engine.close()
