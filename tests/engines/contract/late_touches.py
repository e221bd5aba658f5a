"""Who follows the log learns of a touch that is seen only after the expiry that it has put off."""

import asyncio

import pytest

from keyloft import ManualClock, limits
from keyloft.core.engine import Engine, LogWatch
from keyloft.core.records import ChangeKind, Committed, Key, Latest, LoggedChange, Mutation, Scan, Touch
from tests.engines.contract.calls import LONGEST_SECONDS, A, put, taken, write

_ALL = Scan(A, b"\x00", b"\xff", 1000)


def follow(engine: Engine, since: int | None = None) -> tuple[LogWatch, asyncio.Event]:
    woken = asyncio.Event()
    return engine.follow(_ALL, woken=woken.set, since=since), woken


async def write_late(engine: Engine, clock: ManualClock, seconds: float, *mutations: Mutation) -> Committed:
    """Commit as a process does that was stopped for so long after it had fixed the time of the commit."""
    clock.advance(-seconds)
    done = await write(engine, *mutations)
    clock.advance(seconds)
    return done


async def expired(engine: Engine, clock: ManualClock, log: LogWatch, woken: asyncio.Event) -> LoggedChange:
    """An entry that lives for a second is reported as put, and two seconds later as expired."""
    await write(engine, put(b"k", expire_in=1000))
    assert [change.kind for change in await taken(log, woken, 1)] == [ChangeKind.PUT]
    clock.advance(2)
    [gone] = await taken(log, woken, 1)
    assert (gone.key, gone.kind) == (b"k", ChangeKind.EXPIRED)
    return gone


async def until_put(log: LogWatch, woken: asyncio.Event, key: Key = b"k") -> LoggedChange:
    """The next put of a key that is reported."""
    while True:
        for change in await taken(log, woken, 1):
            if change.key == key and change.kind is ChangeKind.PUT:
                return change


async def caught_up(engine: Engine, log: LogWatch) -> list[LoggedChange]:
    """What is reported until everything is that was committed."""
    [latest] = await engine.read(Latest())
    changes: list[LoggedChange] = []
    async with asyncio.timeout(LONGEST_SECONDS):
        while (log.reached or 0) < latest or log.is_woken:
            changes += await log.take()
            await asyncio.sleep(0.001)
    return changes


class LateTouchContract:
    async def test_a_touch_that_is_seen_after_its_entrys_expiry_is_reported_as_a_put(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        log, woken = follow(engine)
        gone = await expired(engine, clock, log, woken)
        touched = await write_late(engine, clock, 1.5, Touch(A, b"k", 60_000))
        assert touched.found == (True,)
        again = await until_put(log, woken)
        assert again.version == touched.version > gone.version
        clock.advance(60)
        [gone_again] = await taken(log, woken, 1)
        assert (gone_again.kind, gone_again.version >= again.version) == (ChangeKind.EXPIRED, True)

    @pytest.mark.parametrize("is_seen", ["before the next one begins", "later"])
    async def test_a_follower_that_continues_for_another_one_learns_of_the_touch(
        self, engine: Engine, clock: ManualClock, is_seen: str
    ) -> None:
        log, woken = follow(engine)
        gone = await expired(engine, clock, log, woken)
        await log.aclose()
        if is_seen == "later":
            log, woken = follow(engine, gone.version)
            await caught_up(engine, log)
        touched = await write_late(engine, clock, 1.5, Touch(A, b"k", 60_000))
        if is_seen != "later":
            log, woken = follow(engine, gone.version)
        assert (await until_put(log, woken)).version == touched.version

    async def test_a_follower_that_falls_behind_learns_of_the_touch(
        self, engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "WATCH_PENDING_KEYS", 3)
        log, woken = follow(engine)
        await expired(engine, clock, log, woken)
        touched = await write_late(engine, clock, 1.5, Touch(A, b"k", 60_000))
        for number in range(10):
            await write(engine, put(b"%d" % number))
        assert (await until_put(log, woken)).version == touched.version

    async def test_a_follower_that_has_forgotten_what_it_reported_learns_of_the_touch(
        self, engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "WATCH_PENDING_KEYS", 3)
        log, woken = follow(engine)
        await write(engine, put(b"k", expire_in=6500))
        for number in range(1, 6):
            await write(engine, put(b"%d" % number, expire_in=7000 + number))
            await taken(log, woken, 1)
        clock.advance(6.6)
        await taken(log, woken, 1)
        for _ in range(5):
            clock.advance(0.1)
            await caught_up(engine, log)
        touched = await write_late(engine, clock, 1.5, Touch(A, b"k", 60_000))
        assert (await until_put(log, woken)).version == touched.version

    @pytest.mark.parametrize("continues", [False, True])
    async def test_a_touch_is_reported_after_a_clock_was_set_back_that_brings_an_expired_entry_back(
        self, engine: Engine, clock: ManualClock, continues: bool
    ) -> None:
        log, woken = follow(engine)
        gone = await expired(engine, clock, log, woken)
        clock.advance(-1.5)
        if continues:
            await log.aclose()
            log, woken = follow(engine, gone.version)
            await caught_up(engine, log)
        touched = await write(engine, Touch(A, b"k", 60_000))
        assert (await until_put(log, woken)).version == touched.version

    @pytest.mark.parametrize("continues", [False, True])
    async def test_touches_in_time_are_not_reported_to_who_has_caught_up(
        self, engine: Engine, clock: ManualClock, continues: bool
    ) -> None:
        """A lock is renewed every second, while entries expire and are written."""
        before = await write(engine, put(b"lock", expire_in=5000))
        log, woken = follow(engine, before.version if continues else None)
        await caught_up(engine, log)
        for number in range(8):
            await write(engine, put(b"%d" % number, expire_in=500))
            clock.advance(1)
            assert {change.key for change in await taken(log, woken, 2)} == {b"%d" % number}
            await write(engine, Touch(A, b"lock", 5000))
        assert await caught_up(engine, log) == []

    async def test_touches_of_a_backlog_are_reported_once_for_each_key(
        self, engine: Engine, clock: ManualClock
    ) -> None:
        """Who continues can't know which expiries they have put off, and which of these were reported.

        Nor of an entry that is put before: a client that knows the put, and an expiry since, ignores the put.
        """
        before = await write(engine, put(b"lock", expire_in=5000), put(b"changed", expire_in=5000))
        stored = await write(engine, put(b"new", expire_in=5000))
        for _ in range(8):
            clock.advance(1)
            last = await write(engine, *[Touch(A, key, 5000) for key in (b"changed", b"lock", b"new")])
        changed = await write(engine, put(b"changed"))
        log, _ = follow(engine, before.version)
        changes = [(change.key, change.version, change.kind) for change in await caught_up(engine, log)]
        assert changes == [
            (b"new", stored.version, ChangeKind.PUT),
            (b"lock", last.version, ChangeKind.PUT),
            (b"new", last.version, ChangeKind.PUT),
            (b"changed", changed.version, ChangeKind.PUT),
        ]
