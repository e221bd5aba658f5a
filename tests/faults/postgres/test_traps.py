"""PostgreSQL under bad conditions: locks that are held for long, lost machines, poolers, wrong hosts and passwords."""

import asyncio
import time
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft import Store
from keyloft.core.keys import encode
from keyloft.core.records import Batch, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from tests.support.postgres_proxy import ENDLESS_SECONDS, Message, pooler, proxy, silent_port
from tools.postgres import query

_OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


async def listed(kv: Store, *, reverse: bool = False) -> list[keyloft.Entry]:
    return [entry async for entry in kv.list(prefix=(), reverse=reverse)]


async def test_durability_of_a_pooled_engine_does_not_change_that_of_others(postgres_url: str) -> None:
    async def commit_modes(url: str) -> set[Any]:
        connection = await asyncpg.connect(url, statement_cache_size=0)
        try:
            return {await connection.fetchval("SHOW synchronous_commit") for _ in range(6)}
        finally:
            await connection.close()

    async with pooler(postgres_url) as (_, url):
        assert await commit_modes(url) == {"on"}
        async with keyloft.open(url, durability="relaxed") as kv:
            for number in range(5):
                await kv.set(("k",), number)
                await kv.count()
            assert await commit_modes(url) == {"on"}, "others would lose what was acknowledged to them"


async def test_write_whose_outcome_was_read_stays_as_it_was_read(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, patience=1) as kv:
        await kv.set(("k",), 0)
        rival = await asyncpg.connect(postgres_url)
        await rival.execute("BEGIN; LOCK TABLE keyloft_tuples IN EXCLUSIVE MODE")
        with pytest.raises(keyloft.DatabaseError) as caught:
            await kv.set(("k",), 1)
        stored = (await kv.get(("k",))).value
        await rival.execute("COMMIT")
        await kv.set(("elsewhere",), 1)
        await asyncio.sleep(0.3)
        late = (await kv.get(("k",))).value
        await rival.close()
        assert stored == late, repr(caught.value)


async def test_machine_lost_in_the_middle_of_a_write_does_not_stop_all_others(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url), keyloft.open(postgres_url, patience=3) as other:
        lost = await keyloft.open(url, patience=1)
        await lost.set(("k",), 0)
        network.lets_ask = lambda message: b"UPDATE keyloft_version_counter" not in message.body
        writing = asyncio.create_task(lost.atomic().sum(("n",), 1).commit())
        await asyncio.sleep(0.3)
        network.pause()  # a machine without power says no good-bye
        await asyncio.gather(writing, return_exceptions=True)
        try:
            await other.set(("k",), 1)
        finally:
            network.go_on()
            network.cut()
            await lost.aclose()


async def test_silent_first_host_leaves_time_for_the_second(postgres_url: str) -> None:
    async with proxy(postgres_url) as (_, url), silent_port() as silent:
        several = url.replace("@127.0.0.1", f"@127.0.0.1:{silent},127.0.0.1")
        async with keyloft.open(several, patience=3) as kv:
            await kv.set(("k",), 1)


async def test_silent_first_host_is_remembered(postgres_url: str) -> None:
    met: list[None] = []
    async with proxy(postgres_url) as (_, url), silent_port(lambda: met.append(None)) as silent:
        several = url.replace("@127.0.0.1", f"@127.0.0.1:{silent},127.0.0.1")
        async with keyloft.open(several, patience=3) as kv:
            before = len(met)
            assert before > 0
            await kv.get(("k",))
            assert len(met) == before, "each new connection waits for the silent one again"


async def test_aclose_leaves_no_session_of_a_read_under_way(postgres_url: str) -> None:
    kv = await keyloft.open(postgres_url)
    await kv.set(("k",), 1)
    rival = await asyncpg.connect(postgres_url)
    await rival.execute("BEGIN; LOCK TABLE keyloft_tuples IN ACCESS EXCLUSIVE MODE")
    reading = asyncio.create_task(kv.count())
    while not await rival.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
        await asyncio.sleep(0.005)
    await kv.aclose()
    await rival.execute("COMMIT")
    await asyncio.gather(reading, return_exceptions=True)
    async with asyncio.timeout(60):
        while await rival.fetchval(f"SELECT count(*) {_OTHERS}"):
            await asyncio.sleep(0.01)
    await rival.close()


async def test_late_caller_waits_its_whole_timeout(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url), keyloft.open(url, patience=1) as kv:
        await kv.set(("k",), 1)
        network.pause()
        first = asyncio.create_task(kv.set(("k",), 2))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(kv.set(("second",), 1))
        await asyncio.sleep(0.8)
        late = asyncio.create_task(kv.set(("late",), 1))
        await asyncio.wait([first, second])  # their timeouts end while the pause goes on
        assert first.exception() is not None
        assert second.exception() is not None
        assert not late.done()
        network.go_on()
        await late


async def test_watch_polls_though_its_listening_connection_is_dead(postgres_url: str) -> None:
    async with (
        proxy(postgres_url) as (network, url),
        keyloft.open(postgres_url) as other,
        keyloft.open(url, patience=1) as kv,
    ):
        await kv.get(("k",))
        swallowed = 0

        def lets(message: Message) -> bool:
            nonlocal swallowed
            if b"LISTEN" in message.body:
                swallowed = 3  # Parse, Describe, Sync
            swallowed -= 1
            return swallowed < 0

        network.lets_ask = lets
        watch = kv.watch(("k",))
        await anext(watch)
        await other.set(("k",), 1)
        async with asyncio.timeout(60):
            await anext(watch)


@pytest.mark.parametrize("written", ["pa@ssword", "pa/ssword", "pa#ssword", "p@/#"])
async def test_password_that_should_have_been_escaped_is_not_shown(written: str) -> None:
    with pytest.raises(keyloft.KeyloftError) as caught:
        await keyloft.open(f"postgresql://me:{written}@127.0.0.1:1/app", patience=0.3)
    assert "ssword@" not in str(caught.value)
    assert "me:" not in str(caught.value)
    assert "%40" in str(caught.value)


@pytest.mark.parametrize("host", ["[::1/app", "127.0.0.1:99999/app"])
async def test_url_with_an_impossible_host_is_refused(host: str) -> None:
    with pytest.raises(keyloft.KeyloftError):
        await keyloft.open(f"postgresql://me:secret@{host}", patience=0.3)


async def test_port_is_not_taken_for_a_password() -> None:
    with pytest.raises(keyloft.Unreachable, match=r"'127\.0\.0\.1', 1"):
        await keyloft.open("postgresql://127.0.0.1:1/app?user=me", patience=0.3)


async def test_read_only_database_is_read_only_and_not_unreachable(postgres_url: str) -> None:
    name = postgres_url.split("/")[3].partition("?")[0]
    query(postgres_url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(keyloft.DatabaseError) as caught:
        await keyloft.open(postgres_url, patience=0.5)
    assert type(caught.value) is keyloft.ReadOnly, repr(caught.value)


async def test_statements_of_two_processes_are_not_mixed_up_by_a_pooler(postgres_url: str) -> None:
    """A prepared on session 1 and B on session 2, under the same name; then they change places."""
    async with keyloft.open(postgres_url) as kv:
        await kv.set_many({("k", number): number for number in range(3)})
    async with pooler(postgres_url, 2) as (between, url):
        plain = await asyncpg.connect(url, statement_cache_size=0)  # so that both sessions exist
        for _ in range(4):
            await plain.execute("SELECT 1")
        await plain.close()
        one, two = between.idle_sessions.get_nowait(), between.idle_sessions.get_nowait()
        began = asyncpg.connection._uid
        between.idle_sessions.put_nowait(one)
        a = await keyloft.open(url)
        assert [entry.value for entry in await listed(a)] == [0, 1, 2]
        assert between.idle_sessions.get_nowait() is one
        asyncpg.connection._uid = began  # B is another process, which counts from the start
        between.idle_sessions.put_nowait(two)
        b = await keyloft.open(url)
        assert [entry.value for entry in await listed(b, reverse=True)] == [2, 1, 0]
        asyncpg.connection._uid += 1000
        assert between.idle_sessions.get_nowait() is two
        between.idle_sessions.put_nowait(two)
        found = [entry.value for entry in await listed(a)]
        between.idle_sessions.put_nowait(one)
        await a.aclose()
        await b.aclose()
        assert found == [0, 1, 2]


async def test_a_caller_that_makes_a_watch_and_then_reads_or_writes_misses_nothing(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv, keyloft.open(postgres_url) as other:
        for number in range(10):
            await other.set(("users", "old"), number)
            watch = kv.watch(prefix=("users",))
            if number % 2:
                there = {entry.key[1] async for entry in kv.list(prefix=("users",))}
                assert there == {"old"}
            else:
                await kv.set(("go ahead",), number)
            await other.set(("users", "new"), number)
            await other.delete(("users", "old"))
            seen: dict[Any, Any] = {}
            async with asyncio.timeout(60):
                while len(seen) < 2:
                    seen |= {entry.key[1]: entry.value for entry in await anext(watch)}
            assert seen == {"new": number, "old": None}
            await watch.aclose()
            await other.delete(("users", "new"))


async def test_a_submitted_write_waits_for_a_new_watch_so_that_what_follows_it_is_reported(postgres_url: str) -> None:
    """The server is slow to tell from where the watch reports; the write's outcome lets another process go ahead."""
    engine, other = await open_engine(postgres_url), await open_engine(postgres_url)
    reads: Any = engine.reads  # type: ignore[attr-defined]
    counter, go_on, done = reads.counter, asyncio.Event(), asyncio.Event()

    async def late() -> Any:
        await go_on.wait()
        return await counter()

    reads.counter = late
    watch = engine.watch(Scan(Space.TUPLES, b"k", b"l", 10))
    first = Batch((Set(Space.TUPLES, b"go ahead", b"1", Encoding.JSON),))
    engine.submit(first, lambda _: done.set())
    try:
        async with asyncio.timeout(0.5):
            await done.wait()
    except TimeoutError:
        go_on.set()
        await done.wait()
    await other.commit(Batch((Set(Space.TUPLES, b"k", b"1", Encoding.JSON),)))
    go_on.set()
    async with asyncio.timeout(60):
        assert [change.key for change in await anext(aiter(watch))] == [b"k"]
    await watch.aclose()
    await engine.aclose()
    await other.aclose()


async def test_lock_that_is_never_let_go_ends_a_write_in_time_and_undone(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, patience=1) as kv:
        rival = await asyncpg.connect(postgres_url)
        await rival.execute("BEGIN; LOCK TABLE keyloft_tuples IN EXCLUSIVE MODE")
        began = time.monotonic()
        many = await asyncio.gather(*[kv.set(("k", number), 1) for number in range(20)], return_exceptions=True)
        assert time.monotonic() - began < ENDLESS_SECONDS
        assert {type(error) for error in many} == {keyloft.Busy}
        await rival.execute("COMMIT")
        await rival.close()
        await kv.set(("after",), 1)
        assert [entry.key async for entry in kv.list()] == [("after",)]


async def test_locked_row_delays_no_write_to_others(postgres_url: str) -> None:
    async with keyloft.open(postgres_url, patience=4) as kv:
        await kv.set_many({("locked",): 0, ("free",): 0})
        rival = await asyncpg.connect(postgres_url)
        key = encode(("locked",)).hex()
        await rival.execute(rf"BEGIN; UPDATE keyloft_tuples SET value = value WHERE key = '\x{key}'")
        waiting = [asyncio.create_task(kv.set(("locked",), number)) for number in range(3)]
        for number in range(5):
            stamps = await asyncio.gather(*[kv.set(("free", at), number) for at in range(8)])
            assert len(set(stamps)) == 8
        assert not any(task.done() for task in waiting)
        await rival.execute("COMMIT")
        await rival.close()
        stamps = [await task for task in waiting]
        assert stamps == sorted(stamps)
        assert (await kv.get(("locked",))).value == 2


async def test_after_all_tasks_were_cancelled_a_caller_can_still_read_write_and_close(postgres_url: str) -> None:
    verdicts: list[object] = []
    for iterations in range(6):
        kv = await keyloft.open(postgres_url, patience=3)
        await kv.set(("k",), 1)
        calls = [asyncio.create_task(kv.set(("k", number), 1)) for number in range(20)]
        calls += [asyncio.create_task(kv.set(("k",), (await kv.get(("k",))).value))]
        kv.engine.submit(Batch((Set(Space.TUPLES, encode(("s",)), b"1", Encoding.JSON),)), verdicts.append)
        for _ in range(iterations):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        async with asyncio.timeout(60):
            assert (await kv.get(("k",))).value == 1
            await kv.set(("k",), 1)
            await asyncio.gather(*calls, return_exceptions=True)
            await kv.aclose()
    assert any("before a commit was sent" in str(verdict) for verdict in verdicts)


async def test_silent_first_host_is_passed_over_wherever_it_is_named(postgres_url: str) -> None:
    async with proxy(postgres_url) as (_, url), silent_port() as silent:
        place, _, rest = url.removeprefix("postgresql://").partition("@")
        port, _, name = rest.partition(":")[2].partition("/")
        several = f"postgresql://{place}@/{name}?host=127.0.0.1,127.0.0.1&port={silent},{port}"
        async with keyloft.open(several, patience=3) as kv:
            await kv.set(("k",), 1)


async def test_stores_in_two_schemas_do_not_wake_each_other(postgres_url: str) -> None:
    query(postgres_url, "CREATE SCHEMA other")
    joint = "&" if "?" in postgres_url else "?"
    async with keyloft.open(postgres_url) as kv, keyloft.open(f"{postgres_url}{joint}search_path=other") as other:
        await kv.set(("k",), "mine")
        watch = kv.watch(("k",))
        assert [entry.value for entry in await anext(watch)] == ["mine"]
        await other.set(("k",), "another")
        assert (await kv.get(("k",))).value == "mine"
        await kv.set(("k",), "mine again")
        assert [entry.value for entry in await anext(watch)] == ["mine again"]
