"""The event loop never waits for the disk, and an exception in it loses no write."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import apsw
import pytest

import keyloft
from keyloft import ManualClock
from keyloft.core.records import Batch, Committed, Get, Set, Space, Sum
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.sqlite.commits import CommitStep
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.inherited import will_be_inherited
from keyloft.engines.sqlite.lone_callers import LoneCallers, SyncTimes
from keyloft.engines.sqlite.reads import View

from .vfs import RecordingVFS


def raising(error: type[BaseException]) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


Durability: TypeAlias = Literal["full", "relaxed"]


def put(key: int, value: bytes) -> Batch:
    return Batch((Set(Space.TUPLES, b"%d" % key, value, Encoding.BYTES),))


@pytest.mark.parametrize("durability", ["full", "relaxed"])
async def test_with_sync_on_the_thread_the_event_loop_never_syncs(
    durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS", 40)
    vfs = RecordingVFS()
    syncs: list[bool] = []

    def note() -> bool:
        syncs.append(threading.current_thread() is threading.main_thread())
        return False

    vfs.failing_syncs = note
    path = str(tmp_path / "app.db")
    engine = await SqliteEngine.open(SqliteFile(path, durability, "thread", vfs=vfs.vfs_name), ManualClock())
    other_process = apsw.Connection(path, vfs=vfs.vfs_name)
    for number in range(200):  # long enough for the write-ahead log to restart several times
        if number % 40 == 20:
            await asyncio.to_thread(other_process.wal_checkpoint)
        await engine.commit(put(number, b"alone"))
        await asyncio.gather(*[engine.commit(put(other, b"%d" % number)) for other in range(number % 5)])
        while number % 2 and engine.writing.is_lent:
            await asyncio.sleep(0)
    await engine.commit(put(0, b"large" * 100_000))
    other_process.close()
    await engine.aclose()
    assert len(syncs) > (200 if durability == "full" else 10)
    assert not any(syncs)


@pytest.mark.parametrize("durability", ["full", "relaxed"])
async def test_the_event_loop_never_waits_for_another_process(durability: Durability, tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db", durability=durability) as kv:
        await kv.set(("k",), 1)
        rival = apsw.Connection(str(tmp_path / "app.db"))
        rival.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(kv.set(("k",), 2))
        for _ in range(50):
            await asyncio.sleep(0.001)  # which it would not be able to
            assert (await kv.get(("k",))).value == 1
        assert not waiting.done()
        rival.execute("ROLLBACK")
        await waiting
        assert (await kv.get(("k",))).value == 2
        rival.close()


class Signalled(BaseException):
    """As a signal's handler raises, at any moment; KeyboardInterrupt would also end the event loop of this test."""


@pytest.fixture
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a small group is written on the event loop."""
    monkeypatch.setattr("keyloft.limits.INLINE_SECONDS", 60)


@pytest.fixture(params=["thread", "lone caller", "relaxed"])
def durability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Durability:
    """A group is committed on the thread, on the event loop by a lone caller, or there without a sync."""
    if request.param == "lone caller":
        monkeypatch.setattr(LoneCallers, "is_lone", lambda self, now: True)
        monkeypatch.setattr(SyncTimes, "expect_fast", lambda self, now: True)
    return "relaxed" if request.param == "relaxed" else "full"


@pytest.fixture
async def signalled() -> list[BaseException]:
    """What the event loop's callbacks have raised."""
    raised: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    return raised


async def test_an_interrupted_event_loop_leaves_no_caller_waiting(
    durability: Durability, tmp_path: Path, signalled: list[BaseException]
) -> None:
    class InterruptedClock(ManualClock):
        interruptions = 0

        def now(self) -> int:
            if self.interruptions and threading.current_thread() is threading.main_thread():
                self.interruptions -= 1
                raise Signalled
            return super().now()

    clock = InterruptedClock()
    kv = await keyloft.open(tmp_path / "app.db", clock=clock, durability=durability, sweep_every=None)
    await kv.set(("k",), 0)
    clock.interruptions = 1
    async with asyncio.timeout(60):
        await asyncio.create_task(kv.set(("k",), 1))  # that of a task which has called before needs no callback
        assert [type(one) for one in signalled] == [Signalled]
        assert (await kv.get(("k",))).value == 1
        await kv.aclose()


@pytest.mark.usefixtures("_enough_time")
@pytest.mark.parametrize("durability", ["lone caller", "relaxed"], indirect=True)
@pytest.mark.parametrize("together", [1, 2])
async def test_an_interrupted_commit_is_neither_lost_nor_made_twice(
    durability: Durability, tmp_path: Path, together: int, signalled: list[BaseException]
) -> None:
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db"), durability), ManualClock())
    add = Batch((Sum(Space.TUPLES, b"sum", 1),))
    await engine.commit(add)
    interruptions = 1

    def interrupt(connection: apsw.Connection, name: str, pages: int) -> int:
        nonlocal interruptions
        assert threading.current_thread() is threading.main_thread()
        if interruptions:
            interruptions -= 1
            raise Signalled  # SQLite has committed, and Python goes on
        return apsw.SQLITE_OK

    engine.connection.set_wal_hook(interrupt)
    async with asyncio.timeout(60):
        done = await asyncio.gather(*[engine.commit(add) for _ in range(together)])
        assert all(isinstance(one, Committed) for one in done)
        await engine.commit(add)
        [record] = await engine.read(Get(Space.TUPLES, b"sum"))
        assert unpack_counter(record.value) == together + 2
        assert [type(one) for one in signalled] == [Signalled]
        await engine.aclose()


@pytest.mark.usefixtures("_enough_time")
@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("durability", ["lone caller"], indirect=True)
async def test_what_a_handler_raises_in_the_set_of_a_lone_caller_reaches_the_caller(
    durability: Durability, is_committed: bool, is_checked: bool, tmp_path: Path
) -> None:
    interruptions = 0

    def interrupt() -> None:
        nonlocal interruptions
        if interruptions:
            interruptions -= 1
            raise Signalled

    def after_commit(*_: object) -> int:
        interrupt()
        return apsw.SQLITE_OK

    def before_write(cursor: apsw.Cursor, statement: str, bindings: object) -> bool:
        if statement.startswith(("INSERT", "UPDATE")):
            interrupt()
        return True

    async def set_to(number: int) -> None:
        before = await kv.get(("k",))
        await (kv.atomic().check(before).set(("k",), number).commit() if is_checked else kv.set(("k",), number))

    async with keyloft.open(tmp_path / "app.db", durability=durability, sweep_every=None) as kv:
        engine = kv.engine
        assert isinstance(engine, SqliteEngine)
        if is_committed:
            engine.connection.set_wal_hook(after_commit)
        else:
            engine.connection.exec_trace = before_write
        watch = kv.watch(("k",))
        for number in range(3):
            await set_to(number)
        interruptions = 1
        with pytest.raises(Signalled):
            await set_to(3)
        assert not interruptions
        assert not engine.connection.in_transaction
        assert (await kv.get(("k",))).value == (3 if is_committed else 2)
        [entry] = await anext(watch)
        assert entry.value == (3 if is_committed else 2)
        await set_to(4)
        [entry] = await anext(watch)
        assert entry.value == 4


async def test_an_iteration_that_is_interrupted_as_it_begins_ends_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = 0

    def end() -> None:
        nonlocal ends
        ends += 1

    iteration = LoopIteration(at_end=end)
    loop = asyncio.get_running_loop()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iteration.enter()
    assert not iteration.enter()
    await asyncio.sleep(0)
    assert ends == 1


class InterruptedCursor:
    """Raises before or after a statement, while `when` says so."""

    def __init__(self, cursor: apsw.Cursor) -> None:
        self._cursor = cursor
        self.when: str | None = None

    def execute(self, sql: str) -> apsw.Cursor:
        if self.when == "before":
            raise Signalled
        self._cursor.execute(sql)
        if self.when == "after":
            raise Signalled
        return self._cursor


class InterruptedConnection(apsw.Connection):
    last_cursor: InterruptedCursor

    def cursor(self) -> Any:
        self.last_cursor = InterruptedCursor(super().cursor())
        return self.last_cursor


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_view_that_is_interrupted_as_it_begins_or_ends_can_be_used_again(tmp_path: Path, when: str) -> None:
    path = str(tmp_path / "app.db")
    connection = InterruptedConnection(path)
    will_be_inherited(connection, path)
    connection.execute("CREATE TABLE t (a)")
    view = View(connection, own_transaction=True)
    cursor = connection.last_cursor
    for interrupt in (view.cursor, view.end):
        cursor.when = when
        with pytest.raises(Signalled):
            interrupt()
        cursor.when = None
        view.end()  # as the end of the iteration does
        assert not connection.in_transaction
        assert view.cursor().execute("SELECT count(*) FROM t").fetchall() == [(0,)]
        assert connection.in_transaction
    view.end()
    assert not connection.in_transaction
    connection.close()


@pytest.mark.parametrize("step", CommitStep)
@pytest.mark.usefixtures("signalled", "_enough_time")
async def test_a_group_that_an_interruption_lost_does_not_hold_up_later_writes(
    durability: Durability, step: CommitStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.05)
    # Not `async with`: closing finds a lost group, too.
    kv = await keyloft.open(tmp_path / "app.db", durability=durability, sweep_every=None)
    await kv.set(("k",), 0)
    engine = kv.engine
    assert isinstance(engine, SqliteEngine)
    undisturbed = engine.commits.before_step

    def interrupt(at: CommitStep) -> None:
        if at is step:
            engine.commits.before_step = undisturbed
            raise ValueError("an ordinary exception of a signal's handler")

    for _ in range(3):
        engine.commits.before_step = interrupt
        async with asyncio.timeout(60):
            done = await asyncio.gather(*[kv.set(("k", number), 1) for number in range(3)], return_exceptions=True)
            assert all(isinstance(one, (int, keyloft.CommitUnknown)) for one in done)
            version = await kv.set(("k",), 2)
            assert (await kv.get(("k",))).versionstamp == version
    assert not engine.writing.is_lent
    await kv.aclose()


@pytest.mark.usefixtures("signalled", "_enough_time")
@pytest.mark.parametrize("at", range(3))
async def test_a_batch_whose_way_into_a_group_is_interrupted_gets_a_verdict(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.05)
    taken = 0

    class InterruptedQueue(deque[Any]):
        def popleft(self) -> Any:
            nonlocal taken
            first = super().popleft()
            taken += 1
            if taken == at + 1:
                raise Signalled
            return first

    monkeypatch.setattr("keyloft.engines.commit.batcher.deque", InterruptedQueue)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), ManualClock())
    verdicts: list[Any] = []
    async with asyncio.timeout(60):
        engine.submit(put(0, b"v"), verdicts.append)
        engine.submit_each([put(1, b"v")], verdicts.extend)
        done = await asyncio.gather(engine.commit(put(2, b"v")), return_exceptions=True)
        assert isinstance(await engine.commit(put(3, b"v")), Committed)
    assert all(isinstance(one, (Committed, keyloft.CommitUnknown)) for one in [*verdicts, *done])
    assert len(verdicts) == 2
    assert taken >= 4
    await engine.aclose()


@pytest.mark.usefixtures("signalled", "_enough_time")
async def test_callers_that_have_a_verdict_before_an_interruption_get_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyloft.limits.LOST_GROUP_SECONDS", 0.05)
    engine = await SqliteEngine.open(SqliteFile(str(tmp_path / "app.db")), ManualClock())
    verdicts: list[list[object]] = [[] for _ in range(6)]

    def noting(caller: int) -> Callable[[object], None]:
        def note(verdict: object) -> None:
            verdicts[caller].append(verdict)
            if caller == 2 and len(verdicts[2]) == 1:
                raise Signalled

        return note

    engine.submit(put(0, b"v"), noting(0))
    engine.submit_each([put(1, b"v")], noting(1))
    for caller in (2, 3):
        engine.submit(put(caller, b"v"), noting(caller))
    engine.submit_each([put(4, b"v")], noting(4))
    engine.submit(put(5, b"v"), noting(5))
    async with asyncio.timeout(60):
        with pytest.raises(keyloft.CommitUnknown):
            await engine.commit(put(6, b"v"))
    assert [len(of) for of in verdicts] == [1, 1, 2, 1, 1, 1]
    assert isinstance(verdicts[0][0], Committed)
    await engine.aclose()


@pytest.mark.parametrize("step", CommitStep)
@pytest.mark.usefixtures("signalled", "_enough_time")
async def test_a_group_that_an_interruption_lost_does_not_hold_up_closing(
    durability: Durability, step: CommitStep, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "app.db"
    kv = await keyloft.open(path, durability=durability, sweep_every=None)
    await kv.set(("k",), 0)
    engine = kv.engine
    assert isinstance(engine, SqliteEngine)

    def interrupt(at: CommitStep) -> None:
        if at is step:
            raise Signalled

    undisturbed, engine.commits.before_step = engine.commits.before_step, interrupt
    lost = asyncio.create_task(kv.set(("k",), 1))
    waiting = [lost]
    for number in range(3):
        await asyncio.sleep(0.01)
        waiting.append(asyncio.create_task(kv.set(("k",), 2 + number)))
    await asyncio.sleep(0.01)
    engine.commits.before_step = undisturbed
    async with asyncio.timeout(60):
        await kv.aclose()
        done = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, (int, keyloft.CommitUnknown)) for one in done)
    is_to_thread = "thread" in request.node.callspec.params["durability"]
    if step is CommitStep.FINISHED or (step is CommitStep.TO_THREAD and is_to_thread):
        assert isinstance(done[0], keyloft.CommitUnknown)
    else:  # no step of it, or the thread has written it again
        assert done[0] == 3
    rival = apsw.Connection(str(path))
    rival.execute("BEGIN IMMEDIATE")  # no lock is left
    rival.close()


async def test_reads_never_go_back_during_commits_and_checkpoints(
    durability: Durability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change between two connections, one of which a thread uses at times."""
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_PAGES_AFTER_SMALL_COMMITS", 60)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_PAGES", 10)
    monkeypatch.setattr("keyloft.limits.CHECKPOINT_QUIET_SECONDS", 0.001)
    async with keyloft.open(tmp_path / "app.db", durability=durability) as kv, asyncio.timeout(60):
        await kv.set(("shared",), 0)
        await kv.set_many({("own", name): 0 for name in range(3)})
        is_over = False
        reads = 0

        async def write(name: int) -> None:
            for number in range(60):
                await kv.set(("own", name), number)
                assert (await kv.get(("own", name))).value == number
                await kv.set(("shared",), max(number, (await kv.get(("shared",))).value))
                if name == 0 and number % 10 == 9:
                    await asyncio.sleep(0.005)  # quiet, if the others are

        async def read() -> None:
            nonlocal reads
            last: dict[int, int] = {}
            while not is_over:
                for name in range(3):
                    now = (await kv.get(("own", name))).value
                    assert now >= last.get(name, 0)
                    last[name] = now
                many = await kv.get_many([("own", name) for name in range(3)])
                listed = [entry async for entry in kv.list(prefix=("own",))]
                for name in range(3):
                    assert last[name] <= many[name].value <= listed[name].value
                reads += 1
                if reads % 3:
                    await asyncio.sleep(0)

        reading = [asyncio.create_task(read()) for _ in range(2)]
        await asyncio.gather(*[write(name) for name in range(3)])
        is_over = True
        await asyncio.gather(*reading)
        assert reads > 20
