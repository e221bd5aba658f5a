"""A thread that uses a connection holds its lock, because SQLite takes no mutex: checked at each statement."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

import keyloft
from keyloft import ManualClock, limits
from keyloft.clock import SystemClock
from keyloft.core.waiting import refuse_reentry
from keyloft.engines.sqlite import file as sqlite_file
from keyloft.engines.sqlite.inherited import lock_of, will_be_inherited
from keyloft.engines.sqlite.lone_callers import LoneCallers, SyncTimes
from keyloft.errors import ReentrantCall


class StatementsSeen:
    """How many statements each thread has executed, and those that it executed without the lock."""

    def __init__(self) -> None:
        self.by_thread: Counter[str] = Counter()
        self.statements: set[str] = set()
        self.unlocked: list[str] = []
        self.connections: list[apsw.Connection] = []

    def connect(self, connection: apsw.Connection, path: str) -> apsw.Connection:
        will_be_inherited(connection, path)
        if connection.open_flags & apsw.SQLITE_OPEN_NOMUTEX:
            lock = lock_of(connection)

            def note(cursor: apsw.Cursor, statement: str, bindings: object) -> bool:
                self.by_thread[threading.current_thread().name] += 1
                self.statements.add(statement)
                with contextlib.suppress(ReentrantCall):  # this thread has the lock
                    refuse_reentry(lock)
                    self.unlocked.append(statement)
                return True

            connection.exec_trace = note
            self.connections.append(connection)
        return connection


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatementsSeen]:
    seen = StatementsSeen()
    monkeypatch.setattr(sqlite_file, "will_be_inherited", seen.connect)
    yield seen
    assert seen.connections, "engines open their connections without a mutex"
    assert seen.by_thread, "statements are seen"
    assert seen.unlocked == []


@pytest.mark.parametrize("sync", ["auto", "thread"])
async def test_of_the_event_loop_and_its_threads(
    sync: Any, tmp_path: Path, seen: StatementsSeen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_QUIET_PAGES", 1)
    async with keyloft.open(tmp_path / "app.db", sync=sync, sweep_every=0.01, clock=SystemClock()) as kv:
        watch = kv.watch(prefix=())
        for number in range(50):  # of a lone caller
            entry = await kv.get(("k",))
            assert (await kv.atomic().check(entry).set(("k",), number).commit()).ok
            await kv.set(("short",), number, expire_in=0.005)
            assert (await kv.list(prefix=()))[0].key == ("k",)
        await asyncio.gather(*[kv.set(("k", number % 7), number) for number in range(200)])
        await asyncio.gather(*[kv.increment(("sum",)) for _ in range(20)], *[kv.get_many([("k",), ("sum",)])] * 1)
        await kv.set_many({("many", number): "x" * 2000 for number in range(1500)})
        assert await kv.count(prefix=("many",)) == 1500
        assert await kv.delete_many([("many", number) for number in range(1500)]) == 1500
        assert not (await kv.atomic().check(entry).set(("k",), 1).commit()).ok
        assert await anext(watch)
        await kv.sweep()
    assert len(seen.by_thread) > 1


async def test_of_an_event_loop_whose_commit_is_interrupted(
    tmp_path: Path, seen: StatementsSeen, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SignalledClock(ManualClock):
        is_interrupted = False

        def now(self) -> int:
            if self.is_interrupted:
                self.is_interrupted = False
                raise ValueError("of a signal's handler")
            return super().now()

    monkeypatch.setattr(LoneCallers, "is_lone", lambda self, now: True)
    monkeypatch.setattr(SyncTimes, "expect_fast", lambda self, now: True)
    clock = SignalledClock()
    async with keyloft.open(tmp_path / "app.db", sweep_every=None, clock=clock) as kv:
        for number in range(3):
            await kv.set(("k",), number)
        clock.is_interrupted = True
        with pytest.raises(ValueError, match="of a signal's handler"):
            await kv.set(("k",), 3)
        assert (await kv.get(("k",))).value == 2
    assert "ROLLBACK" in seen.statements


@pytest.mark.parametrize("path", ["app.db", ":memory:"])
def test_of_threads(path: str, tmp_path: Path, seen: StatementsSeen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_QUIET_PAGES", 1)
    name = path if path == ":memory:" else str(tmp_path / path)
    with keyloft.open_sync(name, sweep_every=0.01) as kv:

        def work(thread: int) -> None:
            for number in range(40):
                kv.set(("k", thread), number)
                kv.increment(("sum",))
                assert kv.get(("k", thread)).value == number
                assert len(list(kv.list(prefix=("k",)))) >= 1
                assert len(kv.get_many([("k", other) for other in range(5)])) == 5
                kv.set(("short", thread), number, expire_in=0.001)

        with ThreadPoolExecutor(6) as threads, kv.watch(prefix=()) as watch:
            done = [threads.submit(work, thread) for thread in range(6)]
            assert next(iter(watch))
            for one in done:
                one.result()
        assert kv.get(("sum",)).value == 240
        kv.set_many({("many", number): number for number in range(1500)})
        assert kv.delete_range(("many",)) == 1500
    assert len(seen.by_thread) > 6
