"""The sweeper has read what it removes: a commit compares that with what is stored, and reads nothing again."""

import asyncio

import pytest

from keyloft import ManualClock, limits
from keyloft.core.engine import write
from keyloft.core.records import Expired, Mutation, Set, Space
from keyloft.core.sweeper import purge, sweep
from keyloft.core.values import Encoding
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.postgres_commits import opened, reads
from tools.postgres import query


async def store_expired(engine: PostgresEngine, space: Space, clock: ManualClock, count: int) -> None:
    keys = [("trivia", str(number)) if space is Space.PLUGINS else b"%d" % number for number in range(count)]
    puts: list[Mutation] = [Set(space, key, b"1", Encoding.JSON, 1000) for key in keys]
    await write(engine, *puts)
    clock.advance(2)


@pytest.mark.parametrize("count", [3, limits.LONG_BATCH_OPERATIONS + 1])
@pytest.mark.parametrize("space", Space)
async def test_a_sweep_reads_what_it_removes_once(
    emptied_postgres_url: str, clock: ManualClock, space: Space, count: int
) -> None:
    async with opened(emptied_postgres_url, clock) as engine:
        await store_expired(engine, space, clock, count)
        asked = reads(engine)
        [due] = await engine.read(Expired(space, count))
        assert (await purge(engine, space, due)).rows == count
        assert asked == []


@pytest.mark.parametrize("count", [3, limits.LONG_BATCH_OPERATIONS + 1])
async def test_a_row_that_a_person_has_given_another_expiry_is_not_removed(
    emptied_postgres_url: str, clock: ManualClock, count: int
) -> None:
    async with opened(emptied_postgres_url, clock) as engine:
        await store_expired(engine, Space.PLUGINS, clock, count)
        [due] = await engine.read(Expired(Space.PLUGINS, count))
        query(emptied_postgres_url, "UPDATE plugin_kv_storage SET expires_at = 'infinity' WHERE key = '1'")
        assert (await purge(engine, Space.PLUGINS, due)).rows == count - 1
    assert query(emptied_postgres_url, "SELECT key FROM plugin_kv_storage") == [("1",)]


async def test_two_processes_that_sweep_at_once_remove_each_row_once(
    emptied_postgres_url: str, clock: ManualClock
) -> None:
    count = 500
    async with opened(emptied_postgres_url, clock) as one, opened(emptied_postgres_url, clock) as other:
        await store_expired(one, Space.PLUGINS, clock, count)
        removed = await asyncio.gather(sweep(one, Space.PLUGINS), sweep(other, Space.PLUGINS))
        assert sum(removed) == count
    assert query(emptied_postgres_url, "SELECT count(*) FROM plugin_kv_storage") == [(0,)]
