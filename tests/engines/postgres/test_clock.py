"""Time is the server's: when an entry was made, what has expired, what a watch reports, whatever time it is here."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import pytest

import keyloft
from keyloft import limits
from keyloft.core.records import Ask
from keyloft.plugins import BotDatabase
from tools.postgres import query

HOUR = 3600
LONGEST_SECONDS = 20

Shift: TypeAlias = Callable[[float], None]

_time_ns = time.time_ns


@pytest.fixture
def postgres_url(emptied_postgres_url: str) -> str:
    """With Keyloft's tables, which takes less time: no test here is about making them."""
    return emptied_postgres_url


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Shift:
    """Puts the clock of this process forward, or back."""
    return lambda seconds: monkeypatch.setattr(time, "time_ns", lambda: _time_ns() + int(seconds * 1e9))


def server_time(url: str) -> datetime:
    [(now,)] = query(url, "SELECT clock_timestamp()")
    assert isinstance(now, datetime)
    return now


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
class TestWrongTime:
    async def test_entries_carry_the_servers_time(self, postgres_url: str, shift: Shift, seconds: int) -> None:
        shift(seconds)
        async with keyloft.open(postgres_url, sweep_every=None) as kv:
            before = server_time(postgres_url)
            await kv.set(("plain",), 1, expire_in=60)
            await kv.atomic().check(("decided",), None).set(("decided",), 1, expire_in=60).commit()
            await kv.set(("touched",), 1)
            await kv.touch(("touched",), expire_in=60)
            after = server_time(postgres_url)
            async for entry in kv.list():
                assert entry.expires_at is not None
                made = entry.expires_at - timedelta(seconds=60)
                assert before - timedelta(milliseconds=1) <= made <= after, entry.key
        times = query(postgres_url, "SELECT created_at, updated_at FROM keyloft_tuples")
        for moment in {moment for row in times for moment in row}:
            made = datetime.fromtimestamp(moment / 1000, UTC)
            assert before - timedelta(milliseconds=1) <= made <= after

        db = BotDatabase(postgres_url)
        await db.kv_set("trivia", "k", 1, ttl_seconds=limits.LONGEST_TTL_SECONDS)
        await db.close()
        [(created_at, expires_at)] = query(postgres_url, "SELECT created_at, expires_at FROM plugin_kv_storage")
        assert after - timedelta(milliseconds=1) <= created_at <= server_time(postgres_url)
        assert expires_at == created_at + timedelta(seconds=limits.LONGEST_TTL_SECONDS)

    async def test_entries_expire_by_the_servers_time(self, postgres_url: str, shift: Shift, seconds: int) -> None:
        shift(seconds)
        async with keyloft.open(postgres_url, sweep_every=None) as kv:
            await kv.set(("long",), 1, expire_in=60)
            await kv.set(("short",), 1, expire_in=0.05)
            await asyncio.sleep(0.06)
            assert [key async for key in kv.keys()] == [("long",)]
            assert [entry.exists for entry in await kv.get_many([("long",), ("short",)])] == [True, False]
            assert not await kv.delete(("short",))
            assert not (await kv.atomic().check(("long",), None).set(("long",), 2).commit()).ok
            assert await kv.sweep() == 1

    async def test_watches_report_expiry_by_the_servers_time(
        self, postgres_url: str, shift: Shift, seconds: int
    ) -> None:
        shift(seconds)
        async with keyloft.open(postgres_url, sweep_every=None) as kv:
            await kv.set(("a", 1), 1, expire_in=2)
            due = (await kv.get(("a", 1))).expires_at
            assert due is not None
            by_key, by_prefix = kv.watch(("a", 1)), kv.watch(prefix=("a",))
            async with asyncio.timeout(LONGEST_SECONDS):
                [entry] = await anext(by_key)
                assert entry.exists
                for watching in (by_key, by_prefix):
                    [entry] = await anext(watching)
                    assert not entry.exists
                    assert server_time(postgres_url) >= due
                assert server_time(postgres_url) < due + timedelta(seconds=LONGEST_SECONDS)


@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
async def test_a_clock_that_is_set_while_a_watch_waits_makes_it_neither_late_nor_busy(
    postgres_url: str, shift: Shift, seconds: int
) -> None:
    async with keyloft.open(postgres_url, sweep_every=None) as kv:
        watching = kv.watch(("k",))
        await anext(watching)
        reads = 0
        read = kv.engine.read

        async def counted(*asks: Ask) -> list[Any]:
            nonlocal reads
            reads += 1
            return await read(*asks)

        kv.engine.read = counted  # type: ignore[method-assign]
        shift(seconds)
        await kv.set(("k",), 1, expire_in=0.5)
        [entry] = await anext(watching)
        assert entry.exists
        async with asyncio.timeout(60):
            [entry] = await anext(watching)
        assert not entry.exists
        assert reads < 50
