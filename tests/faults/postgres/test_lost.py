"""A PostgreSQL that is killed, cut off or silent loses nothing acknowledged, and is waited for by who is patient."""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest

import keyloft
from keyloft.core.keys import TupleKey
from tests.support.postgres import MortalServer
from tests.support.postgres_proxy import ENDLESS_SECONDS, proxy, silent_port
from tools.postgres import fresh_database, query

from ..moves import Chain, Move, after, chains, contents_of, made_in, make, witness

T = TypeVar("T")

_LONGEST_SECONDS = 30.0
_HALF_A_SECOND_OR_MORE = r"(0\.[5-9]|[1-9]\d*(\.\d)?) s"  # a busy machine takes longer, and the message says so
_OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


class Load:
    """Callers that write and read without a pause, and know what must be stored after each answer they got."""

    def __init__(self, stores: dict[str, keyloft.Store], judge: keyloft.Store) -> None:
        self._stores = stores
        self._judge = judge
        """A store with a long timeout, which reads what became of a write with an unknown outcome."""
        self.made: dict[Chain, int] = {}
        self.stamps: dict[Chain, list[int]] = {}
        self.counted: dict[str, int] = {}
        self.failures: list[tuple[str, keyloft.DatabaseError]] = []
        self.reads = 0
        self._stopping = False

    def failed(self, name: str, kind: type[Exception]) -> int:
        return sum(1 for store, error in self.failures if store == name and isinstance(error, kind))

    @asynccontextmanager
    async def running(self, writers: int) -> AsyncIterator[None]:
        async with asyncio.timeout(_LONGEST_SECONDS), asyncio.TaskGroup() as callers:
            for at, (name, store) in enumerate(self._stores.items()):
                for chain in chains(writers):
                    mine = Chain(chain.kind, chain.writer + at * writers)
                    callers.create_task(self._move_on(name, store, mine))
                callers.create_task(self._count(name, store))
            callers.create_task(self._read(self._get))
            callers.create_task(self._read(self._list))
            try:
                yield
            finally:
                self._stopping = True

    async def goes_on(self) -> None:
        """Wait until every caller got a few things done from now on."""
        before = {chain: len(stamps) for chain, stamps in self.stamps.items()}
        counted, reads = dict(self.counted), self.reads
        while (
            not self.stamps
            or any(len(stamps) < before.get(chain, 0) + 3 for chain, stamps in self.stamps.items())
            or any(count < counted.get(name, 0) + 1 for name, count in self.counted.items())
            or self.reads < reads + 3
        ):
            await asyncio.sleep(0.005)

    async def _move_on(self, name: str, store: keyloft.Store, chain: Chain) -> None:
        self.made[chain] = 0
        stamps = self.stamps[chain] = []
        while not self._stopping:
            move = Move(chain, self.made[chain] + 1)
            done = await self._outcome(name, make(store, move))
            if isinstance(done, int):
                stamps.append(done)
            if isinstance(done, int) or self._was_unknown_but_made(done, await self._shows(witness(move), move.number)):
                self.made[chain] = move.number

    async def _outcome(self, name: str, write: Awaitable[T]) -> T | keyloft.DatabaseError:
        """What a write returned, or one of the two errors that it may raise."""
        try:
            return await write
        except (keyloft.Unreachable, keyloft.CommitUnknown) as error:
            self.failures.append((name, error))
            return error

    def _was_unknown_but_made(self, error: keyloft.DatabaseError, was_made: bool) -> bool:
        """Whether a write that failed was made after all; then its error must have been CommitUnknown."""
        assert not was_made or isinstance(error, keyloft.CommitUnknown), f"this was written nevertheless: {error}"
        return was_made

    async def _shows(self, key: TupleKey, number: int) -> bool:
        entry = await self._judge.get(key)
        value = int.from_bytes(entry.value[:8]) if isinstance(entry.value, bytes) else entry.value
        return entry.exists and value == number

    async def _count(self, name: str, store: keyloft.Store) -> None:
        """Check-and-set increments, each with a key of its own that tells whether it was made."""
        self.counted[name] = attempt = 0
        while not self._stopping:
            entry = await self._judge.get(("count", name))
            attempt += 1
            atomic = store.atomic().check(entry).set(entry.key, (entry.value or 0) + 1)
            done = await self._outcome(name, atomic.set(("counted", name, attempt), True).commit())
            if isinstance(done, keyloft.CommitResult):
                self.counted[name] += done.ok
            else:
                entry = await self._judge.get(("counted", name, attempt))
                self.counted[name] += self._was_unknown_but_made(done, entry.exists)

    async def _read(self, once: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping:
            await once()
            self.reads += 1

    async def _get(self) -> None:
        entries = await self._judge.get_many([("many", 0, part) for part in range(5)])
        assert len({entry.value for entry in entries}) == 1, "a batch was seen in part"

    async def _list(self) -> None:
        entries = [entry async for entry in self._judge.list(prefix=("atomic", 0))]
        assert len({entry.value for entry in entries}) <= 1, "a batch was seen in part"

    async def check(self) -> None:
        """What is stored is what was acknowledged to the callers, no more and no less."""
        contents, _ = await contents_of(self._judge)
        counters = {key: contents.pop(key) for key in list(contents) if key[0] in ("count", "counted")}
        assert made_in(contents, self.made) == self.made
        assert contents == after(self.made)
        for name, count in self.counted.items():
            assert counters.pop(("count", name)) == count, "an increment was lost, or made twice"
        assert len(counters) == sum(self.counted.values()), "an increment was made in part"
        for stamps in self.stamps.values():
            assert stamps == sorted(stamps)
        everything = [stamp for stamps in self.stamps.values() for stamp in stamps]
        assert len(everything) == len(set(everything))
        assert await self._judge.set(("later",), 1) > max(everything)


async def test_server_killed_under_load_loses_nothing_acknowledged_and_is_waited_for(
    mortal_postgres: MortalServer,
) -> None:
    with fresh_database(mortal_postgres.url) as url:
        async with keyloft.open(url, patience=60) as patient, keyloft.open(url, patience=1) as hasty:
            load = Load({"patient": patient, "hasty": hasty}, judge=patient)
            watch = patient.watch(("single", 0))
            async with load.running(writers=2):
                for turn in range(3):
                    await load.goes_on()
                    await asyncio.to_thread(mortal_postgres.kill)
                    try:
                        if turn == 1:
                            with pytest.raises(keyloft.Unreachable):  # and `check` will not find it
                                await hasty.set(("refused",), 1)
                    finally:
                        mortal_postgres.start()
                await load.goes_on()
            await load.check()
            assert not load.failed("patient", keyloft.DatabaseError)
            async with asyncio.timeout(60):
                [entry] = await anext(watch)
                while entry.value != load.made[Chain("single", 0)]:
                    [entry] = await anext(watch)


async def test_sessions_ended_by_an_administrator_lose_nothing_acknowledged_and_are_replaced(
    postgres_url: str,
) -> None:
    async with keyloft.open(postgres_url) as kv:
        load = Load({"patient": kv}, judge=kv)
        ended = 0
        async with load.running(writers=2):
            for _ in range(10):
                await load.goes_on()
                administrator = await asyncpg.connect(postgres_url)
                ended += await administrator.fetchval(f"SELECT count(pg_terminate_backend(pid)) {_OTHERS}")
                await administrator.close()
            await load.goes_on()
        await load.check()
        assert ended >= 30
        assert not load.failed("patient", keyloft.DatabaseError), "these can wait for another session, and ask there"


async def sessions_left(url: str) -> int:
    """How many sessions others still have, after those that are about to end had time to."""
    connection = await asyncpg.connect(url)
    try:
        deadline = time.monotonic() + 30
        while (left := await connection.fetchval(f"SELECT count(*) {_OTHERS}")) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return int(left)
    finally:
        await connection.close()


async def test_sessions_that_end_while_idle_cause_no_error(postgres_url: str) -> None:
    async with keyloft.open(postgres_url) as kv:
        for number in range(3):
            await asyncio.gather(kv.set(("k",), number), kv.get(("k",)), kv.count(()))
            query(postgres_url, f"SELECT pg_terminate_backend(pid) {_OTHERS}")
            assert await sessions_left(postgres_url) == 0
            assert (await kv.get(("k",))).value == number
            assert await kv.count(()) == 1
            await kv.set(("k",), number)


async def test_connections_cut_silently_lose_nothing_acknowledged_and_are_replaced(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url), keyloft.open(url) as kv:
        load = Load({"patient": kv}, judge=kv)
        async with load.running(writers=2):
            for _ in range(10):
                await load.goes_on()
                network.cut()
            await load.goes_on()
        await load.check()
        assert not load.failed("patient", keyloft.DatabaseError)


async def outcome_of(call: Awaitable[object]) -> tuple[object, float]:
    """What a call returned or raised, and how many seconds that took."""
    began = time.monotonic()
    try:
        result = await call
    except keyloft.KeyloftError as error:
        result = error
    return result, time.monotonic() - began


async def listed(kv: keyloft.Store) -> int:
    return len([entry async for entry in kv.list(prefix=())])


async def test_network_pause_is_waited_for_and_callers_that_time_out_learn_the_outcome(
    postgres_url: str,
) -> None:
    async with (
        proxy(postgres_url) as (network, url),
        keyloft.open(url) as patient,
        keyloft.open(url, patience=1) as hasty,
        keyloft.open(postgres_url) as direct,
    ):
        await patient.set(("before",), 1)
        for kv in (patient, hasty):  # so that all have the connections that they need
            await asyncio.gather(kv.get(("before",)), listed(kv), kv.set(("before",), 1))
        watches = [kv.watch(("watched",)) for kv in (patient, hasty)]
        for watch in watches:
            await anext(watch)
        network.pause()
        began = time.monotonic()
        waiting = [
            asyncio.create_task(outcome_of(call))
            for call in (
                patient.set(("patient", "set"), 1),
                patient.atomic().check(("patient", "atomic"), None).set(("patient", "atomic"), 1).commit(),
                patient.get(("before",)),
                listed(patient),
            )
        ]
        sent = asyncio.create_task(outcome_of(hasty.set_many({("sent", part): 1 for part in range(5)})))
        for _ in range(5):
            await asyncio.sleep(0)
        unsent = [
            asyncio.create_task(outcome_of(call))
            for call in (
                hasty.set(("unsent", "set"), 1),
                hasty.atomic().check(("unsent", "atomic"), None).set(("unsent", "atomic"), 1).commit(),
                hasty.delete(("before",)),
                hasty.get(("before",)),
                listed(hasty),
                hasty.count(()),
            )
        ]
        for task, error in [(sent, keyloft.CommitUnknown), *[(task, keyloft.Unreachable) for task in unsent]]:
            result, took = await task
            assert type(result) is error, result
            assert took < 4, "it waited for the network"
        again, took = await outcome_of(hasty.set(("unsent", "later"), 1))
        assert isinstance(again, keyloft.Unreachable)
        assert took < 4
        await asyncio.sleep(began + 5 - time.monotonic())
        assert not any(task.done() for task in waiting)
        await direct.set(("watched",), 1)
        network.go_on()
        results = [(await task)[0] for task in waiting]
        assert not [result for result in results if isinstance(result, Exception)]
        async with asyncio.timeout(60):
            await hasty.set(("works",), 1)
            assert (await hasty.get(("works",))).exists
            assert await listed(hasty) > 0
            for watch in watches:
                [entry] = await anext(watch)
                assert entry.value == 1
        assert (await direct.get(("before",))).exists
        assert await direct.count(("unsent",)) == 0, "what was not sent can't have been written"
        assert await direct.count(("patient",)) == 2
        assert await direct.count(("sent",)) in (0, 5)


# A server that is not there, or not yet


async def test_server_that_is_not_there_is_named_together_with_the_reason() -> None:
    async with silent_port() as port:
        pass
    began = time.monotonic()
    with pytest.raises(keyloft.Unreachable) as refused:
        await keyloft.open(f"postgresql://me:secret@127.0.0.1:{port}/app", patience=0.5)
    assert 0.4 < time.monotonic() - began < ENDLESS_SECONDS
    assert f"127.0.0.1:{port}/app" in str(refused.value)
    assert "refused" in str(refused.value) or "Connect call failed" in str(refused.value)
    assert re.search(rf"\b{_HALF_A_SECOND_OR_MORE}", str(refused.value))
    assert "secret" not in str(refused.value)


async def test_server_that_says_nothing_is_named() -> None:
    async with silent_port() as port:
        began = time.monotonic()
        with pytest.raises(keyloft.Unreachable, match=rf"127.0.0.1:{port}/app.*\b{_HALF_A_SECOND_OR_MORE}"):
            await keyloft.open(f"postgresql://me:secret@127.0.0.1:{port}/app", patience=0.5)
        assert 0.4 < time.monotonic() - began < ENDLESS_SECONDS


async def test_server_that_comes_up_meanwhile_is_waited_for(
    mortal_postgres: MortalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with fresh_database(mortal_postgres.url) as url, caplog.at_level(logging.INFO):
        await asyncio.to_thread(mortal_postgres.kill)
        opening = asyncio.create_task(keyloft.open(url).__aenter__())
        try:
            async with asyncio.timeout(60):
                while "waiting for it" not in caplog.text:
                    await asyncio.sleep(0.01)
        finally:
            mortal_postgres.start()
        async with asyncio.timeout(60):
            kv = await opening
        assert await kv.set(("k",), 1) == 2
        await kv.aclose()
        assert "connected to PostgreSQL" in caplog.text


# Callers that give up


async def pause(rng: random.Random, longest: float) -> None:
    """Some iterations of the event loop, or some time: so short that it ends in the middle of whatever is under way."""
    if rng.random() < 0.5:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(rng.random() * longest)


async def test_cancelled_calls_leave_nothing_half_done_and_never_stop_the_engine(
    postgres_url: str, rng: random.Random
) -> None:
    acknowledged: dict[int, int] = {}

    async def write_pair(kv: keyloft.Store, number: int) -> None:
        atomic = kv.atomic().set(("left", number), number).set(("right", number), number).sum(("pairs",), 1)
        done = await atomic.commit()
        assert done.versionstamp is not None
        acknowledged[number] = done.versionstamp

    async def write_plainly(kv: keyloft.Store, number: int) -> None:
        acknowledged[number] = await kv.set_many({("left", number): number, ("right", number): number})

    async def read(kv: keyloft.Store, number: int) -> None:
        match number % 3:
            case 0:
                left, right = await kv.get_many([("left", number - 1), ("right", number - 1)])
                assert left.versionstamp == right.versionstamp
            case 1:
                await listed(kv)
            case 2:
                await kv.count(("left",))

    async with keyloft.open(postgres_url) as kv:
        number = cancelled = 0
        for turn in range(60):
            tasks = []
            write = write_pair if turn % 2 else write_plainly
            for _ in range(rng.randrange(1, 8)):
                number += 1
                tasks += [asyncio.create_task(write(kv, number)), asyncio.create_task(read(kv, number))]
            await pause(rng, 0.01)
            for task in tasks:
                if rng.random() < 0.6:
                    task.cancel()
                    await pause(rng, 0.002)
            async with asyncio.timeout(60):
                results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
            cancelled += sum(result is not None for result in results)
        assert cancelled > 60
        async with asyncio.timeout(60):
            await asyncio.gather(*[listed(kv) for _ in range(20)])
            assert await kv.set(("later",), 1) > max(acknowledged.values())
        left = {entry.key[1]: entry.versionstamp async for entry in kv.list(prefix=("left",))}
        right = {entry.key[1]: entry.versionstamp async for entry in kv.list(prefix=("right",))}
    assert left == right
    assert acknowledged.items() <= left.items()


async def test_aclose_finishes_or_refuses_what_is_under_way(postgres_url: str, rng: random.Random) -> None:
    for turn in range(4):
        kv = await keyloft.open(postgres_url)
        tasks = [asyncio.create_task(kv.set(("k", turn, number), number)) for number in range(30)]
        tasks += [asyncio.create_task(kv.count(("k", turn))) for _ in range(6)]
        gets = [asyncio.create_task(kv.get(("k", turn, number))) for number in range(30)]
        await pause(rng, 0.02)
        async with asyncio.timeout(60):
            await kv.aclose()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            read = await asyncio.gather(*gets, return_exceptions=True)
        assert all(isinstance(result, (int, keyloft.Closed)) for result in results), results
        assert all(isinstance(result, (keyloft.Entry, keyloft.Closed)) for result in read), read
        async with keyloft.open(postgres_url) as kv:
            kept = {entry.key[2] async for entry in kv.list(prefix=("k", turn))}
        assert kept == {number for number in range(30) if isinstance(results[number], int)}


async def test_cancelled_opening_and_cancelled_closing_leave_no_session(postgres_url: str, rng: random.Random) -> None:
    for _ in range(15):
        opening = asyncio.create_task(keyloft.open(postgres_url).__aenter__())
        await pause(rng, 0.03)
        opening.cancel()
        for kv in await asyncio.gather(opening, return_exceptions=True):
            if isinstance(kv, keyloft.Store):
                closing = asyncio.create_task(kv.aclose())
                await pause(rng, 0.001)
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
                await kv.aclose()
    assert await sessions_left(postgres_url) == 0
    async with keyloft.open(postgres_url) as kv:
        assert await kv.set(("k",), 1) == 2


async def test_aclose_with_the_server_gone_ends_in_time(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url):
        kv = await keyloft.open(url, patience=5)
        await asyncio.gather(kv.set(("k",), 1), kv.get(("k",)), listed(kv))
        network.pause()
        tasks = [
            asyncio.create_task(outcome_of(call))
            for call in (kv.set(("k",), 2), kv.get(("k",)), kv.count(()), kv.delete(("k",)))
        ]
        await asyncio.sleep(0)
        began = time.monotonic()
        await kv.aclose()
        results = [(await task)[0] for task in tasks]
        assert time.monotonic() - began < ENDLESS_SECONDS
        assert all(isinstance(result, keyloft.KeyloftError) for result in results), results
        network.go_on()
