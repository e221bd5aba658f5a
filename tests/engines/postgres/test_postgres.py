"""The PostgreSQL engine keeps the rules, on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import keyloft
from keyloft import CannotOpen, DatabaseError, ManualClock, Unreachable
from keyloft.core import keys
from keyloft.core.engine import Engine
from keyloft.core.maintenance import Existing
from keyloft.core.records import Record, Space
from keyloft.core.values import JSON
from keyloft.engines import open_engine, open_maintenance
from keyloft.engines.postgres.engine import PostgresEngine
from tests.engines.contract import EngineContract
from tests.support.everything import fill
from tests.support.postgres_proxy import Message, pooler, proxy
from tools.postgres import query


class TestPostgres(EngineContract):
    @pytest.fixture
    async def engine(self, clock: ManualClock, emptied_postgres_url: str) -> AsyncIterator[Engine]:
        engine = await open_engine(emptied_postgres_url, clock)
        yield engine
        await engine.aclose()


class TestPostgresByLocking(EngineContract):
    """Where functions can't be made, commits take their locks first."""

    @pytest.fixture
    async def engine(self, clock: ManualClock, emptied_postgres_url: str) -> AsyncIterator[Engine]:
        engine = await open_engine(emptied_postgres_url, clock)
        assert isinstance(engine, PostgresEngine)
        engine.server.has_function = False
        yield engine
        await engine.aclose()


@pytest.mark.repeats
class TestPostgresBehindAPooler(EngineContract):
    """Each transaction may get another session."""

    @pytest.fixture
    async def engine(self, clock: ManualClock, emptied_postgres_url: str) -> AsyncIterator[Engine]:
        async with pooler(emptied_postgres_url) as (_, url):
            engine = await open_engine(url, clock)
            yield engine
            await engine.aclose()


async def test_a_cancelled_call_ends_wherever_it_is(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, sweep_every=None) as kv:
        await kv.count()
        for iterations in range(8):
            calls = [asyncio.ensure_future(call) for call in (kv.count(), kv.get(("k",)), kv.set(("k",), 1))]
            for _ in range(iterations):
                await asyncio.sleep(0)
            under_way = [call for call in calls if not call.done()]
            for call in under_way:
                call.cancel()
            await asyncio.wait(calls)
            assert all(call.cancelled() for call in under_way), iterations


@pytest.mark.parametrize("table", ["keyloft_version", "keyloft_semantic", "plugin_kv_storage"])
async def test_a_table_of_another_program_is_named(postgres_url: str, table: str) -> None:
    query(postgres_url, f"CREATE TABLE {table} (version_num TEXT)")
    with pytest.raises(DatabaseError, match=table) as raised:
        await keyloft.open(postgres_url)
    assert not isinstance(raised.value, Unreachable)


async def test_a_lost_version_counter_is_named(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, sweep_every=None) as kv:
        query(postgres_url, "DELETE FROM keyloft_version_counter")
        for call in (lambda: kv.set(("k",), 1), lambda: kv.delete(("k",)), lambda: anext(kv.watch(prefix=("a",)))):
            with pytest.raises(DatabaseError, match="keyloft_version_counter"):
                await call()
    with pytest.raises(DatabaseError, match="keyloft_version_counter"):
        await keyloft.open(postgres_url)


async def test_a_load_wakes_the_watches_of_other_processes(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a notification: the version counter is hardly ever polled here."""
    monkeypatch.setattr("keyloft.limits.WATCH_CHECK_SECONDS", 60)
    async with keyloft.open(postgres_url, sweep_every=None) as kv, asyncio.timeout(60):
        watch = kv.watch(prefix=("a",))
        await kv.set(("a", 1), 1)
        await anext(watch)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.2)  # then the first notification has arrived, and the watch has compared its range
        maintenance = await open_maintenance(postgres_url)
        loaded = Record(keys.encode(("a", 2)), b"2", JSON, 5, None)
        await maintenance.load([(Space.TUPLES, loaded)], 5, Existing.REFUSE)
        await maintenance.aclose()
        [change] = await waiting
        assert change.key == ("a", 2)


async def test_watches_end_with_an_error_once_the_database_holds_another_store(emptied_postgres_url: str) -> None:
    """A restore has replaced it, and the connections were lost."""
    async with keyloft.open(emptied_postgres_url, sweep_every=None) as kv, asyncio.timeout(20):
        watches = [kv.watch(prefix=()), kv.watch(("k",))]
        await kv.set(("k",), 1)
        for watch in watches:
            await anext(watch)
        waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
        query(emptied_postgres_url, "UPDATE keyloft_store SET store_id = 'another'")
        query(
            emptied_postgres_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        for ended in waiting:
            with pytest.raises(CannotOpen, match="if it was restored or replaced, start this process again"):
                await ended


async def test_connections_ask_the_server_about_no_types(emptied_postgres_url: str) -> None:
    """The driver would ask on each new connection, and the answer is always the same."""
    asked: list[bytes] = []

    def notes(message: Message) -> bool:
        asked.append(message.body)
        return True

    async with proxy(emptied_postgres_url) as (network, url):
        network.lets_ask = notes
        await fill(url)
        async with keyloft.open(url, sweep_every=None) as kv:
            assert len(await kv.get_many([("users", "alice"), ("users", 5)])) == 2
            assert len(await kv.list(prefix=("users",))) == 3
    assert any([b"keyloft_tuples" in body for body in asked])
    assert [body for body in asked if b"pg_type" in body] == []
