"""A group whose commit is cancelled, as at the end of an event loop, gets an error that says whether it was written."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

from keyloft import CommitUnknown, Unreachable
from keyloft.core.engine import Verdict
from keyloft.core.records import Batch
from keyloft.engines.postgres.locked_rows import LockedRows
from tests.support.postgres_commits import opened, put, stored


@pytest.fixture
async def rival(emptied_postgres_url: str) -> AsyncIterator[Any]:
    """Another client."""
    connection = await asyncpg.connect(emptied_postgres_url)
    yield connection
    await connection.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def cancel_writer() -> None:
    """Cancel the commit of the current group, or of the next one."""
    writing: list[asyncio.Task[Any]] = []

    def finds() -> bool:
        writing.extend([task for task in asyncio.all_tasks() if task.get_name() == "keyloft writer"])
        return bool(writing)

    await until(finds)
    writing[0].cancel()


async def test_a_batch_that_waits_for_a_locked_table_was_not_written(emptied_postgres_url: str, rival: Any) -> None:
    """The server has refused its only attempt."""
    verdicts: list[Verdict] = []
    async with opened(emptied_postgres_url) as engine:
        await rival.execute("BEGIN; LOCK TABLE keyloft_tuples")
        batch = Batch((put(b"k"),))
        engine.submit(batch, verdicts.append)
        await until(lambda: engine.writer.is_held_back(batch))
        await cancel_writer()
        await until(lambda: bool(verdicts))
        await rival.execute("ROLLBACK")
        assert [type(verdict) for verdict in verdicts] == [Unreachable]


async def test_a_batch_that_was_written_before_the_others_of_its_group_is_unknown(
    emptied_postgres_url: str, rival: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: dict[str, Verdict] = {}
    monkeypatch.setattr(LockedRows, "is_due", True)
    async with opened(emptied_postgres_url) as engine:
        await engine.commit(Batch((put(b"held"),)))
        await rival.execute("BEGIN; UPDATE keyloft_tuples SET version = version")
        held, free = Batch((put(b"held"),)), Batch((put(b"free"),))
        way: Any = engine.writer.by_function
        call, is_written, waits = way.call, False, asyncio.Event()

        async def calling(slot: Any, attempt: Any, draft: Any) -> Any:
            nonlocal is_written
            if is_written:
                waits.set()
                await asyncio.get_running_loop().create_future()
            answer = await call(slot, attempt, draft)
            is_written = free in attempt.group
            return answer

        engine.submit(held, lambda verdict: verdicts.update(held=verdict))
        await until(lambda: engine.writer.is_held_back(held))
        way.call = calling
        engine.submit(free, lambda verdict: verdicts.update(free=verdict))
        async with asyncio.timeout(30):
            await waits.wait()
        assert verdicts == {}
        await cancel_writer()
        await until(lambda: len(verdicts) == 2)
        way.call = call
        await rival.execute("ROLLBACK")
        assert (await stored(engine, b"free")).value == b"1"
        assert isinstance(verdicts["free"], CommitUnknown)
