"""The change log tells what each commit changed, and who follows it gets each change in order."""

import asyncio

import pytest

from keyloft import HistoryGone, ManualClock, limits
from keyloft.core.engine import Engine
from keyloft.core.records import (
    Append,
    ChangeKind,
    Changes,
    Delete,
    Get,
    Key,
    Latest,
    LoggedChange,
    LogPosition,
    Purge,
    Scan,
    Set,
    Touch,
    appended_key,
)
from keyloft.core.sweeper import sweep
from keyloft.core.values import Encoding
from keyloft.nats.change_reader import ChangeReader
from tests.engines.contract.calls import (
    END,
    LONGEST_SECONDS,
    START,
    A,
    B,
    P,
    next_of,
    put,
    read_the_log_in_small_slices,
    taken,
    write,
)


class ChangeLogContract:
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
        async with asyncio.timeout(LONGEST_SECONDS):
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

    async def test_an_entry_that_one_batch_puts_and_touches_is_logged_as_put(self, engine: Engine) -> None:
        woken = asyncio.Event()
        log = engine.follow(Scan(A, START, END, 1), woken=woken.set)
        both = await write(engine, put(b"k"), Touch(A, b"k", 60_000))
        await asyncio.gather(write(engine, put(b"k")), write(engine, Touch(A, b"k", 50_000)))
        await write(engine, put(b"last"))
        changes = await taken(log, woken, 3)
        assert [(change.key, change.kind) for change in changes] == [
            (b"k", ChangeKind.PUT),
            (b"k", ChangeKind.PUT),
            (b"last", ChangeKind.PUT),
        ]
        assert changes[0].version == both.version

    async def test_who_follows_the_log_from_a_version_gets_an_entry_that_a_long_batch_puts_and_touches(
        self, engine: Engine
    ) -> None:
        """A long batch may be logged in parts, each with its own change of the entry."""
        [before] = await engine.read(Latest())
        others = [put(b"other %d" % number) for number in range(limits.LONG_BATCH_OPERATIONS)]
        done = await write(engine, put(b"k"), *others, Touch(A, b"k", 60_000))
        woken = asyncio.Event()
        log = engine.follow(Scan(A, START, END, 1), woken=woken.set, since=before)
        changes = await taken(log, woken, 1 + len(others))
        reported = [(change.version, change.kind) for change in changes if change.key == b"k"]
        assert reported in ([(done.version, ChangeKind.PUT)], [(done.version, ChangeKind.PUT)] * 2)

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

    async def test_who_follows_the_log_and_falls_behind_gets_no_older_change_after_a_newer_one(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Every slice of the log is dispatched in several steps, and some steps are too much to keep.
        for name, number in (("WATCH_INLINE_CHANGES", 0), ("WATCH_INLINE_CALLS", 3), ("WATCH_PENDING_KEYS", 3)):
            monkeypatch.setattr(limits, name, number)
        log = engine.follow(Scan(A, START, END, 1), woken=lambda: None)
        await engine.read(Latest())
        versions = [0]
        async with asyncio.timeout(LONGEST_SECONDS):
            for pauses in (1, 2, 3, 4):
                writes = [asyncio.create_task(write(engine, put(b"%d" % one))) for one in range(40)]
                while versions[-1] < max([one.result().version if one.done() else 2**53 for one in writes]):
                    for _ in range(pauses):
                        await asyncio.sleep(0)
                    versions += [change.version for change in await log.take()]
        assert versions == sorted(versions)

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

    async def test_who_follows_a_long_commit_in_slices_gets_expiries_after_the_puts_that_they_end(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        woken = asyncio.Event()
        before = engine.follow(Get(A, b"first"), woken=woken.set)
        await write(engine, put(b"first", expire_in=1000))
        clock.advance(2)
        await taken(before, woken, 2)
        clock.advance(-2)  # the commit takes its time, and others see it later

        def wake() -> None:
            clock.advance(0 if reported else 2)
            woken.set()

        reported: list[LoggedChange] = []
        log = engine.follow(Scan(A, b"k", b"l", 1), woken=wake)
        keys = [b"k%04d" % number for number in range(limits.MEMORY_SLICE_CHANGES + 500)]
        await write(engine, *[put(key, expire_in=1000) for key in keys])
        while len(reported) < 2 * len(keys):
            reported += await taken(log, woken, 1)
        versions = [change.version for change in reported]
        assert versions == sorted(versions)

    @pytest.mark.parametrize("from_event", [False, True])
    async def test_who_follows_the_log_and_is_ended_again_and_again_learns_of_expiries_that_are_not_swept(
        self, engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, from_event: bool
    ) -> None:
        """The next follower continues from an event, or from what was reached, with a minute of the log still ahead."""
        read_the_log_in_small_slices(monkeypatch)
        monkeypatch.setattr(limits, "EVENTS_PER_TURN", 3)
        monkeypatch.setattr(limits, "WATCH_DUE_KEYS", 2)
        [since] = await engine.read(Latest())
        keys = [b"k%02d" % number for number in range(20)]
        for key in keys:
            await write(engine, put(key, expire_in=7000), put(b"last", b"1"))
            clock.advance(3)
        clock.advance(7)
        written, gone = set[Key](), set[Key]()
        async with asyncio.timeout(LONGEST_SECONDS):
            while len(gone) < len(keys):
                changes = ChangeReader(engine.follow(Scan(A, START, END, 1), woken=lambda: None, since=since), since)
                continued = since
                while continued == since and len(gone) < len(keys):
                    for change, may_continue in await changes.next_changes():
                        (written if change.kind is ChangeKind.PUT else gone).add(change.key)
                        assert gone <= written, "an expiry follows the write that it ends"
                        if from_event and not may_continue:
                            continued = change.version
                    if not from_event:
                        continued = changes.reached
                    await asyncio.sleep(0)
                await changes.watch.aclose()
                since = continued
        assert written == {*keys, b"last"}


def _columns(change: LoggedChange) -> tuple[object, ...]:
    return change.version, change.space, change.key, change.kind, change.at
