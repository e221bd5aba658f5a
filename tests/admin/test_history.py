"""No version is given twice, and the change log tells what operators' commands changed."""

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

import keyloft
from keyloft import DatabaseError, TransferFailed, admin, limits
from keyloft.clock import ManualClock, SystemClock
from keyloft.core import keys
from keyloft.core.engine import Engine
from keyloft.core.maintenance import LogRow, version_after_jump
from keyloft.core.records import ChangeKind, Changes, LoggedChange, LogPosition, Space
from keyloft.engines import open_engine, open_maintenance
from keyloft.errors import ClockSetBack, HistoryGone
from tests.support.everything import fill, run_sql
from tests.support.postgres import database_url

LONGEST_SECONDS = 20
JUMP = limits.VERSION_JUMP


@pytest.fixture(params=["sqlite file", "postgresql", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = database_url(request.param, request, tmp_path)
    assert url is not None
    return url


@asynccontextmanager
async def engine_of(url: str | Path) -> AsyncIterator[Engine]:
    engine = await open_engine(url)
    try:
        yield engine
    finally:
        await engine.aclose()


async def changes_after(url: str | Path, version: int) -> list[LoggedChange]:
    """What the log tells after a version."""
    found: list[LoggedChange] = []
    async with engine_of(url) as engine:
        position = LogPosition(version)
        while True:
            [piece] = await engine.read(Changes(position))
            found += piece.changes
            if piece.is_last:
                return found
            position = piece.end


async def history(url: str | Path) -> tuple[str, int, list[LogRow]]:
    """The store's id, its version counter and its whole log; the log has no holes."""
    maintenance = await open_maintenance(url)
    try:
        async with maintenance.snapshot() as snapshot:
            rows = [row async for some in snapshot.log() for row in some]
            assert rows[-1].version == snapshot.version
            for before, row in pairwise(rows):
                assert row.base == (before.base if row.part else before.version)
                assert (row.at, row.size) >= (before.at, before.size)
            return await snapshot.store_id(), snapshot.version, rows
    finally:
        await maintenance.aclose()


async def version_of(url: str | Path) -> int:
    return (await history(url))[1]


async def next_version(url: str | Path) -> int:
    async with keyloft.open(url) as kv:
        return await kv.set(("next",), 1)


def lines(*entries: Mapping[str, object]) -> io.BytesIO:
    return io.BytesIO("".join([f"{json.dumps(entry)}\n" for entry in entries]).encode())


# Import


async def test_an_import_logs_the_keys_that_it_put_under_a_version_of_its_own(url: str) -> None:
    async with keyloft.open(url) as kv:
        await kv.set(("kept",), 1)
        before = await kv.set(("replaced",), 1)
    given = lines(
        {"key": "kept", "value": 1},
        {"key": "replaced", "value": 2},
        {"key": "new", "value": 3, "version": 1},
        {"plugin": "trivia", "key": "score", "value": 4},
    )
    await admin.import_(given, url, existing="replace")
    assert await version_of(url) == before + 1
    assert [(change.version, change.space, change.key, change.kind) for change in await changes_after(url, before)] == [
        (before + 1, Space.TUPLES, keys.encode(("replaced",)), ChangeKind.PUT),
        (before + 1, Space.TUPLES, keys.encode(("new",)), ChangeKind.PUT),
        (before + 1, Space.PLUGINS, ("trivia", "score"), ChangeKind.PUT),
    ]
    async with keyloft.open(url) as kv:
        versions = [(await kv.get((name,))).versionstamp for name in ("kept", "replaced", "new")]
        assert versions == [before - 1, before + 1, 1]


async def test_a_watch_sees_an_import_at_once(url: str) -> None:
    async with keyloft.open(url) as kv:
        deleted = await kv.set(("b",), "before")
        await kv.delete(("b",))
        watching = kv.watch(prefix=())
        assert await kv.list() == []
        await admin.import_(lines({"key": "a", "value": 1}, {"key": "b", "value": 2, "version": deleted}), url)
        seen: dict[object, object] = {}
        async with asyncio.timeout(LONGEST_SECONDS):
            while len(seen) < 2:
                seen |= {entry.key: entry.value for entry in await anext(watching)}
        assert seen == {("a",): 1, ("b",): 2}


async def test_an_import_leaves_the_counter_at_or_above_the_highest_version(url: str, tmp_path: Path) -> None:
    await admin.import_(lines({"key": "a", "value": 1, "version": 70}), url)
    assert await version_of(url) == 70
    assert await next_version(url) == 71
    # The first line of an export counts, too: its last versions may have deleted entries.
    await admin.export(url, tmp_path / "all.jsonl")
    async with keyloft.open(tmp_path / "other.db") as kv:
        await kv.set(("mine",), 1)
    await admin.import_(tmp_path / "all.jsonl", tmp_path / "other.db")
    assert await next_version(tmp_path / "other.db") == 72


async def test_an_import_that_stores_nothing_takes_no_version(url: str) -> None:
    await admin.import_(lines({"key": "a", "value": 1}), url)
    before = await history(url)
    await admin.import_(lines({"key": "a", "value": 1}), url)
    with pytest.raises(TransferFailed):
        await admin.import_(lines({"key": "b", "value": 1}, {"key": "a", "value": 2}), url)
    assert await history(url) == before


async def test_a_large_import_is_logged_in_parts(url: str) -> None:
    number = limits.MAINTENANCE_ROWS + 10
    key = "k" * 40
    await admin.import_(lines(*[{"key": f"{key}/={at}", "value": at} for at in range(number)]), url)
    _, version, rows = await history(url)
    assert version == 3
    assert max(len(row.changes) for row in rows) <= limits.LOG_PART_BYTES
    assert max(row.part for row in rows) > 2
    found = await changes_after(url, 0)
    assert [change.key for change in found] == [keys.encode((key, at)) for at in range(number)]
    assert {change.version for change in found} == {2, 3}


@pytest.mark.parametrize("version", [limits.LAST_VERSION + 1, 2**62])
async def test_versions_stay_below_two_to_the_53rd(url: str, version: int) -> None:
    with pytest.raises(TransferFailed, match="version"):
        await admin.import_(lines({"key": "a", "value": 1, "version": version}), url)
    await admin.import_(lines({"key": "a", "value": 1, "version": limits.LAST_VERSION}), url)
    with pytest.raises(DatabaseError, match="no versions are left"):
        await admin.import_(lines({"key": "b", "value": 1}), url)
    assert version_after_jump(limits.LAST_VERSION - JUMP) == limits.LAST_VERSION + 1 - JUMP
    with pytest.raises(DatabaseError, match="no versions are left"):
        version_after_jump(limits.LAST_VERSION)


async def test_an_import_beside_writers_loses_nothing(url: str) -> None:
    """They write the same keys, so each waits for the other's locks."""
    number, versions = 200, set[int]()
    given = lines(*[{"key": f"k/={at}", "value": "imported"} for at in range(number)]).getvalue()

    async def write(kv: keyloft.Store, at: int) -> None:
        version = await kv.set(("k", at % number), at)
        assert version not in versions
        versions.add(version)

    async with keyloft.open(url) as kv:
        await kv.set(("k", 0), 0)
        before = await version_of(url)
        async with asyncio.TaskGroup() as tasks:
            for at in range(2 * number):
                tasks.create_task(write(kv, at))
                if not at % 100:
                    tasks.create_task(admin.import_(io.BytesIO(given), url, existing="replace"))
        assert len(await kv.list(prefix=("k",))) == number
    logged = await changes_after(url, before)
    assert {change.version for change in logged} > versions
    await history(url)


# Backup and restore


async def test_a_backup_carries_the_log_and_the_id_along(url: str, tmp_path: Path) -> None:
    await fill(url)
    saved = await admin.backup(url, tmp_path / "nightly.db")
    assert await history(tmp_path / "nightly.db") == await history(url)
    assert saved.version == await version_of(url)
    assert await changes_after(tmp_path / "nightly.db", 2) == await changes_after(url, 2)


async def test_two_restores_of_one_backup_are_two_stores_that_their_ids_tell_apart(url: str, tmp_path: Path) -> None:
    await fill(url)
    backup, restored = tmp_path / "nightly.db", [tmp_path / "one.db", tmp_path / "other.db"]
    await admin.backup(url, backup)
    for file in restored:
        assert (await admin.restore(backup, file)).version == JUMP
    stores: list[str | Path] = [url, *restored]
    ids = [(await history(store))[0] for store in stores]
    assert len(set(ids)) == 3
    # In one store, no restore gives a version again.
    async with keyloft.open(restored[0]) as kv:
        given = await kv.set(("k",), "given")
    assert (await admin.restore(backup, restored[0], replace=True)).version == 2 * JUMP > given
    assert (await history(restored[0]))[0] not in ids


@pytest.mark.parametrize("into", ["a new file", "the database itself", "another database"])
async def test_a_restored_database_continues_where_no_version_was_given(url: str, tmp_path: Path, into: str) -> None:
    file = tmp_path / "nightly.db"
    async with keyloft.open(url) as kv:
        saved = await kv.set(("k",), "saved")
    await admin.backup(url, file)
    async with keyloft.open(url) as kv:
        lost = await kv.set(("k",), "lost")
    target = {"a new file": tmp_path / "new.db", "another database": tmp_path / "other.db"}.get(into, url)
    if into == "another database":
        async with keyloft.open(target) as kv:
            await kv.set(("mine",), 1)
    report = await admin.restore(file, target, replace=True)
    assert (report.version, report.verified) == (JUMP, True)
    store_id, version, [row] = await history(target)
    assert (version, row.version, row.base) == (JUMP, JUMP, JUMP - 1)
    assert re.fullmatch("[0-9a-f]{32}", store_id)
    assert store_id not in [(await history(other))[0] for other in (file, url) if other != target]
    async with keyloft.open(target) as kv:
        assert (await kv.get(("k",))).versionstamp == saved
        assert await kv.set(("k",), "next") == JUMP + 1 > lost
    assert (await admin.restore(file, target, replace=True)).version == 2 * JUMP
    for since in (saved, lost, JUMP + 1):
        with pytest.raises(HistoryGone):
            await changes_after(target, since)
    assert await changes_after(target, 2 * JUMP) == []


async def test_a_watch_learns_that_a_restore_replaced_everything(url: str, tmp_path: Path) -> None:
    async with keyloft.open(url) as kv:
        await kv.set(("k",), "saved")
        await admin.backup(url, tmp_path / "nightly.db")
        await kv.set(("k",), "lost")
        below, one = kv.watch(prefix=()), kv.watch(("k",))
        assert [entry.value for entry in await anext(one)] == ["lost"]
        await admin.restore(tmp_path / "nightly.db", url, replace=True)
        async with asyncio.timeout(LONGEST_SECONDS):
            with pytest.raises(HistoryGone):
                await anext(below)
            assert [entry.value for entry in await anext(one)] == ["saved"]


# Copy


async def test_a_copy_gives_no_version_that_its_source_gives(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source.db"
    async with keyloft.open(source) as kv:
        await kv.set(("a",), 1)
        await admin.copy(source, url)
        later = await kv.set(("b",), 1)
    assert await version_of(url) == JUMP
    assert [change.key for change in await changes_after(url, 0)] == [keys.encode(("a",))]
    assert await next_version(url) == JUMP + 1 > later
    # It is far above the source already: copying what has changed since takes one version.
    await admin.copy(source, url)
    assert await version_of(url) == JUMP + 2
    assert [change.key for change in await changes_after(url, JUMP + 1)] == [keys.encode(("b",))]
    async with keyloft.open(url) as kv:
        assert (await kv.get(("b",))).versionstamp == later


async def test_a_copy_knows_nothing_of_its_sources_versions(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source.db"
    async with keyloft.open(source) as kv:
        await kv.set(("deleted",), 1)
        seen = await kv.set(("kept",), 1)
        await kv.delete(("deleted",))
    await admin.copy(source, url)
    async with keyloft.open(url) as kv:
        with pytest.raises(keyloft.HistoryGone):  # else the deletion would be missed
            await anext(aiter(kv.watch(prefix=(), since=seen)))
    with pytest.raises(keyloft.HistoryGone):
        [_ async for _ in admin.changes(url, since=seen)]
    # A watch that was reporting the copy when it lost its connection names the version before it.
    assert [change.key for change in await changes_after(url, JUMP - 1)] == [keys.encode(("kept",))]
    # A watch on the target itself goes on over the copy.
    async with keyloft.open(tmp_path / "other.db") as kv:
        before = await kv.set(("own",), 1)
        await admin.copy(source, tmp_path / "other.db", existing="keep")
        changed = await anext(aiter(kv.watch(prefix=(), since=before)))
        assert [entry.key for entry in changed] == [("kept",)]


async def test_a_copy_of_a_copy_jumps_again(tmp_path: Path) -> None:
    first, second, third = [tmp_path / f"{number}.db" for number in range(3)]
    await next_version(first)
    await admin.copy(first, second)
    await admin.copy(second, third)
    assert (await version_of(second), await version_of(third)) == (JUMP, 2 * JUMP)


# Trimming


async def test_trimming_never_removes_the_counter(url: str) -> None:
    clock = ManualClock()
    for round_ in range(3):
        async with keyloft.open(url, clock=clock, sweep_every=None) as kv:
            for _ in range(limits.TRIM_EVERY + 1):
                last = await kv.set(("k",), 1)
        clock.advance(2 * limits.HISTORY_SECONDS)
        assert last == 1 + (round_ + 1) * (limits.TRIM_EVERY + 1)
    _, version, rows = await history(url)
    assert version == last
    assert len(rows) < last
    assert await next_version(url) == last + 1


# The clock


async def test_an_import_is_not_older_than_the_last_commit(tmp_path: Path) -> None:
    file = str(tmp_path / "app.db")
    await next_version(file)
    ahead = SystemClock().now() + 100_000
    run_sql(file, f"UPDATE keyloft_changes SET at = {ahead}")
    await admin.import_(lines({"key": "a", "value": 1}), file)
    assert (await history(file))[2][-1].at == ahead
    run_sql(file, f"UPDATE keyloft_changes SET at = {ahead + 3_600_000}")
    with pytest.raises(ClockSetBack, match=r"app\.db: the time of the last commit is 3\d\d\d s ahead"):
        await admin.import_(lines({"key": "b", "value": 1}), file)


# Damage


@pytest.mark.parametrize("size", [10, 10_000])
async def test_a_row_that_does_not_match_its_checksum_is_found_and_never_moved(tmp_path: Path, size: int) -> None:
    file = str(tmp_path / "app.db")
    async with keyloft.open(file) as kv:
        await kv.set_many({("a",): 1, ("k",): "x" * size, ("z",): 1})
    assert (await admin.check(file)).findings == ()
    good = tmp_path / "good.db"
    await admin.backup(file, good)
    table = "keyloft_tuples" if size < limits.ROW_BYTES else "keyloft_tuples_large"
    run_sql(file, f"UPDATE {table} SET value = replace(CAST(value AS TEXT), 'x', 'y') WHERE key = x'026b00'")
    run_sql(file, f"UPDATE {table} SET value = CAST(value AS BLOB) WHERE key = x'026b00'")
    [finding] = (await admin.check(file)).findings
    assert (finding.code, finding.where) == ("damage", "tuples k")
    assert "checksum" in finding.what
    for attempt in (
        admin.export(file, io.BytesIO()),
        admin.copy(file, tmp_path / "copy.db"),
        admin.backup(file, tmp_path / "bad.db"),
    ):
        with pytest.raises(keyloft.KeyloftError, match="tuples k"):
            await attempt
    assert not (tmp_path / "bad.db").exists()
    await admin.restore(good, file, replace=True)
    assert (await admin.check(file)).findings == ()
    # What was written before there were checksums has none, and is moved as it is.
    run_sql(file, "UPDATE keyloft_tuples SET checksum = NULL")
    assert (await admin.check(file)).findings == ()
    await admin.copy(file, tmp_path / "copy.db", existing="replace")
    assert run_sql(str(tmp_path / "copy.db"), "SELECT count(*) FROM keyloft_tuples WHERE checksum IS NULL") == [(0,)]


@pytest.mark.parametrize("leaving", ["break", "raise KeyError"])
def test_a_program_that_leaves_the_changes_half_way_ends(leaving: str, tmp_path: Path) -> None:
    """asyncio closes all generators at once at its end: one that waits for another never ended, or printed errors."""
    script = f"""
import asyncio, contextlib, keyloft
from keyloft import admin

async def main():
    async with keyloft.open("app.db") as kv:
        await kv.set_many({{(number,): 1 for number in range(3000)}})
    async for change in admin.changes("app.db"):
        {leaving}

with contextlib.suppress(KeyError):
    asyncio.run(main())
"""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
        )
        assert done.stderr == ""


class FailingSnapshot:
    """A snapshot with a million changes, each in a slice of its own, that fails to close."""

    def __init__(self) -> None:
        self.is_waiting = asyncio.Event()
        """Set once two slices are handed over, of which one is not yet taken, and the third is about to be."""

    @asynccontextmanager
    async def opened(self, database: Path) -> AsyncIterator[Self]:
        yield self

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Self]:
        try:
            yield self
        finally:
            raise DatabaseError("closing failed")

    async def changes(self, since: int | None) -> AsyncIterator[list[LoggedChange]]:
        for number in range(1_000_000):
            if number == 2:
                self.is_waiting.set()
            yield [LoggedChange(number, Space.TUPLES, keys.encode((number,)), ChangeKind.PUT, 0)]


async def test_the_changes_can_be_left_half_way_also_if_the_database_fails_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingSnapshot()
    monkeypatch.setattr(sys.modules["keyloft.admin.changes"], "opened", failing.opened)  # `admin.changes` hides it
    found = admin.changes(tmp_path / "app.db")
    assert isinstance(found, AsyncGenerator)
    await anext(found)
    async with asyncio.timeout(20):
        await failing.is_waiting.wait()
        await found.aclose()
