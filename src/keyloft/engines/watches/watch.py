"""What a watch is to its user: an async iterator over the changes of some keys, or of a range.

A watch learns from the feed which keys changed, and reads their entries when its user asks for the next changes. So it
holds keys that changed and are not yet reported, at most a bounded number of them, and no entries.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import (
    Change,
    ChangeKind,
    Changes,
    Due,
    Get,
    Key,
    LoggedChange,
    LogPosition,
    Record,
    Space,
)
from keyloft.engines.watches.interest import Registration
from keyloft.engines.watches.slices import SharedSlice
from keyloft.errors import Closed, HistoryGone, KeyloftError, Undecodable

if TYPE_CHECKING:
    from keyloft.engines.watches.feed import ChangeFeed

T = TypeVar("T")


class WakeCall:
    """Takes the place of an `asyncio.Event` in a watch that no task waits for: a function is called instead."""

    __slots__ = ("_call", "_is_set")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._call()

    def clear(self) -> None:
        self._is_set = False


class EngineWatch(ABC, Generic[T]):
    """An async iterator that sleeps until the feed wakes it."""

    registration: "Registration[EngineWatch[Any]]"
    """Set by the feed."""

    def __init__(self, feed: "ChangeFeed", woken: WakeCall | None = None) -> None:
        self._feed = feed
        self._woken = woken or feed.waiting.event()
        self._started_at: int | None = None
        """The version from which on the feed's changes count; None until it is known."""
        self.reported_to: int | None = None
        self._failure: KeyloftError | None = None
        self._ended = False
        self._is_reading = False

    def __aiter__(self) -> AsyncIterator[list[T]]:
        return self

    async def __anext__(self) -> list[T]:
        assert not isinstance(self._woken, WakeCall), "one with a WakeCall is not iterated"
        self._check_usable()
        self._feed.waiting.check_may_wait()
        while True:
            self._feed.awaited.add(self)
            try:
                await self._woken.wait()
            finally:
                self._feed.awaited.discard(self)
            if changes := await self.take():
                return changes
            if self._ended:
                raise StopAsyncIteration

    async def take(self) -> list[T]:
        """What there is to report now, without waiting for more: perhaps nothing, and nothing once it has ended."""
        self._check_usable()
        with self._feed.lock:
            return await self._take()

    def _check_usable(self) -> None:
        """Refuse a caller that would wait for ever.

        Raises:
            Closed: The watch was made before a fork: what would wake it is in the parent process.
            ReentrantCall: A signal's handler has interrupted its thread in the middle of another call.
        """
        if self._feed.refusal is not None:
            raise Closed(self._feed.refusal)
        self._feed.waiting.check_may_lock()

    async def _take(self) -> list[T]:
        if self._failure is not None and not self._ended:
            self.end()
            raise self._failure
        if self._ended:
            return []
        # Cleared before reading, so that a change during the read wakes it again.
        self._woken.clear()
        self._is_reading = True
        try:
            return await self._read_changes()
        except Closed:
            # The store began to close during the read: that ends a watch.
            self.end()
            return []
        except (HistoryGone, Undecodable):
            self.end()
            raise
        except BaseException:
            self._woken.set()
            raise
        finally:
            self._is_reading = False

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def is_woken(self) -> bool:
        return self._woken.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a task waits for what this watch is about to report."""
        return self._is_reading or (self._woken.is_set() and self in self._feed.awaited)

    async def aclose(self) -> None:
        if self._feed.refusal is None:  # after a fork, it is the parent's
            self._feed.waiting.check_may_lock()
            self.end()

    def end(self) -> None:
        with self._feed.lock:
            self._ended = True
            self._woken.set()
            self._feed.forget(self.registration)

    def start(self, version: int, at: int) -> None:
        """The feed reports changes after this version, and expiries after this moment."""
        self._started_at = version

    def fail(self, error: KeyloftError) -> None:
        """The engine can't start this watch, or has lost what it would report."""
        self._failure = error
        self._woken.set()

    @abstractmethod
    def changed(self, change: LoggedChange) -> None:
        """A commit changed a key."""

    @abstractmethod
    def expired(self, key: Key) -> None:
        """The entry at this key has expired."""

    @abstractmethod
    def lost(self, gone: HistoryGone) -> None:
        """The feed has missed changes."""

    @abstractmethod
    async def _read_changes(self) -> list[T]:
        """What changed since the last call; if this raises, nothing counts as reported."""


class KeyWatch(EngineWatch[Change]):
    """The state of some keys: once at first, or with `since` once one has changed; then whenever one changed."""

    def __init__(self, feed: "ChangeFeed", gets: list[Get], since: int | None) -> None:
        super().__init__(feed)
        self._gets = gets
        self._since = since
        self._reported: list[tuple[int, int | None] | None] | None = None

    def start(self, version: int, at: int) -> None:
        super().start(version, at)
        # Not before: what changed between a first read and the start would be missed.
        self._woken.set()

    def changed(self, change: LoggedChange) -> None:
        if self._started_at is None or change.version > self._started_at:
            self._woken.set()

    def expired(self, key: Key) -> None:
        self._woken.set()

    def lost(self, gone: HistoryGone) -> None:
        self._woken.set()  # a comparison with what was reported tells what changed

    async def _read_changes(self) -> list[Change]:
        if self._since is not None and not await self._has_changed(self._since):
            self._since = None
            return []
        reached = self._feed.last_version
        records = await self._feed.reader.read(*self._gets)
        self.reported_to = max(reached, self.reported_to or 0)
        state = [None if record is None else (record.version, record.expires_at) for record in records]
        if state == self._reported:
            return []
        self._since, self._reported = None, state
        return [Change(get.key, record) for get, record in zip(self._gets, records, strict=True)]

    async def _has_changed(self, since: int) -> bool:
        """Whether one of the keys changed, or its entry expired, after a version."""
        position = LogPosition(since)
        [piece] = await self._feed.reader.read(Changes(position))
        began, addresses = piece.began, self.registration.addresses
        while not any([(change.space, change.key) in addresses for change in piece.changes]):
            if piece.is_last:
                stored = await self._feed.reader.read(
                    *[Get(get.space, get.key, include_expired=True) for get in self._gets]
                )
                alive = await self._feed.reader.read(*self._gets)
                return any(
                    record is not None and record.expires_at is not None and record.expires_at > began and now is None
                    for record, now in zip(stored, alive, strict=True)
                )
            position = piece.end
            await asyncio.sleep(0)
            [piece] = await self._feed.reader.read(Changes(position))
        return True


class _Backlog(Struct):
    """Where a watch stands that reads the change log itself, until it has caught up with the feed."""

    position: LogPosition
    expired_to: int | None
    """Up to which moment expiries were reported; None if that is the time of the position's version."""
    has_read_expiries: bool = False
    has_read_log: bool = False
    """Whether it has reached the end of the log once."""
    clock_is_behind: bool = False
    """The clock was set back, so that the feed is ahead of it; the feed reads these expiries again."""
    slice: SharedSlice | None = None
    """What it has read last: it is kept for others that read the same."""


class LogFollowingWatch(EngineWatch[T]):
    """What changed in a range, or at some keys. It holds the changes to report; of too many, only where they begin."""

    _reads_log_first = False
    """Of a backlog, whether expiries are reported after the changes of the log, not before."""
    # An expiry may be noticed a little later than a commit that followed it, and then be reported after that. A reader
    # that continues from that commit gets it nevertheless.
    _earlier_expiries: Final = round(1000 * limits.LATE_EXPIRY_SECONDS)
    """Of a backlog, for how many milliseconds before its beginning expiries are reported, too."""

    def __init__(self, feed: "ChangeFeed", space: Space, since: int | None, woken: WakeCall | None = None) -> None:
        super().__init__(feed, woken)
        self._space = space
        self._pending: dict[Hashable, LoggedChange] = {}
        """Changes that are not yet reported; those with version 0 are expiries that the log does not have yet."""
        self._backlog: _Backlog | None = None
        self._drained = LogPosition(0)
        self._drained_at = 0
        """The position and the time up to which all was reported when there was last nothing pending."""
        if since is not None:
            self.reported_to = since
            self._backlog = _Backlog(LogPosition(since), None)
            self._woken.set()

    @abstractmethod
    def _slot(self, change: LoggedChange) -> Hashable:
        """Of pending changes with the same slot, the last one is reported."""

    @abstractmethod
    async def _report(self, changes: Iterable[LoggedChange], up_to: int) -> list[T]:
        """What is reported for some changes, in the order of their versions; `up_to` is the version reached."""

    def start(self, version: int, at: int) -> None:
        super().start(version, at)
        self._drained, self._drained_at = LogPosition(version), at
        if self._backlog is None:
            self.reported_to = version
        self._pending = {
            slot: change for slot, change in self._pending.items() if change.version > version or not change.version
        }

    def changed(self, change: LoggedChange) -> None:
        if self._started_at is None or change.version > self._started_at:
            self._add(change)

    def expired(self, key: Key) -> None:
        self._add(self._expiry(key))

    def lost(self, gone: HistoryGone) -> None:
        self.fail(gone)

    def _expiry(self, key: Key) -> LoggedChange:
        return LoggedChange(0, self._space, key, ChangeKind.EXPIRED, 0)

    def _add(self, change: LoggedChange) -> None:
        if self._backlog is not None:
            return  # it will be read from the log
        self._pending[self._slot(change)] = change
        if len(self._pending) > limits.WATCH_PENDING_KEYS and self._started_at is not None:
            self._backlog = _Backlog(self._drained, self._drained_at)
            self._pending.clear()
        self._woken.set()

    async def _read_changes(self) -> list[T]:
        if self._backlog is not None:
            return await self._read_backlog(self._backlog)
        taken, self._pending = self._pending, {}
        position, now = self._feed.position, self._feed.expired_to.get(self._space, 0)
        try:
            changes = await self._report(taken.values(), self._feed.last_version)
        except BaseException:
            self._pending = taken | self._pending
            raise
        if self._backlog is None and position is not None:
            self._drained, self._drained_at = position, now
            self.reported_to = position.version
        return changes

    async def _read_backlog(self, backlog: _Backlog) -> list[T]:
        """Report one slice of the log, or one page of expiries. What is swept meanwhile is logged.

        The watch is live again once it has reached what the feed has dispatched.
        """
        self._woken.set()  # until it has caught up
        reader, feed, space = self._feed.reader, self._feed, self._space
        if backlog.expired_to is None:
            backlog.slice = await feed.slices.after(backlog.position, feed.position)
            backlog.expired_to = backlog.slice.piece.began - self._earlier_expiries
        if not backlog.has_read_expiries and (backlog.has_read_log or not self._reads_log_first):
            [page] = await reader.read(Due(space, backlog.expired_to, limits.WATCH_DUE_KEYS))
            # What was written again since is in the log.
            changes = await self._report([self._expiry(key) for key in page.keys if self._contains(key)], 0)
            backlog.clock_is_behind = page.is_last and page.up_to < feed.expired_to.get(space, 0)
            backlog.expired_to, backlog.has_read_expiries = page.up_to, page.is_last
            return changes
        backlog.slice = await feed.slices.after(backlog.position, feed.position)
        piece = backlog.slice.piece
        found = {self._slot(change): change for change in backlog.slice.of(self.registration, space)}
        up_to = piece.end.version if piece.is_last or not piece.changes else piece.changes[-1].version
        changes = await self._report(found.values(), up_to)
        backlog.position, backlog.has_read_log = piece.end, backlog.has_read_log or piece.is_last
        # The rest of the last version may be in the next slice.
        self.reported_to = up_to if piece.is_last else max(self.reported_to or 0, up_to - 1)
        # No await from here on: the feed dispatches nothing between this comparison and the switch.
        if piece.is_last and backlog.has_read_expiries and feed.position is not None and piece.end >= feed.position:
            if feed.expired_to.get(space, 0) > backlog.expired_to and not backlog.clock_is_behind:
                backlog.has_read_expiries = False
            else:
                self._started_at = piece.end.version
                self._drained, self._drained_at = piece.end, backlog.expired_to
                self._backlog = None
                self._woken.clear()
        return changes

    def _contains(self, key: Key) -> bool:
        return self.registration.contains(self._space, key)


class RangeWatch(LogFollowingWatch[Change]):
    """The keys of a range that changed, each with what is stored there now."""

    def _slot(self, change: LoggedChange) -> Hashable:
        slot: Hashable = change.key
        return slot

    async def _report(self, changes: Iterable[LoggedChange], up_to: int) -> list[Change]:
        """What is stored at some keys now, in the order of their changes.

        An entry that was changed again by a commit that this watch has not reached is left out: that commit will report
        it. So a reader that continues from the last versionstamp it has seen misses nothing in between.
        """
        changed = sorted(changes, key=lambda change: (change.version, change.key))
        reported: list[Change] = []
        for first in range(0, len(changed), limits.SCAN_ROWS):
            some = changed[first : first + limits.SCAN_ROWS]
            records: list[Record | None] = await self._feed.reader.read(
                *[Get(self._space, change.key) for change in some]
            )
            reported += [
                Change(change.key, record)
                for change, record in zip(some, records, strict=True)
                if record is None or record.version <= max(up_to, change.version)
            ]
        return reported
