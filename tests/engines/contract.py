"""The rules that every engine keeps. An engine's own test file is this class and a fixture."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from keyloft import Closed, CounterOutOfRange, HistoryGone, InvalidArgument, ManualClock, NotACounter, limits
from keyloft.core.engine import Engine, LogWatch, Verdict, Watch
from keyloft.core.paging import Pages
from keyloft.core.records import (
    Add,
    Append,
    Batch,
    Change,
    ChangeKind,
    Changes,
    Check,
    Committed,
    Conflict,
    Count,
    Delete,
    Due,
    Expired,
    Get,
    Key,
    Latest,
    LoggedChange,
    LogPosition,
    Max,
    Min,
    Mutation,
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
    appended_key,
)
from keyloft.core.schema import LAST_MOMENT
from keyloft.core.sweeper import sweep
from keyloft.core.values import Encoding, pack_counter, unpack_counter

A = Space.TUPLES
B = Space.SEMANTIC
P = Space.PLUGINS
START, END = b"\x00", b"\xff"
_LONGEST_SECONDS = 30


def put(key: bytes, value: bytes = b'"v"', expire_in: int | None = None, space: Space = A) -> Set:
    return Set(space, key, value, Encoding.JSON, expire_in)


async def write(engine: Engine, *mutations: Mutation) -> Committed:
    return await commit(engine, Batch(mutations))


async def commit(engine: Engine, batch: Batch) -> Committed:
    done = await engine.commit(batch)
    assert isinstance(done, Committed)
    return done


async def get(engine: Engine, key: Key, space: Space = A) -> Record | None:
    [record] = await engine.read(Get(space, key))
    return record


async def stored(engine: Engine, key: bytes) -> Record:
    record = await get(engine, key)
    assert record is not None
    return record


async def scan(
    engine: Engine, start: bytes = START, end: bytes = END, limit: int = 100, **options: bool
) -> list[bytes]:
    [records] = await engine.read(Scan(A, start, end, limit, **options))
    return [record.key for record in records]


async def counter(engine: Engine, key: bytes) -> int:
    return unpack_counter((await stored(engine, key)).value)


async def taken(log: LogWatch, woken: asyncio.Event, number: int) -> list[LoggedChange]:
    """So many changes, once they are there."""
    changes: list[LoggedChange] = []
    async with asyncio.timeout(_LONGEST_SECONDS):
        while len(changes) < number:
            if not log.is_woken:
                await woken.wait()
            woken.clear()
            changes += await log.take()
    return changes


class EngineContract:
    """Subclass it and give it an `engine` fixture that uses the `clock`."""

    @pytest.fixture
    def engine(self, clock: ManualClock) -> AsyncIterator[Engine]:
        raise NotImplementedError

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

    # Checks

    async def test_a_check_holds_for_the_version_it_names(self, engine: Engine) -> None:
        first = await write(engine, put(b"k"))
        done = await engine.commit(Batch((put(b"k", b"2"),), (Check(A, b"k", first.version),)))
        assert isinstance(done, Committed)
        assert (await stored(engine, b"k")).value == b"2"

    async def test_a_conflict_names_every_failed_check_with_what_is_stored(self, engine: Engine) -> None:
        here = await write(engine, put(b"here"))
        stale = Check(A, b"here", here.version - 1)
        missing = Check(A, b"missing", 7)
        taken = Check(A, b"here", None)
        fine = Check(A, b"here", here.version)
        result = await engine.commit(Batch((put(b"new"),), (fine, stale, missing, taken)))
        assert isinstance(result, Conflict)
        record = await stored(engine, b"here")
        assert [(failed.check, failed.current) for failed in result.failed] == [
            (stale, record),
            (missing, None),
            (taken, record),
        ]
        assert await get(engine, b"new") is None

    async def test_checks_look_at_the_state_before_their_batch(self, engine: Engine) -> None:
        done = await engine.commit(Batch((put(b"k"), Delete(A, b"k"), put(b"k")), (Check(A, b"k", None),)))
        assert isinstance(done, Committed)

    async def test_of_many_concurrent_claims_one_wins(self, engine: Engine) -> None:
        batch = Batch((put(b"lock"),), (Check(A, b"lock", None),))
        results = await asyncio.gather(*[engine.commit(batch) for _ in range(64)])
        [winner] = [result for result in results if isinstance(result, Committed)]
        assert (await stored(engine, b"lock")).version == winner.version

    async def test_concurrent_read_check_write_loses_no_update(self, engine: Engine) -> None:
        await write(engine, put(b"n", b"0"))

        async def increment() -> None:
            while True:
                record = await stored(engine, b"n")
                batch = Batch((put(b"n", b"%d" % (int(record.value) + 1)),), (Check(A, b"n", record.version),))
                if isinstance(await engine.commit(batch), Committed):
                    return

        await asyncio.gather(*[increment() for _ in range(20)])
        assert (await stored(engine, b"n")).value == b"20"

    # Deleting

    async def test_committed_tells_per_delete_whether_the_key_existed(self, engine: Engine) -> None:
        await write(engine, put(b"a"))
        done = await write(engine, Delete(A, b"a"), Delete(A, b"b"), put(b"c"), Delete(A, b"c"), Delete(A, b"a"))
        assert done.found == (True, False, True, False)
        assert await scan(engine) == []

    async def test_mutations_of_a_batch_apply_in_their_order(self, engine: Engine) -> None:
        await write(engine, put(b"k", b"1"), Delete(A, b"k"), put(b"k", b"2"), put(b"k", b"3"))
        assert (await stored(engine, b"k")).value == b"3"

    # All or nothing

    async def test_a_batch_that_fails_leaves_nothing_and_other_batches_are_made(self, engine: Engine) -> None:
        await write(engine, put(b"text"), put(b"kept"))
        bad = Batch((put(b"half"), Delete(A, b"kept"), Sum(A, b"text", 1)), ())
        before, failure, after = await asyncio.gather(
            write(engine, put(b"before")), engine.commit(bad), write(engine, put(b"after")), return_exceptions=True
        )
        assert isinstance(failure, NotACounter)
        assert isinstance(before, Committed)
        assert isinstance(after, Committed)
        assert await scan(engine) == [b"after", b"before", b"kept", b"text"]

    # Long batches, which an engine may commit in parts

    async def test_a_long_batch_is_decided_in_its_order(self, engine: Engine) -> None:
        await write(engine, put(b"old", b"0"), put(b"gone"))
        before = (await stored(engine, b"old")).created_at
        filling = [put(b"k%04d" % number) for number in range(1500)]
        done = await write(
            engine,
            *(Sum(A, b"n", 1), Delete(A, b"gone"), put(b"old", b"1"), put(b"new"), put(b"k0000")),
            *filling,
            *(Sum(A, b"n", 1), Delete(A, b"gone"), put(b"old", b"2"), Delete(A, b"new"), Touch(A, b"k0001")),
        )
        assert done.values == (1, 2)
        assert done.found == (True, False, True, True)
        old = await stored(engine, b"old")
        assert (old.value, old.version, old.created_at) == (b"2", done.version, before)
        assert await counter(engine, b"n") == 2
        assert len(await scan(engine, b"k", b"l", 2000)) == 1500
        assert await scan(engine, b"l", b"z") == [b"n", b"old"]
        assert (await write(engine, put(b"k"))).version == done.version + 1

    async def test_short_batches_around_a_long_one_get_their_verdicts(self, engine: Engine) -> None:
        long = [put(b"k%04d" % number) for number in range(limits.LONG_BATCH_OPERATIONS + 1)]
        batches = [put(b"before")], long, [put(b"after")], [put(b"at the end")]
        done = await asyncio.gather(*[write(engine, *batch) for batch in batches])
        assert len({each.version for each in done}) == len(batches)

    async def test_a_long_batch_that_fails_leaves_nothing(self, engine: Engine) -> None:
        await write(engine, put(b"text"), put(b"kept", b"1"), put(b"touched", expire_in=60_000))
        before = await engine.read(Scan(A, START, END, 10), Latest())
        filling = [put(b"k%04d" % number, expire_in=1000) for number in range(1500)]
        changing = Delete(A, b"kept"), Touch(A, b"touched"), put(b"kept", b"2", 1000)
        with pytest.raises(NotACounter):
            await engine.commit(Batch((*changing, *filling, Delete(A, b"kept"), Sum(A, b"text", 1))))
        after = await engine.read(Scan(A, START, END, 10), Latest())
        assert [list(after[0]), after[1]] == [list(before[0]), before[1]]

    async def test_every_failed_check_of_a_long_batch_is_named(self, engine: Engine) -> None:
        done = await write(engine, put(b"first"), put(b"last", b"[2]"))
        holding = [Check(A, b"k%04d" % number, None) for number in range(1500)]
        failing = Check(A, b"first", None), Check(A, b"last", done.version + 1)
        changes = [put(b"k%04d" % number) for number in range(1500)]
        conflict = await engine.commit(Batch(tuple(changes), (failing[0], *holding, failing[1])))
        assert isinstance(conflict, Conflict)
        assert [(failure.check, failure.current and failure.current.value) for failure in conflict.failed] == [
            (failing[0], b'"v"'),
            (failing[1], b"[2]"),
        ]
        assert await scan(engine, b"k", b"l") == []
        assert isinstance(await engine.commit(Batch(tuple(changes), tuple(holding))), Committed)

    # Counters

    async def test_sum_begins_at_zero_and_adds(self, engine: Engine) -> None:
        await write(engine, Sum(A, b"n", 5))
        await write(engine, Sum(A, b"n", 2), Sum(A, b"n", 1))
        assert await counter(engine, b"n") == 8

    async def test_sum_wraps_around(self, engine: Engine) -> None:
        await write(engine, Set(A, b"n", pack_counter(2**64 - 1), Encoding.U64), Sum(A, b"n", 3))
        assert await counter(engine, b"n") == 2
        await write(engine, Sum(A, b"n", -3))
        assert await counter(engine, b"n") == 2**64 - 1

    async def test_min_and_max_keep_the_smaller_and_the_larger(self, engine: Engine) -> None:
        await write(engine, Min(A, b"low", 5), Max(A, b"high", 5))
        await write(engine, Min(A, b"low", 9), Max(A, b"high", 9))
        await write(engine, Min(A, b"low", 3), Max(A, b"high", 3))
        assert (await counter(engine, b"low"), await counter(engine, b"high")) == (3, 9)

    async def test_concurrent_sums_all_count(self, engine: Engine) -> None:
        await asyncio.gather(*[write(engine, Sum(A, b"n", 1)) for _ in range(100)])
        assert await counter(engine, b"n") == 100

    async def test_a_counter_keeps_its_expiry_when_summed(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, Set(A, b"n", pack_counter(1), Encoding.U64, 1000))
        due = clock.now() + 1000
        clock.advance(0.5)
        await write(engine, Sum(A, b"n", 1))
        assert (await stored(engine, b"n")).expires_at == due

    async def test_an_expired_counter_restarts_without_expiry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, Set(A, b"n", pack_counter(7), Encoding.U64, 1000))
        clock.advance(1)
        await write(engine, Sum(A, b"n", 1))
        assert await counter(engine, b"n") == 1
        assert (await stored(engine, b"n")).expires_at is None

    async def test_committed_tells_the_new_value_of_each_counter(self, engine: Engine) -> None:
        done = await write(engine, Sum(A, b"s", 5), put(b"beside"), Add(A, b"a", -7), Min(A, b"m", 4), Max(A, b"x", 6))
        assert done.values == (5, -7, 4, 6)
        done = await write(engine, Sum(A, b"s", -6), Add(A, b"a", 9), Min(A, b"m", 9), Max(A, b"x", 9), Add(A, b"a", 1))
        assert done.values == (2**64 - 1, 2, 4, 9, 3)
        assert await counter(engine, b"s") == 2**64 - 1
        assert ((await stored(engine, b"a")).value, (await stored(engine, b"a")).encoding) == (b"3", Encoding.JSON)

    async def test_add_counts_long_json_integers_and_keeps_a_u64_one(self, engine: Engine) -> None:
        await write(engine, put(b"big", str(10**30).encode()), Set(A, b"u", pack_counter(3), Encoding.U64))
        done = await write(engine, Add(A, b"big", 1), Add(A, b"u", -3))
        assert done.values == (10**30 + 1, 0)
        assert (await stored(engine, b"big")).value == str(10**30 + 1).encode()
        assert (await stored(engine, b"u")).encoding == Encoding.U64
        for operand in (-1, 2**64):
            with pytest.raises(CounterOutOfRange):
                await write(engine, put(b"half"), Add(A, b"u", operand))
        for text in (b'"x"', b"1.5", b"true", b"null", b"[1]", b"7" * (limits.COUNTER_DIGITS + 1)):
            await write(engine, put(b"other", text))
            with pytest.raises(NotACounter):
                await write(engine, put(b"half"), Add(A, b"other", 1))
        assert await get(engine, b"half") is None

    async def test_add_keeps_the_expiry_and_gives_one_to_a_new_counter(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, Add(P, ("p", "n"), 1, 1000), Add(A, b"n", 1, expire_at=clock.now() + 2000))
        await write(engine, Add(P, ("p", "n"), 1, 9000), Add(A, b"n", 1))
        [plugin] = await engine.read(Get(P, ("p", "n")))
        assert plugin is not None
        assert (plugin.value, plugin.expires_at) == (b"2", clock.now() + 1000)
        assert (await stored(engine, b"n")).expires_at == clock.now() + 2000

    # Only if absent

    async def test_a_set_only_if_absent_keeps_what_is_there_and_commits_the_rest(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        def add(key: bytes, value: bytes) -> Set:
            return Set(A, key, value, Encoding.JSON, if_absent=True)

        await write(engine, put(b"there", b"1"), put(b"due", b"1", expire_in=1000))
        clock.advance(1)
        done = await write(engine, add(b"there", b"2"), add(b"due", b"2"), put(b"new", b"2"), add(b"new", b"3"))
        assert done.found == (True, False, True)
        values = {key: (await stored(engine, key)).value for key in (b"there", b"due", b"new")}
        assert values == {b"there": b"1", b"due": b"2", b"new": b"2"}

    async def test_a_set_keeps_the_expiry_of_a_live_entry_if_asked(self, engine: Engine, clock: ManualClock) -> None:
        def keeping(key: bytes, value: bytes) -> Set:
            return Set(A, key, value, Encoding.JSON, expire_in=5000, keep_expiry=True)

        await write(engine, put(b"soon", expire_in=2000), put(b"due", expire_in=1000), put(b"never"))
        clock.advance(1)
        began = clock.now()
        await write(engine, *[keeping(key, b"2") for key in (b"soon", b"due", b"never", b"new")], keeping(b"new", b"3"))
        expiries = {key: (await stored(engine, key)).expires_at for key in (b"soon", b"due", b"never", b"new")}
        assert expiries == {b"soon": began + 1000, b"due": began + 5000, b"never": None, b"new": began + 5000}
        await asyncio.gather(write(engine, Touch(A, b"soon", 9000)), write(engine, keeping(b"soon", b"4")))
        found = await stored(engine, b"soon")
        assert (found.value, found.expires_at) == (b"4", began + 9000)

    async def test_of_many_concurrent_adds_one_is_kept(self, engine: Engine) -> None:
        sets = [Set(A, b"k", b"%d" % number, Encoding.JSON, if_absent=True) for number in range(30)]
        done = await asyncio.gather(*[write(engine, one) for one in sets])
        [first] = [one for one in done if one.found == (False,)]
        assert (await stored(engine, b"k")).version == first.version

    # Expiry

    async def test_an_expiry_can_be_absolute(self, engine: Engine, clock: ManualClock) -> None:
        due = clock.now() + 1500
        await write(
            engine,
            Set(A, b"set", b"1", Encoding.JSON, expire_at=due),
            put(b"touched"),
            Set(P, ("p", "k"), b"1", Encoding.JSON, expire_at=due),
            Append(B, b"log/", b"1", Encoding.JSON, expire_at=due),
            Sum(A, b"sum", 1, expire_at=due),
        )
        await write(engine, Touch(A, b"touched", expire_at=due))
        for key in (b"set", b"touched", b"sum"):
            assert (await stored(engine, key)).expires_at == due
        [plugin, page] = await engine.read(Get(P, ("p", "k")), Scan(B, b"log/", b"log0", 9))
        assert (plugin.expires_at, list(page.expiries)) == (due, [due])
        clock.advance(1.5)
        assert await scan(engine) == []

    async def test_an_absolute_expiry_in_the_past_leaves_no_entry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"touched"))
        past = clock.now() - 1
        await write(engine, Set(A, b"set", b"1", Encoding.JSON, expire_at=past), Touch(A, b"touched", expire_at=past))
        assert await scan(engine) == []

    @pytest.mark.parametrize("moment", [-1, LAST_MOMENT + 1, 3 * 2**61 + 1, 2**63])
    async def test_an_expiry_that_no_database_holds_is_refused_and_harms_no_other_batch(
        self, engine: Engine, moment: int
    ) -> None:
        await write(engine, put(b"touched"))
        refused: list[Mutation] = [
            Set(A, b"set", b"1", Encoding.JSON, expire_at=moment),
            Set(P, ("p", "k"), b"1", Encoding.JSON, expire_at=moment),
            Append(B, b"log/", b"1", Encoding.JSON, expire_at=moment),
            Sum(A, b"sum", 1, expire_at=moment),
            Touch(A, b"touched", expire_at=moment),
        ]
        done = await asyncio.gather(
            *[engine.commit(Batch((put(b"half"), one))) for one in refused],
            *[engine.commit(Batch((one,))) for one in refused],
            write(engine, put(b"other")),
            return_exceptions=True,
        )
        assert [type(one) for one in done] == [InvalidArgument] * 10 + [Committed]
        with pytest.raises(InvalidArgument):
            await engine.commit(Batch((refused[0],)))
        assert await scan(engine) == [b"other", b"touched"]

    async def test_due_gives_what_expired_after_a_moment_and_what_is_next(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        began = clock.now()
        for at in range(1, 8):
            keys = [Set(P, ("p", f"{at}{part}"), b"1", Encoding.JSON, 1000 * at) for part in "ab"]
            await write(engine, put(b"%d" % at, expire_in=1000 * at), *keys)
        [nothing] = await engine.read(Due(A, began, 10))
        assert (list(nothing.keys), nothing.is_last, nothing.next_expiry) == ([], True, began + 1000)
        clock.advance(5)
        [page] = await engine.read(Due(A, began + 2000, 10))
        assert (sorted(page.keys), page.up_to, page.is_last) == ([b"3", b"4", b"5"], clock.now(), True)
        assert page.next_expiry == began + 6000
        seen, after = list[Key](), began
        while True:
            [page] = await engine.read(Due(P, after, 3))
            seen += page.keys
            after = page.up_to
            if page.is_last:
                break
        assert sorted(seen) == [("p", f"{at}{part}") for at in range(1, 6) for part in "ab"]
        clock.advance(5)
        [rest] = await engine.read(Due(A, after, 10))
        assert (sorted(rest.keys), rest.next_expiry) == ([b"6", b"7"], None)

    async def test_an_entry_is_gone_from_its_very_millisecond(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1500))
        clock.advance(1.499)
        assert await get(engine, b"k") is not None
        assert await scan(engine) == [b"k"]
        clock.advance(0.001)
        assert await get(engine, b"k") is None
        assert await scan(engine) == []
        assert await scan(engine, keys_only=True) == []
        assert await engine.read(Count(A, START, END)) == [0]

    async def test_an_expired_key_fails_a_check_for_its_version(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        result = await engine.commit(Batch((put(b"k"),), (Check(A, b"k", first.version),)))
        assert isinstance(result, Conflict)
        assert result.failed[0].current is None
        assert isinstance(await engine.commit(Batch((put(b"k"),), (Check(A, b"k", None),))), Committed)

    async def test_deleting_or_touching_an_expired_key_finds_nothing(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        assert (await write(engine, Delete(A, b"k"), Touch(A, b"k", None))).found == (False, False)
        assert await get(engine, b"k") is None

    async def test_a_get_can_include_the_expired_record(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", b"[7]", expire_in=1000))
        clock.advance(1)
        [record] = await engine.read(Get(A, b"k", include_expired=True))
        assert record is not None
        assert (record.value, record.version) == (b"[7]", first.version)

    async def test_set_replaces_the_expiry(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1000))
        await write(engine, put(b"k"))
        clock.advance(10)
        assert (await stored(engine, b"k")).expires_at is None

    async def test_touch_changes_the_expiry_and_keeps_the_version(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"k", expire_in=1000))
        assert (await write(engine, Touch(A, b"k", 5000))).found == (True,)
        record = await stored(engine, b"k")
        assert (record.version, record.expires_at) == (first.version, clock.now() + 5000)
        await write(engine, Touch(A, b"k", None))
        clock.advance(10)
        assert (await stored(engine, b"k")).version == first.version

    async def test_touch_after_set_in_one_batch(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", b"[1]"), Touch(A, b"k", 1000))
        record = await stored(engine, b"k")
        assert (record.value, record.expires_at) == (b"[1]", clock.now() + 1000)

    async def test_expired_lists_what_is_due_the_longest_overdue_first(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, put(b"c", expire_in=3000), put(b"a", expire_in=1000), put(b"b", expire_in=2000), put(b"d"))
        clock.advance(2)
        [due] = await engine.read(Expired(A, 10))
        assert [record.key for record in due] == [b"a", b"b"]
        [due] = await engine.read(Expired(A, 1))
        assert [record.key for record in due] == [b"a"]
        assert await engine.read(Expired(B, 10)) == [[]]

    async def test_purge_removes_only_that_version_and_only_if_expired(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        old = await write(engine, put(b"alive"), put(b"due", expire_in=1000), put(b"again", expire_in=1000))
        clock.advance(1)
        new = await write(engine, put(b"again", expire_in=1000))
        done = await write(
            engine,
            Purge(A, b"alive", old.version),
            Purge(A, b"due", old.version - 1),
            Purge(A, b"due", old.version),
            Purge(A, b"again", old.version),
            Purge(A, b"again", new.version),
        )
        assert done.found == (False, False, True, False, False)
        assert await scan(engine) == [b"again", b"alive"]
        assert await engine.read(Get(A, b"due", include_expired=True)) == [None]

    @pytest.mark.parametrize("others", [0, limits.LONG_BATCH_OPERATIONS])
    async def test_the_expiry_that_a_purge_names_decides_nothing(
        self, engine: Engine, clock: ManualClock, others: int
    ) -> None:
        more = [b"more %d" % number for number in range(others)]
        names = (*more, b"again", b"due", b"gone", b"later", b"sooner")
        large = put(b"large", b'"%s"' % bytes(limits.ROW_BYTES).hex().encode(), expire_in=1000)
        old = await write(engine, large, *[put(key, expire_in=1000) for key in names])
        named = clock.now() + 1000
        await write(engine, put(b"again"), Delete(A, b"gone"), Touch(A, b"later", 9000), Touch(A, b"sooner", 500))
        clock.advance(1)
        found = dict.fromkeys(more, True) | {b"again": False, b"due": True, b"gone": False, b"large": True}
        found |= {b"later": False, b"sooner": True}
        done = await write(engine, *[Purge(A, key, old.version, named) for key in found])
        assert done.found == tuple(found.values())
        assert await scan(engine) == [b"again", b"later"]
        assert await engine.read(Expired(A, 1)) == [[]]

    @pytest.mark.parametrize("expire_in", [None, 1000])
    async def test_a_checked_set_replaces_that_version_of_an_entry_whatever_their_sizes(
        self, engine: Engine, clock: ManualClock, expire_in: int | None
    ) -> None:
        small, large = b'"s"', b'"%s"' % bytes(limits.ROW_BYTES).hex().encode()
        made = clock.now()
        last = await write(engine, put(b"k", small, expire_in))
        for value in (small, large, large, small, small):
            clock.advance(0.1)
            replacing = Batch((put(b"k", value, expire_in),), (Check(A, b"k", last.version),))
            last = await commit(engine, replacing)
            [page] = await engine.read(Scan(A, START, END, 10, times=True))
            expires_at = None if expire_in is None else clock.now() + expire_in
            assert list(page) == [Record(b"k", value, Encoding.JSON, last.version, expires_at, made, clock.now())]
            refused = await engine.commit(replacing)
            assert isinstance(refused, Conflict)
            assert [failed.current for failed in refused.failed] == await engine.read(Get(A, b"k"))

    async def test_a_check_can_ask_for_an_expired_entry(self, engine: Engine, clock: ManualClock) -> None:
        old = await write(engine, put(b"k", expire_in=1000))
        clock.advance(1)
        guarded = Batch((put(b"taken"),), (Check(A, b"k", old.version, include_expired=True),))
        assert isinstance(await engine.commit(guarded), Committed)
        refused = await engine.commit(Batch((put(b"k"),), (Check(A, b"k", None, include_expired=True),)))
        assert isinstance(refused, Conflict)
        assert refused.failed[0].current is not None
        await write(engine, Purge(A, b"k", old.version))
        assert isinstance(await engine.commit(guarded), Conflict)

    # Appending

    @pytest.mark.parametrize("space", [A, B])
    async def test_what_is_appended_sorts_as_it_was_committed(
        self, engine: Engine, clock: ManualClock, space: Space
    ) -> None:
        """Alone, with others of its batch and of its group; each key ends with the version of its commit."""

        def append(number: int, suffix: bytes = b"") -> Append:
            return Append(space, b"log/", b"%d" % number, Encoding.JSON, suffix=suffix)

        first = await write(engine, append(0))
        assert first.at == clock.now()
        both = await write(engine, append(1, b"a"), put(b"beside", space=space), append(2, b"b"))
        many = await asyncio.gather(*[write(engine, append(number)) for number in range(3, 40)])
        [page] = await engine.read(Scan(space, b"log/", b"log0", 100))
        keys = [appended_key(space, b"log/", first.version)]
        keys += [appended_key(space, b"log/", both.version, suffix) for suffix in (b"a", b"b")]
        assert list(page.keys[:3]) == keys
        assert list(page.versions) == sorted([first.version, *[both.version] * 2, *[done.version for done in many]])
        by_version = {done.version: b"%d" % number for number, done in enumerate(many, 3)}
        assert [by_version[record.version] for record in list(page)[3:]] == list(page.values[3:])

    async def test_what_is_appended_expires_and_is_watched_like_all_else(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        watch = engine.watch(Scan(B, b"log/", b"log0", 100))
        done = await write(engine, Append(B, b"log/", b"1", Encoding.JSON, 1000))
        [change] = await anext(aiter(watch))
        assert change.key == appended_key(B, b"log/", done.version)
        clock.advance(1)
        assert await get(engine, change.key, B) is None

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

    # Watching

    async def test_watching_keys_gives_their_state_then_each_change(self, engine: Engine) -> None:
        await write(engine, put(b"a", b"1"))
        watch = engine.watch(Get(A, b"b"), Get(A, b"a"))
        assert values_of(await next_of(watch)) == {b"b": None, b"a": b"1"}
        await write(engine, put(b"b", b"2"))
        assert values_of(await next_of(watch)) == {b"b": b"2", b"a": b"1"}
        await write(engine, Delete(A, b"a"), put(b"other"))
        changes = await next_of(watch)
        assert [change.key for change in changes] == [b"b", b"a"]
        assert values_of(changes) == {b"b": b"2", b"a": None}

    async def test_watching_a_range_gives_the_changed_keys_only(self, engine: Engine) -> None:
        await write(engine, put(b"p1"), put(b"p2"), put(b"q"))
        watch = engine.watch(Scan(A, b"p", b"q", 1))
        await write(engine, put(b"p3", b"3"), put(b"q", b"4"))
        assert values_of(await next_of(watch)) == {b"p3": b"3"}
        await write(engine, Delete(A, b"p1"))
        await write(engine, put(b"p2", b"2"))
        assert values_of(await next_of(watch)) == {b"p1": None, b"p2": b"2"}

    async def test_watches_see_expiry_without_a_sweep(self, engine: Engine, clock: ManualClock) -> None:
        keys, everything = engine.watch(Get(A, b"k")), engine.watch(Scan(A, START, END, 1))
        await write(engine, put(b"k", b"1", expire_in=1000), put(b"l", b"2", expire_in=2000))
        assert values_of(await next_of(keys)) == {b"k": b"1"}
        assert values_of(await next_of(everything)) == {b"k": b"1", b"l": b"2"}
        clock.advance(1)
        assert values_of(await next_of(keys)) == {b"k": None}
        assert values_of(await next_of(everything)) == {b"k": None}
        waiting = asyncio.create_task(next_of(everything))
        await asyncio.sleep(0)
        clock.advance(1)
        assert values_of(await waiting) == {b"l": None}

    async def test_a_touched_entry_expires_for_watchers_at_its_new_time(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        keys, everything = engine.watch(Get(A, b"k")), engine.watch(Scan(A, START, END, 1))
        await write(engine, put(b"k", b"1", expire_in=5000), put(b"l", b"2", expire_in=1000))
        for watch in (keys, everything):
            await next_of(watch)
        await write(engine, Touch(A, b"k", 3000), Touch(A, b"l", 9000), put(b"seen"))
        assert values_of(await next_of(everything)) == {b"k": b"1", b"l": b"2", b"seen": b'"v"'}
        clock.advance(3)
        for watch in (keys, everything):
            assert values_of(await next_of(watch)) == {b"k": None}

    async def test_a_slow_watcher_gets_the_latest_state(self, engine: Engine) -> None:
        watch = engine.watch(Get(A, b"k"))
        await next_of(watch)
        for number in range(100):
            await write(engine, put(b"k", b"%d" % number))
        assert values_of(await next_of(watch)) == {b"k": b"99"}

    async def test_a_cancelled_wait_loses_no_change(self, engine: Engine) -> None:
        watch = engine.watch(Scan(A, START, END, 1))
        for number in range(20):
            waiting = asyncio.create_task(next_of(watch))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            await write(engine, put(b"k", b"%d" % number))
            waiting.cancel()
            [seen] = await asyncio.gather(waiting, return_exceptions=True)
            changes = await next_of(watch) if isinstance(seen, BaseException) else seen
            assert values_of(changes) == {b"k": b"%d" % number}

    async def test_a_change_during_the_first_read_is_not_lost(self, engine: Engine) -> None:
        """The first read may show a commit before this process reports it to the watch."""
        for tries in range(40):
            await write(engine, put(b"old"))
            watch = engine.watch(Scan(A, START, END, 1))
            writing = asyncio.create_task(write(engine, Delete(A, b"old"), put(b"new", b"%d" % tries)))
            for _ in range(tries % 8):
                await asyncio.sleep(0)
            seen = values_of(await next_of(watch))
            while len(seen) < 2:
                seen.update(values_of(await next_of(watch)))
            assert seen == {b"old": None, b"new": b"%d" % tries}
            await writing

    async def test_an_expiry_between_watch_and_first_step_is_seen(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"k", expire_in=1000))
        watch = engine.watch(Scan(A, START, END, 1))
        await engine.read(Get(A, b"k"))  # it waits until the watch has started
        clock.advance(1)
        assert values_of(await next_of(watch)) == {b"k": None}

    async def test_closing_ends_watches(self, engine: Engine) -> None:
        watches = [engine.watch(Get(A, b"k")), engine.watch(Scan(A, START, END, 1))]
        await next_of(watches[0])
        waiting = [asyncio.create_task(collect(watch)) for watch in watches]
        await asyncio.sleep(0)
        await engine.aclose()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [[], []]

    async def test_closing_one_watch_ends_it_alone(self, engine: Engine) -> None:
        first, second = engine.watch(Get(A, b"k")), engine.watch(Get(A, b"k"))
        await first.aclose()
        assert await collect(first) == []
        assert values_of(await next_of(second)) == {b"k": None}

    async def test_a_read_after_watch_and_what_it_reports_are_the_whole_truth(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        """Watch, then list: whatever is deleted or expires around that moment, the two together show the state."""
        for tries in range(30):
            await write(engine, *[put(b"%d" % number, expire_in=1000 + number % 3) for number in range(10)])
            deleting = asyncio.create_task(write(engine, *[Delete(A, b"%d" % number) for number in range(0, 10, 2)]))
            for _ in range(tries % 5):
                await asyncio.sleep(0)
            watch = engine.watch(Scan(A, START, END, 1))
            seen = set(await scan(engine))
            clock.advance(1.001)
            await deleting
            await write(engine, put(b"last", b"%d" % tries))
            while b"last" not in seen:
                for change in await next_of(watch):
                    (seen.discard if change.record is None else seen.add)(change.key)
            while seen != set(await scan(engine)):
                for change in await next_of(watch):
                    (seen.discard if change.record is None else seen.add)(change.key)
            await watch.aclose()
            await write(engine, Delete(A, b"last"))
            clock.advance(1)

    async def test_a_watch_sees_expiries_after_the_clock_was_set_back(self, engine: Engine, clock: ManualClock) -> None:
        await write(engine, put(b"first", expire_in=60_000))
        watch, key = engine.watch(Scan(A, START, END, 1)), engine.watch(Get(A, b"second"))
        assert values_of(await next_of(key)) == {b"second": None}
        clock.advance(60)
        assert values_of(await next_of(watch)) == {b"first": None}
        clock.advance(-30)
        await write(engine, put(b"second", b"2", expire_in=1000))
        assert values_of(await next_of(watch)) == {b"second": b"2"}
        assert values_of(await next_of(key)) == {b"second": b"2"}
        await engine.read(Get(A, b"second"))
        clock.advance(1)
        assert values_of(await next_of(watch)) == {b"second": None}
        assert values_of(await next_of(key)) == {b"second": None}

    # The change log

    async def test_the_log_tells_what_each_commit_changed(self, engine: Engine, clock: ManualClock) -> None:
        [before] = await engine.read(Latest())
        first = await write(engine, put(b"a"), put(b"due", expire_in=1000), Set(P, ("p", "k"), b"1", Encoding.JSON))
        clock.advance(2)
        appends = [Append(space, b"log/", b"1", Encoding.JSON) for space in (A, B)]
        second = await write(engine, Touch(A, b"a", 5000), Delete(A, b"absent"), *appends)
        third = await write(engine, Purge(A, b"due", first.version), Delete(P, ("p", "k")))
        nothing = await write(engine, Delete(A, b"absent"))
        [piece] = await engine.read(Changes(LogPosition(before)))
        late = second.at
        assert sorted(map(_columns, piece.changes), key=str) == sorted(
            [
                (first.version, A, b"a", ChangeKind.PUT, first.at),
                (first.version, A, b"due", ChangeKind.PUT, first.at),
                (first.version, P, ("p", "k"), ChangeKind.PUT, first.at),
                (second.version, A, b"a", ChangeKind.TOUCH, late),
                (second.version, A, appended_key(A, b"log/", second.version), ChangeKind.PUT, late),
                (second.version, B, appended_key(B, b"log/", second.version), ChangeKind.PUT, late),
                (third.version, A, b"due", ChangeKind.EXPIRED, late),
                (third.version, P, ("p", "k"), ChangeKind.DELETE, late),
            ],
            key=str,
        )
        assert (piece.end, piece.is_last) == (LogPosition(nothing.version), True)
        [rest] = await engine.read(Changes(LogPosition(second.version)))
        assert {change.version for change in rest.changes} == {third.version}
        assert rest.began == late
        [empty] = await engine.read(Changes(LogPosition(nothing.version)))
        assert (list(empty.changes), empty.is_last, empty.end) == ([], True, LogPosition(nothing.version))

    async def test_a_position_within_a_group_leaves_out_what_came_before_it(self, engine: Engine) -> None:
        done = await asyncio.gather(*[write(engine, put(b"%02d" % number)) for number in range(20)])
        versions = sorted(one.version for one in done)
        for version in versions:
            [piece] = await engine.read(Changes(LogPosition(version)))
            assert [change.version for change in piece.changes] == [later for later in versions if later > version]

    async def test_a_long_log_is_read_in_slices(self, engine: Engine) -> None:
        [before] = await engine.read(Latest())
        await write(engine, *[put(b"%064d" % number) for number in range(5000)])
        await asyncio.gather(*[write(engine, put(b"%d" % number)) for number in range(100)])
        position, seen = LogPosition(before), list[LoggedChange]()
        slices = 0
        while True:
            [piece] = await engine.read(Changes(position))
            seen += piece.changes
            assert piece.end > position
            position = piece.end
            slices += 1
            if piece.is_last:
                break
        assert [change.version for change in seen] == sorted(change.version for change in seen)
        assert len(seen) == len({(change.key, change.version) for change in seen}) == 5100
        assert slices > 2

    async def test_a_version_that_the_log_does_not_hold_is_history_gone(self, engine: Engine) -> None:
        done = await write(engine, put(b"k"))
        for version in (-1, done.version + 1, 2**52):
            with pytest.raises(HistoryGone, match="list the entries, then watch again"):
                await engine.read(Changes(LogPosition(version)))
            with pytest.raises(HistoryGone):
                await next_of(engine.watch(Scan(A, START, END, 1), since=version))
            with pytest.raises(HistoryGone):
                await next_of(engine.watch(Get(A, b"k"), since=version))

    async def test_who_follows_the_log_gets_each_change_in_order_without_touches(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        woken = asyncio.Event()
        before = await write(engine, put(b"p0"))
        log = engine.follow(Scan(A, b"p", b"q", 1), woken=woken.set)
        versions = [(await write(engine, put(b"p1", str(number).encode()))).version for number in range(3)]
        await write(engine, put(b"x"))
        await write(engine, Touch(A, b"p1", 60_000))
        versions.append((await write(engine, Delete(A, b"p1"))).version)
        changes = await taken(log, woken, 4)
        assert [(change.key, change.version) for change in changes] == [(b"p1", version) for version in versions]
        assert [change.kind for change in changes] == [ChangeKind.PUT] * 3 + [ChangeKind.DELETE]
        [latest] = await engine.read(Latest())
        await write(engine, put(b"x"))
        async with asyncio.timeout(_LONGEST_SECONDS):
            while (log.reached or 0) <= latest:
                await asyncio.sleep(0.01)
        await log.aclose()
        assert log.has_ended
        assert await log.take() == []
        # From a version on, and by keys.
        woken.clear()
        later = engine.follow(Get(A, b"p1"), Get(A, b"p0"), woken=woken.set, since=before.version)
        assert [change.version for change in await taken(later, woken, 4)] == versions
        gone = engine.follow(Get(A, b"p1"), woken=woken.set, since=10**9)
        with pytest.raises(HistoryGone):
            await taken(gone, woken, 1)

    async def test_many_who_watch_the_same_get_each_change_once(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "WATCH_INLINE_CALLS", 7)
        wakers = [asyncio.Event() for _ in range(5)]
        logs = [engine.follow(Scan(A, START, END, 1), woken=woken.set) for woken in wakers]
        await engine.read(Latest())  # all have started
        groups = [[write(engine, put(b"%d" % one), put(b"x%d" % one)) for one in range(8)] for _ in range(3)]
        done = [one for group in groups for one in await asyncio.gather(*group)]
        expected = sorted([one.version for one in done for _ in range(2)])
        for log, woken in zip(logs, wakers, strict=True):
            assert [change.version for change in await taken(log, woken, len(expected))] == expected

    async def test_who_follows_the_log_gets_an_expiry_after_the_put_that_it_ends(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        woken = asyncio.Event()
        log = engine.follow(Scan(A, START, END, 1), woken=woken.set)
        begin = await write(engine, put(b"k", expire_in=1000))
        [put_] = await taken(log, woken, 1)
        clock.advance(2)
        [expired] = await taken(log, woken, 1)
        assert (put_.kind, expired.kind) == (ChangeKind.PUT, ChangeKind.EXPIRED)
        assert expired.version >= put_.version
        await sweep(engine, A)
        other = await write(engine, put(b"other"))
        assert [change.version for change in await taken(log, woken, 1)] == [other.version], "it is reported once"
        # One that continues from before the put gets both, in this order.
        woken.clear()
        again = engine.follow(Get(A, b"k"), woken=woken.set, since=begin.version - 1)
        assert [change.kind for change in await taken(again, woken, 2)] == [ChangeKind.PUT, ChangeKind.EXPIRED]

    async def test_a_watch_since_a_version_reports_what_changed_after_it(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        first = await write(engine, put(b"a"), put(b"b"), put(b"c", expire_in=1000), put(b"d", expire_in=2000))
        await write(engine, put(b"a", b"2"), Delete(A, b"b"))
        clock.advance(1)
        watch = engine.watch(Scan(A, START, END, 1), since=first.version)
        seen: dict[bytes, bytes | None] = {}
        while len(seen) < 3:
            seen |= values_of(await next_of(watch))
        assert seen == {b"a": b"2", b"b": None, b"c": None}
        await write(engine, put(b"e", b"5"))
        assert values_of(await next_of(watch)) == {b"e": b"5"}
        clock.advance(1)
        assert values_of(await next_of(watch)) == {b"d": None}

    async def test_a_watch_is_continued_from_where_it_has_reported_to(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _read_the_log_in_small_slices(monkeypatch)
        [before] = await engine.read(Latest())
        await write(engine, put(b"a"))
        for number in range(30):
            await write(engine, put(b"k%02d" % number))
        await write(engine, put(b"a", b"2"), Delete(A, b"k29"))
        await write(engine, *[put(b"l%02d" % number) for number in range(30)])
        end = await write(engine, put(b"last"))
        since, seen = before, dict[bytes, bytes | None]()
        while since < end.version:
            watch = engine.watch(Scan(A, START, END, 1), since=since)
            while watch.reported_to is None or watch.reported_to <= since:
                seen |= values_of(await next_of(watch))
            since = watch.reported_to
            await watch.aclose()
        assert seen == {b"a": b"2", b"k29": None, b"last": b'"v"'} | {
            key: b'"v"' for number in range(30) for key in (b"k%02d" % number, b"l%02d" % number) if key != b"k29"
        }

    async def test_a_watch_that_is_continued_misses_no_expiry_that_was_noticed_late(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        """A commit that follows an expiry may be reported before it; a reader may continue from that commit."""
        await write(engine, put(b"a", expire_in=1000))
        seen: dict[bytes, bytes | None] = {}
        watch = engine.watch(Scan(A, START, END, 1))
        await write(engine, put(b"b"))
        seen |= values_of(await next_of(watch))
        clock.advance(1)
        await write(engine, put(b"c"))
        while b"c" not in seen:
            seen |= values_of(await next_of(watch))
        since = watch.reported_to
        await watch.aclose()
        watch = engine.watch(Scan(A, START, END, 1), since=since)
        while b"a" not in seen:
            seen |= values_of(await next_of(watch))
        assert seen == {b"a": None, b"b": b'"v"', b"c": b'"v"'}

    async def test_a_watch_is_continued_from_the_last_version_that_was_seen(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An entry that was changed again later is shown with that later change, never before it."""
        _read_the_log_in_small_slices(monkeypatch)
        [since] = await engine.read(Latest())
        await write(engine, put(b"a"))
        for number in range(60):
            await write(engine, put(b"k%02d" % number))
        end = await write(engine, put(b"a", b"2"))
        seen: list[bytes] = []
        while since < end.version:
            watch = engine.watch(Scan(A, START, END, 1), since=since)
            for change in await next_of(watch):
                assert change.record is not None
                assert change.record.version > since
                since = change.record.version
                seen.append(change.key)
                if len(seen) % 3 == 0:
                    break  # in the middle of what was reported
            await watch.aclose()
        assert seen == [*[b"k%02d" % number for number in range(60)], b"a"]

    async def test_a_watch_of_keys_since_a_version_waits_for_a_change(self, engine: Engine, clock: ManualClock) -> None:
        first = await write(engine, put(b"a"), put(b"b"), put(b"c", expire_in=1000))
        await write(engine, put(b"b", b"2"))
        changed = engine.watch(Get(A, b"a"), Get(A, b"b"), since=first.version)
        assert values_of(await next_of(changed)) == {b"a": b'"v"', b"b": b"2"}
        unchanged = engine.watch(Get(A, b"a"), since=first.version)
        waiting = asyncio.create_task(next_of(unchanged))
        await write(engine, put(b"other"))
        await write(engine, put(b"a", b"3"))
        assert values_of(await waiting) == {b"a": b"3"}
        clock.advance(1)
        expired = engine.watch(Get(A, b"c"), since=first.version)
        assert values_of(await next_of(expired)) == {b"c": None}

    async def test_a_watch_that_falls_behind_reads_the_log(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("keyloft.limits.WATCH_PENDING_KEYS", 50)
        watch = engine.watch(Scan(A, START, END, 1))
        for first in range(0, 400, 40):
            await write(engine, *[put(b"%d" % number) for number in range(first, first + 40)])
        await write(engine, Delete(A, b"7"))
        seen: dict[bytes, bytes | None] = {}
        while len(seen) < 400 or seen[b"7"] is not None:
            seen |= values_of(await next_of(watch))
        assert len(seen) == 400
        await write(engine, put(b"live", b"1"))
        while b"live" not in seen:
            seen |= values_of(await next_of(watch))

    async def test_an_empty_store_is_watched_from_its_beginning(self, engine: Engine) -> None:
        watch = engine.watch(Scan(A, START, END, 1), since=0)
        waiting = asyncio.create_task(next_of(watch))
        for _ in range(5):
            await asyncio.sleep(0)  # it does not keep the event loop busy
        await write(engine, put(b"a"))
        assert values_of(await waiting) == {b"a": b'"v"'}

    @pytest.mark.parametrize("is_away", [False, True])
    async def test_large_values_are_reported_in_parts(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, is_away: bool
    ) -> None:
        """From the end of each part another watch continues, and misses nothing."""
        monkeypatch.setattr("keyloft.limits.WATCH_REPORT_BYTES", 3000)
        [before] = await engine.read(Latest())
        everything = Scan(A, START, END, 1)
        watch = engine.watch(everything, since=before) if is_away else engine.watch(everything)
        value = b'"%s"' % (b"x" * 998)
        for number in range(6):
            await write(engine, put(b"one%d" % number, value))
        await write(engine, *[put(b"all%02d" % number, value) for number in range(12)], Delete(A, b"one0"))
        end = await write(engine, put(b"last", value))
        expected = {b"last": value, b"one0": None}
        expected |= dict.fromkeys([b"one%d" % number for number in range(1, 6)], value)
        expected |= dict.fromkeys([b"all%02d" % number for number in range(12)], value)
        seen: dict[bytes, bytes | None] = {}
        while seen != expected:
            changes = await next_of(watch)
            assert sum([0 if each.record is None else len(each.record.value) for each in changes]) <= 3000
            seen |= values_of(changes)
            assert watch.reported_to is not None
            resumed, found = engine.watch(everything, since=watch.reported_to), dict(seen)
            while watch.reported_to < end.version and found != expected:
                found |= values_of(await next_of(resumed))
            assert found == expected
            await resumed.aclose()
        assert watch.reported_to == end.version
        await write(engine, put(b"more", b"1"))
        assert values_of(await next_of(watch)) == {b"more": b"1"}

    # Submitting

    async def test_a_submitted_batch_is_committed_and_reported(self, engine: Engine) -> None:
        outcomes: list[Verdict] = []
        finished = asyncio.Event()

        def done(verdict: Verdict) -> None:
            outcomes.append(verdict)
            if len(outcomes) == 3:
                finished.set()
            raise ValueError("a callback that fails harms no one")

        engine.submit(Batch((put(b"k", b"1"),)), done)
        engine.submit(Batch((put(b"k", b"2"),), (Check(A, b"k", None),)), done)
        engine.submit(Batch((Sum(A, b"k", 1),)), done)
        last = await write(engine, put(b"k", b"3"))
        await asyncio.wait_for(finished.wait(), 10)
        committed, conflict, error = outcomes
        assert isinstance(committed, Committed)
        assert isinstance(conflict, Conflict)
        assert isinstance(error, NotACounter)
        assert committed.version < last.version
        assert (await stored(engine, b"k")).value == b"3"

    # Closing

    async def test_a_closed_engine_says_so(self, engine: Engine) -> None:
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(Closed, match="closed"):
            await engine.read(Get(A, b"k"))
        with pytest.raises(Closed, match="closed"):
            await engine.commit(Batch((put(b"k"),)))
        with pytest.raises(Closed, match="closed"):
            engine.watch(Get(A, b"k"))
        with pytest.raises(Closed, match="closed"):
            engine.submit(Batch((put(b"k"),)), print)


def _read_the_log_in_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOG_SLICE_BYTES", "LOG_SLICE_ROWS", "MEMORY_SLICE_CHANGES"):
        monkeypatch.setattr(f"keyloft.limits.{name}", 10)


def _columns(change: LoggedChange) -> tuple[object, ...]:
    return change.version, change.space, change.key, change.kind, change.at


async def next_of(watch: Watch) -> list[Change]:
    async with asyncio.timeout(60):  # wait_for of Python 3.11 loses a result that arrives with a cancellation
        return await watch.__anext__()


async def collect(watch: Watch) -> list[list[Change]]:
    return [changes async for changes in watch]


def values_of(changes: list[Change]) -> dict[bytes, bytes | None]:
    return {change.key: None if change.record is None else change.record.value for change in changes}
