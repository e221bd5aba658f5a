"""Watches as their users see them, async iterators over changes; and the base of those that follow the change log.

A watch learns from the feed which keys changed, and reads their entries when its user asks for the next changes. So it
holds a bounded number of keys that changed and are not yet reported, and no entries but those that a cancelled reader
had read. It reads and reports a few large entries at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import (
    ChangeKind,
    Due,
    Key,
    LoggedChange,
    LogPosition,
    Record,
    Space,
)
from keyloft.engines.watches.backlog import Backlog, Portion
from keyloft.engines.watches.interest import Registration
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
    def expired(self, key: Key, at: int) -> None:
        """Note that the entry at this key has expired, and at which moment."""

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


class LogFollowingWatch(EngineWatch[T]):
    """A watch of a range, or of some keys, that holds the changes to report; if there are too many, only where they
    begin in the log."""

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

    def expired(self, key: Key, at: int) -> None:
        self._add(self._expiry(key, at))

    def lost(self, gone: HistoryGone) -> None:
        self.fail(gone)

    def _expiry(self, key: Key, at: int) -> LoggedChange:
        return LoggedChange(0, self._space, key, ChangeKind.EXPIRED, at)

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
        """Report a portion of the log with the expiries up to there, or a part of it.

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
        self.reported_to = max(self.reported_to or 0, backlog.pass_portion())
        if not backlog.has_caught_up:
            return changes
        if self._started_at is None:
            # If it took changes from the feed now, `start` would drop those up to the version at which it starts.
            # So it goes on reading the log, and `start` wakes it.
            if not changes:
                self._woken.clear()
            return changes
        # No await from here on: the feed dispatches nothing between this comparison and the switch.
        if feed.position is not None and backlog.position >= feed.position:
            if backlog.expired_to >= feed.expired_to.get(self._space, 0):
                self._started_at = backlog.position.version
                self._drained, self._drained_at = backlog.position, backlog.expired_to
                self._backlog = None
                self._woken.clear()
            else:
                backlog.has_read_expiries = False  # they are read with the next portion
        return changes

    async def _next_portion(self, backlog: Backlog) -> Portion:
        """What is to be reported next, from the slice of the log that is being reported, or from the next one.

        Nothing, if a page of expiries had to be read before that, and has none that concern this watch.
        """
        if backlog.slice is None:
            await self._read_slice(backlog)
        if backlog.needs_expiries:
            await self._read_expiries(backlog)
            # Each page is reported before the next one is read, however many entries expired between two changes.
            if not backlog.has_expiries:
                return Portion((), self.reported_to or 0)
        changes, expired, up_to = backlog.ready(self.reported_to or 0)
        expiries = [self._expiry(key, moment) for moment, key in expired]
        # If an entry was written again since it expired, the log has that.
        expiries = sorted([*expiries, *self._late_expiries(changes, backlog)], key=attrgetter("at"))
        found = {self._slot(one): one for one in [*expiries, *changes]}  # of a key's expiries, the last one
        return Portion(self._ordered(found.values()), up_to)

    async def _read_slice(self, backlog: Backlog) -> None:
        feed = self._feed
        shared = await feed.slices.after(backlog.position, max(feed.position or backlog.seen, backlog.seen))
        changes = sorted(shared.of(self.registration, self._space), key=attrgetter("version"))
        backlog.begin_slice(shared, changes)

    async def _read_expiries(self, backlog: Backlog) -> None:
        """Read a page of expiries. Entries that were swept meanwhile are in the log."""
        feed, space = self._feed, self._space
        latest_time = feed.latest_time
        while True:
            [page] = await feed.reader.read(Due(space, backlog.expired_to, limits.WATCH_DUE_KEYS))
            feed.late_touches.read(page)
            if page.is_last and page.up_to < latest_time:
                feed.note_time(page.up_to)
            if not page.is_last or page.up_to >= backlog.expired_to:
                break
            # The clock was set back: entries that expired before may be reported as expired a second time.
            backlog.read_again(page.up_to - round(1000 * limits.CLOCK_AHEAD_SECONDS))
        found = zip(page.expired_at, page.keys, strict=True)
        backlog.add_page(page, [one for one in found if self.registration.contains(space, one[1])])

    def _expire_again(self, stored: Iterable[Record | None]) -> None:
        """If entries are there though their expiry was read, because the clock was set back, let it be read again."""
        backlog, feed = self._backlog, self._feed
        moment = feed.expired_to.get(self._space, 0) if backlog is None else backlog.expired_to
        expiries = [one.expires_at for one in stored if one is not None and one.expires_at is not None]
        if (earliest := min(expiries, default=moment + 1)) > moment:
            return
        if backlog is None:
            feed.dispatch_expiries_after(earliest - 1)
        else:
            backlog.read_again(earliest - 1)

    def _late_expiries(self, changes: Sequence[LoggedChange], backlog: Backlog) -> list[LoggedChange]:
        """Entries written by some changes that may have expired, though no page shows it."""
        return []


def _last_whole(changes: Sequence[LoggedChange], count: int) -> int | None:
    """The last version of which all changes are among the first `count`; None if there is none."""
    following = changes[count].version
    return max([change.version for change in changes[:count] if 0 < change.version < following], default=None)
