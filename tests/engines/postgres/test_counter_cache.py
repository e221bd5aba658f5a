"""Counters that this process has written last need not be read, and are exact although others change them, too."""

import asyncio

import pytest

from keyloft import ManualClock, NotACounter, limits
from keyloft.core.records import Add, Batch, Committed, Delete, Space, Sum, Touch
from keyloft.core.values import pack_counter, unpack_counter
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.postgres_commits import A, opened, put, reads, stored
from tools.postgres import query


async def count(engine: PostgresEngine, *keys: bytes) -> list[int]:
    """Add 1 to counters, each in a batch of its own; returns what they are then."""
    done = await asyncio.gather(*[engine.commit(Batch((Sum(A, key, 1),))) for key in keys])
    return [one.values[0] for one in done if isinstance(one, Committed)]


async def test_counters_are_read_once(emptied_postgres_url: str) -> None:
    async with opened(emptied_postgres_url) as engine:
        asked = reads(engine)
        for number in range(1, 4):
            assert await count(engine, b"a", b"b") == [number, number]
        assert asked == [2]
        # Where one is not known, all are read; then that one is known, too.
        assert await count(engine, b"a", b"c") == [4, 1]
        assert await count(engine, b"a", b"b", b"c") == [5, 4, 2]
        assert asked == [2, 2]


async def test_what_this_process_does_to_a_counter_otherwise_is_known_too(
    emptied_postgres_url: str, clock: ManualClock
) -> None:
    async with opened(emptied_postgres_url, clock) as engine:
        asked = reads(engine)
        await count(engine, b"n")
        await engine.commit(Batch((put(b"n", b"7"),)))
        with pytest.raises(NotACounter):
            await count(engine, b"n")
        assert await engine.commit(Batch((Add(A, b"n", 1),)))
        await engine.commit(Batch((Delete(A, b"n"),)))
        assert await count(engine, b"n") == [1]
        await engine.commit(Batch((Touch(A, b"n", 1000),)))
        assert await count(engine, b"n") == [2]
        known = len(asked)
        assert await count(engine, b"n") == [3]
        assert len(asked) == known
        clock.advance(1)
        assert await count(engine, b"n") == [1], "it has expired"
        assert (await stored(engine, b"n")).expires_at is None


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM keyloft_tuples",
        # As a restore or an import could leave it: another value under the same version.
        f"UPDATE keyloft_tuples SET value = '\\x{pack_counter(40).hex()}', updated_at = updated_at + 1",
        f"UPDATE keyloft_tuples SET value = '\\x{pack_counter(40).hex()}', version = version + 1",
        f"UPDATE keyloft_tuples SET value = '\\x{pack_counter(40).hex()}', expires_at = {2**50}",
    ],
)
async def test_a_counter_that_others_have_changed_is_read_again(emptied_postgres_url: str, change: str) -> None:
    async with opened(emptied_postgres_url) as engine:
        await count(engine, b"n")
        await count(engine, b"n")
        query(emptied_postgres_url, change)
        assert await count(engine, b"n") == [1 if change.startswith("DELETE") else 41]


async def test_processes_that_change_the_same_counters_read_them_and_lose_no_race_for_long(
    emptied_postgres_url: str,
) -> None:
    keys = [b"%d" % number for number in range(4)]
    async with opened(emptied_postgres_url) as one, opened(emptied_postgres_url) as other:
        asked = reads(one), reads(other)
        for _ in range(64):
            for engine in (one, other):
                await count(engine, *keys)
        assert await count(one, *keys) == [129] * len(keys)
        for each in asked:
            # Of 64 groups, those after 1, 2, 4 … groups that were read are tried without a read.
            assert len(each) >= 64
            assert sum(each) == len(each) * len(keys)
    async with opened(emptied_postgres_url) as another:
        assert unpack_counter((await stored(another, keys[0])).value) == 129


async def test_what_is_remembered_is_bounded(emptied_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POSTGRES_CACHED_COUNTERS", 100)
    async with opened(emptied_postgres_url) as engine:
        for first in range(0, 500, 50):
            await engine.commit(Batch(tuple([Sum(A, b"%04d" % number, 1) for number in range(first, first + 50)])))
        assert 0 < len(engine.writer.by_function.counters) <= 150
        assert await count(engine, b"0000", b"0499") == [2, 2]


async def test_a_counter_of_a_plugin_is_read_each_time_because_people_change_it(emptied_postgres_url: str) -> None:
    async with opened(emptied_postgres_url) as engine:
        asked = reads(engine)
        for _ in range(3):
            await engine.commit(Batch((Add(Space.PLUGINS, ("p", "n"), 1),)))
        assert asked == [1, 1, 1]
