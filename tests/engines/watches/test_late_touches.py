"""A touch by a process that was stopped within its commit: meanwhile, readers found no entry."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keyloft import ManualClock
from keyloft.core.records import Batch, ChangeKind, Due, Get, Latest, Now, Scan, Touch
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.writes import SqliteWriter
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.engines.watches.followed import FollowedLog
from tests.engines.contract.calls import END, START, A, get, put, write
from tests.engines.contract.late_touches import caught_up, follow, until_put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
async def engine(path: Path, clock: ManualClock) -> AsyncIterator[SqliteEngine]:
    engine = await SqliteEngine.open(SqliteFile(str(path)), clock)
    yield engine
    await engine.aclose()


class StoppedWriter:
    """Another process: the times of its commits are those at which it was stopped."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        file, self.clock = SqliteFile(str(path)), ManualClock(clock.now())
        self._writer = SqliteWriter(file, self.clock, file.open_writer(), KeptHistory())

    def touch(self, key: bytes, expire_in: int = 60_000) -> int:
        """Returns the version of the commit."""
        return self._writer.attempt_alone(Batch((Touch(A, key, expire_in),))).version_after

    def put(self, key: bytes, expire_in: int) -> int:
        return self._writer.attempt_alone(Batch((put(key, expire_in=expire_in),))).version_after

    def close(self) -> None:
        self._writer.connection.close()


@pytest.fixture
async def other(engine: SqliteEngine, path: Path, clock: ManualClock) -> AsyncIterator[StoppedWriter]:
    other = StoppedWriter(path, clock)
    yield other
    other.close()


class Feed:
    """A feed of its own on a file, so that a test chooses in which order it reads."""

    def __init__(self, engine: SqliteEngine, clock: ManualClock) -> None:
        self._engine = engine
        self.before_expiries: Callable[[], None] = lambda: None
        self.after_read_of_entries: Callable[[], Awaitable[None]] | None = None
        self.feed = ChangeFeed(self, clock)
        self.woken = asyncio.Event()

    async def read(self, *asks: Any) -> Any:
        if isinstance(asks[0], Due):
            self.before_expiries()
        answers = await self._engine.read(*asks)
        if isinstance(asks[0], Get) and self.after_read_of_entries is not None:
            then, self.after_read_of_entries = self.after_read_of_entries, None
            await then()
        return answers

    async def sees(self, version: int) -> None:
        """Dispatch a commit."""
        self.feed.observe(version)
        while self.feed.last_version < version:
            await asyncio.sleep(0)

    async def follow_an_entry(self, expire_in: int) -> FollowedLog:
        """Follow the log, and put an entry that is reported."""
        latest, now = await self._engine.read(Latest(), Now())
        log = self.feed.follow((Scan(A, START, END, 1),), None, self.woken.set, Start(latest, now))
        self.feed.observe((await write(self._engine, put(b"k", expire_in=expire_in))).version)
        await until_put(log, self.woken)
        await asyncio.sleep(0)  # reads the expiries, too
        return log


@pytest.mark.parametrize("reads_first", ["log", "expiries"])
async def test_the_touch_is_seen_before_the_expiry_that_is_due_was_dispatched(
    engine: SqliteEngine, other: StoppedWriter, clock: ManualClock, reads_first: str
) -> None:
    feed = Feed(engine, clock)
    log = await feed.follow_an_entry(1000)
    versions = list[int]()
    if reads_first == "log":
        clock.advance(2)  # from now on, a reader finds no entry
        versions.append(other.touch(b"k"))
    else:
        feed.before_expiries = lambda: None if versions else versions.append(other.touch(b"k"))
        clock.advance(2)
        while not versions:
            await asyncio.sleep(0)
    feed.feed.observe(versions[0])
    assert (await until_put(log, feed.woken)).version == versions[0]


@pytest.mark.parametrize("is_seen", ["before", "during", "after"])
async def test_the_touch_is_seen_after_the_expiry_was_dispatched(
    engine: SqliteEngine, other: StoppedWriter, clock: ManualClock, is_seen: str
) -> None:
    """Before the entry is read, once that read has shown none, or once it has shown that it is there again."""
    feed = Feed(engine, clock)
    log = await feed.follow_an_entry(1000)
    clock.advance(2)
    while not log.is_woken:
        await asyncio.sleep(0)
    assert await get(engine, b"k") is None
    if is_seen == "during":
        feed.after_read_of_entries = lambda: feed.sees(other.touch(b"k"))
        assert [change.kind for change in await log.take()] == [ChangeKind.EXPIRED]
        version = feed.feed.last_version
    else:
        version = other.touch(b"k")
        if is_seen == "before":
            await feed.sees(version)
        else:
            await asyncio.sleep(0)  # reads of one iteration of the event loop share a view
            assert await log.take() == []
        await feed.sees(version)
    assert (await until_put(log, feed.woken)).version == version


async def test_touches_of_another_process_in_time_are_not_reported(
    engine: SqliteEngine, other: StoppedWriter, clock: ManualClock
) -> None:
    await write(engine, put(b"lock", expire_in=5000))
    log, _ = follow(engine)
    await caught_up(engine, log)
    for number in range(5):
        other.put(b"%d" % number, expire_in=500)
        changes = await caught_up(engine, log)
        for one in (clock, other.clock):
            one.advance(1)
        while not any([change.kind is ChangeKind.EXPIRED for change in changes]):
            changes += await log.take()
            await asyncio.sleep(0.001)
        assert b"%d" % number in {change.key for change in changes}
        version = other.touch(b"lock", 5000)
        assert await engine.read(Latest()) == [version]
        # What was reported before may be reported again.
        assert b"lock" not in [change.key for change in await caught_up(engine, log)]
