"""The client when connections break, and when the service is away, restarts, is killed or overloaded."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import keyloft
import keyloft.engines.remote.engine  # here: to import it takes the event loop of the first test too long
from keyloft import Busy, Closed, CommitUnknown, HistoryGone, ManualClock, NotPermitted, Store, Unreachable
from keyloft.core.records import Ask, Batch, Committed, Conflict
from keyloft.engines import KeptHistory
from keyloft.engines.memory import MemoryEngine
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import AccessToken, admin_token
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS, running_api
from tests.http.cut_connections import cutting_proxy
from tests.support.fork_server import ForkedProcess
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]


def opened(port: int, **options: Any) -> keyloft.Opening:
    return keyloft.open(f"http://127.0.0.1:{port}", token=ADMIN_TOKEN, **options)


@asynccontextmanager
async def memory(clock: ManualClock | None = None, history: KeptHistory | None = None) -> AsyncIterator[MemoryEngine]:
    engine = MemoryEngine(clock or ManualClock(), history)
    yield engine
    await engine.aclose()


async def states(watch: Any, wanted: dict[Any, object]) -> None:
    """A watch reports these states in the end, and at least one."""
    seen: dict[Any, object] = {}
    async with asyncio.timeout(LONGEST_SECONDS):
        while not seen or seen != wanted:
            seen |= {entry.key: entry.value for entry in await anext(watch)}


async def test_a_read_whose_connection_is_cut_is_made_again() -> None:
    async with running_api() as api, cutting_proxy(api.port) as proxy, opened(proxy.port) as kv:
        await kv.set_many({("k", number): number for number in range(10)})
        for call in (
            lambda: kv.get(("k", 1)),
            lambda: kv.get_many([("k", 1), ("k", 2)]),
            lambda: asyncio.gather(*[kv.get(("k", number)) for number in range(10)]),
            lambda: kv.count(),
        ):
            proxy.answers_to_cut = 2
            await call()
        assert len(await kv.list()) == 10
        assert proxy.cut == 8


async def test_a_commit_whose_answer_is_lost_is_unknown_and_not_made_twice() -> None:
    async with running_api() as api, cutting_proxy(api.port) as proxy, opened(proxy.port) as kv:
        await kv.increment(("n",))
        proxy.answers_to_cut = 1
        with pytest.raises(CommitUnknown, match="all of the batch was written, or nothing; read the entries"):
            await kv.increment(("n",))
        assert (await kv.get(("n",))).value == 2
        assert await kv.increment(("n",)) == 3


async def test_a_service_that_is_away_is_waited_for_and_nothing_is_made_twice() -> None:
    port = free_port()
    async with memory() as engine:
        async with running_api(engine=engine, port=port):
            kv = await opened(port)
            await kv.increment(("n",))
        calls = asyncio.gather(kv.get(("n",)), *[kv.increment(("n",)) for _ in range(50)], kv.list())
        await asyncio.sleep(0.1)
        assert not calls.done()
        async with running_api(engine=engine, port=port):
            async with asyncio.timeout(LONGEST_SECONDS):
                await calls
            assert (await kv.get(("n",))).value == 51
            await kv.aclose()


async def test_a_service_that_stays_away_is_an_error_after_the_patience() -> None:
    port = free_port()
    async with running_api(port=port):
        kv = await opened(port, patience=0.3)
    for call in (lambda: kv.get(("k",)), lambda: kv.set(("k",), 1), kv.list):
        with pytest.raises(Unreachable, match="does not answer"):
            await call()
    await kv.aclose()


@pytest.mark.slow
async def test_an_overloaded_service_is_asked_again_and_in_the_end_its_error_is_raised() -> None:
    class BusyEngine(MemoryEngine):
        refusals = 0

        async def commit(self, batch: Batch) -> Committed | Conflict:
            self._refuse()
            return await super().commit(batch)

        async def read(self, *asks: Ask) -> list[Any]:
            self._refuse()
            return await super().read(*asks)

        def _refuse(self) -> None:
            if self.refusals:
                self.refusals -= 1
                raise Busy("/secret/path was locked")

    engine = BusyEngine(ManualClock())
    async with running_api(engine=engine) as api, opened(api.port) as kv, opened(api.port, patience=0.1) as hasty:
        engine.refusals = 2  # the service asks for a pause of a second
        await asyncio.gather(kv.set(("k",), 1), kv.get(("k",)))
        engine.refusals = 1000
        for call in (hasty.set(("k",), 2), hasty.get(("k",))):
            with pytest.raises(Busy) as refused:
                await call
            assert "secret" not in str(refused.value)
        engine.refusals = 0
        assert (await kv.get(("k",))).value == 1
    await engine.aclose()


async def test_a_watch_goes_on_over_a_restart_and_misses_nothing(clock: ManualClock) -> None:
    port = free_port()
    async with memory(clock) as engine:
        inside = Store(engine)
        async with running_api(engine=engine, port=port):
            kv = await opened(port)
            watch, keys, later = kv.watch(prefix=("a",)), kv.watch(("a", 1), ("b",)), kv.watch(("b",), since=1)
            await kv.set_many({("a", 1): 1, ("a", 2): 1})
            await states(watch, {("a", 1): 1, ("a", 2): 1})
            await states(keys, {("a", 1): 1, ("b",): None})
            await kv.set(("a", 5), 5, expire_in=10)
            await states(watch, {("a", 5): 5})
        waiting = asyncio.create_task(anext(watch))
        await inside.delete(("a", 1))
        await inside.set(("a", 3), 3)
        await inside.set(("b",), 2)
        clock.advance(10)
        async with running_api(engine=engine, port=port):
            async with asyncio.timeout(LONGEST_SECONDS):
                first = {entry.key: entry.value for entry in await waiting}
                while first != {("a", 1): None, ("a", 3): 3, ("a", 5): None}:
                    first |= {entry.key: entry.value for entry in await anext(watch)}
            await states(keys, {("a", 1): None, ("b",): 2})
            await states(later, {("b",): 2})
            await kv.set(("a", 4), 4)
            await states(watch, {("a", 4): 4})
            await kv.aclose()
        assert [entries async for entries in watch] == []


async def test_a_watch_of_a_prefix_that_was_away_too_long_says_so_and_one_of_keys_reads_their_state() -> None:
    port = free_port()
    async with memory(history=KeptHistory(seconds=0, mib=0)) as engine:
        inside = Store(engine)
        async with running_api(engine=engine, port=port):
            kv = await opened(port)
            watch, keys = kv.watch(prefix=()), kv.watch(("k",))
            await states(keys, {("k",): None})
        for number in range(100):
            await inside.set(("k",), number)
        async with running_api(engine=engine, port=port):
            async with asyncio.timeout(LONGEST_SECONDS):
                with pytest.raises(HistoryGone, match="list the entries, then watch again"):
                    await states(watch, {})
            await states(keys, {("k",): 99})
            with pytest.raises(HistoryGone):
                await anext(kv.watch(("k",), since=1))
            await kv.aclose()


async def test_a_watch_that_is_not_read_is_cut_off_by_the_service_and_goes_on() -> None:
    """It asks for more than the service keeps of its last events."""
    async with running_api() as api, opened(api.port) as kv:
        watch = kv.watch(prefix=())
        for number in range(60):
            await kv.set(("k", number), "x" * 300_000)
        await kv.set(("last",), 1)
        seen = set[Any]()
        async with asyncio.timeout(LONGEST_SECONDS):
            while len(seen) < 61:
                seen |= {entry.key for entry in await anext(watch)}


async def test_a_watch_can_be_asked_while_it_begins() -> None:
    async with running_api() as api, cutting_proxy(api.port) as proxy, opened(proxy.port) as kv:
        await kv.set(("k",), 1)
        proxy.trickles = True
        watch, asked = kv.watch(("k",)), 0
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                asked += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.0005):
                        [entry] = await anext(watch)
                        break
        assert asked > 1
        assert entry.value == 1


async def test_reads_after_watch_are_never_older_than_its_beginning() -> None:
    """What a read shows, and what the watch reports after it, is the state, while another store writes."""
    async with running_api() as api, opened(api.port) as kv, opened(api.port) as other:
        for tries in range(20):
            await kv.set_many({("k", number): tries for number in range(5)})
            deleting = asyncio.create_task(other.delete_many([("k", number) for number in range(0, 5, 2)]))
            await asyncio.sleep(0.001 * (tries % 4))
            watch = kv.watch(prefix=("k",))
            seen = {entry.key: entry.value for entry in await kv.list(("k",))}
            await deleting
            await other.set(("k", "last"), tries)
            async with asyncio.timeout(LONGEST_SECONDS):
                while seen.get(("k", "last")) != tries:
                    for entry in await anext(watch):
                        seen[entry.key] = entry.value
            assert {key for key, value in seen.items() if value is not None} == {*await kv.keys(("k",))}
            await watch.aclose()


async def test_closing_lets_a_commit_under_way_end_and_refuses_the_rest() -> None:
    class SlowEngine(MemoryEngine):
        is_asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def commit(self, batch: Batch) -> Committed | Conflict:
            self.is_asked.set()
            await self.may_go_on.wait()
            return await super().commit(batch)

    engine = SlowEngine(ManualClock())
    async with running_api(engine=engine) as api, asyncio.timeout(LONGEST_SECONDS):
        kv = await opened(api.port)
        watch = kv.watch(("k",))
        writing = asyncio.create_task(kv.set(("k",), 1))
        await engine.is_asked.wait()
        closing = asyncio.create_task(kv.aclose())
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            await kv.get(("k",))
        engine.may_go_on.set()
        assert await writing == 2
        await closing
        async for _ in watch:
            pass
    await engine.aclose()


async def test_a_cancelled_call_harms_no_other() -> None:
    async with running_api() as api, opened(api.port) as kv:
        await kv.set(("k",), 1)
        for after in range(12):
            calls = [asyncio.create_task(kv.get(("k",))) for _ in range(6)]
            for _ in range(after):
                await asyncio.sleep(0)
            calls[0].cancel()
            calls[3].cancel()
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [one.value for one in found if not isinstance(one, BaseException)] == [1] * (
                6 - sum([isinstance(one, asyncio.CancelledError) for one in found])
            )


async def test_a_caller_that_is_cancelled_while_it_closes_a_watch_leaves_no_connection_open() -> None:
    async with running_api() as api, opened(api.port) as kv, asyncio.timeout(LONGEST_SECONDS):
        watch = kv.watch(prefix=("k",))
        await kv.get(("k",))  # answered once the watch has begun
        assert api.context.meters.watches == 1
        closing = asyncio.create_task(watch.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        while api.context.meters.watches:
            await asyncio.sleep(0.01)


class RevocableTokens(ValidTokens):
    are_revoked = False

    def find(self, given: str) -> AccessToken | None:
        return None if self.are_revoked else super().find(given)


async def test_gets_with_a_token_that_was_revoked_fail_at_once_and_together() -> None:
    valid = RevocableTokens((admin_token(ADMIN_TOKEN),))
    async with running_api(valid=valid) as api, opened(api.port) as kv:
        before = api.listener.served
        valid.are_revoked = True
        calls = [kv.get(("k", number)) for number in range(60)]
        async with asyncio.timeout(LONGEST_SECONDS):
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in found} == {NotPermitted}
        assert api.listener.served - before <= 3  # the service answers wrong tokens late


async def test_an_unexpected_answer_is_no_cancellation_of_those_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_api() as api, opened(api.port) as kv:
        await kv.set(("k",), 1)
        monkeypatch.setattr("keyloft.http.batches.shown_key", lambda _: "=no-key")
        found = await asyncio.gather(*[kv.get(("k",)) for _ in range(5)], return_exceptions=True)
        assert not [one for one in found if isinstance(one, asyncio.CancelledError)]
        fewer = b'{"entries":[]}'
        monkeypatch.setattr("keyloft.http.batches.to_json", lambda _: fewer)
        found = await asyncio.gather(*[kv.get(("k",)) for _ in range(5)], return_exceptions=True)
        assert not [one for one in found if isinstance(one, asyncio.CancelledError)]
        assert [one for one in found if isinstance(one, Exception)]


@pytest.mark.slow
async def test_what_a_killed_service_has_acknowledged_is_there_and_a_watch_has_seen_it(tmp_path: Path) -> None:
    port, acknowledged = free_port(), set[int]()

    def start() -> ForkedProcess:
        arguments = ["-m", "tests.http.serve_file", str(tmp_path / "app.db"), str(port), ADMIN_TOKEN]
        return ForkedProcess(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)

    process = start()
    kv = await opened(port)
    watch = kv.watch(prefix=("k",))
    seen = dict[Any, object]()

    async def write(number: int) -> None:
        while len(acknowledged) < 120:
            try:
                await kv.set(("k", number), number)
            except CommitUnknown:
                pass  # all others fail the test
            else:
                acknowledged.add(number)
            number += 10

    async def follow() -> None:
        async for entries in watch:
            for entry in entries:
                seen[entry.key[1]] = entry.value

    following = asyncio.create_task(follow())
    async with asyncio.timeout(60):
        writing = asyncio.gather(*map(write, range(10)))
        for goal in (20, 70):
            while len(acknowledged) < goal:
                await asyncio.sleep(0.001)
            process.kill()
            process.wait()
            process = start()
        await writing
        stored = {entry.key[1] async for entry in kv.list(("k",))}
        assert acknowledged <= stored
        while seen.keys() != stored:
            await asyncio.sleep(0.01)
    await kv.aclose()
    await following
    process.kill()
    process.wait()
