"""Reports changes to watches: this process's commits by key, other processes' commits by reading again."""

import asyncio
import heapq
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from keyloft import limits
from keyloft.clock import Clock, Timer
from keyloft.core.engine import Reader
from keyloft.core.paging import Pages
from keyloft.core.records import NO_LIMIT, Address, Change, Get, Key, Latest, Record, Scan
from keyloft.errors import Closed


class Notifier:
    """Knows the open watches of an engine and wakes those that a commit concerns."""

    def __init__(self, engine: Reader, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        # Weak: a watch that its user dropped without closing it is collected.
        self._watches: weakref.WeakSet[KeyWatch | RangeWatch] = weakref.WeakSet()
        # Strong while a task waits in a watch: nothing else may refer to that task, and it must not be collected.
        self.awaited: set[object] = set()
        self.last_version: int | None = None
        """The version of the last commit that the watches know of."""

    def watch(
        self, asks: tuple[Get | Scan, ...], read_version: Callable[[], int] | None = None
    ) -> "KeyWatch | RangeWatch":
        """Make a watch of what is committed from now on.

        Args:
            asks: Gets, or one Scan.
            read_version: Returns the version of the last commit; None where that takes a request to a server.
        """
        scans = [ask for ask in asks if isinstance(ask, Scan)]
        gets = [ask for ask in asks if isinstance(ask, Get)]
        watch: KeyWatch | RangeWatch
        if len(scans) == 1 and not gets:
            watch = RangeWatch(self, scans[0], read_version)
        elif gets and not scans:
            watch = KeyWatch(self, gets)
        else:
            raise ValueError("watch takes Gets, or one Scan")
        self._watches.add(watch)
        return watch

    @property
    def has_watches(self) -> bool:
        return bool(self._watches)

    def committed(self, addresses: Iterable[Address], version: int) -> None:
        """This process wrote these keys, up to this version."""
        if self._watches:
            touched = set(addresses)
            for watch in list(self._watches):
                watch.committed(touched, version)

    def observe(self, before: int, after: int) -> None:
        """Compare the version counter, as read before and after a step, with the last one known."""
        if before != self.last_version:
            self.committed_elsewhere()
        self.last_version = after

    def committed_up_to(self, version: int) -> None:
        """Another process committed up to this version."""
        self.last_version = max(version, self.last_version or 0)
        self.committed_elsewhere()

    def committed_elsewhere(self) -> None:
        """Another process committed something."""
        for watch in list(self._watches):
            watch.committed_elsewhere()

    async def wait_until_reported(self, seconds: float) -> None:
        """Wait until the watches have reported what they were woken for, but no longer than this."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while any([watch.is_busy for watch in self._watches]) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(limits.WATCH_DRAIN_POLL_SECONDS)

    def close(self) -> None:
        for watch in list(self._watches):
            watch.end()


class _WokenIterator(ABC):
    """An async iterator that sleeps until a commit or the expiry of an entry wakes it."""

    def __init__(self, notifier: Notifier) -> None:
        self._engine = notifier.engine
        self._clock = notifier.clock
        self._awaited = notifier.awaited
        self._ended = False
        self._is_reading = False
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
            # Cleared before reading, so that a commit during the read wakes it again.
            self._woken.clear()
            self._is_reading = True
            try:
                changes = await self._read_changes()
            except Closed:
                # The store began to close during the read: that ends a watch.
                self.end()
                raise StopAsyncIteration from None
            except BaseException:
                self._woken.set()
                raise
            finally:
                self._is_reading = False
            if changes:
                return changes

    @property
    def is_busy(self) -> bool:
        """Whether a task waits for what this watch is about to report."""
        return self._is_reading or (self._woken.is_set() and self in self._awaited)

    async def aclose(self) -> None:
        self.end()

    def end(self) -> None:
        self._ended = True
        self._wake_at(None)
        self._woken.set()

    @abstractmethod
    async def _read_changes(self) -> list[Change]:
        """What changed since the last call; if this raises, nothing counts as reported."""

    def _wake_at(self, moment: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The callback refers to the event alone: a timer must not keep a dropped watch alive.
        self._timer = None if moment is None or self._ended else self._clock.call_at(moment, self._woken.set)


class KeyWatch(_WokenIterator):
    """The state of some keys: once at first, then whenever one of them changed."""

    def __init__(self, notifier: Notifier, gets: list[Get]) -> None:
        super().__init__(notifier)
        self._gets = gets
        self._addresses = {(get.space, get.key) for get in gets}
        self._reported: list[int | None] | None = None

    def committed(self, addresses: set[Address], version: int) -> None:
        if not self._addresses.isdisjoint(addresses):
            self._woken.set()

    def committed_elsewhere(self) -> None:
        self._woken.set()

    async def _read_changes(self) -> list[Change]:
        records = await self._engine.read(*self._gets)
        self._wake_at(min((r.expires_at for r in records if r and r.expires_at is not None), default=None))
        state = [None if record is None else record.version for record in records]
        if state == self._reported:
            return []
        self._reported = state
        return [Change(get.key, record) for get, record in zip(self._gets, records, strict=True)]


class RangeWatch(_WokenIterator):
    """The keys of a range that changed.

    A deletion by another process leaves nothing to find, so the watch keeps the version of every entry in the range,
    and compares them with the whole range after another process has committed something.
    """

    def __init__(self, notifier: Notifier, scan: Scan, read_version: Callable[[], int] | None) -> None:
        super().__init__(notifier)
        self._scan = Scan(scan.space, scan.start, scan.end, NO_LIMIT, keys_only=True)
        self._read_version = read_version
        self._first_read_version: int | None = None
        self._versions: dict[Key, int] = {}
        self._expiries: dict[Key, int] = {}
        self._next_expiries: list[tuple[int, Key]] = []
        self._touched: set[Key] = set()
        self._maybe_never_seen: set[Key] = set()
        self._must_compare = False
        self._next_comparison_at = 0.0
        self._comparison_timer: asyncio.TimerHandle | None = None
        # At once, not with the first step: another process may delete in between what was there at the start.
        self.first_read: asyncio.Future[tuple[int, list[Record], int]] | None = self._start_first_read()

    def committed(self, addresses: set[Address], version: int) -> None:
        space, start, end = self._scan.space, self._scan.start, self._scan.end
        if keys := [key for at, key in addresses if at == space and start <= key < end]:
            self._touched.update(keys)
            # The first read may already show this commit: a key that it deleted was then never in the range.
            if self._first_read_version is None or version <= self._first_read_version:
                self._maybe_never_seen.update(keys)
            self._woken.set()

    def committed_elsewhere(self) -> None:
        self._must_compare = True
        self._woken.set()

    def end(self) -> None:
        super().end()
        if self.first_read is not None:
            self.first_read.cancel()

    async def _read_changes(self) -> list[Change]:
        candidates, self._touched = self._touched | self._take_expired(), set()
        must_compare, self._must_compare = self._must_compare, False
        try:
            if self._first_read_version is None:
                candidates |= await self._take_first_read()
                # The first read may be long done: what other processes committed since then needs a comparison.
                self._must_compare |= must_compare
                if self._must_compare:
                    self._woken.set()
            elif must_compare and self._may_compare():
                candidates |= self._differing(await self._read_range())
            records = await self._read(sorted(candidates))
        except BaseException:
            self._touched |= candidates
            self._must_compare |= must_compare
            raise
        changes = [Change(key, record) for key, record in records.items() if self._is_change(key, record)]
        self._remember(records)
        self._maybe_never_seen -= records.keys()
        self._wake_at(self._next_expiries[0][0] if self._next_expiries else None)
        return changes

    async def _take_first_read(self) -> set[Key]:
        """Remember what there was at the start; returns what was written after it, and so is a change."""
        reading = self.first_read = self.first_read or self._start_first_read()
        await asyncio.wait([reading])  # a cancelled caller leaves it running
        if reading.cancelled():
            raise Closed
        self.first_read = None
        start_version, records, self._first_read_version = reading.result()
        self._remember({record.key: record for record in records if record.version <= start_version})
        return {record.key for record in records if record.version > start_version}

    def _start_first_read(self) -> asyncio.Future[tuple[int, list[Record], int]]:
        start_version = self._read_version() if self._read_version is not None else None
        reading = asyncio.ensure_future(self._read_first(start_version))
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())
        return reading

    async def _read_first(self, start_version: int | None) -> tuple[int, list[Record], int]:
        """The version after which a commit is a change, the records of the range, and a version that they show."""
        if start_version is None:
            [start_version] = await self._engine.read(Latest())
        records = await self._read_range()
        [latest] = await self._engine.read(Latest())
        return start_version, records, latest

    async def _read_range(self) -> list[Record]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = [record async for page in Pages(self._engine, self._scan) for record in page]
        self._next_comparison_at = loop.time() + limits.WATCH_PAUSE_FACTOR * (loop.time() - began)
        return found

    def _may_compare(self) -> bool:
        """Whether the pause since the last comparison is over; if not, sets a timer for its end."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_comparison_at:
            return True
        self._must_compare = True
        if self._comparison_timer is None or self._comparison_timer.when() != self._next_comparison_at:
            # As with `_wake_at`, the callback refers to the event alone.
            self._comparison_timer = loop.call_at(self._next_comparison_at, self._woken.set)
        return False

    def _differing(self, records: list[Record]) -> set[Key]:
        """Where what is stored is not what is remembered."""
        versions, expiries = self._versions, self._expiries
        same = {r.key for r in records if versions.get(r.key) == r.version and expiries.get(r.key) == r.expires_at}
        return (versions.keys() | {record.key for record in records}) - same

    async def _read(self, keys: list[Key]) -> dict[Key, Record | None]:
        records: dict[Key, Record | None] = {}
        for first in range(0, len(keys), limits.SCAN_ROWS):
            some = keys[first : first + limits.SCAN_ROWS]
            answers = await self._engine.read(*[Get(self._scan.space, key) for key in some])
            records.update(zip(some, answers, strict=True))
        return records

    def _is_change(self, key: Key, record: Record | None) -> bool:
        if record is None:
            return key in self._versions or key in self._maybe_never_seen
        return self._versions.get(key) != record.version

    def _remember(self, records: Mapping[Key, Record | None]) -> None:
        for key, record in records.items():
            if record is None:
                self._versions.pop(key, None)
                self._expiries.pop(key, None)
            else:
                self._versions[key] = record.version
                if record.expires_at is None:
                    self._expiries.pop(key, None)
                elif self._expiries.get(key) != record.expires_at:
                    self._expiries[key] = record.expires_at
                    heapq.heappush(self._next_expiries, (record.expires_at, key))

    def _take_expired(self) -> set[Key]:
        """The keys that have expired; leaves the next valid expiry at the head of the heap."""
        now = self._clock.now()
        keys = set()
        while self._next_expiries:
            expires_at, key = self._next_expiries[0]
            if self._expiries.get(key) == expires_at:
                if expires_at > now:
                    break
                keys.add(key)
                del self._expiries[key]
            heapq.heappop(self._next_expiries)
        return keys
