"""Several batches that are submitted at once are committed, refused and withdrawn as if each were submitted alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from keyloft import ManualClock
from keyloft.core.engine import TakesSeveral, Verdict
from keyloft.core.records import Batch, Check, Committed, Conflict, Mutation, Space, Sum
from keyloft.engines.sqlite.commits import CommitStep
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.errors import Closed, CommitUnknown, NotACounter
from tests.engines.contract.calls import get, put, stored, write

A = Space.TUPLES


@pytest.fixture
async def engine(clock: ManualClock, tmp_path: Path) -> AsyncIterator[SqliteEngine]:
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    yield engine
    await engine.aclose()


def batches(*mutations: Mutation) -> list[Batch]:
    return [Batch((one,)) for one in mutations]


def submitted(engine: SqliteEngine, several: Sequence[Batch]) -> "asyncio.Future[Sequence[Verdict]]":
    """The verdicts on batches that are submitted at once."""
    verdicts: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
    engine.submit_each(several, verdicts.set_result)
    return verdicts


async def test_each_is_decided_by_itself(engine: SqliteEngine) -> None:
    assert isinstance(engine, TakesSeveral)
    several = [*batches(put(b"a", b"1"), Sum(A, b"a", 1)), Batch((put(b"b", b"2"),), (Check(A, b"b", 7),))]
    first, refused, conflict, last = await submitted(engine, [*several, *batches(put(b"c", b"3"))])
    assert isinstance(first, Committed)
    assert isinstance(refused, NotACounter)
    assert isinstance(conflict, Conflict)
    assert isinstance(last, Committed)
    assert first.version < last.version
    assert [(await stored(engine, key)).value for key in (b"a", b"c")] == [b"1", b"3"]
    assert await get(engine, b"b") is None


async def test_they_keep_their_order_with_others(engine: SqliteEngine) -> None:
    before = asyncio.ensure_future(write(engine, put(b"k", b"1")))
    await asyncio.sleep(0)
    several = submitted(engine, batches(put(b"k", b"2"), put(b"k", b"3")))
    after = asyncio.ensure_future(write(engine, put(b"k", b"4")))
    verdicts = [await before, *await several, await after]
    versions = [verdict.version for verdict in verdicts if isinstance(verdict, Committed)]
    assert versions == sorted({*versions})
    assert len(versions) == 4
    assert (await stored(engine, b"k")).value == b"4"


async def test_withdrawn_ones_are_not_written(engine: SqliteEngine) -> None:
    reported: list[Sequence[Verdict]] = []
    withdrawn = engine.submit_each(batches(put(b"a"), put(b"b")), reported.append)
    kept = submitted(engine, batches(put(b"c")))
    assert withdrawn.withdraw()
    assert len(await kept) == 1
    assert reported == []
    assert [await get(engine, key) for key in (b"a", b"b")] == [None, None]


async def test_one_of_them_is_withdrawn_alone(engine: SqliteEngine) -> None:
    verdicts: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
    handed = batches(put(b"a"), put(b"b"), put(b"c"))
    several = engine.submit_each(handed, verdicts.set_result)
    assert several.withdraw_one(1)
    assert len(await verdicts) == 3
    assert [await get(engine, key) is None for key in (b"a", b"b", b"c")] == [False, True, False]
    assert not several.withdraw_one(0)
    assert len(handed[1].mutations) == 1, "the caller's list is left alone"


async def test_what_is_being_written_is_not_withdrawn(engine: SqliteEngine) -> None:
    verdicts: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
    several = engine.submit_each(batches(put(b"a"), put(b"b")), verdicts.set_result)
    await verdicts
    assert not several.withdraw()


async def test_a_callback_that_fails_harms_no_one(engine: SqliteEngine, caplog: pytest.LogCaptureFixture) -> None:
    def fail(verdicts: Sequence[Verdict]) -> None:
        raise ValueError

    engine.submit_each(batches(put(b"a"), put(b"b")), fail)
    assert len(await submitted(engine, batches(put(b"c")))) == 1
    assert "a callback for the outcome of a write failed" in caplog.text


async def test_an_interrupted_group_leaves_none_without_a_verdict(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.02)
    undisturbed = engine.commits.before_step

    def interrupt(step: CommitStep) -> None:
        if step is CommitStep.FINISHED:
            engine.commits.before_step = undisturbed
            raise RuntimeError("as a signal's handler may do")

    engine.commits.before_step = interrupt
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with asyncio.timeout(10):
        verdicts = await submitted(engine, batches(put(b"a"), put(b"b")))
    assert [type(verdict) for verdict in verdicts] == [CommitUnknown, CommitUnknown]
    assert isinstance((await submitted(engine, batches(put(b"c"))))[0], Committed)


async def test_a_closed_engine_refuses_them(engine: SqliteEngine) -> None:
    await engine.aclose()
    with pytest.raises(Closed):
        engine.submit_each(batches(put(b"a")), lambda verdicts: None)
