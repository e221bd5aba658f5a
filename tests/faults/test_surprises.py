"""What is not planned for: lost files, a failing writer, stubborn rivals, giant batches, writes that can't be made."""

import asyncio
import random
import threading
from pathlib import Path

import apsw
import pytest

import keyloft
from keyloft import admin, limits
from keyloft.clock import SystemClock

from .children import child
from .moves import Chain, after, chains, contents_of, made_in

_FOR_THE_THREAD = "x" * limits.INLINE_BYTES


class FailingClock(SystemClock):
    """Fails in the writer's thread as often as `failures` says; readers get the time."""

    __slots__ = ("_failure", "failures")

    def __init__(self, failure: type[BaseException] = RuntimeError) -> None:
        self.failures = 0
        self._failure = failure

    def now(self) -> int:
        if self.failures and threading.current_thread() is not threading.main_thread():
            self.failures -= 1
            raise self._failure("the clock has stopped")
        return super().now()


async def test_unexpected_failure_of_the_writer_reaches_its_callers_and_the_writer_goes_on(tmp_path: Path) -> None:
    clock = FailingClock()
    async with keyloft.open(tmp_path / "failing.db", clock=clock) as kv, asyncio.timeout(60):
        clock.failures = 1
        with pytest.raises(keyloft.DatabaseError, match=r"failing\.db.*RuntimeError"):
            await kv.set(("k",), _FOR_THE_THREAD)
        assert not (await kv.get(("k",))).exists
        # A group is tried once as a whole, then batch by batch: here two of ten fail in the end.
        clock.failures = 3
        results = await asyncio.gather(
            *[kv.set(("k", n), [n, _FOR_THE_THREAD]) for n in range(10)], return_exceptions=True
        )
        refused = [n for n, result in enumerate(results) if isinstance(result, keyloft.DatabaseError)]
        assert refused == [0, 1]
        assert [entry.key[1] async for entry in kv.list(prefix=("k",))] == [*range(2, 10)]
        assert await kv.set(("k",), 1) > max(result for result in results if isinstance(result, int))


async def test_system_exit_in_the_writer_leaves_no_caller_waiting_for_ever(tmp_path: Path) -> None:
    clock = FailingClock(SystemExit)
    # Not `async with`: where this promise is broken, closing waits for ever, too.
    kv = await keyloft.open(tmp_path / "failing.db", clock=clock, sweep_every=None)
    clock.failures = 1
    async with asyncio.timeout(60):
        with pytest.raises(keyloft.DatabaseError, match=r"failing\.db.*SystemExit"):
            await kv.set(("k",), _FOR_THE_THREAD)
        await kv.set(("k",), 2)
        await kv.aclose()


async def test_batch_that_the_database_refuses_harms_no_other_batch_of_its_group(tmp_path: Path) -> None:
    path = tmp_path / "refusing.db"
    async with keyloft.open(path) as kv, asyncio.timeout(60):
        rival = apsw.Connection(str(path))
        for verb in ("ABORT", "ROLLBACK", "FAIL"):
            rival.execute(
                f"CREATE TRIGGER {verb}_it BEFORE INSERT ON keyloft_tuples WHEN instr(NEW.key, CAST('{verb}' AS BLOB)) "
                f"BEGIN SELECT RAISE({verb}, 'not this one'); END"
            ).fetchall()
        rival.close()
        for verb in ("ABORT", "ROLLBACK", "FAIL"):
            writes = []
            for number in range(20):
                key = (verb, number) if number % 7 == 3 else ("fine", number)
                writes.append(kv.atomic().set(("before", number), verb).set(key, verb).sum(("made",), 1).commit())
            results = await asyncio.gather(*writes, return_exceptions=True)
            for number, result in enumerate(results):
                refused = number % 7 == 3
                assert isinstance(result, keyloft.DatabaseError if refused else keyloft.CommitResult), result
                assert ((await kv.get(("before", number))).value == verb) != refused
            assert await kv.count((verb,)) == 0
        assert (await kv.get(("made",))).value == 3 * 17


async def test_stubborn_rival_makes_writes_fail_as_busy_and_lets_them_through_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.BUSY_SECONDS", 0.1)
    path = tmp_path / "held.db"
    async with keyloft.open(path) as kv, asyncio.timeout(60):
        await kv.set(("k",), 1)
        rival = apsw.Connection(str(path))
        rival.execute("BEGIN IMMEDIATE").fetchall()
        results = await asyncio.gather(*[kv.set(("k", n), n) for n in range(10)], return_exceptions=True)
        for result in results:
            assert isinstance(result, keyloft.Busy)
            assert str(path) in str(result)
        assert (await kv.get(("k",))).value == 1
        rival.execute("ROLLBACK").fetchall()
        rival.close()
        await kv.set(("k",), 2)
        assert await kv.count(("k",)) == 0


async def killed_store(path: Path) -> dict[Chain, int]:
    """Leave a store whose process was killed, with its log beside it; returns the last moves it acknowledged."""
    last = dict.fromkeys(chains(2), 0)
    async with child("writer", path, "2") as process:
        acknowledged = 0
        async for line in process.lines():
            if not line.startswith("open"):
                kind, writer, number, _ = line.split()
                last[Chain(kind, int(writer))] = int(number)
                acknowledged += 1
                if acknowledged == 300:
                    process.kill()
    return last


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


async def test_shared_memory_file_lost_or_spoilt_after_a_kill_loses_nothing(tmp_path: Path, rng: random.Random) -> None:
    for spoil in ("lost", "garbled", "cut"):
        path = tmp_path / f"{spoil}.db"
        last = await killed_store(path)
        shared = beside(path, "-shm")
        match spoil:
            case "lost":
                shared.unlink()
            case "garbled":
                shared.write_bytes(rng.randbytes(32768))
            case "cut":
                shared.write_bytes(b"")
        async with keyloft.open(path) as kv:
            contents, _ = await contents_of(kv)
        found = made_in(contents, last)
        assert all(found[chain] in (number, number + 1) for chain, number in last.items())
        assert contents == after(found)


async def test_log_removed_after_a_kill_leaves_an_older_state_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    async with keyloft.open(path) as kv:
        await kv.set(("checkpointed",), 1)
    await killed_store(path)
    beside(path, "-wal").unlink()
    async with keyloft.open(path) as kv:
        contents, _ = await contents_of(kv)
        assert contents.pop(("checkpointed",)) == 1
        assert contents == after(made_in(contents, chains(2)))
        await kv.set(("k",), 1)


async def test_log_of_a_removed_database_does_not_leak_into_a_fresh_one(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    await killed_store(path)
    path.unlink()
    async with keyloft.open(path) as kv:
        assert await kv.count(()) == 0
        assert await kv.set(("k",), 1) == 2
    async with keyloft.open(path) as kv:
        assert (await contents_of(kv))[0] == {("k",): 1}


async def test_write_to_a_file_that_was_removed_or_replaced_is_never_acknowledged(tmp_path: Path) -> None:
    for how in ("removed", "replaced"):
        path = tmp_path / f"{how}.db"
        async with keyloft.open(tmp_path / f"other-{how}.db") as other:
            await other.set(("other",), 1)
        kv = await keyloft.open(path)
        await kv.set(("k",), 1)
        if how == "removed":
            path.unlink()
        else:
            (tmp_path / f"other-{how}.db").rename(path)
        with pytest.raises(keyloft.DatabaseError, match=str(path)):
            await kv.set(("k",), 2)
        async with asyncio.timeout(60):
            await kv.aclose()


async def test_a_file_with_two_names_is_refused_under_both(tmp_path: Path) -> None:
    """Under each name SQLite would use a write-ahead log of its own, and one would overwrite what the other holds."""
    path, link = tmp_path / "app.db", tmp_path / "link.db"
    async with keyloft.open(path) as kv:
        await kv.set(("k",), 1)
    link.hardlink_to(path)
    for name in (path, link):
        for wanted in (name, f"sqlite:///{name}?mode=ro"):
            with pytest.raises(keyloft.CannotOpen, match="2 names"):
                await keyloft.open(wanted)
            with pytest.raises(keyloft.CannotOpen, match="2 names"):
                await asyncio.to_thread(keyloft.open_sync, wanted)
        with pytest.raises(keyloft.CannotOpen, match="2 names"):
            await admin.check(name)
    link.unlink()
    async with keyloft.open(path) as kv:
        assert (await kv.get(("k",))).value == 1


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_long_reads_of_a_file_that_was_removed_or_replaced_leave_the_new_file_alone(
    tmp_path: Path, how: str
) -> None:
    """They use connections of their own. SQLite would apply the write-ahead log of the old file to the new one."""
    path = tmp_path / "app.db"
    async with keyloft.open(tmp_path / "other.db") as other:
        await other.set(("other",), 1)
    kv, sync = await keyloft.open(path), keyloft.open_sync(path)
    await kv.set(("k",), 1)
    before = (tmp_path / "other.db").read_bytes()
    path.unlink() if how == "removed" else (tmp_path / "other.db").rename(path)
    for count in (kv.count(()), asyncio.to_thread(sync.count, ())):
        with pytest.raises(keyloft.DatabaseError, match=f"{path} was moved, removed or replaced .* nothing was read"):
            await count
    await asyncio.to_thread(sync.close)
    await kv.aclose()
    assert (path.read_bytes() if how == "replaced" else before) == before
    assert path.exists() == (how == "replaced")


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_watches_of_a_file_that_was_removed_or_replaced_end_with_an_error(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_CHECK_SECONDS", 0.05)
    path = tmp_path / "app.db"
    async with keyloft.open(tmp_path / "other.db") as other:
        await other.set(("other",), 1)
    async with keyloft.open(path) as kv, asyncio.timeout(60):
        await kv.set(("k",), 1)
        sync = keyloft.open_sync(path)
        by_prefix, by_key, by_thread = kv.watch(prefix=()), kv.watch(("k",)), sync.watch(prefix=())
        assert [entry.value for entry in await anext(by_key)] == [1]
        path.unlink() if how == "removed" else (tmp_path / "other.db").rename(path)
        for step in (anext(by_prefix), anext(by_key), asyncio.to_thread(next, by_thread)):
            with pytest.raises(keyloft.DatabaseError, match=f"{path} was moved, removed or replaced .* watches end"):
                await step
        await asyncio.to_thread(sync.close)


@pytest.mark.slow
async def test_batch_of_a_hundred_thousand_sets_is_made_whole_while_others_read_and_write(tmp_path: Path) -> None:
    path = tmp_path / "huge.db"
    count = 100_000
    async with keyloft.open(path) as kv:
        entries = {("huge", number): number for number in range(count)}
        huge = asyncio.create_task(kv.set_many(entries))
        others = 0
        while not huge.done():
            seen = len([key async for key in kv.keys(prefix=("huge",), limit=1)])
            assert seen in (0, 1)
            await kv.set(("other",), others)
            others += 1
        assert await kv.count(("huge",)) == count
    async with keyloft.open(path) as kv:
        assert await kv.count(("huge",)) == count
        assert (await kv.get(("huge", count - 1))).versionstamp == await huge


async def test_values_of_one_mebibyte_by_many_callers_at_once_are_all_kept(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "large.db"
    values = {("large", number): rng.randbytes(1024 * 1024) for number in range(48)}
    async with keyloft.open(path) as kv:
        await asyncio.gather(*[kv.set(key, value) for key, value in values.items()])
    async with keyloft.open(path) as kv:
        assert (await contents_of(kv))[0] == values


async def test_two_stores_of_one_process_on_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "twice.db"
    async with keyloft.open(path) as one, keyloft.open(path) as two, asyncio.timeout(60):

        async def add(kv: keyloft.Store) -> list[int | None]:
            return [(await kv.atomic().sum(("sum",), 1).commit()).versionstamp for _ in range(100)]

        stamps = [stamp for side in await asyncio.gather(add(one), add(two), add(one), add(two)) for stamp in side]
        assert sorted(stamp for stamp in stamps if stamp is not None) == [*range(2, 402)]
        assert (await one.get(("sum",))).value == (await two.get(("sum",))).value == 400
        await one.aclose()
        assert await two.set(("after",), 1) == 402
