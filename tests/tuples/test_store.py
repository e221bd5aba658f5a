"""The store as its users meet it, on every engine."""

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import keyloft
from keyloft import (
    U64,
    Entry,
    InvalidArgument,
    InvalidCursor,
    InvalidKey,
    InvalidValue,
    KeyloftError,
    ManualClock,
    NotACounter,
    Store,
    Undecodable,
    ValueTooLarge,
)
from keyloft.core.keys import TupleKey, encode
from keyloft.core.records import Batch, Expired, Set, Space
from tests.support.postgres import IN_MEMORY, database_url
from tests.support.threads import SYNCHRONOUS, opened


@pytest.fixture(params=["memory", "sqlite file", f"sqlite file{SYNCHRONOUS}", "sqlite in memory", "postgresql", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def kv(url: str | None, clock: ManualClock, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async with opened(request.node.callspec.params["url"], url, clock) as store:
        yield store


async def everything(kv: Store) -> dict[tuple[Any, ...], Any]:
    return {entry.key: entry.value async for entry in kv.list()}


class TestGetAndSet:
    async def test_a_value_comes_back_with_key_version_and_expiry(self, kv: Store, clock: ManualClock) -> None:
        stamp = await kv.set(("users", "alice"), {"name": "Alice"}, expire_in=30)
        due = datetime.fromtimestamp(clock.now() / 1000, UTC) + timedelta(seconds=30)
        entry = await kv.get(("users", "alice"))
        assert entry == Entry(("users", "alice"), {"name": "Alice"}, stamp, due)
        assert entry.exists

    async def test_an_absent_key_has_an_entry_that_does_not_exist(self, kv: Store) -> None:
        entry = await kv.get(["users", "bob"])
        assert entry == Entry(("users", "bob"), None, None, None)
        assert not entry.exists
        assert not entry

    async def test_a_stored_none_exists(self, kv: Store) -> None:
        await kv.set(("k",), None)
        entry = await kv.get(("k",))
        assert entry.value is None
        assert entry.exists
        assert entry

    async def test_reading_on_and_on_starves_no_other_task(self, kv: Store) -> None:
        setting = asyncio.create_task(kv.set(("flag",), 1))

        async def read_on_and_on() -> None:
            while True:
                await kv.get(("flag",))

        greedy = [asyncio.create_task(read_on_and_on()) for _ in range(3)]
        for _ in range(100):
            assert (await kv.get(("absent",))).exists is False
        await asyncio.wait_for(setting, 10)  # while they read on; how long a disk takes is not the point
        for reader in greedy:
            reader.cancel()
        await asyncio.wait(greedy)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read_on_and_on(), 0.05)
        assert (await kv.get(("flag",))).exists

    async def test_one_key_per_type(self, kv: Store) -> None:
        many: list[TupleKey] = [(1,), (1.0,), (True,), ("1",), (b"1",)]
        for key in many:
            await kv.set(key, repr(key))
        assert [entry.value for entry in await kv.get_many(many)] == [repr(key) for key in many]
        assert [type(key[0]) async for key in kv.keys()] == [bytes, str, int, float, bool]

    async def test_get_many_keeps_order_and_repeats(self, kv: Store) -> None:
        await kv.set_many({("a",): 1, ("b",): 2})
        entries = await kv.get_many([("b",), ("missing",), ("a",), ("b",)])
        assert [entry.value for entry in entries] == [2, None, 1, 2]
        assert await kv.get_many([]) == []

    async def test_set_many_shares_one_version(self, kv: Store) -> None:
        stamp = await kv.set_many([(["a"], 1), (("b",), 2)], expire_in=timedelta(minutes=1))
        assert [entry.versionstamp async for entry in kv.list()] == [stamp, stamp]

    async def test_delete_tells_whether_there_was_one(self, kv: Store) -> None:
        await kv.set_many({(n,): n for n in range(4)})
        assert await kv.delete((0,)) is True
        assert await kv.delete((0,)) is False
        assert await kv.delete_many([(0,), (1,), (2,), (2,)]) == 2
        assert await everything(kv) == {(3,): 3}

    @pytest.mark.blocks_the_loop
    @pytest.mark.slow
    @pytest.mark.parametrize("url", ["postgresql"], indirect=True)
    async def test_a_hundred_thousand_entries_in_one_set_many(self, kv: Store) -> None:
        """In memory and on SQLite, tests/faults/test_long_calls.py does the same, and more."""
        await kv.set_many({("n", n): n for n in range(100_000)})
        assert await kv.count(("n",)) == 100_000
        assert [key async for key in kv.keys(reverse=True, limit=1)] == [("n", 99_999)]


class TestList:
    @pytest.fixture(autouse=True)
    async def _filled(self, kv: Store) -> None:
        await kv.set_many({("a",): 0, ("a", 1): 1, ("a", 2): 2, ("a", 2, "x"): 3, ("a", 3): 4, ("ab", 1): 5, ("b",): 6})

    @pytest.mark.parametrize(
        ("selector", "values"),
        [
            ({}, [0, 1, 2, 3, 4, 5, 6]),
            ({"prefix": ()}, [0, 1, 2, 3, 4, 5, 6]),
            ({"prefix": ("a",)}, [1, 2, 3, 4]),
            ({"prefix": ["a", 2]}, [3]),
            ({"prefix": ("a", 2, "x")}, []),
            ({"prefix": ("nothing",)}, []),
            ({"start": ("a", 2)}, [2, 3, 4, 5, 6]),
            ({"end": ("a", 2)}, [0, 1]),
            ({"start": ("a", 2), "end": ("b",)}, [2, 3, 4, 5]),
            ({"start": ("a", 2), "end": ("a", 2)}, []),
            ({"prefix": ("a",), "start": ("a", 2)}, [2, 3, 4]),
            ({"prefix": ("a",), "end": ("a", 3)}, [1, 2, 3]),
            ({"prefix": ("a",), "start": ("a", 2), "end": ("a", 3)}, [2, 3]),
            ({"start": ("a", 1.0)}, [5, 6]),
        ],
    )
    async def test_selectors(self, kv: Store, selector: dict[str, Any], values: list[int]) -> None:
        assert [entry.value async for entry in kv.list(**selector)] == values
        assert [entry.value async for entry in kv.list(**selector, reverse=True)] == values[::-1]
        assert [entry.value async for entry in kv.list(**selector, limit=2)] == values[:2]
        assert [entry.value async for entry in kv.list(**selector, limit=2, reverse=True)] == values[::-1][:2]
        assert [key async for key in kv.keys(**selector)] == [entry.key async for entry in kv.list(**selector)]
        assert await kv.count(**selector) == len(values)
        if selector:
            left = len(await everything(kv)) - len(values)
            assert await kv.delete_range(**selector) == len(values)
            assert len(await everything(kv)) == left

    async def test_a_cursor_resumes_after_the_last_entry_given(self, kv: Store) -> None:
        first = kv.list(limit=3)
        assert first.cursor is None
        assert [entry.value async for entry in first] == [0, 1, 2]
        second = kv.list(cursor=first.cursor, limit=100)
        assert (await anext(aiter(second))).value == 3
        third = kv.list(cursor=second.cursor)
        assert [entry.value async for entry in third] == [4, 5, 6]
        at_the_end = kv.list(cursor=third.cursor)
        assert [entry async for entry in at_the_end] == []
        assert at_the_end.cursor == third.cursor

    async def test_an_awaited_list_has_a_cursor(self, kv: Store) -> None:
        first = await kv.list(limit=3)
        assert [entry.value for entry in first] == [0, 1, 2]
        rest = await kv.list(cursor=first.cursor)
        assert [entry.value for entry in rest] == [3, 4, 5, 6]
        nothing = await kv.keys(cursor=rest.cursor)
        assert (nothing, nothing.cursor) == ([], rest.cursor)

    async def test_a_list_that_was_not_read_is_neither_true_nor_false(self, kv: Store) -> None:
        with pytest.raises(TypeError, match="has not been read yet"):
            bool(kv.list())

    async def test_a_cursor_of_keys_resumes_a_reverse_list_within_a_prefix(self, kv: Store) -> None:
        first = kv.keys(("a",), reverse=True, limit=1)
        assert [key async for key in first] == [("a", 3)]
        rest = kv.list(("a",), reverse=True, cursor=first.cursor)
        assert [entry.value async for entry in rest] == [3, 2, 1]

    async def test_a_cursor_outlives_its_entry(self, kv: Store) -> None:
        page = kv.keys(limit=2)
        last = [key async for key in page][-1]
        await kv.delete(last)
        assert [entry.value async for entry in kv.list(cursor=page.cursor)] == [2, 3, 4, 5, 6]

    @pytest.mark.parametrize("other", [{"prefix": ("b",)}, {"reverse": True}, {"start": ("a", 2)}, {"end": ("b",)}])
    @IN_MEMORY
    async def test_a_cursor_fits_its_own_selector_only(self, kv: Store, other: dict[str, Any]) -> None:
        page = kv.list(limit=1)
        [_] = [entry async for entry in page]
        with pytest.raises(InvalidCursor, match="other arguments"):
            kv.list(cursor=page.cursor, **other)

    @pytest.mark.parametrize("cursor", ["", "x", "§", "AAAAAAAAAAA=", 7, b"x"])
    @IN_MEMORY
    async def test_what_is_no_cursor_is_refused(self, kv: Store, cursor: Any) -> None:
        with pytest.raises(InvalidCursor):
            kv.list(cursor=cursor)

    async def test_an_entry_written_while_listing_does_not_disturb_it(self, kv: Store) -> None:
        await kv.set_many({("many", n): n for n in range(3000)})
        seen = []
        async for entry in kv.list(("many",)):
            seen.append(entry.value)
            if len(seen) == 10:
                await kv.delete_range(("many",), start=("many", 2000))
                await kv.set(("many", -1), "behind")
        assert seen == list(range(2000))

    async def test_a_list_continues_by_its_cursor_after_a_loop_that_ended_early(self, kv: Store) -> None:
        await kv.set_many({("many", n): n for n in range(3000)})
        listing = kv.list(("many",))
        seen: list[int] = []
        while len(seen) < 3000:
            listing = kv.list(("many",), cursor=listing.cursor)
            async for entry in listing:
                seen.append(entry.value)
                if len(seen) % 700 == 0:
                    break
        assert seen == list(range(3000))

    async def test_tasks_that_share_a_list_get_every_entry(self, kv: Store) -> None:
        await kv.set_many({("many", n): n for n in range(3000)})
        listing = kv.list(("many",))

        async def take() -> list[int]:
            return [entry.value async for entry in listing]

        async def take_at_once() -> list[int]:
            return [entry.value for entry in await listing]

        for taken in await asyncio.gather(take(), take_at_once(), take()):
            assert taken == [*range(3000)]

    async def test_a_damaged_entry_hides_no_other(self, kv: Store) -> None:
        damaged = Set(Space.TUPLES, encode(("a", 2)), b"{", 0)
        await kv.engine.commit(Batch((damaged,)))
        listing = kv.list()
        seen = []
        try:
            async for entry in listing:
                seen.append(entry.value)
        except Undecodable as error:
            seen.append(str(error))
        assert seen == [0, 1, "the entry at ('a', 2) is damaged: a stored value of 1 bytes is not JSON"]
        assert [entry.value async for entry in kv.list(cursor=listing.cursor)] == [3, 4, 5, 6]
        with pytest.raises(Undecodable):
            await listing
        assert [entry.value for entry in await kv.list(cursor=listing.cursor)] == [3, 4, 5, 6]

    async def test_large_values_come_in_small_pages(self, kv: Store) -> None:
        value = "x" * 900_000
        for n in range(20):
            await kv.set(("large", n), value)
        assert [len(entry.value) async for entry in kv.list(("large",))] == [900_000] * 20

    async def test_delete_range_without_arguments_is_refused(self, kv: Store) -> None:
        with pytest.raises(InvalidArgument, match="prefix=\\(\\) stands for everything"):
            await kv.delete_range()
        assert await kv.delete_range(prefix=()) == 7


class TestBadInput:
    """Each with an error that names the problem, and with nothing written."""

    @pytest.mark.parametrize("url", ["sqlite file"], indirect=True)  # it is refused before an engine sees it
    @pytest.mark.parametrize(
        ("call", "error", "says"),
        [
            (lambda kv: kv.set((), 1), InvalidKey, "at least one part"),
            (lambda kv: kv.set("k", 1), InvalidKey, "bare str"),
            (lambda kv: kv.set(("k", None), 1), InvalidKey, "key: part 2 is None"),
            (lambda kv: kv.set(("k", "\ud800"), 1), InvalidKey, "surrogate"),
            (lambda kv: kv.set(("k" * 2048,), 1), InvalidKey, "2,050 bytes .* 2,048"),
            (
                lambda kv: kv.set(("k",), "x" * 2**20),
                ValueTooLarge,
                "1 MiB limit: 1,048,578 bytes .* 1,048,576 allowed; max_value_bytes",
            ),
            (lambda kv: kv.set(("k",), b"x" * (2**20 + 1)), ValueTooLarge, "1,048,577 bytes"),
            (lambda kv: kv.set(("k",), {"a": [math.nan]}), InvalidValue, r"value\['a'\]\[0\]: nan"),
            (lambda kv: kv.set(("k",), {1, 2}), InvalidValue, "type set"),
            (lambda kv: kv.set(("k",), 1, expire_in=0), InvalidArgument, "more than 0"),
            (lambda kv: kv.set(("k",), 1, expire_in=-1), InvalidArgument, "more than 0"),
            (lambda kv: kv.set(("k",), 1, expire_in=math.nan), InvalidArgument, "more than 0"),
            (lambda kv: kv.set(("k",), 1, expire_in=math.inf), InvalidArgument, "at most"),
            (lambda kv: kv.set(("k",), 1, expire_in=10**400), InvalidArgument, "at most"),
            (lambda kv: kv.set(("k",), 1, expire_in=timedelta(0)), InvalidArgument, "more than 0"),
            (lambda kv: kv.set(("k",), 1, expire_in=timedelta.max), InvalidArgument, "at most"),
            (lambda kv: kv.set(("k",), 1, expire_in="30"), InvalidArgument, "got str"),
            (lambda kv: kv.set(("k",), 1, expire_in=True), InvalidArgument, "got bool"),
            (lambda kv: kv.touch(("k",), expire_in=0), InvalidArgument, "more than 0"),
            (lambda kv: kv.set_many({("k",): 1, ("l",): {1}}), InvalidValue, "type set"),
            (
                lambda kv: kv.set_many({("k",): 1, (): 2}),
                InvalidKey,
                "^entries: a key can.t be stored",
            ),
            (lambda kv: kv.get_many([("k",), "l"]), InvalidKey, "^an item of keys: expected .* bare str"),
            (lambda kv: kv.delete_many([("k",), ()]), InvalidKey, "^an item of keys: expected at least one part"),
            (lambda kv: kv.get_many(("users", "alice")), InvalidKey, "^keys: expected a list of keys"),
            (
                lambda kv: kv.delete_many(("users", "alice")),
                InvalidKey,
                r"^keys: expected a list of keys.* as in delete_many\(\[key, ",
            ),
            (lambda kv: kv.list(reverse="yes"), InvalidArgument, "True or False"),
            (lambda kv: kv.set_many([("users", "alice")]), InvalidArgument, "^entries: expected a dict, or pairs"),
            (lambda kv: kv.set_many([(("k",), 1), ("l",)]), InvalidArgument, "^entries: expected a dict, or pairs"),
            (lambda kv: kv.set_many(7), InvalidArgument, "^entries: expected a dict, or pairs"),
            (lambda kv: kv.delete(()), InvalidKey, "at least one part"),
            (lambda kv: kv.count("k"), InvalidKey, "bare str"),
            (lambda kv: kv.count(start=("b",), end=("a",)), InvalidArgument, "start: comes after end"),
            (lambda kv: kv.count(("a",), start=("b", 1)), InvalidArgument, "start: outside the prefix"),
            (lambda kv: kv.count(("a",), start=("a",)), InvalidArgument, "start: outside the prefix"),
            (lambda kv: kv.count(("a",), end=("ab",)), InvalidArgument, "end: outside the prefix"),
            (lambda kv: kv.count(start=()), InvalidKey, "at least one part"),
            (lambda kv: kv.list(limit=0), InvalidArgument, "at least 1"),
            (lambda kv: kv.list(limit=-5), InvalidArgument, "at least 1"),
            (lambda kv: kv.list(limit=2.5), InvalidArgument, "at least 1"),
            (lambda kv: kv.keys(limit=True), InvalidArgument, "at least 1"),
            (lambda kv: anext(kv.watch()), InvalidArgument, "keys or a prefix"),
            (lambda kv: anext(kv.watch(("a",), prefix=("b",))), InvalidArgument, "keys or a prefix"),
            (lambda kv: anext(kv.watch("a")), InvalidKey, "bare str"),
            (
                lambda kv: kv.atomic().set(("k",), 1).sum(("n",), 1.5).commit(),
                InvalidValue,
                "operand of sum: expected an int, got float",
            ),
            (lambda kv: kv.atomic().set(("k",), 1).sum(("n",), True).commit(), InvalidValue, "got bool"),
            (
                lambda kv: kv.atomic().set(("k",), 1).sum(("n",), 2**64).commit(),
                InvalidArgument,
                "operand of sum: expected an int from",
            ),
            (
                lambda kv: kv.atomic().set(("k",), 1).max(("n",), -1).commit(),
                InvalidArgument,
                "operand of max: expected an int from 0",
            ),
            (lambda kv: kv.atomic().check(("k",)).set(("k",), 1).commit(), InvalidArgument, "a key and a versionstamp"),
            (lambda kv: kv.atomic().check(("k",), "1").set(("k",), 1).commit(), InvalidArgument, "got str"),
            (lambda kv: kv.atomic().check(Entry(("k",)), 1).commit(), InvalidArgument, "an entry alone"),
            (lambda kv: kv.atomic().check((), None).commit(), InvalidKey, "at least one part"),
        ],
    )
    async def test_is_refused(
        self, kv: Store, call: Callable[[Store], Awaitable[object]], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says) as raised:
            await call(kv)
        assert isinstance(raised.value, KeyloftError)
        assert isinstance(raised.value, (ValueError, TypeError))
        assert await everything(kv) == {}

    async def test_set_many_says_which_value(self, kv: Store) -> None:
        with pytest.raises(InvalidValue) as raised:
            await kv.set_many({("a",): 1, ("b",): {1}})
        assert str(raised.value).startswith("entries: the value for ('b',) can't be stored, and nothing was: value")

    async def test_values_never_appear_in_errors(self, kv: Store) -> None:
        for value in ({"password": {"hunter2"}}, ["hunter2", math.nan], "hunter2" * 2**20, {("hunter2",): 1}):
            with pytest.raises(InvalidValue) as raised:
                await kv.set(("k",), value)
            assert "hunter2" not in str(raised.value)


class TestAtomic:
    async def test_a_check_by_entry_holds_until_the_entry_changes(self, kv: Store) -> None:
        await kv.set(("stock",), 5)
        entry = await kv.get(("stock",))
        done = await kv.atomic().check(entry).set(("stock",), 4).commit()
        assert done.ok
        assert done
        assert done.versionstamp == (await kv.get(("stock",))).versionstamp
        late = await kv.atomic().check(entry).set(("stock",), 3).commit()
        assert not late.ok
        assert not late
        assert late.versionstamp is None
        assert late.conflicts == (await kv.get(("stock",)),)

    async def test_a_set_writes_its_own_key_whatever_key_was_checked(self, kv: Store) -> None:
        checked, other, changed = ("a",), ("b",), ["c"]
        atomic = kv.atomic().check(checked, None).check(other, None).set(checked, 1).set(other, 2)
        atomic.check(changed, None)
        changed[0] = "d"
        assert (await atomic.set(changed, 3).commit()).ok
        entries = await kv.list(prefix=())
        assert [(entry.key, entry.value) for entry in entries] == [(("a",), 1), (("b",), 2), (("d",), 3)]
        for nothing in ((), None):
            with pytest.raises(InvalidKey):
                kv.atomic().check(["c"], None).set(nothing, 1)  # type: ignore[arg-type]
            with pytest.raises(InvalidKey):
                kv.atomic().set(nothing, 1)  # type: ignore[arg-type]

    async def test_none_checks_for_absence(self, kv: Store) -> None:
        claim = kv.atomic().check(("lock",), None).set(("lock",), "me")
        assert (await claim.commit()).ok
        second = await claim.commit()
        assert [entry.value for entry in second.conflicts] == ["me"]
        absent = await kv.get(("other",))
        assert (await kv.atomic().check(absent).set(("other",), 1).commit()).ok

    async def test_every_conflict_is_named(self, kv: Store) -> None:
        stamp = await kv.set(("a",), 1)
        done = await kv.atomic().check(("a",), None).check(("a",), stamp).check(("b",), 9).set(("c",), 1).commit()
        assert done.conflicts == (Entry(("a",), 1, stamp), Entry(("b",)))

    async def test_counters(self, kv: Store) -> None:
        await kv.atomic().sum(("n",), 5).sum(("n",), U64(2)).min(("low",), 5).max(("high",), 9).commit()
        await kv.atomic().sum(("n",), -3).min(("low",), 3).max(("high",), 3).commit()
        entries = await kv.get_many([("n",), ("low",), ("high",)])
        assert [entry.value for entry in entries] == [4, 3, 9]
        assert all(type(entry.value) is U64 for entry in entries)

    async def test_overflow_wraps_in_both_directions(self, kv: Store) -> None:
        await kv.set(("n",), U64(2**64 - 1))
        await kv.atomic().sum(("n",), 2).commit()
        assert (await kv.get(("n",))).value == 1
        await kv.atomic().sum(("n",), -2).commit()
        assert (await kv.get(("n",))).value == 2**64 - 1

    async def test_a_sum_on_something_else_fails_the_whole_batch(self, kv: Store) -> None:
        await kv.set_many({("int",): 5, ("kept",): 1})
        with pytest.raises(NotACounter, match=r"\('int',\) is not a U64 counter") as raised:
            await kv.atomic().set(("new",), 1).delete(("kept",)).sum(("int",), 1).commit()
        assert raised.value.code == "NOT_A_COUNTER"
        assert await everything(kv) == {("int",): 5, ("kept",): 1}

    async def test_a_new_counter_gets_an_expiry_and_an_old_one_keeps_its_own(
        self, kv: Store, clock: ManualClock
    ) -> None:
        """A rate limiter: so many in a window that begins with the first."""
        for _ in range(3):
            await kv.atomic().sum(("n",), 1, expire_in=60).max(("m",), 5, expire_in=60).commit()
            clock.advance(20)
        assert not await kv.get(("n",))
        assert not await kv.get(("m",))
        await kv.atomic().sum(("n",), 1, expire_in=60).commit()
        clock.advance(59.999)
        assert (await kv.get(("n",))).value == 1

    async def test_touch_joins_other_writes(self, kv: Store, clock: ManualClock) -> None:
        await kv.set_many({("session",): 1, ("index",): 1}, expire_in=10)
        done = await kv.atomic().touch(("session",), expire_in=100).touch(("index",), expire_in=None).commit()
        assert done.ok
        clock.advance(99)
        assert await everything(kv) == {("index",): 1, ("session",): 1}

    async def test_an_empty_atomic_commits(self, kv: Store) -> None:
        assert (await kv.atomic().commit()).ok


class TestExpiry:
    async def test_due_means_absent_everywhere_without_a_sweep(self, kv: Store, clock: ManualClock) -> None:
        stamp = await kv.set(("k",), 1, expire_in=2)
        watch = kv.watch(("k",))
        assert [entry.exists for entry in await anext(watch)] == [True]
        clock.advance(1.999)
        assert (await kv.get(("k",))).exists
        clock.advance(0.001)
        assert not (await kv.get(("k",))).exists
        assert not (await kv.get_many([("k",)]))[0].exists
        assert await everything(kv) == {}
        assert [key async for key in kv.keys()] == []
        assert await kv.count() == 0
        assert not (await kv.atomic().check(("k",), stamp).commit()).ok
        assert (await kv.atomic().check(("k",), None).commit()).ok
        assert [entry.exists for entry in await anext(watch)] == [False]
        assert not await kv.touch(("k",), expire_in=5)
        assert not await kv.delete(("k",))
        assert await kv.delete_range(prefix=()) == 0
        assert await kv.sweep() == 1
        assert await kv.sweep() == 0

    async def test_set_without_expire_in_clears_it(self, kv: Store, clock: ManualClock) -> None:
        await kv.set(("k",), 1, expire_in=2)
        await kv.set(("k",), 2)
        clock.advance(5)
        assert (await kv.get(("k",))).value == 2

    async def test_the_smallest_expiry_is_a_millisecond(self, kv: Store, clock: ManualClock) -> None:
        await kv.set(("k",), 1, expire_in=1e-9)
        assert (await kv.get(("k",))).exists
        clock.advance(0.001)
        assert not (await kv.get(("k",))).exists

    @pytest.mark.parametrize(
        ("seconds", "milliseconds"), [(0.1, 100), (0.0011, 2), (1e6, 10**9), (0.3, 300), (4.35, 4350)]
    )
    async def test_fractions_are_rounded_up_to_the_millisecond(
        self, kv: Store, clock: ManualClock, seconds: float, milliseconds: int
    ) -> None:
        await kv.set(("k",), 1, expire_in=seconds)
        due = (await kv.get(("k",))).expires_at
        assert due is not None
        assert round(due.timestamp() * 1000) == clock.now() + milliseconds

    async def test_the_longest_expiry_can_be_shown(self, kv: Store) -> None:
        await kv.set(("k",), 1, expire_in=timedelta(days=366 * 1000))
        due = (await kv.get(("k",))).expires_at
        assert due is not None
        assert due.year > 3000

    async def test_touch_prolongs_and_clears(self, kv: Store, clock: ManualClock) -> None:
        stamp = await kv.set(("k",), 1, expire_in=2)
        assert await kv.touch(("k",), expire_in=10)
        clock.advance(9)
        assert (await kv.get(("k",))).versionstamp == stamp
        assert await kv.touch(("k",), expire_in=None)
        clock.advance(1000)
        assert (await kv.get(("k",))).expires_at is None

    async def test_sweep_takes_slices_and_leaves_the_rest(self, kv: Store, clock: ManualClock) -> None:
        await kv.set_many({("due", n): n for n in range(1000)}, expire_in=1)
        await kv.set_many({("later", n): n for n in range(10)}, expire_in=5)
        await kv.set(("stays",), 1)
        clock.advance(1)
        assert await kv.sweep() == 1000
        assert await kv.count() == 11


class TestSpaces:
    async def test_the_empty_prefix_shows_no_keys_of_other_interfaces(self, kv: Store) -> None:
        foreign = Set(Space.SEMANTIC, b"\x02tenant\x00", b"1", 0, 1)
        await kv.engine.commit(Batch((foreign,)))
        assert await kv.count() == 0
        assert await everything(kv) == {}
        assert await kv.delete_range(prefix=()) == 0
        assert await kv.sweep() == 0


class TestWatch:
    async def test_keys_in_their_order_then_each_change(self, kv: Store) -> None:
        watch = kv.watch(("b",), ("a",))
        assert [(e.key, e.exists) for e in await anext(watch)] == [(("b",), False), (("a",), False)]
        await kv.set(("a",), 1)
        assert [entry.value for entry in await anext(watch)] == [None, 1]
        await kv.atomic().set(("a",), 2).set(("b",), 3).commit()
        assert [entry.value for entry in await anext(watch)] == [3, 2]
        await kv.delete(("b",))
        assert [(entry.value, entry.exists) for entry in await anext(watch)] == [(None, False), (2, True)]

    async def test_a_prefix_gives_the_changed_entries_only(self, kv: Store) -> None:
        await kv.set(("users", "old"), 0)
        watch = kv.watch(prefix=("users",))
        await kv.set_many({("users", "a"): 1, ("users",): "not below it", ("other",): 2})
        [entry] = await anext(watch)
        assert (entry.key, entry.value) == (("users", "a"), 1)
        await kv.delete(("users", "old"))
        [entry] = await anext(watch)
        assert entry == Entry(("users", "old"))

    async def test_a_damaged_entry_hides_no_other_change(self, kv: Store) -> None:
        watch = kv.watch(prefix=("a",))
        good = [Set(Space.TUPLES, encode(("a", n)), b"1", 0) for n in (1, 3)]
        await kv.engine.commit(Batch((*good, Set(Space.TUPLES, encode(("a", 2)), b"{", 0))))
        assert [entry.key for entry in await anext(watch)] == [("a", 1)]
        with pytest.raises(Undecodable, match=r"\('a', 2\) is damaged"):
            await anext(watch)
        assert [entry.key for entry in await anext(watch)] == [("a", 3)]

    async def test_a_waiting_watch_is_kept_alive(self, kv: Store) -> None:
        seen = asyncio.Queue[Any]()

        async def follow() -> None:
            async for [entry] in kv.watch(("k",)):
                seen.put_nowait(entry.value)

        asyncio.create_task(follow())  # noqa: RUF006  # only its own watch holds it: that is the point
        assert await seen.get() is None
        gc.collect()
        await kv.set(("k",), 1)
        assert await asyncio.wait_for(seen.get(), 10) == 1

    async def test_closing_the_store_ends_it(self, kv: Store) -> None:
        began = asyncio.Event()

        async def watched() -> int:
            count = 0
            async for _ in kv.watch(("k",)):
                count += 1
                began.set()
            return count

        watching = asyncio.create_task(watched())
        await began.wait()
        await kv.aclose()
        assert await asyncio.wait_for(watching, 10) == 1

    async def test_a_watch_can_be_closed_by_itself(self, kv: Store) -> None:
        watch = kv.watch(("k",))
        await watch.aclose()
        assert [changes async for changes in watch] == []


async def test_expired_entries_are_swept_in_the_background(tmp_path: Path, clock: ManualClock) -> None:
    async with keyloft.open(tmp_path / "app.db", clock=clock, sweep_every=0.01) as kv:
        await kv.set(("k",), 1, expire_in=1)
        clock.advance(1)
        async with asyncio.timeout(60):
            while await kv.engine.read(Expired(Space.TUPLES, 10)) != [[]]:
                await asyncio.sleep(0.005)
