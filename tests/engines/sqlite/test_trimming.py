"""The change log is trimmed by age and by size, a little at each commit, and never loses the version counter."""

import asyncio
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import keyloft
from keyloft import HistoryGone, ManualClock, Undecodable, admin, limits
from keyloft.core.records import Changes, LogPosition, Scan, Space
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from tests.engines.contract.calls import next_of, put, write
from tests.support.fork_server import run


@pytest.fixture(autouse=True)
def _frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRIM_EVERY", 4)
    monkeypatch.setattr(limits, "TRIM_ROWS", 8)


async def opened(path: Path, clock: ManualClock, **kept: float) -> SqliteEngine:
    return await SqliteEngine.open(SqliteFile(str(path)), clock, KeptHistory(**kept))


def logged(engine: SqliteEngine) -> list[int]:
    """The versions of the rows that are kept."""
    return [version for [version] in engine.connection.execute("SELECT version FROM keyloft_changes ORDER BY version")]


async def test_old_rows_go_and_younger_ones_stay(clock: ManualClock, tmp_path: Path) -> None:
    engine = await opened(tmp_path / "app.db", clock, seconds=10)
    for _ in range(40):
        await write(engine, put(b"k"))
        clock.advance(1)
    versions = logged(engine)
    assert versions[-1] == 41
    assert 10 <= len(versions) <= 10 + 2 * limits.TRIM_EVERY
    assert versions == [*range(versions[0], 42)]
    await engine.aclose()


async def test_rows_go_once_the_log_is_too_large(clock: ManualClock, tmp_path: Path) -> None:
    engine = await opened(tmp_path / "app.db", clock, mib=0.01)
    for number in range(100):
        await write(engine, *[put(b"%4d %4d" % (number, each)) for each in range(50)])
    size: int = engine.connection.execute("SELECT sum(length(changes)) FROM keyloft_changes").get
    assert 0.005 * 2**20 < size < 0.02 * 2**20
    assert logged(engine)[-1] == 101
    await engine.aclose()


async def test_one_commit_removes_a_bounded_number_of_rows(clock: ManualClock, tmp_path: Path) -> None:
    engine = await opened(tmp_path / "app.db", clock, seconds=1e6)
    for _ in range(100):
        await write(engine, put(b"k"))
    await engine.aclose()
    clock.advance(100)
    engine = await opened(tmp_path / "app.db", clock, seconds=1)
    kept = len(logged(engine))
    for _ in range(100):
        await write(engine, put(b"k"))
        assert kept - len(logged(engine)) < limits.TRIM_ROWS
        kept = len(logged(engine))
    assert logged(engine)[0] == 101, "the newest row that may go stays"
    await engine.aclose()


async def test_the_newest_row_stays_and_versions_go_on_after_years(clock: ManualClock, tmp_path: Path) -> None:
    for number in range(2, 20):
        engine = await opened(tmp_path / "app.db", clock, seconds=0, mib=0)
        assert (await write(engine, put(b"k"))).version == number
        assert number in logged(engine)
        await engine.aclose()
        clock.advance(365 * 86_400)


async def test_a_position_that_was_trimmed_is_named(clock: ManualClock, tmp_path: Path) -> None:
    engine = await opened(tmp_path / "app.db", clock, seconds=1)
    for _ in range(40):
        await write(engine, put(b"k"))
        clock.advance(1)
    oldest = logged(engine)[0]
    with pytest.raises(HistoryGone):
        await engine.read(Changes(LogPosition(oldest - 1)))
    [piece] = await engine.read(Changes(LogPosition(oldest)))
    assert [change.version for change in piece.changes] == [*range(oldest + 1, 42)]
    await engine.aclose()


async def test_a_slow_watch_of_a_trimmed_log_learns_that_it_missed_changes(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_PENDING_KEYS", 5)
    engine = await opened(tmp_path / "app.db", clock, seconds=1)
    await write(engine, put(b"k"))
    watch = engine.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1))
    for number in range(60):  # which are not read
        await write(engine, put(b"%d" % number))
        clock.advance(1)
    with pytest.raises(HistoryGone):
        await next_of(watch)
    await engine.aclose()


_TRIMMING = """
import asyncio, sys
from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.core.records import Batch, Set, Space
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile

limits.TRIM_EVERY, limits.TRIM_ROWS = 4, 8


async def main():
    engine = await SqliteEngine.open(SqliteFile(sys.argv[1]), SystemClock(), KeptHistory(seconds=0, mib=0))
    for number in range(300):
        done = await engine.commit(Batch((Set(Space.TUPLES, b"%d" % number, b"1", 1),)))
        print(done.version)
    await engine.aclose()


asyncio.run(main())
"""


async def test_two_processes_that_trim_at_once_give_no_version_twice(clock: ManualClock, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    await (await opened(path, clock)).aclose()
    ended = await asyncio.gather(*[asyncio.to_thread(run, ["-c", _TRIMMING, str(path)]) for _ in range(2)])
    assert [process.returncode for process in ended] == [0, 0]
    versions = [int(line) for process in ended for line in process.stdout.split()]
    assert sorted(versions) == [*range(2, 602)]
    connection = apsw.Connection(str(path))
    kept = [version for [version] in connection.execute("SELECT version FROM keyloft_changes ORDER BY version")]
    assert kept[-1] == 601
    assert len(kept) < 40
    connection.close()


async def test_a_log_of_large_commits_stays_within_its_bounds(tmp_path: Path) -> None:
    """Each commit leaves several rows: as many are removed."""
    path = tmp_path / "app.db"
    async with keyloft.open(path, history_mib=1, history_seconds=1e6, durability="relaxed") as kv:
        for number in range(60):
            await kv.set_many({("k", "x" * 1800, at): number for at in range(100)})
    with closing(apsw.Connection(str(path))) as connection:
        [[size]] = connection.execute("SELECT sum(length(changes)) FROM keyloft_changes").fetchall()
    assert isinstance(size, int)
    assert size < 2 * 1024 * 1024


async def test_a_commit_with_more_rows_than_are_removed_at_once_is_trimmed(clock: ManualClock, tmp_path: Path) -> None:
    engine = await opened(tmp_path / "app.db", clock, seconds=10)
    await write(engine, *[put(b"k%05d" % number) for number in range(5000)])
    assert len(logged(engine)) > 2 * limits.TRIM_ROWS
    for _ in range(20):
        await write(engine, put(b"k"))
        clock.advance(10)
    assert len(logged(engine)) < 2 * limits.TRIM_ROWS
    await engine.aclose()


async def test_a_damaged_row_of_the_log_ends_watches_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        before = await kv.set(("k",), 1)
        live = kv.watch(prefix=())
        waiting = asyncio.ensure_future(anext(live))
        await asyncio.sleep(0)
        async with keyloft.open(path) as other:
            with closing(apsw.Connection(str(path))) as connection:
                await other.set(("k",), 2)
                connection.execute(
                    "UPDATE keyloft_changes SET changes = x'9194cc01000000' WHERE version > ?", (before,)
                )
        with pytest.raises(Undecodable, match=f"the change log is damaged after version {before}: run `keyloft check`"):
            await anext(kv.watch(prefix=(), since=before))
        # The live watch has read the row before it was damaged, or ends with the same error.
        result: object
        async with asyncio.timeout(60):
            [result] = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(result, (Undecodable, list))
        await kv.set(("k",), 3)
        watch = kv.watch(prefix=())
        await kv.set(("k",), 4)
        [entry] = await anext(watch)
        assert entry.value == 4
    findings = (await admin.check(path)).findings
    assert any("don't match their checksum" in finding.what for finding in findings)
