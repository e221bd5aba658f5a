"""Everyday calls: a default, add, pop, increment, update, children, scoped stores, and expiry at a moment."""

import asyncio
import contextvars
import json
import pickle
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

import keyloft
from keyloft import (
    U64,
    Closed,
    CounterOutOfRange,
    Entry,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyTooLarge,
    ManualClock,
    NotACounter,
    Store,
    VersionConflict,
)
from keyloft.core.keys import Part, TupleKey
from keyloft.core.records import Scan
from tests.support.postgres import database_url


@pytest.fixture(params=["memory", "sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def kv(url: str | None, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(url, clock=clock, sweep_every=None) as store:
        yield store


@pytest.fixture
async def memory(clock: ManualClock) -> AsyncIterator[Store]:
    """For what does not depend on the engine."""
    async with keyloft.open(clock=clock, sweep_every=None) as store:
        yield store


def now(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now() / 1000, UTC)


async def test_a_default_stands_for_an_absent_value_and_for_no_other(memory: Store) -> None:
    await memory.set(("none",), None)
    assert (await memory.get(("none",), default=5)).value is None
    absent = await memory.get(("absent",), 5)
    assert (absent.value, absent.exists) == (5, False)
    assert await memory.atomic().check(absent).set(absent.key, 6).commit()


async def test_add_stores_only_where_nothing_is(kv: Store, clock: ManualClock) -> None:
    assert await kv.add(("k",), 1, expire_in=5)
    assert not await kv.add(("k",), 2)
    assert (await kv.get(("k",))).value == 1
    clock.advance(5)
    assert await kv.add(("k",), 3)
    assert (await kv.get(("k",))).value == 3
    tried = await asyncio.gather(*[kv.add(("once",), number) for number in range(10)])
    assert sum(tried) == 1


async def test_pop_gives_an_entry_to_one_caller(kv: Store) -> None:
    stamp = await kv.set(("job",), {"n": 1})
    taken = await asyncio.gather(*[kv.pop(("job",), "none") for _ in range(8)])
    assert sorted([entry.exists for entry in taken]) == [False] * 7 + [True]
    assert [entry for entry in taken if entry.exists] == [Entry(("job",), {"n": 1}, stamp)]
    assert {entry.value for entry in taken if not entry.exists} == {"none"}
    assert not (await kv.get(("job",))).exists


async def test_increment_returns_the_new_number_and_keeps_expiry_and_kind(kv: Store, clock: ManualClock) -> None:
    assert await kv.increment(("visits",), expire_in=30) == 1
    clock.advance(10)
    assert await kv.increment(("visits",), -5, expire_in=999) == -4
    entry = await kv.get(("visits",))
    assert (entry.value, type(entry.value), entry.expires_at) == (-4, int, now(clock) + timedelta(seconds=20))
    await kv.set(("sold",), U64(3))
    assert await kv.increment(("sold",), 4) == 7
    assert repr((await kv.get(("sold",))).value) == "U64(7)"
    with pytest.raises(CounterOutOfRange, match=r"\('sold',\)"):
        await kv.increment(("sold",), -8)
    await kv.set(("name",), "x")
    with pytest.raises(NotACounter, match=r"\('name',\) is not an integer"):
        await kv.increment(("name",))
    for wrong in ("1", 1.5, True):
        with pytest.raises(InvalidValue, match="by: expected an int, got"):
            await kv.increment(("visits",), wrong)  # type: ignore[arg-type]
    numbers = await asyncio.gather(*[kv.increment(("n",)) for _ in range(20)])
    assert sorted(numbers) == list(range(1, 21))


class TestUpdateOfTuples:
    async def test_no_change_of_many_tasks_is_lost(self, kv: Store) -> None:
        async def slowly(players: list[int]) -> list[int]:
            await asyncio.sleep(0)
            return [*players, len(players)]

        for _ in range(2):
            await asyncio.gather(*[kv.update(("players",), slowly, default=[]) for _ in range(25)])
        assert (await kv.get(("players",))).value == list(range(50))

    async def test_the_entry_that_was_stored_is_returned(self, kv: Store, clock: ManualClock) -> None:
        await kv.set(("k",), 1, expire_in=30)
        entry = await kv.update(("k",), lambda value: value + 1)
        assert entry == await kv.get(("k",))
        assert (entry.value, entry.expires_at) == (2, now(clock) + timedelta(seconds=30))
        entry = await kv.update(("k",), lambda value: value + 1, expire_in=5)
        assert entry == await kv.get(("k",))
        assert entry.expires_at == now(clock) + timedelta(seconds=5)
        entry = await kv.update(("k",), lambda value: value + 1, expire_at=now(clock) + timedelta(seconds=7))
        assert entry == await kv.get(("k",))
        clock.advance(7)
        assert await kv.update(("k",), lambda value: value + 1, 0) == await kv.get(("k",))
        assert (await kv.get(("k",))).value == 1

    async def test_the_value_of_that_entry_is_the_one_that_a_get_returns(self, kv: Store) -> None:
        stored: list[Any] = ["kept", (1, 2)]
        entry = await kv.update(("k",), lambda _: stored)
        assert entry == await kv.get(("k",))
        assert entry.value == ["kept", [1, 2]]
        stored.append("later")
        assert len(entry.value) == 2

    async def test_the_default_stays_as_it_is(self, memory: Store) -> None:
        default: dict[str, int] = {}

        def change(value: dict[str, int]) -> dict[str, int]:
            value["n"] = value.get("n", 0) + 1
            return value

        await memory.update(("a",), change, default)
        await memory.update(("b",), change, default)
        assert default == {}
        assert (await memory.get(("b",))).value == {"n": 1}

    async def test_what_the_function_raises_is_raised_and_nothing_is_written(self, memory: Store) -> None:
        await memory.set(("k",), 1)
        with pytest.raises(ZeroDivisionError):
            await memory.update(("k",), lambda value: value / 0)
        with pytest.raises(InvalidValue):
            await memory.update(("k",), lambda value: {value})
        assert (await memory.get(("k",))).value == 1

    async def test_one_that_needs_a_value_where_nothing_is_stored_names_the_default(self, memory: Store) -> None:
        def append(names: list[str]) -> list[str]:
            names.append("alice")
            return names

        for key, change, default, has_note in (
            (("absent",), lambda n: n + 1, None, True),
            (("absent",), append, None, True),
            (("absent",), lambda n: n + 1, "text", False),
            (("none",), lambda n: n + 1, None, False),
        ):
            await memory.set(("none",), None)
            with pytest.raises((TypeError, AttributeError)) as raised:
                await memory.update(key, change, default)
            notes = getattr(raised.value, "__notes__", [])
            assert ["pass default=" in note for note in notes] == [True] * has_note

    async def test_one_that_changes_the_value_in_place_and_returns_none_is_refused(self, memory: Store) -> None:
        await memory.set(("list",), [1])
        await memory.set(("dict",), {"a": 1})
        in_place: list[tuple[TupleKey, Callable[[Any], Any]]] = [
            (("list",), lambda numbers: numbers.append(2)),
            (("dict",), lambda names: names.update(b=2)),
            (("absent",), lambda numbers: numbers.append(2)),
        ]
        for key, change in in_place:
            with pytest.raises(InvalidArgument, match=r"^fn: .*in place and returned None"):
                await memory.update(key, change, default=[])
        assert [entry.value for entry in await memory.get_many([key for key, _ in in_place])] == [[1], {"a": 1}, None]

    async def test_none_is_stored_where_the_value_was_left_alone(self, memory: Store) -> None:
        await memory.set(("list",), [1])
        for key in (("list",), ("absent",)):
            await memory.update(key, lambda _: None, default=[])
            entry = await memory.get(key)
            assert entry.exists
            assert entry.value is None

    async def test_it_gives_up_when_others_are_always_faster(
        self, memory: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("keyloft.limits.UPDATE_PAUSES", (0, 0))

        async def overtaken(value: int) -> int:
            # In another context, as another caller's task.
            await asyncio.create_task(_increment(memory), context=contextvars.Context())
            return value + 1

        with pytest.raises(VersionConflict, match=r"\('k',\) 100 times before this update"):
            await memory.update(("k",), overtaken, 0)
        assert (await memory.get(("k",))).value == 100

    async def test_a_function_that_writes_the_entry_itself_is_soon_named_as_the_cause(self, kv: Store) -> None:
        key = ("players", 1)
        other, scoped = ("other",), kv.scoped(("players",))
        ways: list[Callable[[int], Awaitable[object]]] = [
            lambda value: kv.set(key, value + 1),
            lambda value: kv.set_many({other: 1, key: value + 1}),
            lambda _: kv.increment(key),
            lambda _: kv.update(key, lambda inner: inner + 1),
            lambda _: scoped.increment((1,)),
            lambda value: kv.atomic().set(key, value + 1).set(other, 1).commit(),
            lambda _: asyncio.create_task(kv.increment(key)),
        ]
        for way in ways:
            await kv.set(key, 1)
            calls = 0

            async def counted(value: int, way: Callable[[int], Awaitable[object]] = way) -> None:
                nonlocal calls
                calls += 1
                await way(value)

            with pytest.raises(InvalidArgument, match=r"^fn: .*\('players', 1\).*return the new value"):
                await kv.update(key, counted)
            assert calls == 3
            assert (await kv.get(key)).value == 4

    async def test_a_function_may_write_other_entries_and_the_same_one_in_its_first_call(self, kv: Store) -> None:
        async def with_defaults(value: dict[str, int] | None) -> dict[str, int]:
            await kv.increment(("calls",))
            if value is None:
                value = {"score": 0}
                await kv.add(("k",), value)
            return {"score": value["score"] + 1}

        assert (await kv.update(("k",), with_defaults)).value == {"score": 1}
        assert (await kv.get(("calls",))).value == 2


async def _increment(kv: Store) -> None:
    await kv.increment(("k",))


class TestChildren:
    async def test_each_part_below_a_prefix_is_there_once(self, kv: Store) -> None:
        stored: list[TupleKey] = [("a",), ("a", 1), ("a", 1, 2), ("a", 2, "x"), ("a", 2, "y"), ("a", "s"), ("b", 1)]
        await kv.set_many(dict.fromkeys(stored, 0))
        assert await kv.children(("a",)) == [("a", "s"), ("a", 1), ("a", 2)]
        assert await kv.children(("a",), reverse=True) == [("a", 2), ("a", 1), ("a", "s")]
        assert [key async for key in kv.children()] == [("a",), ("b",)]
        assert await kv.children(("a",), limit=2) == [("a", "s"), ("a", 1)]
        assert await kv.children(("nothing",)) == []
        with pytest.raises(InvalidArgument, match="limit: expected"):
            kv.children(("a",), limit=0)

    async def test_they_are_those_of_a_list_whatever_is_stored(self, memory: Store) -> None:
        chance = random.Random(7)
        parts: list[Any] = [b"", b"\x00", "", "a\x00", "z", -300, -1, 0, 1, 255, 256, 2**70, -0.5, 1.5, True, False]
        for reverse in (False, True):
            for _ in range(60):
                keys = {tuple(chance.choices(parts, k=chance.randint(1, 4))): 0 for _ in range(chance.choice((3, 200)))}
                await memory.delete_range(prefix=())
                await memory.set_many(keys)
                prefix = tuple(chance.choices(parts, k=chance.randint(0, 1)))
                below = await memory.keys(prefix=prefix, reverse=reverse)
                wanted = list(dict.fromkeys([repr(key[: len(prefix) + 1]) for key in below]))
                found = await memory.children(prefix, reverse=reverse)
                assert [repr(key) for key in found] == wanted

    async def test_what_lies_below_a_child_is_passed_over(self, memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        await memory.set_many({("deep", child, number): 0 for child in range(5) for number in range(2000)})
        await memory.set_many({("flat", number): 0 for number in range(2000)})
        read, engine_read = list[int](), memory.engine.read

        async def counting(*asks: Any) -> list[Any]:
            answers: list[Any] = await engine_read(*asks)
            read.extend([len(answer) for ask, answer in zip(asks, answers, strict=True) if isinstance(ask, Scan)])
            return answers

        monkeypatch.setattr(memory.engine, "read", counting)
        assert len(await memory.children(("deep",))) == 5
        assert sum(read) < 40
        read.clear()
        assert len(await memory.children(("flat",))) == 2000
        assert len(read) < 20

    @pytest.mark.parametrize("reverse", [False, True])
    async def test_parts_with_zero_bytes_are_children_of_their_own(self, kv: Store, reverse: bool) -> None:
        parts: list[Part] = [b"a", b"a\x00", b"a\x00\x00b", b"a\x00\xff", b"a\x01"]
        parts += ["a", "a\x00", "a\x00\x00b", "a\x01", "a\xff", 1, 1.5, True]
        await kv.set_many([(("up", part, deep), 1) for part in parts for deep in range(3)])
        children = [("up", part) for part in parts]
        if reverse:
            children.reverse()
        assert await kv.children(("up",), reverse=reverse) == children
        assert await kv.scoped(("up",)).children(reverse=reverse) == [(part,) for _, part in children]


class TestScoped:
    async def test_keys_are_relative_both_ways(self, kv: Store) -> None:
        below = kv.scoped(("app", 7))
        await kv.set_many({("app", 7): "itself", ("app", 7, "a"): 1, ("app", 70, "a"): 2, ("app", 8): 3, ("a",): 4})
        assert (await below.get(("a",))).key == ("a",)
        await below.set_many({("b",): 2, ("c", 1): 3, ("c", 2): 4})
        assert [(entry.key, entry.value) for entry in await below.list()] == [
            (("a",), 1),
            (("b",), 2),
            (("c", 1), 3),
            (("c", 2), 4),
        ]
        assert await below.keys(prefix=("c",), reverse=True, limit=1) == [("c", 2)]
        assert await below.children() == [("a",), ("b",), ("c",)]
        assert await below.count() == 4
        page = await below.list(limit=1)
        assert len(await below.list(cursor=page.cursor)) == 3
        assert [entry.key for entry in await below.get_many([("b",), ("x",)])] == [("b",), ("x",)]
        assert await below.increment(("a",)) == 2
        assert (await below.update(("a",), lambda n: n + 1)).key == ("a",)
        assert (await below.pop(("b",))).value == 2
        inner = below.scoped(("c",))
        assert [entry.key for entry in await inner.list()] == [(1,), (2,)]
        assert await inner.delete_range(prefix=()) == 2
        assert await kv.keys() == [("a",), ("app", 7), ("app", 7, "a"), ("app", 8), ("app", 70, "a")]

    async def test_atomic_watch_and_errors_too(self, kv: Store) -> None:
        below = kv.scoped(("app",))
        async with below.watch(prefix=()) as watch, below.watch(("k",)) as keys:
            assert await below.atomic().check(("k",), None).set(("k",), 1).sum(("n",), 1).commit()
            await kv.set(("other",), 1)
            changed = await asyncio.wait_for(watch.__anext__(), 30)
            assert {entry.key for entry in changed} == {("k",), ("n",)}
            while True:
                [entry] = await asyncio.wait_for(keys.__anext__(), 30)
                assert entry.key == ("k",)
                if entry.exists:
                    break
        lost = await below.atomic().check(("k",), None).delete(("k",)).commit()
        assert [conflict.key for conflict in lost.conflicts] == [("k",)]
        with pytest.raises(NotACounter, match=r"at \('k',\)"):
            await below.atomic().sum(("k",), 1).commit()
        assert (await kv.get(("app", "n"))).value == U64(1)

    async def test_an_entry_is_checked_where_it_was_read(self, kv: Store, url: str | None) -> None:
        below = kv.scoped(("app",))
        inner = below.scoped((7,))
        await kv.set_many({("k",): 1, ("app", "k"): 2, ("app", 7, "k"): 3})
        stores = {"kv": kv, "below": below, "inner": inner}
        for store in stores.values():
            async with store.watch(("k",)) as watch, store.watch(prefix=(), since=0) as changes:
                lost = await store.atomic().check(("k",), 1).commit()
                entries = [
                    await store.get(("k",)),
                    await store.get(["absent"]),
                    *await store.get_many([("k",)]),
                    *[entry for entry in await store.list() if entry.key == ("k",)],
                    *[entry for entry in await asyncio.wait_for(anext(changes), 30) if entry.key == ("k",)],
                    *await asyncio.wait_for(anext(watch), 30),
                    *lost.conflicts,
                    await store.update(("updated",), lambda _: 1),
                    await store.pop(("absent",)),
                ]
            assert len(entries) == 9
            entries += [pickle.loads(pickle.dumps(entry)) for entry in entries]
            for entry in entries:
                assert type(entry.key) is tuple or store is not kv
                assert await store.atomic().check(entry).commit(), entry
                assert await store.scoped(()).atomic().check(entry).commit()
                for other in stores.values():
                    if other is not store:
                        with pytest.raises(InvalidArgument, match="check: this entry was read from another store"):
                            other.atomic().check(entry)
        assert await below.scoped((7,)).atomic().check(await kv.scoped(("app", 7)).get(("k",))).commit()
        read = await below.get(("k",))
        assert await kv.atomic().check(("app", *read.key), read.versionstamp).set(("app", *read.key), 4).commit()
        if url is not None:
            async with keyloft.open(url, name="shop", sweep_every=None) as shop:
                with pytest.raises(InvalidArgument, match="read from another store"):
                    kv.atomic().check(await shop.get(("k",)))
                with pytest.raises(InvalidArgument, match="read from another store"):
                    shop.atomic().check(await kv.get(("k",)))
                assert await shop.atomic().check(await shop.get(("k",))).commit()

    async def test_its_entries_are_plain_to_others(self, memory: Store) -> None:
        below = memory.scoped(("app",))
        await below.set(("k", 1), "v")
        entry = await below.get(("k", 1))
        assert entry == Entry(("k", 1), "v", entry.versionstamp)
        assert hash(entry) == hash(Entry(("k", 1), "v", entry.versionstamp))
        assert repr(entry) == f"Entry(key=('k', 1), value='v', versionstamp={entry.versionstamp}, expires_at=None)"
        assert json.loads(json.dumps(entry, default=Entry.asdict))["key"] == ["k", 1]
        assert msgspec.json.decode(msgspec.json.encode(entry))["key"] == ["k", 1]

    async def test_it_is_the_same_store(self, clock: ManualClock) -> None:
        async with keyloft.open(name="shop", clock=clock, sweep_every=None, max_value_bytes=10) as kv:
            async with kv.scoped(("app",)) as below:
                assert repr(below) == "<Store on memory, store shop, below ('app',), open>"
                await below.set(("k",), 1, expire_in=1)
                with pytest.raises(InvalidValue):
                    await below.set(("k",), "x" * 10)
                with pytest.raises(KeyTooLarge, match="2,049 bytes encoded with the prefix of the scoped store"):
                    await below.set(("x" * 2042,), 1)
                await below.set(("x" * 2041,), 1)
                with pytest.raises(KeyTooLarge):
                    await below.get(("x" * 2042,))
                with pytest.raises(InvalidKey):
                    await below.get(())
            clock.advance(1)
            assert await below.sweep() == 1
            assert await kv.count() == 1
        with pytest.raises(keyloft.Closed):
            await below.get(("k",))


class TestExpireAt:
    async def test_an_entry_expires_at_that_moment(self, kv: Store, clock: ManualClock) -> None:
        due = now(clock) + timedelta(seconds=10)
        elsewhere = due.astimezone(timezone(timedelta(hours=-5)))
        await kv.set(("a",), 1, expire_at=due)
        await kv.set_many({("b",): 1}, expire_at=elsewhere)
        await kv.add(("c",), 1, expire_at=due)
        await kv.increment(("d",), expire_at=due)
        await kv.atomic().set(("e",), 1, expire_at=due).sum(("f",), 1, expire_at=due).commit()
        await kv.set(("g",), 1)
        assert await kv.touch(("g",), expire_at=due)
        assert {entry.expires_at for entry in await kv.list()} == {due}
        clock.advance(9.999)
        assert await kv.count() == 7
        clock.advance(0.001)
        assert await kv.count() == 0

    @pytest.mark.parametrize("days", [1, 40 * 366, 400 * 366])
    async def test_the_past_is_accepted_and_the_entry_absent(self, kv: Store, clock: ManualClock, days: int) -> None:
        await kv.set(("k",), 1)
        await kv.set(("k",), 2, expire_at=now(clock) - timedelta(days=days))
        assert not (await kv.get(("k",))).exists

    async def test_what_is_no_moment_is_refused(self, memory: Store) -> None:
        soon: Any
        for soon in (datetime(2030, 1, 1), 5, "2030-01-01T00:00:00Z"):
            with pytest.raises(InvalidArgument, match="expire_at: expected a datetime"):
                await memory.set(("k",), 1, expire_at=soon)
        with pytest.raises(InvalidArgument, match="expire_in, expire_at: expected one of them, got both"):
            await memory.set(("k",), 1, expire_in=1, expire_at=datetime(2030, 1, 1, tzinfo=UTC))
        with pytest.raises(InvalidArgument, match="expire_in: expected seconds, a timedelta or None"):
            await memory.touch(("k",))
        assert await memory.set(("k",), 1, expire_at=datetime.max.replace(tzinfo=UTC))


async def test_an_atomic_returns_the_new_numbers_of_its_counters(kv: Store) -> None:
    await kv.set_many({("a",): U64(5), ("b",): U64(5), ("x",): 1})
    done = await (
        kv.atomic().set(("c",), 1).sum(("a",), 2).delete(("x",)).min(("b",), 3).touch(("c",), expire_in=None).commit()
    )
    assert done.values == (None, 7, None, 3, None)
    assert (await kv.atomic().check(("a",), None).sum(("a",), 1).commit()).values == ()


class TestAppend:
    async def test_entries_sort_as_they_were_committed(self, kv: Store) -> None:
        numbers = list(range(30))
        done = await asyncio.gather(*[kv.atomic().append(("log",), number).commit() for number in numbers])
        by_stamp = sorted((each.versionstamp or 0, number) for each, number in zip(done, numbers, strict=True))
        assert [(entry.key, entry.value) for entry in await kv.list(("log",))] == [
            (("log", stamp), number) for stamp, number in by_stamp
        ]
        assert [each.appended for each in done] == [(("log", each.versionstamp),) for each in done]

    async def test_several_in_one_atomic_have_keys_of_their_own(self, kv: Store, clock: ManualClock) -> None:
        async with kv.watch(prefix=()) as watch:
            atomic = kv.atomic().append((), "a").append(("log",), 1, expire_in=5).set(("k",), 1).append(("log",), 2)
            done = await atomic.append((1,), "int").append((True,), "bool").append(("log",), 3).commit()
            stamp = done.versionstamp
            several = [("log", stamp), ("log", stamp, 1), (1, stamp), (True, stamp), ("log", stamp, 2)]
            assert done.appended == ((stamp,), *several)
            assert done.values == (None,) * 7
            changed = await asyncio.wait_for(watch.__anext__(), 30)
            assert {entry.key for entry in changed} == {*done.appended, ("k",)}
        assert [(entry.key, entry.value) for entry in await kv.list(("log",))] == [
            (("log", stamp), 1),
            (("log", stamp, 1), 2),
            (("log", stamp, 2), 3),
        ]
        again = await atomic.commit()
        assert again.versionstamp != stamp
        clock.advance(5)
        assert await kv.count(("log",)) == 4
        assert not await kv.atomic().check(("k",), None).append(("log",), 9).commit()
        assert await kv.count(("log",)) == 4

    async def test_below_a_prefix_and_in_a_named_store_too(self, memory: Store) -> None:
        below = memory.scoped(("app",))
        done = await below.atomic().append(("log",), 1).commit()
        assert await below.keys() == [("log", done.versionstamp)] == list(done.appended)
        assert await memory.keys() == [("app", "log", done.versionstamp)]
        for kv, longest in ((memory, 2048 - 10), (below, 2048 - 10 - 5)):
            await kv.atomic().append(("x" * longest,), 1).commit()
            with pytest.raises(KeyTooLarge):
                await kv.atomic().append(("x" * (longest + 1),), 1).commit()


async def test_a_wrong_argument_is_named_with_what_to_pass_instead(memory: Store) -> None:
    number: Any = 5
    with pytest.raises(InvalidArgument, match=r"^fn: expected a function .*, got int$"):
        await memory.update(("k",), number)
    unread: Any = memory.list()
    with pytest.raises(TypeError, match="await it, then take its length"):
        len(unread)
    with pytest.raises(TypeError, match="await it, then take an item"):
        unread[0]
    with pytest.raises(InvalidKey, match=r"^watched: .*watch\(key, other_key\), got a list$"):
        memory.watch([("a",), ("b",)])
    with pytest.raises(InvalidValue, match=r"^value\['x'\]: the type U64 .* only as a whole value"):
        await memory.set(("k",), {"x": U64(1)})
    with pytest.raises(InvalidArgument, match=r"^type: expected a type, got an instance of Entry$"):
        await memory.get(("k",), type=Entry(("secret",)))
    for call in (memory.get_many, memory.delete_many):
        with pytest.raises(InvalidKey, match=r"^keys: expected a list of keys"):
            await call(number)
    nothing: Any = None
    with pytest.raises(InvalidKey, match=r"^prefix: expected a tuple of parts, got NoneType$"):
        memory.children(nothing)
    assert not await memory.get(("k",))


async def test_a_list_and_an_entry_that_are_taken_for_their_values_say_what_to_write(memory: Store) -> None:
    await memory.set(("k",), {"name": "Alice"})
    entry: Any = await memory.get(("k",))
    for use in (lambda: entry["name"], lambda: [*entry], lambda: "name" in entry):
        with pytest.raises(TypeError, match=r"an entry is not its value: .*entry\.value"):
            use()
    with keyloft.open_sync() as kv:
        kv.set(("k",), 1)
        lists: list[tuple[Any, str]] = [
            (memory.list(), "await it"),
            (kv.list(), r"all\(\)"),
            (kv.children(), "all"),
        ]
        for lazy, cure in lists:
            for use in (lambda lazy=lazy: len(lazy), lambda lazy=lazy: lazy[0], lambda lazy=lazy: lazy[-1:]):
                with pytest.raises(TypeError, match=f"has not been read yet: .*{cure}"):
                    use()
        assert [found.value for found in kv.list()] == [found.value for found in list(kv.list())] == [1]
        wrong: Any = ("a", "b")
        for call in (kv.get_many, kv.delete_many):
            with pytest.raises(TypeError, match=rf"^keys: .*as in {call.__name__}\(\[key, other_key\]\)"):
                call(wrong)
        with pytest.raises(TypeError, match=r"a dict key of type int, .*type=dict\[int, …\]"):
            kv.set(("k",), {1: 2})


async def test_what_a_generator_of_entries_raises_is_the_caller_s(memory: Store) -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        await memory.set_many(((text,), float(text)) for text in ("1", "one"))
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        await memory.set_many(((1,), None + 1) for _ in range(1))  # type: ignore[operator]
    assert await memory.count() == 0


async def test_a_closed_store_can_t_be_entered() -> None:
    kv = await keyloft.open()
    await kv.aclose()
    with pytest.raises(Closed, match="open it again"):
        async with kv:
            pass


async def test_the_key_of_an_entry_is_a_value_in_every_store(kv: keyloft.Store) -> None:
    """As a reference from one entry to another."""
    for store in (kv, kv.scoped(("app", 7))):
        await store.set(("to",), 1)
        key = (await store.get(("to",))).key
        await store.set(("from",), {"to": key, "all": [key]})
        assert (await store.get(("from",))).value == {"to": ["to"], "all": [["to"]]}
