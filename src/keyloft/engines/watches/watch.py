"""Watches as their users see them, async iterators over changes; and the base of those that follow the change log.

A watch learns from the feed which keys changed, and reads their entries when its user asks for the next changes. So it
holds a bounded number of keys that changed and are not yet reported, and no entries but those that a cancelled reader
had read. It reads and reports a few large entries at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import (
    ChangeKind,
    Due,
    DuePage,
    Key,
    LoggedChange,
    LogPosition,
    LogSlice,
    Space,
)
from keyloft.engines.watches.interest import Registration
from keyloft.engines.watches.slices import SharedSlice
from keyloft.errors import Closed, HistoryGone, KeyloftError, Undecodable

if TYPE_CHECKING:
    from keyloft.engines.watches.feed import ChangeFeed

T = TypeVar("T")


class WakeCall:
    """Replaces the `asyncio.Event` of a watch for which no task waits: instead, a function is called."""

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
        """Changes of the feed after this version are reported; None until it is known."""
        self.reported_to: int | None = None
        self._failure: KeyloftError | None = None
        self._ended = False
        self._is_reading = False

    def __aiter__(self) -> AsyncIterator[list[T]]:
        return self

    async def __anext__(self) -> list[T]:
        self._check_usable()
        while True:
            await self.wait()
            if changes := await self.take():
                return changes
            if self._ended:
                raise StopAsyncIteration

    async def wait(self) -> None:
        """Return once there may be something to report."""
        assert not isinstance(self._woken, WakeCall), "one with a WakeCall is not waited for"
        self._feed.waiting.check_may_wait()
        self._feed.awaited.add(self)
        try:
            await self._woken.wait()
        finally:
            self._feed.awaited.discard(self)

    async def take(self) -> list[T]:
        """The changes to report now, without waiting; perhaps none, and none once the watch has ended."""
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
        # Cleared before the read, so that a change during the read wakes this watch again.
        self._woken.clear()
        self._is_reading = True
        try:
            return await self._read_changes()
        except Closed:
            # The store began to close during the read, which ends the watch.
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
    def has_failed(self) -> bool:
        """Whether it ends with an error, as soon as its user asks for changes."""
        return self._failure is not None

    @property
    def is_woken(self) -> bool:
        return self._woken.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a task waits for what this watch is about to report."""
        return self._is_reading or (self._woken.is_set() and self in self._feed.awaited)

    async def aclose(self) -> None:
        if self._feed.refusal is None:  # in a forked child, the watch is the parent's
            self._feed.waiting.check_may_lock()
            self.end()

    def end(self) -> None:
        with self._feed.lock:
            self._ended = True
            self._woken.set()
            self._feed.forget(self.registration)

    def start(self, version: int, at: int) -> None:
        """Begin: the feed passes on changes after this version, and expiries after this moment."""
        self._started_at = version

    def fail(self, error: KeyloftError) -> None:
        """End with an error: the engine can't start this watch, or has lost what it would report."""
        self._failure = error
        self._woken.set()

    @abstractmethod
    def changed(self, change: LoggedChange) -> None:
        """Note that a commit changed a key."""

    @abstractmethod
    def expired(self, key: Key) -> None:
        """Note that the entry at this key has expired."""

    def clock_was_set_back(self) -> None:
        """Note that entries which have expired are alive again, until they expire a second time."""

    @abstractmethod
    def lost(self, gone: HistoryGone) -> None:
        """Note that the feed has missed changes."""

    @abstractmethod
    async def _read_changes(self) -> list[T]:
        """What changed since the last call; if this raises, nothing counts as reported."""


class _TakenChanges(Struct):
    """Pending changes that are being reported, in parts. What a cancelled reader did not get stays here."""

    changes: Sequence[LoggedChange]
    """The changes that are not yet reported, in the order in which they will be."""
    position: LogPosition | None
    """The position of the feed when they were taken."""
    up_to: int
    """The version up to which all is reported once these are."""
    expired_to: int
    """Up to which moment the feed had dispatched expiries."""


class Portion(Struct):
    """Changes of a backlog that were read together, and are reported together or in parts."""

    changes: Sequence[LoggedChange]
    """The changes that are not yet reported, in the order in which they will be."""
    up_to: int
    """The version up to which all is reported once these are."""
    read: LogSlice | DuePage
    """The slice or page that they were read from."""
    expired_to: int = 0
    """For a page of expiries: up to which moment the feed had dispatched expiries before the page was read."""


class Backlog(Struct):
    """The progress of a watch that reads the change log itself, until it has caught up with the feed."""

    position: LogPosition
    expired_to: int | None
    """Up to which moment expiries were reported; None stands for the time of the position's version."""
    has_read_expiries: bool = False
    has_read_log: bool = False
    """Whether the watch has reached the end of the log once."""
    clock_is_behind: bool = False
    """Whether the clock was set back, so that the feed's moment is ahead of it; the feed reads those expiries again."""
    slice: SharedSlice | None = None
    """The slice that was read last, kept for other watches that read the same one."""
    portion: Portion | None = None
    """The portion that is being reported in parts."""


class LogFollowingWatch(EngineWatch[T]):
    """A watch of a range, or of some keys, that holds the changes to report; if there are too many, only where they
    begin in the log."""

    _reads_log_first = False
    """In a backlog: whether expiries are reported after the changes of the log, not before."""
    # An expiry may be noticed a little after a later commit, and then be reported after that commit. A reader that
    # continues from that commit must get it nevertheless.
    _earlier_expiries: Final = round(1000 * limits.LATE_EXPIRY_SECONDS)
    """In a backlog: for how many milliseconds before its beginning expiries are reported, too."""

    def __init__(self, feed: "ChangeFeed", space: Space, since: int | None, woken: WakeCall | None = None) -> None:
        super().__init__(feed, woken)
        self._space = space
        self._pending: dict[Hashable, LoggedChange] = {}
        """Changes that are not yet reported; those with version 0 are expiries that the log does not have yet."""
        self._taken: _TakenChanges | None = None
        self._backlog: Backlog | None = None
        self._drained = LogPosition(0)
        self._drained_at = 0
        """The position and the time up to which all was reported, the last time that nothing was pending."""
        if since is not None:
            self.reported_to = since
            self._backlog = Backlog(LogPosition(since), None)
            self._woken.set()

    @abstractmethod
    def _slot(self, change: LoggedChange) -> Hashable:
        """The slot of a pending change: of changes with the same slot, only the last one is reported."""

    @abstractmethod
    def _ordered(self, changes: Iterable[LoggedChange]) -> list[LoggedChange]:
        """Changes in the order in which they are reported: that of their versions."""

    @abstractmethod
    async def _report(self, changes: Sequence[LoggedChange], up_to: int) -> tuple[list[T], int]:
        """What is reported for the first of some changes, and how many changes that covers: at least one.

        Args:
            changes: In their order.
            up_to: The version up to which all is reported once all of them are.
        """

    def start(self, version: int, at: int) -> None:
        super().start(version, at)
        self._drained, self._drained_at = LogPosition(version), at
        if self._backlog is None:
            self.reported_to = version
        else:
            self._woken.set()
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
            return  # the change will be read from the log
        self._pending[self._slot(change)] = change
        if len(self._pending) > limits.WATCH_PENDING_KEYS and self._started_at is not None:
            self._backlog = Backlog(self._drained, self._drained_at)
            self._pending.clear()
            self._taken = None
        self._woken.set()

    @property
    def changes_held(self) -> int:
        """For tests: how many changes are in memory."""
        return len(self._pending) + (0 if self._taken is None else len(self._taken.changes))

    async def _read_changes(self) -> list[T]:
        if self._backlog is not None:
            return await self._read_backlog(self._backlog)
        if (taken := self._taken) is None:
            feed, ordered = self._feed, self._ordered(self._pending.values())
            moment = feed.expired_to.get(self._space, 0)
            taken = self._taken = _TakenChanges(ordered, feed.position, feed.dispatched_to, moment)
            self._pending = {}
        changes, count = await self._report(taken.changes, taken.up_to)
        if self._taken is not taken:
            return changes  # the rest will be read from the log
        position, reached = taken.position, taken.up_to
        if count < len(taken.changes):
            whole = _last_whole(taken.changes, count)
            taken.changes = taken.changes[count:]
            self._woken.set()
            if whole is None:
                return changes
            position, reached = LogPosition(whole), whole
        else:
            self._taken = None
            if self._pending:  # they arrived before these were reported
                self._woken.set()
        if position is not None:
            self._drained, self._drained_at = position, taken.expired_to
            self.reported_to = max(reached, self.reported_to or 0)
        return changes

    async def _read_backlog(self, backlog: Backlog) -> list[T]:
        """Report a slice of the log, or a page of expiries, or a part of it. Entries swept meanwhile are in the log.

        The watch gets changes from the feed again once it has reached what the feed has dispatched.
        """
        self._woken.set()  # stays set until the watch has caught up
        if backlog.portion is None:
            backlog.portion = await self._next_portion(backlog)
        portion, feed = backlog.portion, self._feed
        changes, count = await self._report(portion.changes, portion.up_to)
        if count < len(portion.changes):
            whole = _last_whole(portion.changes, count)
            self.reported_to = max(whole or 0, self.reported_to or 0)
            portion.changes = portion.changes[count:]
            return changes
        backlog.portion = None
        piece = portion.read
        if isinstance(piece, DuePage):
            backlog.clock_is_behind = piece.is_last and piece.up_to < portion.expired_to
            backlog.expired_to, backlog.has_read_expiries = piece.up_to, piece.is_last
            return changes
        assert backlog.expired_to is not None, "it is known since the first portion was read"
        backlog.position, backlog.has_read_log = piece.end, backlog.has_read_log or piece.is_last
        # The rest of the last version may be in the next slice.
        self.reported_to = portion.up_to if piece.is_last else max(self.reported_to or 0, portion.up_to - 1)
        if self._started_at is None:
            # If it took changes from the feed now, `start` would drop those up to the version at which it starts.
            # So it goes on reading the log, and `start` wakes it.
            if piece.is_last and backlog.has_read_expiries and not changes:
                self._woken.clear()
            return changes
        # No await from here on: the feed dispatches nothing between this comparison and the switch.
        if piece.is_last and backlog.has_read_expiries and feed.position is not None and piece.end >= feed.position:
            if feed.expired_to.get(self._space, 0) > backlog.expired_to and not backlog.clock_is_behind:
                backlog.has_read_expiries = False
            else:
                self._started_at = piece.end.version
                self._drained, self._drained_at = piece.end, backlog.expired_to
                self._backlog = None
                self._woken.clear()
        return changes

    async def _next_portion(self, backlog: Backlog) -> Portion:
        """What is to be reported next: a page of expiries, or a slice of the log."""
        feed, space = self._feed, self._space
        if backlog.expired_to is None:
            backlog.slice = await feed.slices.after(backlog.position, feed.position)
            backlog.expired_to = backlog.slice.piece.began - self._earlier_expiries
        if not backlog.has_read_expiries and (backlog.has_read_log or not self._reads_log_first):
            dispatched = feed.expired_to.get(space, 0)
            [page] = await feed.reader.read(Due(space, backlog.expired_to, limits.WATCH_DUE_KEYS))
            # If one of these keys was written again since, the log has that.
            expired = [self._expiry(key) for key in page.keys if self._contains(key)]
            return Portion(self._ordered(expired), 0, page, dispatched)
        backlog.slice = await feed.slices.after(backlog.position, feed.position)
        piece = backlog.slice.piece
        found = {self._slot(change): change for change in backlog.slice.of(self.registration, space)}
        up_to = piece.end.version if piece.is_last or not piece.changes else piece.changes[-1].version
        return Portion(self._ordered(found.values()), up_to, piece)

    def _contains(self, key: Key) -> bool:
        return self.registration.contains(self._space, key)


def _last_whole(changes: Sequence[LoggedChange], count: int) -> int | None:
    """The last version of which all changes are among the first `count`; None if there is none."""
    following = changes[count].version
    return max([change.version for change in changes[:count] if 0 < change.version < following], default=None)
