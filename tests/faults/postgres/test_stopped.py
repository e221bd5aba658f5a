"""A client that is stopped, busy or cut off delays no other writer for long, and its commits are made once or never."""

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft import limits
from keyloft.core.keys import encode
from keyloft.core.records import Batch, Check, Committed, Conflict, Get, Set, Space, Sum
from keyloft.core.values import Encoding, unpack_counter
from keyloft.engines import open_engine
from keyloft.engines.postgres import function
from keyloft.engines.postgres.engine import PostgresEngine
from keyloft.plugins import BotDatabase
from tests.support.examples import rounds
from tests.support.postgres_commits import before_commit
from tests.support.postgres_proxy import Message, proxy
from tools.postgres import query

from ..children import child

A, P, S = Space.TUPLES, Space.PLUGINS, Space.SEMANTIC
LONGEST_WAIT_SECONDS = 5.0
"""Half of what a caller waits before it gives up: a busy machine is slow, too."""


@pytest.fixture
def postgres_url(emptied_postgres_url: str) -> str:
    """With Keyloft's tables, which takes less time: no test here is about making them."""
    return emptied_postgres_url


@asynccontextmanager
async def engines(url: str, count: int = 1, patience: float = 10) -> AsyncIterator[list[PostgresEngine]]:
    opened = [await open_engine(url, patience=patience) for _ in range(count)]
    try:
        yield [engine for engine in opened if isinstance(engine, PostgresEngine)]
    finally:
        for engine in opened:
            await engine.aclose()


async def sum_of(engine: PostgresEngine, key: bytes) -> int:
    [record] = await engine.read(Get(A, key))
    return 0 if record is None else unpack_counter(record.value)


# Stopped and busy clients


@pytest.mark.parametrize("way", ["function", "locking"])
async def test_a_stopped_client_delays_no_other_writer_for_long(
    postgres_url: str, way: str, rng: random.Random
) -> None:
    async with keyloft.open(postgres_url, sweep_every=None) as kv, child("pg_writer", postgres_url, way) as writer:
        assert await writer.line() == "writing"
        longest = 0.0
        for _ in rounds(4):
            await asyncio.sleep(rng.uniform(0.01, 0.05))
            os.kill(writer.pid, signal.SIGSTOP)
            try:
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    began = time.monotonic()
                    await kv.atomic().sum(("own",), 1).sum(("shared",), 1).commit()
                    await kv.set(("plain",), 1)
                    longest = max(longest, time.monotonic() - began)
            finally:
                os.kill(writer.pid, signal.SIGCONT)
        assert longest < LONGEST_WAIT_SECONDS


async def test_a_client_that_computes_between_its_read_and_its_commit_delays_no_one_else(postgres_url: str) -> None:
    async with engines(postgres_url, 2) as [busy, other]:
        await busy.commit(Batch((Sum(A, b"n", 1),)))
        has_read, has_computed = asyncio.Event(), asyncio.Event()

        async def compute() -> None:
            has_read.set()
            await has_computed.wait()

        before_commit(busy, compute)
        computing = asyncio.create_task(busy.commit(Batch((Sum(A, b"n", 1),))))
        async with asyncio.timeout(60):
            await has_read.wait()
        for _ in range(20):  # one that waited for the busy client would be refused
            await other.commit(Batch((Sum(A, b"n", 1), Set(A, b"own", b"1", Encoding.JSON))))
        has_computed.set()
        assert isinstance(await computing, Committed)
        assert await sum_of(other, b"n") == 22


async def test_a_commit_that_takes_too_long_on_the_server_gives_the_version_counter_back(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trigger makes the write of one row slow; others of its group are committed without it."""
    monkeypatch.setattr("keyloft.limits.POSTGRES_TRANSACTION_SECONDS", 0.2)
    async with engines(postgres_url) as [engine]:
        first = await engine.commit(Batch((Sum(A, b"slow", 1), Sum(A, b"fast", 1))))
        assert isinstance(first, Committed)
        query(
            postgres_url,
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END$$",
        )
        query(
            postgres_url,
            "CREATE TRIGGER dawdle BEFORE UPDATE ON keyloft_tuples FOR EACH ROW "
            rf"WHEN (OLD.key = '\x{b'slow'.hex()}') EXECUTE FUNCTION dawdle()",
        )
        slow, fast = await asyncio.gather(
            engine.commit(Batch((Sum(A, b"slow", 1), Set(A, b"other", b"1", Encoding.JSON)))),
            engine.commit(Batch((Sum(A, b"fast", 1),))),
            return_exceptions=True,
        )
        assert isinstance(slow, keyloft.Busy)
        assert "write less at once" in str(slow)
        assert isinstance(fast, Committed)
        assert await engine.read(Get(A, b"other")) == [None]
        assert (await sum_of(engine, b"slow"), await sum_of(engine, b"fast")) == (1, 2)


# Commits whose reply was lost


async def test_a_commit_that_arrives_after_it_was_given_up_is_refused(postgres_url: str) -> None:
    """The same call, made again once the engine has learned that it was not made: as if a backend had been stopped."""
    async with engines(postgres_url, patience=2) as [engine]:
        await engine.commit(Batch((Sum(A, b"n", 1),)))
        slot: Any = engine.writer.slot
        calls: list[tuple[Any, ...]] = []
        call = slot.call

        async def lost(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise ConnectionResetError("cut before the server got it")
            return await call(*arguments)

        slot.call = lost
        assert isinstance(await engine.commit(Batch((Sum(A, b"n", 10),))), Committed)
        assert len(calls) == 2
        late = await asyncpg.connect(postgres_url)
        [[answer]] = await late.fetch(*calls[0])
        [[again]] = await late.fetch(*calls[1])
        await late.close()
        assert answer[0] == again[0] == function.REFUSED
        assert await sum_of(engine, b"n") == 11


async def test_a_commit_that_was_made_is_reported_though_its_reply_was_lost(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url), engines(url, patience=4) as [engine]:
        first = await engine.commit(Batch((Sum(A, b"n", 1),)))
        asked = False

        def lets_ask(message: Message) -> bool:
            nonlocal asked
            asked = asked or (message.kind == b"B" and engine.writer.attempt.completed is not None)  # type: ignore[union-attr]
            return True

        def lets_answer(message: Message) -> bool:
            if asked:
                network.lets_answer = lambda message: True
                asyncio.get_running_loop().call_later(0.2, network.cut)
            return not asked

        network.lets_ask, network.lets_answer = lets_ask, lets_answer
        done = await engine.commit(Batch((Sum(A, b"n", 1),), (Check(A, b"n", first.version),)))  # type: ignore[union-attr]
        assert isinstance(done, Committed)
        assert done.values == (2,)
        assert await sum_of(engine, b"n") == 2
        [[stored]] = query(postgres_url, "SELECT version FROM keyloft_tuples")
        assert stored == done.version


async def test_commits_of_stopped_backends_are_made_once_or_never(postgres_url: str, rng: random.Random) -> None:
    async with engines(postgres_url, 2, patience=4) as [engine, other]:
        counted, stop = 0, False

        async def count() -> None:
            nonlocal counted
            while not stop:
                try:
                    done = await engine.commit(Batch((Sum(A, b"n", 1),)))
                    counted += isinstance(done, Committed)
                except (keyloft.Unreachable, keyloft.Busy):
                    pass  # nothing was written

        counting = [asyncio.create_task(count()) for _ in range(8)]
        for _ in rounds(1):
            await asyncio.sleep(rng.uniform(0.1, 0.2))
            backend = (await engine.writer.slot.connected()).get_server_pid()
            os.kill(backend, signal.SIGSTOP)
            await asyncio.sleep(3.4)  # the engine has begun to ask what became of its commit
            os.kill(backend, signal.SIGCONT)
        await asyncio.sleep(0.5)
        stop = True
        await asyncio.gather(*counting)
        assert counted > 10
        assert await sum_of(other, b"n") == counted


# Locked rows


async def test_batches_that_share_a_key_keep_their_order_behind_a_locked_row_and_others_pass(postgres_url: str) -> None:
    def put(key: bytes, *checked: bytes) -> Batch:
        return Batch((Set(A, key, b"1", Encoding.JSON),), tuple([Check(A, one, None) for one in checked]))

    async with engines(postgres_url) as [engine]:
        await engine.commit(put(b"locked"))
        rival = await asyncpg.connect(postgres_url)
        await rival.execute(f"BEGIN; UPDATE keyloft_tuples SET value = value WHERE key = '\\x{b'locked'.hex()}'")
        done: dict[str, Any] = {}

        def submit(name: str, batch: Batch) -> None:
            engine.submit(batch, lambda verdict: done.__setitem__(name, verdict))

        submit("locked", put(b"locked"))
        submit("checks it", put(b"other", b"absent", b"locked"))
        submit("shares a key", put(b"third", b"absent"))
        submit("free", put(b"free"))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        for number in range(20):
            await engine.commit(put(b"free %d" % number))
        assert time.monotonic() - began < LONGEST_WAIT_SECONDS
        assert set(done) == {"free"}
        await rival.execute("ROLLBACK")
        await rival.close()
        async with asyncio.timeout(60):
            while len(done) < 4:
                await asyncio.sleep(0.01)
        assert isinstance(done["checks it"], Conflict)
        assert done["locked"].version < done["shares a key"].version


async def test_long_batches_pass_those_that_wait_for_a_locked_row_and_others_pass_long_ones(postgres_url: str) -> None:
    def put(*keys: bytes) -> Batch:
        return Batch(tuple([Set(A, key, b"1", Encoding.JSON) for key in keys]))

    def long(name: bytes, *keys: bytes) -> Batch:
        return put(*keys, *[b"%s %d" % (name, number) for number in range(limits.LONG_BATCH_OPERATIONS)])

    async with engines(postgres_url) as [engine]:
        await engine.commit(put(b"locked"))
        rival = await asyncpg.connect(postgres_url)
        await rival.execute(f"BEGIN; UPDATE keyloft_tuples SET value = value WHERE key = '\\x{b'locked'.hex()}'")
        done: dict[str, Any] = {}

        def submit(name: str, batch: Batch) -> None:
            engine.submit(batch, lambda verdict: done.__setitem__(name, verdict))

        submit("locked", put(b"locked"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await engine.commit(long(b"free"))
        submit("long", long(b"waits", b"locked", b"shared"))
        submit("shares a key", long(b"waits, too", b"shared"))
        submit("shares a key, too", put(b"shared"))
        for number in range(20):
            await engine.commit(put(b"free %d" % number))
        await engine.commit(long(b"free"))
        assert time.monotonic() - began < LONGEST_WAIT_SECONDS
        assert not done
        await rival.execute("ROLLBACK")
        await rival.close()
        async with asyncio.timeout(60):
            while len(done) < 4:
                await asyncio.sleep(0.01)
        versions = [done[name].version for name in ("locked", "long", "shares a key", "shares a key, too")]
        assert versions == sorted(versions)


async def test_a_write_that_has_waited_for_a_locked_row_until_its_end_says_so(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POSTGRES_LOCKED_PAUSES", (0.05, 0.05))
    async with keyloft.open(postgres_url, patience=2) as kv:
        await kv.set(("locked",), 0)
        rival = await asyncpg.connect(postgres_url)
        await rival.execute("BEGIN; UPDATE keyloft_tuples SET value = value")
        with pytest.raises(keyloft.Busy, match="another client holds a lock"):
            await kv.set(("locked",), 1)
        await rival.close()


async def test_a_locked_row_of_one_plugin_delays_no_other_plugin(postgres_url: str) -> None:
    db = BotDatabase(postgres_url)
    await db.kv_set("a", "k", 0)
    rival = await asyncpg.connect(postgres_url)
    await rival.execute("BEGIN; UPDATE plugin_kv_storage SET value_json = '1' WHERE plugin_name = 'a'")
    waiting = [asyncio.create_task(db.kv_set("a", "k", number)) for number in range(20)]
    delays: list[float] = []
    for number in range(50):
        began = time.monotonic()
        await db.kv_set("b", "k", number)
        delays.append(time.monotonic() - began)
        await asyncio.sleep(0.01)
    assert statistics.median(delays) < 0.25
    assert max(delays) < LONGEST_WAIT_SECONDS
    assert not any(task.done() for task in waiting)
    await rival.execute("ROLLBACK")
    await rival.close()
    await asyncio.gather(*waiting)
    assert (await db.kv_get("a", "k"))["value"] == 19
    await db.close()


async def test_a_row_that_another_client_inserts_and_does_not_commit_delays_others_for_a_moment(
    postgres_url: str,
) -> None:
    async with keyloft.open(postgres_url, patience=60) as kv:
        await kv.set(("free",), 0)
        rival = await asyncpg.connect(postgres_url)
        key = encode(("new",)).hex()
        await rival.execute(rf"BEGIN; INSERT INTO keyloft_tuples VALUES ('\x{key}', 0, 1, NULL, 0, 0, '1')")
        waiting = asyncio.create_task(kv.set(("new",), 1))
        delays: list[float] = []
        for number in range(20):
            began = time.monotonic()
            await kv.set(("free",), number)
            delays.append(time.monotonic() - began)
        assert statistics.median(delays) < 0.75
        assert not waiting.done()
        await rival.execute("ROLLBACK")
        await rival.close()
        await waiting


# Locked tables


@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])
@pytest.mark.parametrize("way", ["function", "locking"])
async def test_a_locked_table_stops_no_write_to_another_and_keeps_the_order_of_its_own(
    postgres_url: str, way: str, mode: str
) -> None:
    """As by a migration of one interface's table, or by VACUUM FULL."""

    def tuples(key: bytes) -> Batch:
        return Batch((Sum(A, key, 1),))

    async with engines(postgres_url, patience=1.5) as [engine]:
        engine.server.has_function = way == "function"
        await engine.commit(tuples(b"k"))
        rival = await asyncpg.connect(postgres_url)
        await rival.execute(f"BEGIN; LOCK TABLE keyloft_tuples IN {mode} MODE")
        waiting: list[asyncio.Task[Any]] = []
        # Until callers have been refused, who waited for as long as one may; all others go on.
        while sum(task.done() for task in waiting) < 9:
            waiting += [asyncio.create_task(engine.commit(tuples(b"%d" % (len(waiting) + more)))) for more in range(3)]
            await asyncio.gather(
                *[engine.commit(Batch((Set(P, ("p", str(number)), b"1", Encoding.JSON),))) for number in range(5)]
            )
            await asyncio.sleep(0.05)
        assert {type(task.exception()) for task in waiting if task.done()} == {keyloft.Busy}
        names: list[str] = []

        def submit(name: str, batch: Batch) -> None:
            engine.submit(batch, lambda verdict: names.append(f"{name} {type(verdict).__name__}"))

        both = Batch((Sum(A, b"k", 1), Set(P, ("p", "shared"), b"1", Encoding.JSON)))
        submit("both tables", both)
        submit("shares a key", Batch((Set(P, ("p", "shared"), b"2", Encoding.JSON),)))
        await engine.commit(Batch((Set(P, ("p", "free"), b"1", Encoding.JSON),)))
        await engine.commit(Batch((Set(S, b"free", b"1", Encoding.JSON),)))
        assert names == []
        await rival.execute("ROLLBACK")
        await rival.close()
        await engine.commit(tuples(b"k"))
        assert names == ["both tables Committed", "shares a key Committed"]
        assert await sum_of(engine, b"k") == 3
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_rows_that_another_client_inserts_and_does_not_commit_starve_no_batch(postgres_url: str) -> None:
    """More of them than one pass over a group waits for, and before the others in each group."""
    async with engines(postgres_url, patience=60) as [engine]:
        rival = await asyncpg.connect(postgres_url)
        rows = ", ".join([f"('\\x{(b'new %d' % number).hex()}', 0, 1, NULL, 0, 0, '1')" for number in range(4)])
        await rival.execute(f"BEGIN; INSERT INTO keyloft_tuples VALUES {rows}")
        keys = [b"new %d" % number for number in range(4)]
        waiting = [asyncio.create_task(engine.commit(Batch((Set(A, key, b"2", Encoding.JSON),)))) for key in keys]
        await asyncio.gather(
            *[engine.commit(Batch((Set(A, b"free %d" % number, b"1", Encoding.JSON),))) for number in range(10)]
        )
        assert not any(task.done() for task in waiting)
        await rival.execute("ROLLBACK")
        await rival.close()
        await asyncio.gather(*waiting)
