"""A watch reports every change, and can continue from a version."""

import asyncio

import pytest

from keyloft import ManualClock
from keyloft.core.engine import Engine
from keyloft.core.records import Add, ChangeKind, Delete, Get, Key, Latest, Scan, Set, Touch
from keyloft.core.values import Encoding
from tests.engines.contract.calls import (
    END,
    IN_LARGE_BATCHES,
    START,
    A,
    collect,
    next_of,
    put,
    read_the_log_in_small_slices,
    scan,
    taken,
    values_of,
    write,
    write_large_batches,
)


class WatchContract:
    # From now on

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

    async def test_a_watch_sees_an_expiry_that_a_clock_skips_while_it_is_set_right_again(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, put(b"first", expire_in=60_000))
        watch, key = engine.watch(Scan(A, START, END, 1)), engine.watch(Get(A, b"second"))
        assert values_of(await next_of(key)) == {b"second": None}
        clock.advance(60)
        assert values_of(await next_of(watch)) == {b"first": None}
        clock.advance(-30)
        await write(engine, put(b"second", b"2", expire_in=1000))
        assert values_of(await next_of(watch)) == {b"second": b"2"}
        assert values_of(await next_of(key)) == {b"second": b"2"}
        clock.advance(40)
        assert values_of(await next_of(watch))[b"second"] is None
        assert values_of(await next_of(key)) == {b"second": None}

    async def test_a_watch_that_begins_after_the_clock_was_set_back_sees_an_entry_expire_again(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        await write(engine, put(b"k", b"1", expire_in=60_000))
        earlier = engine.watch(Get(A, b"k"), Get(A, b"other"))
        assert values_of(await next_of(earlier)) == {b"k": b"1", b"other": None}
        clock.advance(60)
        assert values_of(await next_of(earlier)) == {b"k": None, b"other": None}
        clock.advance(-30)
        watch = engine.watch(Get(A, b"k"))
        assert values_of(await next_of(watch)) == {b"k": b"1"}
        clock.advance(30)
        assert values_of(await next_of(watch)) == {b"k": None}

    # From a version on

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
        read_the_log_in_small_slices(monkeypatch)
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

    async def test_all_up_to_where_a_watch_has_reported_to_was_reported(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also in the midst of the changes of a long commit, or of a group of commits."""
        read_the_log_in_small_slices(monkeypatch)
        watch = engine.watch(Scan(A, START, END, 1))
        writing = asyncio.create_task(write_large_batches(engine))
        seen, states = set[Key](), list[tuple[int, set[Key]]]()
        while len(seen) < IN_LARGE_BATCHES:
            seen |= {change.key for change in await next_of(watch)}
            states.append((watch.reported_to or 0, seen.copy()))
        versions = await writing
        for reported_to, keys in states:
            assert not {key for key, version in versions.items() if version <= reported_to} - keys

    async def test_all_up_to_where_a_follower_of_the_log_has_reached_was_reported(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read_the_log_in_small_slices(monkeypatch)
        woken = asyncio.Event()
        log = engine.follow(Scan(A, START, END, 1), woken=woken.set)
        writing = asyncio.create_task(write_large_batches(engine))
        seen, states = set[Key](), list[tuple[int, set[Key]]]()
        while len(seen) < IN_LARGE_BATCHES:
            seen |= {change.key for change in await taken(log, woken, 1)}
            states.append((log.reached or 0, seen.copy()))
        versions = await writing
        for reached, keys in states:
            assert not {key for key, version in versions.items() if version <= reached} - keys

    async def test_a_follower_of_the_log_learns_of_an_entry_that_has_expired_when_it_is_written(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        woken = asyncio.Event()
        log = engine.follow(Scan(A, START, END, 1), woken=woken.set)
        await write(engine, put(b"a"), put(b"b"), put(b"c"))
        await taken(log, woken, 3)
        past = clock.now() - 5000
        await write(engine, Touch(A, b"a", expire_at=past))
        await write(engine, put(b"b", expire_in=0))
        await write(
            engine,
            Touch(A, b"c", 0),
            Set(A, b"d", b"1", Encoding.JSON, expire_at=past),
            Add(A, b"e", 1, expire_at=past),
        )
        changes = await taken(log, woken, 5)
        assert [change.key for change in changes] == [b"a", b"b", b"c", b"d", b"e"]
        assert {change.kind for change in changes} == {ChangeKind.EXPIRED}

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
        read_the_log_in_small_slices(monkeypatch)
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
