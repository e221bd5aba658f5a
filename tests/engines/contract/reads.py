"""What a read returns: records, versions, times, ranges, and the entries of plugins."""

import asyncio

import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.core.paging import Pages
from keyloft.core.records import (
    Batch,
    Changes,
    Check,
    Committed,
    Conflict,
    Count,
    Delete,
    Expired,
    Get,
    Key,
    Latest,
    LogPosition,
    Now,
    Purge,
    Record,
    Scan,
    Set,
    Space,
    StoreId,
    Sum,
    Touch,
    Usage,
    UsageSlice,
    Used,
)
from keyloft.core.values import Encoding
from tests.engines.contract.calls import END, START, A, B, P, get, next_of, put, scan, stored, values_of, write


class ReadContract:
    # Reading and writing

    async def test_what_was_committed_is_read(self, engine: Engine, clock: ManualClock) -> None:
        done = await write(engine, put(b"k", b"[1]"))
        now = clock.now()
        assert done.at == now
        assert await get(engine, b"k") == Record(b"k", b"[1]", Encoding.JSON, done.version, None, now, now)
        assert await get(engine, b"other") is None

    async def test_a_store_has_an_id_that_stays(self, engine: Engine) -> None:
        [store] = await engine.read(StoreId())
        assert len(bytes.fromhex(store)) == 16
        await write(engine, put(b"k"))
        assert await engine.read(StoreId(), Get(A, b"nothing")) == [store, None]

    async def test_answers_come_in_the_order_asked(self, engine: Engine) -> None:
        await write(engine, put(b"a"), put(b"b"))
        b, nothing, found, count, a = await engine.read(
            Get(A, b"b"), Get(A, b"c"), Scan(A, START, END, 10), Count(A, START, END), Get(A, b"a")
        )
        assert (b.key, nothing, [record.key for record in found], count, a.key) == (b"b", None, [b"a", b"b"], 2, b"a")

    async def test_many_gets_are_answered_in_their_order(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, *[put(b"%03d" % number, b"%d" % number) for number in range(0, 100, 2)])
        await write(engine, *[put(b"%03d" % number, expire_in=1000) for number in range(0, 100, 10)])
        await write(engine, put(b"006", b"another space", space=B), Set(P, ("p", "006"), b"6", Encoding.JSON))
        clock.advance(1)
        numbers = [*range(100), 4, 4, 7, 0]
        found = await engine.read(*[Get(A, b"%03d" % number) for number in numbers])
        values = [None if record is None else record.value for record in found]
        assert values == [b"%d" % n if n % 2 == 0 and n % 10 else None for n in numbers]
        mixed = await engine.read(*[Get(space, b"006") for space in (A, B) * 20])
        assert [record and record.value for record in mixed] == [b"6", b"another space"] * 20
        [*others, expired] = await engine.read(*[Get(P, ("p", "006"))] * 31, Get(A, b"010", include_expired=True))
        assert {record and record.value for record in others} == {b"6"}
        assert expired is not None

    async def test_an_empty_read_has_no_answers(self, engine: Engine) -> None:
        assert await engine.read() == []

    async def test_several_asks_are_one_snapshot(self, engine: Engine) -> None:
        """Two keys are always written together: no read may see them apart."""
        await write(engine, put(b"a", b"0"), put(b"b", b"0"))

        async def writer() -> None:
            for number in range(1, 50):
                await write(engine, put(b"a", b"%d" % number), put(b"b", b"%d" % number))

        writing = asyncio.create_task(writer())
        while not writing.done():
            a, b, [first, second] = await engine.read(Get(A, b"a"), Get(A, b"b"), Scan(A, START, END, 10))
            assert a.value == b.value == first.value == second.value
            await asyncio.sleep(0)
        await writing

    async def test_an_empty_value_is_ordinary(self, engine: Engine) -> None:
        await write(engine, Set(A, b"k", b"", Encoding.BYTES))
        assert (await stored(engine, b"k")).value == b""

    async def test_binary_values_come_back_as_they_were(self, engine: Engine) -> None:
        every_byte = bytes(range(256)) * 300
        await write(engine, Set(A, every_byte[:2000], every_byte, Encoding.BYTES))
        assert (await stored(engine, every_byte[:2000])).value == every_byte

    # Versions

    async def test_no_commit_gets_version_1_which_rows_by_hand_have(self, engine: Engine) -> None:
        assert await engine.read(Latest()) == [1]
        done = await write(engine, put(b"k"))
        assert done.version == (await stored(engine, b"k")).version == 2
        assert await engine.read(Latest()) == [2]
        for since in (0, 1):
            [piece] = await engine.read(Changes(LogPosition(since)))
            assert [(change.version, change.key) for change in piece.changes] == [(2, b"k")]
            assert (piece.end, piece.is_last) == (LogPosition(2), True)
            watch = engine.watch(Scan(A, START, END, 1), since=since)
            assert values_of(await next_of(watch)) == {b"k": b'"v"'}

    async def test_versions_grow_in_commit_order(self, engine: Engine) -> None:
        versions = [(await write(engine, put(b"%d" % n))).version for n in range(5)]
        done = await asyncio.gather(*[write(engine, put(b"%d" % n)) for n in range(50)])
        versions += [each.version for each in done]
        assert versions == sorted(set(versions))

    async def test_all_keys_of_a_batch_share_its_version(self, engine: Engine) -> None:
        done = await write(engine, put(b"a"), put(b"b"), Sum(A, b"c", 1))
        assert {(await stored(engine, key)).version for key in (b"a", b"b", b"c")} == {done.version}

    async def test_versions_of_different_spaces_are_one_sequence(self, engine: Engine) -> None:
        first = await write(engine, put(b"k", space=A))
        second = await write(engine, put(b"k", space=B))
        assert second.version > first.version

    async def test_a_batch_that_changes_nothing_still_has_a_version_of_its_own(self, engine: Engine) -> None:
        first = await write(engine, put(b"k"))
        second = await write(engine, Delete(A, b"absent"))
        third = await write(engine, put(b"k"))
        assert first.version < second.version < third.version

    # Times

    async def test_the_time_is_that_by_which_entries_expire(self, engine: Engine, clock: ManualClock) -> None:
        assert await engine.read(Now()) == [clock.now()]
        clock.advance(5)
        now, nothing = await engine.read(Now(), Get(A, b"k"))
        assert (now, nothing) == (clock.now(), None)

    @pytest.mark.parametrize(("space", "key"), [(A, b"k"), (B, b"k"), (P, ("p", "k"))])
    async def test_a_scan_tells_when_entries_were_made_and_last_written(
        self, engine: Engine, clock: ManualClock, space: Space, key: Key
    ) -> None:
        start, end = (("p", ""), ("p", "z")) if space is P else (START, END)
        born = clock.now()
        await write(engine, Set(space, key, b"1", Encoding.JSON))
        clock.advance(5)
        await write(engine, Set(space, key, b"2", Encoding.JSON))
        for keys_only in (False, True):
            [[record]] = await engine.read(Scan(space, start, end, 10, keys_only=keys_only, times=True))
            assert (record.created_at, record.updated_at) == (born, clock.now())
        [plain] = await engine.read(Scan(space, start, end, 10))
        assert (plain.created, plain.updated) == ((), ())

    async def test_a_scan_of_the_semantic_space_tells_when_entries_were_written(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, put(b"a", space=B))
        clock.advance(5)
        await write(engine, put(b"b", space=B))
        [page, other] = await engine.read(
            Scan(B, START, END, 10, times=True), Scan(B, START, END, 10, keys_only=True, times=True)
        )
        assert [record.updated_at for record in page] == [clock.now() - 5000, clock.now()]
        assert (list(other.updated), list(other.created)) == (list(page.updated), list(page.created))

    async def test_created_at_is_kept_by_an_update_and_restarted_by_a_new_entry(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        born = clock.now()
        await write(engine, put(b"k", expire_in=5000), put(b"d"))
        clock.advance(1)
        await write(engine, put(b"k", expire_in=5000))
        record = await stored(engine, b"k")
        assert (record.created_at, record.updated_at) == (born, clock.now())
        clock.advance(5)
        await write(engine, put(b"k"), Delete(A, b"d"), put(b"d"))
        assert (await stored(engine, b"k")).created_at == clock.now()
        assert (await stored(engine, b"d")).created_at == clock.now()

    # Scanning

    async def test_scan_is_start_inclusive_end_exclusive_both_ways(self, engine: Engine) -> None:
        await write(engine, *[put(bytes([65 + n])) for n in range(6)])
        assert await scan(engine, b"B", b"E") == [b"B", b"C", b"D"]
        assert await scan(engine, b"B", b"E", reverse=True) == [b"D", b"C", b"B"]
        assert await scan(engine, b"B", b"E", after=True) == [b"C", b"D"]
        assert await scan(engine, b"B", b"E", limit=2) == [b"B", b"C"]
        assert await scan(engine, b"B", b"E", limit=2, reverse=True) == [b"D", b"C"]
        assert await scan(engine, b"C", b"C") == []
        assert await engine.read(Count(A, b"B", b"E")) == [3]

    async def test_keys_only_brings_everything_but_the_value(self, engine: Engine) -> None:
        done = await write(engine, put(b"k", b"[1]", expire_in=1000))
        [[record]] = await engine.read(Scan(A, START, END, 10, keys_only=True))
        assert (record.key, record.value, record.version) == (b"k", b"", done.version)

    async def test_limit_counts_live_entries(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"a", expire_in=1), put(b"b"), put(b"c", expire_in=1), put(b"d"))
        clock.advance(1)
        assert await scan(engine, limit=2) == [b"b", b"d"]
        assert await scan(engine, limit=1, reverse=True) == [b"d"]

    @pytest.mark.parametrize("reverse", [False, True])
    async def test_pages_give_the_whole_range_once(self, engine: Engine, reverse: bool) -> None:
        keys = [b"%05d" % n for n in range(2500)]
        await write(engine, *[put(key) for key in keys])
        found = [r.key async for page in Pages(engine, Scan(A, START, END, 2400, reverse)) for r in page]
        assert found == (keys[::-1] if reverse else keys)[:2400]

    async def test_a_very_long_scan_in_one_read(self, engine: Engine) -> None:
        await write(engine, *[put(b"%05d" % n) for n in range(3000)])
        assert len(await scan(engine, limit=5000)) == 3000

    # Spaces

    async def test_spaces_never_see_each_other(self, engine: Engine) -> None:
        await write(engine, put(b"k", b"1", space=A), put(b"k", b"2", space=B))
        assert (await stored(engine, b"k")).value == b"1"
        await write(engine, Delete(A, b"k"))
        record = await get(engine, b"k", B)
        assert record is not None
        assert record.value == b"2"
        assert await scan(engine) == []

    async def test_one_batch_may_span_spaces_and_fails_in_all(self, engine: Engine) -> None:
        result = await engine.commit(Batch((put(b"k", space=A), put(b"k", space=B)), (Check(B, b"x", 1),)))
        assert isinstance(result, Conflict)
        assert await get(engine, b"k", A) is None
        assert await get(engine, b"k", B) is None

    # The plugins' space: keys of two texts, in a table that people read

    async def test_a_plugins_entry_is_written_read_and_removed(self, engine: Engine) -> None:
        done = await write(engine, Set(P, ("trivia", "score"), b'{"a":1}', Encoding.JSON, 5000))
        record = await get(engine, ("trivia", "score"), P)
        assert record is not None
        assert (record.key, record.value, record.encoding) == (("trivia", "score"), b'{"a":1}', Encoding.JSON)
        assert record.version == done.version
        assert await get(engine, ("quotes", "score"), P) is None
        assert (await write(engine, Delete(P, ("quotes", "score")), Delete(P, ("trivia", "score")))).found == (
            False,
            True,
        )
        assert await get(engine, ("trivia", "score"), P) is None

    async def test_plugins_keys_come_in_the_order_of_unicode(self, engine: Engine) -> None:
        names = ["", "\x01", "A", "_", "a", "aa", "é", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"]
        await write(engine, *[Set(P, ("p", name + "!"), b"1", Encoding.JSON) for name in reversed(names)])
        await write(engine, *[Set(P, (other, "x"), b"1", Encoding.JSON) for other in ("o", "p-", "p0", "q")])
        beyond = "\U0010ffff" * 256
        for reverse in (False, True):
            [page] = await engine.read(Scan(P, ("p", ""), ("p", beyond), 100, reverse=reverse))
            wanted = sorted([name + "!" for name in names], reverse=reverse)
            assert [key for _, key in page.keys] == wanted
            assert {plugin for plugin, _ in page.keys} == {"p"}
        assert await engine.read(Count(P, ("p", ""), ("p", beyond))) == [len(names)]

    async def test_a_plugins_entry_expires_to_the_millisecond(self, engine: Engine, clock: ManualClock) -> None:
        put = Set(P, ("p", "k"), b"1", Encoding.JSON, 1001)
        await write(engine, put, Set(P, ("p", "l"), b"2", Encoding.JSON))
        clock.advance(1)
        record = await get(engine, ("p", "k"), P)
        assert record is not None
        assert record.expires_at == clock.now() + 1
        clock.advance(0.001)
        assert await get(engine, ("p", "k"), P) is None
        assert await engine.read(Count(P, ("p", ""), ("p", "z"))) == [1]
        [page] = await engine.read(Scan(P, ("p", ""), ("p", "z"), 10))
        assert page.keys[0] == ("p", "l")
        [due] = await engine.read(Expired(P, 10))
        assert [(record.key, record.value) for record in due] == [(("p", "k"), b"")]
        purged = await write(engine, Purge(P, ("p", "k"), due[0].version), Purge(P, ("p", "l"), due[0].version))
        assert purged.found == (True, False)

    async def test_touch_changes_the_expiry_of_a_plugins_entry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, Set(P, ("p", "k"), b"1", Encoding.JSON, 1000))
        assert (await write(engine, Touch(P, ("p", "k"), None), Touch(P, ("p", "none"), 5))).found == (True, False)
        clock.advance(2)
        assert await get(engine, ("p", "k"), P) is not None

    async def test_usage_counts_what_lives_by_plugin(self, engine: Engine, clock: ManualClock) -> None:
        everything = Usage(("", ""), 100)
        assert await engine.read(everything) == [UsageSlice([], None, 1)]
        done = await write(
            engine,
            Set(P, ("b", "1"), '"é"'.encode(), Encoding.JSON),
            Set(P, ("b", "2"), b"22", Encoding.JSON),
            Set(P, ("a", "1"), b"1", Encoding.JSON, 1000),
            Set(P, ("a", "2"), b"333", Encoding.JSON, 2000),
            put(b"not a plugin's"),
        )
        clock.advance(1)
        used = [Used("a", 1, 3), Used("b", 2, 6)]
        assert await engine.read(everything) == [UsageSlice(used, None, done.version)]

    async def test_usage_is_counted_slice_by_slice(self, engine: Engine, clock: ManualClock) -> None:
        done = await write(
            engine,
            Set(P, ("a", "1"), b"1", Encoding.JSON, 1000),
            *[Set(P, ("b", str(number)), b"22", Encoding.JSON) for number in range(3)],
            Set(P, ("c", "1"), b"333", Encoding.JSON),
        )
        clock.advance(1)
        slices = await engine.read(*[Usage(after, 2) for after in (("", ""), ("b", "0"), ("b", "2"), ("c", "1"))])
        # Rows that have expired are read, and not counted.
        assert slices[0] == UsageSlice([Used("a", 0, 0), Used("b", 1, 2)], ("b", "0"), done.version)
        assert slices[1] == UsageSlice([Used("b", 2, 4)], ("b", "2"), done.version)
        assert slices[2] == UsageSlice([Used("c", 1, 3)], None, done.version)
        assert slices[3] == UsageSlice([], None, done.version)

    async def test_one_batch_spans_spaces_or_fails_in_all(self, engine: Engine) -> None:
        key = ("p", "k")
        done = await engine.commit(Batch((Set(P, key, b"1", Encoding.JSON), put(b"k")), (Check(P, key, None),)))
        assert isinstance(done, Committed)
        again = await engine.commit(Batch((Delete(P, key), put(b"other")), (Check(P, key, None),)))
        assert isinstance(again, Conflict)
        assert again.failed[0].current is not None
        assert again.failed[0].current.version == done.version
        assert await get(engine, b"other") is None
