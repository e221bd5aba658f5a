"""What a batch does: all of it or nothing, in its order, and only if its checks hold."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from keyloft import CounterOutOfRange, ManualClock, NotACounter, limits
from keyloft.core.engine import Engine, Verdict
from keyloft.core.records import (
    Add,
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    Count,
    Delete,
    Get,
    Latest,
    Max,
    Min,
    Mutation,
    Scan,
    Set,
    Space,
    Sum,
    Touch,
    appended_key,
)
from keyloft.core.values import Encoding, pack_counter
from keyloft.engines.memory import MemoryEngine
from tests.engines.contract.calls import END, START, A, B, P, counter, get, logged_after, put, scan, stored, write


class BatchContract:
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

    async def test_batches_of_one_key_keep_their_order_whether_committed_or_submitted(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "LOOP_ITERATION_SECONDS", 0.0)  # every iteration has lasted too long
        done = asyncio.get_running_loop().create_future()

        async def submit() -> None:
            engine.submit(Batch((put(b"k", b"2"),)), done.set_result)

        await asyncio.gather(write(engine, put(b"other")), write(engine, put(b"k", b"1")), submit())
        assert isinstance(await done, Committed)
        assert (await stored(engine, b"k")).value == b"2"

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

    async def test_a_long_batch_stores_what_short_ones_store(self, engine: Engine, clock: ManualClock) -> None:
        model = MemoryEngine(clock)
        plugin_keys = ['"', "\\", "{a,b}", "NULL", "null", "ä 漢\U0001f600", "a'b", " ", "$1", "x" * 200]
        stored_before = [
            put(b"a%03d" % number, b"%d" % number, 60_000 if number % 3 else None) for number in range(300)
        ]
        stored_before += [Set(A, b"n%03d" % number, pack_counter(number), Encoding.U64) for number in range(100)]
        stored_before += [put(b"due%03d" % number, b"0", 1) for number in range(100)]
        stored_before += [put(b"large%d" % number, b"[%s]" % (b"1" * 70_000)) for number in range(4)]
        stored_before += [Set(P, ("p", key), b'"old"', Encoding.JSON) for key in plugin_keys[:5]]
        long: list[Mutation] = [put(b"a%03d" % number, b"[%d]" % number) for number in range(100)]
        long += [Delete(A, b"a%03d" % number) for number in range(100, 150)]
        long += [Touch(A, b"a%03d" % number, 5000 if number % 2 else None) for number in range(150, 200)]
        long += [Set(A, b"a%03d" % number, b"1", Encoding.JSON, if_absent=True) for number in range(290, 310)]
        long += [Set(A, b"a%03d" % number, b"1", Encoding.JSON, keep_expiry=True) for number in range(200, 220)]
        long += [Sum(A, b"n%03d" % number, 5) for number in range(120)]
        long += [Delete(A, b"due%03d" % number) for number in range(30)]
        long += [put(b"due%03d" % number, b"1", 9000) for number in range(30, 60)]
        long += [put(b"large0", b"2"), Delete(A, b"large1"), Touch(A, b"large2", 7000), put(b"large4", b"1" * 70_000)]
        long += [
            Set(P, ("p", key), f'["{number}","\\\\"]'.encode(), Encoding.JSON) for number, key in enumerate(plugin_keys)
        ]
        long += [Touch(P, ("p", "none"), 1000), Delete(P, ("q", "none"))]
        long += [put(b"b\x00\xff%04d" % number, b'"\\""', space=B) for number in range(1000)]
        random.Random(4).shuffle(long)
        await write(engine, *stored_before)
        for mutation in stored_before:
            await write(model, mutation)
        clock.advance(0.1)
        done = await write(engine, *long)
        alone = [await write(model, mutation) for mutation in long]
        assert done.found == tuple(found for each in alone for found in each.found)
        assert done.values == tuple(value for each in alone for value in each.values)
        every = (A, START, END), (B, START, END), (P, ("p", ""), ("p", "\U0010ffff"))
        for space, start, end in every:
            asks = Scan(space, start, end, 5000, times=True), Count(space, start, end)
            [found, count], [expected, expected_count] = await engine.read(*asks), await model.read(*asks)
            assert count == expected_count
            assert [replace(each, version=0) for each in found] == [replace(each, version=0) for each in expected]
        logged = await logged_after(engine, done.version - 1)
        assert {change.version for change in logged} == {done.version}
        expected_log = await logged_after(model, alone[0].version - 1)
        assert sorted([(change.space, change.key, change.kind) for change in logged]) == sorted(
            [(change.space, change.key, change.kind) for change in expected_log]
        )

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
