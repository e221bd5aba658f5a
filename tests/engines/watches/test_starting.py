"""What keeps a watch from reporting keeps no other from it: one that has yet to start, a read that fails."""

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace

from keyloft import DatabaseError, ManualClock
from keyloft.core.records import Ask, Batch, Change, Committed, Due, Latest, Scan, Space
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.starting import WatchStarter
from keyloft.engines.watches.watch import EngineWatch
from tests.support.postgres_commits import opened, put


async def test_a_watch_that_has_not_started_keeps_no_other_from_reporting(
    emptied_postgres_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: WatchStarter, watch: object) -> None:
        await asyncio.Event().wait()

    async def changed() -> list[bytes]:
        async with asyncio.timeout(30):
            changes: list[Change] = await anext(watch)
            return [change.key for change in changes]

    async with opened(emptied_postgres_url, clock) as engine, opened(emptied_postgres_url, clock) as other:
        watch = engine.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1))
        await engine.commit(Batch((put(b"expiring", expire_in=1000),)))
        assert await changed() == [b"expiring"]
        monkeypatch.setattr(WatchStarter, "_start", never)
        engine.watch(Scan(Space.SEMANTIC, b"\x00", b"\xff", 1))
        clock.advance(2)
        assert await changed() == [b"expiring"]
        await other.commit(Batch((put(b"foreign"),)))
        assert await changed() == [b"foreign"]


async def test_a_watch_that_continues_misses_nothing_until_it_has_started(
    emptied_postgres_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another watch of the engine follows the log already, so that one can catch up before it knows its beginning."""
    may_start = asyncio.Event()

    async def answer_later() -> tuple[int, int]:
        await may_start.wait()
        return await answer()

    async with (
        opened(emptied_postgres_url, clock) as engine,
        opened(emptied_postgres_url, clock) as other,
        asyncio.timeout(30),
    ):
        done = await engine.commit(Batch((put(b"expiring", expire_in=1000),)))
        assert isinstance(done, Committed)
        first = engine.watch(Scan(Space.SEMANTIC, b"\x00", b"\xff", 1))
        await engine.read(Latest())  # reads wait until it has started
        answer = engine.reads.counter
        monkeypatch.setattr(engine.reads, "counter", answer_later)
        watch = cast("EngineWatch[Change]", engine.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1), since=done.version))
        reads = 0
        while watch.is_woken:
            assert await watch.take() == []
            assert (reads := reads + 1) < 100, "it reads the log to its end, not without pause until it has started"
        clock.advance(2)
        foreign = await other.commit(Batch((put(b"foreign"), replace(put(b"seen"), space=Space.SEMANTIC))))
        assert isinstance(foreign, Committed)
        await anext(first)  # so the feed has passed on that commit
        may_start.set()
        await engine.read(Latest())
        found = set[bytes]()
        while found != {b"expiring", b"foreign"}:
            found |= {change.key for change in await anext(watch)}


async def test_a_read_that_did_not_wait_for_a_watch_to_start_is_not_older_than_its_start(
    emptied_postgres_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch may take long to start, as in a failover, and then starts at a version after that of the answer."""
    may_start, was_read = asyncio.Event(), asyncio.Event()
    wait, bounds = WatchStarter.wait, iter([False])

    async def answer_later() -> tuple[int, int]:
        await may_start.wait()
        return await answer()

    async def first_not_at_all(self: WatchStarter, seconds: float | None = None) -> bool:
        return next(bounds, True) and await wait(self)

    async with opened(emptied_postgres_url, clock) as engine, opened(emptied_postgres_url, clock) as other:
        answer, read = engine.reads.counter, engine.reads.read

        async def noted(*asks: Ask) -> list[Any]:
            found = await read(*asks)
            was_read.set()
            return found

        monkeypatch.setattr(engine.reads, "counter", answer_later)
        monkeypatch.setattr(engine.reads, "read", noted)
        monkeypatch.setattr(WatchStarter, "wait", first_not_at_all)
        everything = Scan(Space.TUPLES, b"\x00", b"\xff", 10)
        async with asyncio.timeout(30):
            watch = engine.watch(everything)
            reading = asyncio.create_task(engine.read(everything))
            await was_read.wait()
            await other.commit(Batch((put(b"k"),)))
            may_start.set()
            [page] = await reading
        assert list(page.keys) == [b"k"]
        await watch.aclose()


async def test_watches_survive_an_unexpected_failure_of_the_feed(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("keyloft.limits.WATCH_CHECK_SECONDS", 0.001)
    engine, failures = MemoryEngine(clock), [RuntimeError("unexpected")]
    read = engine.read

    async def failing_once(*asks: Ask) -> list[Any]:
        if failures:
            raise failures.pop()
        return await read(*asks)

    watch = engine.watch(Scan(Space.TUPLES, b"\x00", b"\xff", 1))
    await engine.commit(Batch((put(b"expiring", expire_in=1000),)))
    assert [change.key for change in await anext(watch)] == [b"expiring"]
    monkeypatch.setattr(engine, "read", failing_once)
    clock.advance(2)
    async with asyncio.timeout(30):
        while "unexpectedly" not in caplog.text:
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert [change.record for change in await anext(watch)] == [None]
    await engine.aclose()


async def test_the_end_of_a_watch_that_no_one_reads_is_logged_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What ends watches, such as a file that was replaced, is found again and again."""
    engine = MemoryEngine(clock)
    feed, everything = ChangeFeed(engine, clock), (Scan(Space.TUPLES, b"\x00", b"\xff", 1),)
    watches = [feed.watch(everything, None, Start(0, clock.now()))]
    for _ in range(3):
        feed.fail(DatabaseError("it was replaced"))
    watches.append(feed.watch(everything, None, Start(0, clock.now())))
    feed.fail(DatabaseError("it was replaced"))
    for watch in watches:
        with pytest.raises(DatabaseError, match="it was replaced"):
            await anext(watch)
    assert caplog.text.count("watches end: it was replaced") == len(watches)
    feed.close()
    await engine.aclose()


async def test_a_watch_that_starts_during_a_read_of_expiries_gets_none_of_before(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server says when the watch starts while it answers an earlier read: its clock was not set back."""
    engine = MemoryEngine(clock)
    read, is_read, may_answer, spaces = engine.read, asyncio.Event(), asyncio.Event(), list[Space]()

    async def answer_late(*asks: Ask) -> list[Any]:
        found = await read(*asks)
        if isinstance(first := asks[0], Due):
            spaces.append(first.space)
            is_read.set()
            await may_answer.wait()
        return found

    monkeypatch.setattr(engine, "read", answer_late)
    expired = await engine.commit(Batch((put(b"expired", expire_in=1000),)))
    assert isinstance(expired, Committed)
    clock.advance(2)
    feed = ChangeFeed(engine, clock)
    earlier = feed.watch((Scan(Space.SEMANTIC, b"\x00", b"\xff", 1),), None, Start(expired.version, clock.now()))
    async with asyncio.timeout(30):
        await is_read.wait()
        clock.advance(0.001)
        watch = feed.watch((Scan(Space.TUPLES, b"\x00", b"\xff", 1),), None, Start(expired.version, clock.now()))
        may_answer.set()
        while Space.TUPLES not in spaces:
            await asyncio.sleep(0)
        marker = await engine.commit(Batch((put(b"marker"),)))
        assert isinstance(marker, Committed)
        feed.observe(marker.version)
        assert [change.key for change in await anext(watch)] == [b"marker"]
    await earlier.aclose()
    feed.close()
    await engine.aclose()


async def test_expiries_that_are_to_be_read_again_are_so_if_the_log_is_being_read(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch meets an entry that is alive though its expiry was read, while a commit waits for expiries before it."""
    engine = MemoryEngine(clock)
    read, reads, is_read, may_answer = engine.read, list[Ask](), asyncio.Event(), asyncio.Event()

    async def answer_late(*asks: Ask) -> list[Any]:
        found = await read(*asks)
        reads.extend(asks)
        if isinstance(asks[0], Due) and clock.now() > start.at and not is_read.is_set():
            is_read.set()
            await may_answer.wait()
        return found

    await engine.commit(Batch((put(b"earlier", expire_in=1000),)))
    put_later = await engine.commit(Batch((put(b"later", expire_in=3000),)))
    assert isinstance(put_later, Committed)
    clock.advance(2)
    monkeypatch.setattr(engine, "read", answer_late)
    feed, start = ChangeFeed(engine, clock), Start(put_later.version, clock.now())
    watch = feed.watch((Scan(Space.TUPLES, b"\x00", b"\xff", 1),), None, start)
    async with asyncio.timeout(30):
        while not reads:
            await asyncio.sleep(0)
        clock.advance(20)
        marker = await engine.commit(Batch((put(b"marker"),)))
        assert isinstance(marker, Committed)
        feed.observe(marker.version)
        await is_read.wait()
        feed.dispatch_expiries_after(start.at - 1500)
        may_answer.set()
        found = set[bytes]()
        while b"earlier" not in found:
            found |= {change.key for change in await anext(watch)}
    feed.close()
    await engine.aclose()
