"""Many engines share one PostgreSQL, some through a pooler or without notifications; all see one order of writes."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import keyloft
from keyloft.engines.postgres.engine import PostgresEngine
from tests.support.postgres_proxy import NOTIFICATION, pooler, proxy

from ..children import ChildProcess, child
from ..children.peer import Stamps, add, increment, store_own

_COUNT = 25


@asynccontextmanager
async def stores(url: str, count: int) -> AsyncIterator[list[keyloft.Store]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(keyloft.open(url)) for _ in range(count)]


def is_pooled(kv: keyloft.Store) -> bool:
    assert isinstance(kv.engine, PostgresEngine)
    return kv.engine.server.is_pooled


async def seen_by(watch: keyloft.Watching, wanted: object) -> list[Any]:
    """The values of one key that a watch gave, up to the one that is waited for."""
    seen = []
    async with asyncio.timeout(60):
        async for [entry] in watch:
            seen.append(entry.value)
            if entry.value == wanted:
                break
    return seen


# One order of writes


def check_order(sides: Sequence[dict[str, Stamps]]) -> None:
    """No increment was lost, and the order of versionstamps is that of the commits."""
    stamps = [stamp for side in sides for kind in side.values() for _, stamp in kind]
    # Only these engines wrote, so in one order of commits no number is left out.
    assert sorted(stamps) == list(range(2, 3 * _COUNT * len(sides) + 2))
    checked = sorted(tuple(written) for side in sides for written in side["checked"])
    assert [value for value, _ in checked] == list(range(1, _COUNT * len(sides) + 1)), "an increment was lost"
    assert [stamp for _, stamp in checked] == sorted(stamp for _, stamp in checked)
    for side in sides:
        for kind in side.values():
            assert [stamp for _, stamp in kind] == sorted(stamp for _, stamp in kind)


@pytest.mark.parametrize("engines", [2, 4])
async def test_engines_write_the_same_keys_at_once_without_loss_and_in_one_order(
    engines: int, postgres_url: str
) -> None:
    async with stores(postgres_url, engines) as several:
        watches = [kv.watch(("race", "checked")) for kv in several]
        watching = [asyncio.create_task(seen_by(watch, engines * _COUNT)) for watch in watches]

        async def race(kv: keyloft.Store, name: str) -> dict[str, Stamps]:
            written = await asyncio.gather(increment(kv, _COUNT), add(kv, _COUNT), store_own(kv, name, _COUNT))
            return dict(zip(("checked", "sum", "own"), written, strict=True))

        async with asyncio.timeout(60):
            sides = await asyncio.gather(*[race(kv, str(at)) for at, kv in enumerate(several)])
        check_order(sides)
        assert (await several[0].get(("race", "sum"))).value == engines * _COUNT
        for task in watching:
            seen = [value for value in await task if value is not None]
            assert seen == sorted(seen), "a watch went back in time"
        entries = [entry async for entry in several[0].list(prefix=("own",))]
        own = sorted(stamp for side in sides for _, stamp in side["own"])
        assert sorted(entry.versionstamp or 0 for entry in entries) == own


async def test_two_processes_open_a_fresh_database_at_once_and_write_it_without_loss(postgres_url: str) -> None:
    async def answer(peer: ChildProcess) -> Any:
        line = await peer.line()
        assert line, await peer.ended()
        return json.loads(line)

    async with child("peer", "a") as a, child("peer", "b") as b:
        await asyncio.gather(answer(a), answer(b))
        for peer in (a, b):
            peer.tell(f"race {postgres_url} {_COUNT}")
        sides = [(await answer(peer))["answer"] for peer in (a, b)]
    check_order(sides)
    async with keyloft.open(postgres_url) as kv:
        assert (await kv.get(("race", "sum"))).value == 2 * _COUNT
        assert (await kv.get(("race", "checked"))).value == 2 * _COUNT


async def test_engines_that_open_a_fresh_database_at_once_all_succeed(postgres_url: str) -> None:
    several = await asyncio.gather(*[keyloft.open(postgres_url).__aenter__() for _ in range(6)])
    stamps = await asyncio.gather(*[kv.set(("k",), 1) for kv in several])
    assert sorted(stamps) == [2, 3, 4, 5, 6, 7]
    for kv in several:
        await kv.aclose()


async def test_watch_on_a_prefix_sees_the_changes_of_other_engines(postgres_url: str) -> None:
    async with stores(postgres_url, 3) as [watching, one, another]:
        await one.set(("users", "old"), 0)
        watch = watching.watch(prefix=("users",))
        await watching.set(("users", "own"), 0)
        assert [entry.key for entry in await anext(watch)] == [("users", "own")]
        seen: dict[Any, Any] = {}
        await one.set(("users", "new"), 1)
        await another.delete(("users", "old"))
        await another.set(("elsewhere",), 1)
        async with asyncio.timeout(60):
            while len(seen) < 2:
                seen |= {entry.key[1]: entry.value for entry in await anext(watch)}
        assert seen == {"new": 1, "old": None}


# A network that loses notifications


async def test_watch_sees_the_changes_of_others_where_notifications_get_lost(postgres_url: str) -> None:
    async with proxy(postgres_url) as (network, url), keyloft.open(url) as kv, keyloft.open(postgres_url) as other:
        network.lets_answer = lambda message: message.kind != NOTIFICATION
        watch = kv.watch(("k",))
        assert [entry.exists for entry in await anext(watch)] == [False]
        for number in range(5):
            await other.set(("k",), number)
            await seen_by(watch, number)


async def test_watch_sees_the_changes_of_others_where_notifications_get_lost_after_some_arrived(
    postgres_url: str,
) -> None:
    async with proxy(postgres_url) as (network, url), keyloft.open(url) as kv, keyloft.open(postgres_url) as other:
        watch = kv.watch(("k",))
        await other.set(("k",), 0)
        await seen_by(watch, 0)
        network.lets_answer = lambda message: message.kind != NOTIFICATION
        for number in range(1, 4):
            await other.set(("k",), number)
            await seen_by(watch, number)


# A pooler


async def test_all_calls_work_through_a_pooler(postgres_url: str) -> None:
    async with pooler(postgres_url) as (between, url), keyloft.open(url) as kv, asyncio.timeout(60):
        for turn in range(10):
            done = await asyncio.gather(
                kv.set(("set", turn), turn),
                kv.set_many({("many", turn, part): part for part in range(3)}),
                kv.atomic().check(("checked", turn), None).set(("checked", turn), turn).sum(("sum",), 1).commit(),
            )
            assert done[2].ok
            assert not (await kv.atomic().check(("checked", turn), None).set(("checked", turn), 0).commit()).ok
            found = await asyncio.gather(*[kv.get(("set", number)) for number in range(turn + 1)])
            assert [entry.value for entry in found] == [*range(turn + 1)]
            counts = await asyncio.gather(*[kv.count((name,)) for name in ("set", "many", "checked")])
            assert counts == [turn + 1, 3 * (turn + 1), turn + 1]
            assert [entry.value async for entry in kv.list(prefix=("many", turn))] == [0, 1, 2]
            [entry, total] = await kv.get_many([("checked", turn), ("sum",)])
            assert (entry.value, total.value) == (turn, turn + 1)
        assert await kv.delete(("set", 0))
        assert not await kv.delete(("set", 0))
        assert await kv.delete_range(("many",)) == 30
        assert is_pooled(kv)
        assert between.transactions > 50


async def test_engines_behind_a_pooler_lose_no_update_and_harm_no_other_client(postgres_url: str) -> None:
    async with pooler(postgres_url) as (_, url), stores(url, 2) as several, keyloft.open(postgres_url) as direct:
        everyone = [*several, direct]
        async with asyncio.timeout(60):
            sides = [
                {"checked": checked, "sum": summed, "own": own}
                for [checked, summed, own] in await asyncio.gather(
                    *[
                        asyncio.gather(increment(kv, _COUNT), add(kv, _COUNT), store_own(kv, str(at), _COUNT))
                        for at, kv in enumerate(everyone)
                    ]
                )
            ]
        check_order(sides)
        assert not is_pooled(direct)


async def test_watch_through_a_pooler_sees_what_others_write_directly(postgres_url: str) -> None:
    async with pooler(postgres_url) as (_, url), keyloft.open(url) as kv, keyloft.open(postgres_url) as other:
        await other.set(("users", "old"), 0)
        watch, prefix = kv.watch(("k",)), kv.watch(prefix=("users",))
        pending = asyncio.ensure_future(anext(prefix))
        await anext(watch)
        for number in range(3):
            await other.set(("k",), number)
            await seen_by(watch, number)
        await other.delete(("users", "old"))
        async with asyncio.timeout(60):
            [entry] = await pending
        assert (entry.key, entry.exists) == (("users", "old"), False)
