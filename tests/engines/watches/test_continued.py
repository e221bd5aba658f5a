"""A reader that is ended again and again, and continues from what it has seen, learns of every expiry in the end."""

import asyncio
import random
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from keyloft import ManualClock, limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import ChangeKind, Delete, Get, Key, Latest, Mutation, Scan, Set, Space, Touch
from keyloft.core.sweeper import sweep
from keyloft.core.values import Encoding
from keyloft.engines import open_engine
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.watches.range_watch import RangeWatch
from keyloft.nats.change_reader import ChangeReader

pytestmark = pytest.mark.slow

_SPACE = Space.TUPLES
_SOME = Scan(_SPACE, b"k", b"l", 1000)
_KEYS = 60
_STEPS = 120
_PATIENCE = 400


class ContinuedReader(ABC):
    """Continues where it was ended; what it knows in the end is what all its watches together have reported."""

    def __init__(self, engine: Engine, chance: random.Random, since: int) -> None:
        self._engine = engine
        self._chance = chance
        self.since = since
        """A version after which the next watch may begin."""
        self.known: dict[Key, int] = {}
        self._has_begun = False

    @abstractmethod
    def begin(self) -> None:
        """Watch what happened since the version."""

    @abstractmethod
    async def take(self) -> None:
        """Take some changes, if there are any."""

    @abstractmethod
    async def end(self) -> None:
        """End the watch."""

    async def step(self) -> None:
        """Begin, take some changes, and end now and then."""
        if not self._has_begun:
            if self._chance.random() < 0.6:
                return
            self.begin()
            self._has_begun = True
        for _ in range(self._chance.choice((0, 1, 1, 3, 20))):
            await self.take()
            if self._chance.random() < 0.1:
                await self.end()
                self._has_begun = False
                return

    async def learns(self, state: dict[Key, int]) -> bool:
        """Whether it knows this state after a while."""
        while not self._has_begun:
            await self.step()
        for _ in range(_PATIENCE):
            await self.take()
            if self._has_learnt(state):
                break
            await asyncio.sleep(0 if isinstance(self._engine, MemoryEngine) else 0.001)
        await self.end()
        return self._has_learnt(state)

    def _has_learnt(self, state: dict[Key, int]) -> bool:
        return self.known == state

    async def read(self, key: Key) -> None:
        """Read an entry, as a program does that watches: what is reported later must tell if that has changed."""
        [record] = await self._engine.read(Get(_SPACE, key))
        self.learn(key, None if record is None else record.version)

    def learn(self, key: Key, version: int | None) -> None:
        if version is None:
            self.known.pop(key, None)
        else:
            self.known[key] = version


class FollowingReader(ContinuedReader):
    """Follows the log, as a watch over NATS does. It continues from an event, or from what the watch has reached."""

    def begin(self) -> None:
        self._changes = ChangeReader(self._engine.follow(_SOME, woken=lambda: None, since=self.since), self.since)
        self._newest = self.since

    async def take(self) -> None:
        for change, may_continue in await self._changes.next_changes():
            assert change.version >= self._newest, "no version is followed by a lower one"
            self._newest = change.version
            self.learn(change.key, change.version if change.kind is ChangeKind.PUT else None)
            if not may_continue:
                self.since = change.version

    def _has_learnt(self, state: dict[Key, int]) -> bool:
        # A touch that is reported as a put has a version of its own; its entry keeps the one it had.
        return self.known.keys() == state.keys() and all([self.known[key] >= state[key] for key in state])

    async def end(self) -> None:
        if self._chance.random() < 0.5:
            self.since = self._changes.reached
        await self._changes.watch.aclose()


class WatchingReader(ContinuedReader):
    """Watches a range, and continues from what the watch has reported to."""

    def begin(self) -> None:
        self._watch = self._engine.watch(_SOME, since=self.since)

    async def take(self) -> None:
        assert isinstance(self._watch, RangeWatch)
        for change in await self._watch.take() if self._watch.is_woken else ():
            self.learn(change.key, None if change.record is None else change.record.version)
        self.since = self._watch.reported_to or self.since

    async def end(self) -> None:
        await self._watch.aclose()


Reader = type[FollowingReader | WatchingReader]


class SlowClock(ManualClock):
    """Lets a commit have an earlier time, as if its process had been stopped since."""

    behind = 0

    def now(self) -> int:
        behind, self.behind = self.behind, 0
        return super().now() - behind


class Writer:
    """Changes entries, and the time. Some commits take their time: others see them later than they were made."""

    def __init__(self, engines: list[Engine], clocks: list[SlowClock], chance: random.Random) -> None:
        """The reader has the first engine; each has a clock."""
        self._engines, self._clocks, self._chance = engines, clocks, chance
        self.latest = clocks[0].now()
        """The latest time that there has been."""

    def advance(self, seconds: float) -> None:
        for clock in self._clocks:
            clock.advance(seconds)
        self.latest = max(self.latest, self._clocks[0].now())

    async def change(self) -> None:
        """Change a few entries, or the time."""
        chance = self._chance
        at = chance.randrange(len(self._engines))
        key, expire_in = _some_key(chance), chance.choice((None, 100, 1000, 7000, 30_000))
        back = chance.choice((0.2, 1, 6)) if chance.random() < 0.1 else 0.0
        match chance.randrange(12):
            case 0 | 1 | 2:
                await self._write(at, back, Set(_SPACE, key, b"1", Encoding.JSON, expire_in))
            case 3:
                keys = {_some_key(chance) for _ in range(10)}
                await self._write(at, back, *[Set(_SPACE, one, b"1", Encoding.JSON, expire_in) for one in keys])
            case 4:
                await self._write(at, back, Delete(_SPACE, key))
            case 5 | 6:
                await self._write(at, back, Touch(_SPACE, key, expire_in))
            case 7:
                await self._write(at, back, Set(_SPACE, b"other", b"1", Encoding.JSON, expire_in))
            case 8 | 9:
                self.advance(chance.choice((0.05, 1, 4, 20)))
            case 10:
                if chance.random() < 0.3:
                    self.advance(-chance.choice((1, 4, 20)))
            case _:
                if chance.random() < 0.2:
                    await sweep(self._engines[at], _SPACE)

    async def expired(self) -> tuple[Key, int] | None:
        """An entry that has expired lately, if there is one, and when."""
        keys = [b"k%02d" % number for number in range(_KEYS)]
        records = await self._engines[-1].read(*[Get(_SPACE, key, include_expired=True) for key in keys])
        now = self._clocks[0].now()
        moments = {one.key: one.expires_at for one in records if one is not None and one.expires_at is not None}
        expired = sorted([(moment, key) for key, moment in moments.items() if moment <= now])
        moment, key = self._chance.choice(expired[-3:]) if expired else (0, b"")
        return (key, moment) if expired else None

    async def touch_late(self, key: Key, moment: int) -> None:
        """Touch an entry before the moment at which it expires; all others see that only now."""
        at = self._chance.randrange(len(self._engines))
        back = (self._clocks[0].now() - moment + 1) / 1000
        await self._write(at, back, Touch(_SPACE, key, self._chance.choice((None, 1000, 30_000))))

    async def _write(self, at: int, back: float, *changes: Mutation) -> None:
        self._clocks[at].behind = round(1000 * back)
        await write(self._engines[at], *changes)
        self._clocks[at].behind = 0


def _some_key(chance: random.Random) -> Key:
    return b"k%02d" % chance.randrange(_KEYS)


async def _learns_all(
    reader_class: Reader, engines: list[Engine], clocks: list[SlowClock], chance: random.Random
) -> bool:
    [since] = await engines[0].read(Latest())
    reader, writer = reader_class(engines[0], chance, since), Writer(engines, clocks, chance)
    for _ in range(_STEPS):
        late = None
        if chance.random() < 0.1:
            writer.advance(chance.choice((0.2, 1, 4)))
            late = await writer.expired()
        else:
            await writer.change()
        if chance.random() < 0.3:
            await reader.read(_some_key(chance) if late is None else late[0])
        for _ in range(chance.choice((0, 1, 1, 5))):
            await asyncio.sleep(0)
        if chance.random() < 0.4:
            await reader.step()
        if late is not None:
            await writer.touch_late(*late)
    writer.advance((writer.latest - clocks[0].now()) / 1000 + chance.choice((0, 1, 20)))
    await write(engines[-1], Set(_SPACE, b"other", b"2", Encoding.JSON))
    [page] = await engines[0].read(_SOME)
    return await reader.learns({record.key: record.version for record in page})


def _choose_bounds(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Small bounds, so that readers fall behind, and a backlog has many slices and pages."""
    for name, numbers in (
        ("WATCH_PENDING_KEYS", (5, 20, 10_000)),
        ("WATCH_DUE_KEYS", (1, 5, 1000)),
        ("WATCH_INLINE_CHANGES", (0, 1000)),
        ("LOG_SLICE_ROWS", (3, 1000)),
        ("MEMORY_SLICE_CHANGES", (4, 1000)),
        ("EVENTS_PER_TURN", (1, 3, 256)),
        ("WATCH_REPORT_BYTES", (3, 1000)),
    ):
        monkeypatch.setattr(limits, name, chance.choice(numbers))


async def in_memory(reader: Reader, seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    chance, clock = random.Random(seed), SlowClock()
    _choose_bounds(monkeypatch, chance)
    engine = MemoryEngine(clock)
    try:
        return await _learns_all(reader, [engine], [clock], chance)
    finally:
        await engine.aclose()


async def on_a_file(reader: Reader, seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    chance, clocks = random.Random(seed), [SlowClock(), SlowClock()]
    _choose_bounds(monkeypatch, chance)
    engines = [await open_engine(str(path), clock=clock, durability="relaxed") for clock in clocks]
    try:
        return await _learns_all(reader, engines, clocks, chance)
    finally:
        for engine in engines:
            await engine.aclose()


@pytest.mark.parametrize("reader", [FollowingReader, WatchingReader])
async def test_in_memory(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [seed for seed in range(200) if not await in_memory(reader, seed, monkeypatch)] == []


@pytest.mark.parametrize("reader", [FollowingReader, WatchingReader])
async def test_two_writers_on_a_file(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = [seed for seed in range(20) if not await on_a_file(reader, seed, tmp_path / f"{seed}.db", monkeypatch)]
    assert missed == []
