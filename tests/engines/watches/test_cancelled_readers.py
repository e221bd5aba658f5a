"""A reader whose steps are cancelled again and again gets all changes, and its watch does not hold more and more."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keyloft import ManualClock, limits
from keyloft.core.engine import Engine, Watch
from keyloft.core.records import Delete, Get, Key, Scan
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.watches.range_watch import RangeWatch
from tests.engines.contract.calls import END, START, A, put, read_the_log_in_small_slices, write


@pytest.fixture(params=["memory", "sqlite"])
async def engine(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Engine]:
    engine: Engine = MemoryEngine(clock)
    if request.param == "sqlite":
        await engine.aclose()
        engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), clock)
    yield engine
    await engine.aclose()


async def step_of_few_iterations(watch: Watch) -> set[Key]:
    """The keys that a step reports, if it takes only a few iterations of the event loop."""
    step = asyncio.ensure_future(watch.__anext__())
    for _ in range(5):
        await asyncio.sleep(0)
    step.cancel()
    try:
        return {change.key for change in await step}
    except asyncio.CancelledError:
        return set()


@pytest.mark.parametrize("pending", [limits.WATCH_PENDING_KEYS, 100], ids=["keys", "backlog"])
async def test_a_reader_that_is_cancelled_in_each_step_gets_all_changes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pending: int
) -> None:
    monkeypatch.setattr(limits, "WATCH_PENDING_KEYS", pending)
    watch = engine.watch(Scan(A, START, END, 1))
    keys = [b"k%03d" % number for number in range(900)]
    await write(engine, *map(put, keys))
    monkeypatch.setattr(limits, "LOOP_ITERATION_SECONDS", -1.0)  # each read lets the event loop run
    seen = set[Key]()
    for _ in range(1000):
        seen |= await step_of_few_iterations(watch)
        if len(seen) == len(keys):
            break
    assert seen == {*keys}


async def test_a_reader_of_keys_that_is_cancelled_in_each_step_learns_what_changed_since_a_version(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_the_log_in_small_slices(monkeypatch)
    since = (await write(engine, put(b"k"))).version
    for number in range(100):
        await write(engine, put(b"other %d" % number))
    await write(engine, Delete(A, b"k"))
    watch = engine.watch(Get(A, b"k"), since=since)
    assert watch.reported_to == since
    monkeypatch.setattr(limits, "LOOP_ITERATION_SECONDS", -1.0)  # each read lets the event loop run
    for _ in range(1000):
        if await step_of_few_iterations(watch):
            break
    else:
        pytest.fail("the reader never learned it")


async def test_a_watch_holds_a_bounded_number_of_keys_for_a_reader_that_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_PENDING_KEYS", 100)
    monkeypatch.setattr(limits, "WATCH_FIRST_KEYS", 1)
    monkeypatch.setattr(limits, "WATCH_READ_KEYS", 1)
    watch = engine.watch(Scan(A, START, END, 1))
    assert isinstance(watch, RangeWatch)
    monkeypatch.setattr(limits, "LOOP_ITERATION_SECONDS", -1.0)
    await write(engine, put(b"first"))
    for number in range(20):
        step = asyncio.ensure_future(watch.__anext__())
        await asyncio.sleep(0)
        await write(engine, *[put(b"%02d-%02d" % (number, key)) for key in range(90)])
        step.cancel()
        await asyncio.wait([step])
        assert watch.changes_held <= 200
