"""Tells watchers what changed: what this process committed at once, what others committed by looking again."""

import asyncio
import heapq
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TypeAlias

from keyloft import limits
from keyloft.clock import Clock, Timer
from keyloft.core.engine import Reader
from keyloft.core.paging import Pages
from keyloft.core.records import EVERYTHING, Address, Change, Get, Key, Latest, Record, Scan
from keyloft.errors import Closed

Beginning: TypeAlias = Callable[[], int | asyncio.Future[int]]
"""Tells the version of the last commit; a database elsewhere needs a moment for that."""

# A watch of a large range spends at most a tenth of the time on looking through it.
_REST = 9.0
_LOOK_AGAIN_SECONDS = 0.002


class Notifier:
    """Knows the open watches of an engine and wakes those that a commit concerns."""

    def __init__(self, engine: Reader, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        # Weak: a watch that its user dropped without closing it is gone.
        self._watches: weakref.WeakSet[KeyWatch | RangeWatch] = weakref.WeakSet()
        # Strong while somebody waits: a task that nobody but its own watch refers to must not be collected.
        self._awaited: set[object] = set()
        self.seen_clock: int | None = None
        """The version of the last commit that was heard of."""

    def watch(self, asks: tuple[Get | Scan, ...], begin: Beginning) -> "KeyWatch | RangeWatch":
        """Make a watch of what is committed from now on."""
        scans = [ask for ask in asks if isinstance(ask, Scan)]
        gets = [ask for ask in asks if isinstance(ask, Get)]
        watch: KeyWatch | RangeWatch
        if len(scans) == 1 and not gets:
            watch = RangeWatch(self._engine, self._clock, self._awaited, scans[0], begin)
        elif gets and not scans:
            watch = KeyWatch(self._engine, self._clock, self._awaited, gets)
        else:
            raise ValueError("watch takes Gets, or one Scan")
        self._watches.add(watch)
        return watch

    @property
    def watched(self) -> bool:
        return bool(self._watches)

    def committed(self, addresses: Iterable[Address], latest: int) -> None:
        """This process wrote these keys, up to version `latest`."""
        if self._watches:
            touched = set(addresses)
            for watch in list(self._watches):
                watch.touched(touched, latest)

    def observe(self, before: int, after: int) -> None:
        """Notice from the clock, before and after something of ours, that somebody else committed."""
        if before != self.seen_clock:
            self.committed_elsewhere()
        self.seen_clock = after

    def told_of(self, version: int) -> None:
        """Somebody else committed up to this version."""
        self.seen_clock = max(version, self.seen_clock or 0)
        self.committed_elsewhere()

    def committed_elsewhere(self) -> None:
        """Another process wrote something."""
        for watch in list(self._watches):
            watch.suspect()

    async def quiet(self, seconds: float) -> None:
        """Wait until the watches have told what they were woken for, but no longer than this."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while any([watch.is_busy for watch in self._watches]) and loop.time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    def close(self) -> None:
        for watch in list(self._watches):
            watch.end()


class _Waking(ABC):
    """An async iterator that sleeps until it is woken, by a commit or by an entry's expiry."""

    def __init__(self, engine: Reader, clock: Clock, awaited: set[object]) -> None:
        self._engine = engine
        self._clock = clock
        self._awaited = awaited
        self._ended = False
        self._is_looking = False
        self._timer: Timer | None = None
        self._woken = asyncio.Event()
        self._woken.set()

    def __aiter__(self) -> AsyncIterator[list[Change]]:
        return self

    async def __anext__(self) -> list[Change]:
        while True:
            self._awaited.add(self)
            try:
                await self._woken.wait()
            finally:
                self._awaited.discard(self)
            if self._ended:
                raise StopAsyncIteration
            # Cleared before looking: whatever happens from here on wakes again.
            self._woken.clear()
            self._is_looking = True
            try:
                changes = await self._look()
            except Closed:
                # The store began to close while this watch was looking: for a watch, that is the end.
                self.end()
                raise StopAsyncIteration from None
            except BaseException:
                self._woken.set()
                raise
            finally:
                self._is_looking = False
            if changes:
                return changes

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for what this watch is about to tell."""
        return self._is_looking or (self._woken.is_set() and self in self._awaited)

    async def aclose(self) -> None:
        self.end()

    def end(self) -> None:
        self._ended = True
        self._wake_at(None)
        self._woken.set()

    @abstractmethod
    async def _look(self) -> list[Change]:
        """What changed since the last look; if this raises, nothing counts as reported."""

    def _wake_at(self, moment: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The callback holds the event alone: a timer must not keep a dropped watch alive.
        self._timer = None if moment is None or self._ended else self._clock.call_at(moment, self._woken.set)


class KeyWatch(_Waking):
    """The state of some keys: once at first, then whenever one of them changed."""

    def __init__(self, engine: Reader, clock: Clock, awaited: set[object], gets: list[Get]) -> None:
        super().__init__(engine, clock, awaited)
        self._gets = gets
        self._addresses = {(get.space, get.key) for get in gets}
        self._reported: list[int | None] | None = None

    def touched(self, addresses: set[Address], latest: int) -> None:
        if not self._addresses.isdisjoint(addresses):
            self._woken.set()

    def suspect(self) -> None:
        self._woken.set()

    async def _look(self) -> list[Change]:
        records = await self._engine.read(*self._gets)
        self._wake_at(min((r.expires_at for r in records if r and r.expires_at is not None), default=None))
        state = [None if record is None else record.version for record in records]
        if state == self._reported:
            return []
        self._reported = state
        return [Change(get.key, record) for get, record in zip(self._gets, records, strict=True)]


class RangeWatch(_Waking):
    """The keys of a range that changed.

    A deletion by another process leaves nothing to be found, so the version of every entry in the range is held in
    memory, and compared with the whole range when another process committed something.
    """

    def __init__(self, engine: Reader, clock: Clock, awaited: set[object], scan: Scan, begin: Beginning) -> None:
        super().__init__(engine, clock, awaited)
        self._scan = Scan(scan.space, scan.start, scan.end, EVERYTHING, keys_only=True)
        self._begin = begin
        self._beginning = begin()
        self._first_look_at: int | None = None
        self._known: dict[Key, int] = {}
        self._due: dict[Key, int] = {}
        self._due_next: list[tuple[int, Key]] = []
        self._touched: set[Key] = set()
        self._unseen: set[Key] = set()
        self._suspicious = False
        self._rest_until = 0.0
        self._rested: asyncio.TimerHandle | None = None
        # At once, not with the first step: until then, others may delete what was there when the watch was made.
        self.first_survey: asyncio.Future[tuple[int, list[Record], int]] | None
        self.first_survey = asyncio.ensure_future(self._survey_first())
        self.first_survey.add_done_callback(lambda survey: survey.cancelled() or survey.exception())

    def touched(self, addresses: set[Address], latest: int) -> None:
        space, start, end = self._scan.space, self._scan.start, self._scan.end
        if keys := [key for at, key in addresses if at == space and start <= key < end]:
            self._touched.update(keys)
            # The first look may see a commit before word of it gets here: a key deleted by it was never seen at all.
            if self._first_look_at is None or latest <= self._first_look_at:
                self._unseen.update(keys)
            self._woken.set()

    def suspect(self) -> None:
        self._suspicious = True
        self._woken.set()

    def end(self) -> None:
        super().end()
        if self.first_survey is not None:
            self.first_survey.cancel()
        if self._rested is not None:
            self._rested.cancel()

    async def _look(self) -> list[Change]:
        doubtful, self._touched = self._touched | self._overdue(), set()
        suspicious, self._suspicious = self._suspicious, False
        try:
            if self._first_look_at is None:
                doubtful |= await self._look_first()
                # The first survey may be long done: what others committed since then is for the next look.
                self._suspicious |= suspicious
                if self._suspicious:
                    self._woken.set()
            elif suspicious and self._may_survey():
                doubtful |= self._differing(await self._survey())
            records = await self._read(sorted(doubtful))
        except BaseException:
            self._touched |= doubtful
            self._suspicious |= suspicious
            raise
        changes = [Change(key, record) for key, record in records.items() if self._is_news(key, record)]
        self._remember(records)
        self._unseen -= records.keys()
        self._wake_at(self._due_next[0][0] if self._due_next else None)
        return changes

    async def _look_first(self) -> set[Key]:
        """Learn what there is; returns what came after the watch was made, and so is news."""
        if self.first_survey is None:
            self._beginning = self._begin()
            self.first_survey = asyncio.ensure_future(self._survey_first())
        survey = self.first_survey
        await asyncio.wait([survey])  # which a cancelled caller leaves running
        if survey.cancelled():
            raise Closed
        self.first_survey = None
        made_at, records, self._first_look_at = survey.result()
        self._remember({record.key: record for record in records if record.version <= made_at})
        return {record.key for record in records if record.version > made_at}

    async def _survey_first(self) -> tuple[int, list[Record], int]:
        """From which version on something is news, what there is, and the version that this is sure to show."""
        made_at = self._beginning if isinstance(self._beginning, int) else await self._beginning
        records = await self._survey()
        [latest] = await self._engine.read(Latest())
        return made_at, records, latest

    async def _survey(self) -> list[Record]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = [record async for page in Pages(self._engine, self._scan) for record in page]
        self._rest_until = loop.time() + _REST * (loop.time() - began)
        return found

    def _may_survey(self) -> bool:
        """Whether it is time to look through the whole range again; if not, wakes when it is."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._rest_until:
            return True
        self._suspicious = True
        if not self._rested:
            self._rested = loop.call_at(self._rest_until, self._end_rest)
        return False

    def _end_rest(self) -> None:
        self._rested = None
        self._woken.set()

    def _differing(self, records: list[Record]) -> set[Key]:
        """Where what is stored is not what is remembered."""
        changed = {
            r.key for r in records if self._known.get(r.key) != r.version or self._due.get(r.key) != r.expires_at
        }
        return changed | (self._known.keys() - {record.key for record in records})

    async def _read(self, keys: list[Key]) -> dict[Key, Record | None]:
        records: dict[Key, Record | None] = {}
        for first in range(0, len(keys), limits.SCAN_ROWS):
            some = keys[first : first + limits.SCAN_ROWS]
            answers = await self._engine.read(*[Get(self._scan.space, key) for key in some])
            records.update(zip(some, answers, strict=True))
        return records

    def _is_news(self, key: Key, record: Record | None) -> bool:
        if record is None:
            return key in self._known or key in self._unseen
        return self._known.get(key) != record.version

    def _remember(self, records: Mapping[Key, Record | None]) -> None:
        for key, record in records.items():
            if record is None:
                self._known.pop(key, None)
                self._due.pop(key, None)
            else:
                self._known[key] = record.version
                if record.expires_at is None:
                    self._due.pop(key, None)
                elif self._due.get(key) != record.expires_at:
                    self._due[key] = record.expires_at
                    heapq.heappush(self._due_next, (record.expires_at, key))

    def _overdue(self) -> set[Key]:
        """The keys whose time has come, and at the head of the queue the next whose time will come."""
        now = self._clock.now()
        keys = set()
        while self._due_next:
            due, key = self._due_next[0]
            if self._due.get(key) == due:
                if due > now:
                    break
                keys.add(key)
                del self._due[key]
            heapq.heappop(self._due_next)
        return keys
