"""A synchronous store survives kills, interrupts and forks, and shares its file with other threads and processes."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import keyloft
from keyloft import Closed

from .children import child

pytestmark = pytest.mark.slow

_THREADS = 16
_KILLS = 2
_LONGEST_SECONDS = 60


async def test_sixteen_threads_that_are_killed_lose_nothing_acknowledged(tmp_path: Path, rng: random.Random) -> None:
    path, newest = tmp_path / "killed.db", 0
    for _ in range(_KILLS):
        last: dict[int, int] = {}
        left = rng.randrange(1, 300)
        async with child("sync_writer", path, str(_THREADS)) as process:
            async for line in process.lines():
                [thread, number, stamp] = map(int, line.split())
                assert number == last.get(thread, number - 1) + 1
                assert stamp > newest, "a versionstamp was given twice"
                last[thread] = number
                left -= 1
                if left == 0:
                    process.kill()
            assert await process.ended() == (-9, "")
        with keyloft.open_sync(path) as kv:
            for thread in range(_THREADS):
                count = int(kv.get(("count", thread)).value or 0)
                # The commit that was under way may have been made.
                assert count in (last.get(thread, count), last.get(thread, count) + 1)
                logged = kv.list(("log", thread)).all()
                assert [entry.value for entry in logged] == list(range(1, count + 1)), "something is there in part"
                newest = max([newest, *[entry.versionstamp or 0 for entry in logged]])
    connection = apsw.Connection(str(path))
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def test_interrupts_at_any_moment_leave_commits_whole_and_nothing_locked(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "interrupted.db"
    async with child("interrupted", path, str(rng.randrange(10**6)), "100") as process:
        least, most = map(int, (await process.line()).split())
        made = [*map(int, (await process.line()).split())]
        with keyloft.open_sync(path) as kv:
            async with asyncio.timeout(_LONGEST_SECONDS):
                await asyncio.to_thread(kv.set, ("not", "locked"), True)
            assert least <= int(kv.get(("main", "a")).value or 0) <= most
            assert [int(kv.get(("other", number, "b")).value) for number in range(len(made))] == made
        process.tell("done")
        code, _ = await process.ended()
        assert code == 0


async def test_interrupts_leave_no_lock_taken_and_lose_no_event() -> None:
    """In a process without the tracer of coverage, whose own locks an interrupt would leave taken."""
    async with child("interrupted_locks") as process:
        assert await process.line() == "kept"


async def test_an_async_and_a_synchronous_store_share_a_file(tmp_path: Path) -> None:
    """In one process here, and with a second one that writes by an async store."""
    path, count = tmp_path / "shared.db", 60
    async with child("appender", path, "1") as process, keyloft.open(path) as kv:
        await process.line()
        with keyloft.open_sync(path) as sync:
            watching = sync.watch(prefix=("sum",))
            seen: list[int] = []

            def follow() -> None:
                for entries in watching:
                    seen.extend(int(entry.value) for entry in entries)

            follower = threading.Thread(target=follow, daemon=True)
            follower.start()

            def add() -> None:
                for _ in range(count):
                    sync.atomic().sum(("sum",), 1).sum(("sum", "below"), 1).commit()

            adding = [asyncio.to_thread(add) for _ in range(2)]

            async def add_here() -> None:
                for _ in range(count):
                    await kv.atomic().sum(("sum",), 1).sum(("sum", "below"), 1).commit()

            await asyncio.gather(add_here(), *adding)
            assert int(sync.get(("sum",)).value) == int((await kv.get(("sum",))).value) == 3 * count
            async with asyncio.timeout(_LONGEST_SECONDS):
                while not seen or seen[-1] != 3 * count:
                    await asyncio.sleep(0.005)
            assert seen == sorted(seen)
            watching.close()
            await asyncio.to_thread(follower.join, _LONGEST_SECONDS)
            assert not follower.is_alive(), "closing the watch did not end its iteration"
            process.kill()
            await process.ended()


def test_a_fork_is_refused_and_harms_neither_process(tmp_path: Path) -> None:
    path = tmp_path / "forked.db"
    with keyloft.open_sync(path) as kv:
        kv.set(("before",), 1)
        watching = kv.watch(("before",))
        engine: Any = kv.engine
        held, is_forked = threading.Event(), threading.Event()

        def hold() -> None:
            # By a thread that the child does not have: it must not wait for it.
            with engine.feed.lock, engine.shared.lock:
                held.set()
                is_forked.wait(_LONGEST_SECONDS)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(_LONGEST_SECONDS)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                refused = 0
                calls: list[Callable[[], object]] = [
                    lambda: kv.get(("before",)),
                    lambda: kv.set(("before",), 2),
                    lambda: next(watching),
                    lambda: kv.watch(prefix=()),
                    kv.__enter__,
                ]
                for call in calls:
                    try:
                        call()
                    except Closed as error:
                        refused += "before a fork" in str(error)
                watching.close()
                kv.close()
                code = 0 if refused == len(calls) else 2
            finally:
                os._exit(code)
        is_forked.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        kv.set(("after",), 2)
        assert [entry.value for entry in kv.list()] == [2, 1]


async def test_an_async_watch_from_before_a_fork_is_refused(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "forked.db") as kv:
        watching = kv.watch(("before",))
        await anext(watching)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                await anext(watching)
            except Closed as error:
                await watching.aclose()
                code = 0 if "before a fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await kv.set(("before",), 1)
        assert [entry.value for entry in await anext(watching)] == [1]
