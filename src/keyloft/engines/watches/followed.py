"""Reports the changes of a range, or of some keys, one by one as the change log has them, without their entries."""

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import ChangeKind, Get, Key, LoggedChange, Now
from keyloft.core.schema import LAST_MOMENT
from keyloft.engines.watches.backlog import Backlog
from keyloft.engines.watches.watch import LogFollowingWatch


class FollowedLog(LogFollowingWatch[LoggedChange]):
    """Every single put, delete and expiry, in the order of their versions. Most touches are left out.

    The log has no version for an expiry until it is swept: it is reported between the changes of the log, where its
    moment lies, with a version up to which all changes were reported before it.

    A touch may be seen only after the expiry that it has put off: its commit took longer than the entry was to live.
    If the expiry may have been reported, the touch is reported as a put.
    """

    _expiries: dict[Key, bool] | None = None
    """Keys whose expiry was dispatched before the log had it, and whether it was reported.

    If it was, it is not reported again once they are swept. If it was not, because they have an entry, this entry was
    touched or put, and the log has that.
    """
    _checked: frozenset[Key] = frozenset()
    """Keys whose expiry is about to be reported, unless they have an entry."""
    _remembers_from = LAST_MOMENT
    """Of an expiry before this moment it is not known whether it was reported: by a watch that this one continues, or
    by this one, which has forgotten it."""
    _newest = 0
    """The version of what was reported last. A watch that fell behind may read earlier changes again."""
    _noticed_at: int | None = None
    """The version up to which the feed had dispatched changes when the first of the pending expiries was noticed."""

    @property
    def reached(self) -> int | None:
        """The version up to which there is nothing left to report, for another watch to continue."""
        has_nothing = self._backlog is None and self._taken is None and not self._pending
        if has_nothing and not self._is_reading and self._started_at is not None:
            return max(self._feed.dispatched_to, self.reported_to or 0)  # a backlog may end beyond the feed
        return self.reported_to

    def start(self, version: int, at: int) -> None:
        super().start(version, at)
        self._remembers_from = self._feed.late_touches.newest_time  # `at`, or later if the clock was set back

    def changed(self, change: LoggedChange) -> None:
        if self._started_at is not None and change.version <= self._started_at:
            return
        if change.kind is not ChangeKind.TOUCH or self._may_be_known_as_expired(change):
            super().changed(change)
        if _may_have_expired(change, self._feed.expired_to.get(self._space, 0)):
            self.expired(change.key, change.at)

    async def _read_backlog(self, backlog: Backlog) -> list[LoggedChange]:
        changes = await super()._read_backlog(backlog)
        if self._backlog is None:  # of the expiries that were dispatched meanwhile, it may not have read all
            self._remembers_from = max(self._remembers_from, self._feed.late_touches.newest_time)
        return changes

    def _may_be_known_as_expired(self, touch: LoggedChange) -> bool:
        """Whether the expiry that a touch has put off may have been reported before the touch was seen."""
        key = touch.key
        if key in (self._expiries or ()) or key in self._checked or _slot_of_expiry(key) in self._pending:
            return True
        return touch.at < self._remembers_from or self._feed.late_touches.may_have(touch)

    def expired(self, key: Key, at: int) -> None:
        if self._backlog is not None:
            return
        if self._noticed_at is None:
            self._noticed_at = self._feed.dispatched_to
        expiry = self._expiry(key, at)
        known = self._pending.get(self._slot(expiry))
        self._add(expiry if known is None or known.at < at else known)

    def _late_expiries(self, changes: Sequence[LoggedChange], backlog: Backlog) -> list[LoggedChange]:
        if not changes or backlog.missed_before(changes[-1].version) <= changes[0].at:
            return []
        return [
            self._expiry(change.key, change.at)
            for change in changes
            if _may_have_expired(change, backlog.missed_before(change.version))
        ]

    def _slot(self, change: LoggedChange) -> Hashable:
        # A long batch that puts an entry and touches it may be logged in parts: the touch must not replace the put.
        return change.version, change.key, change.kind is ChangeKind.TOUCH

    def _ordered(self, changes: Iterable[LoggedChange]) -> list[LoggedChange]:
        """Those of the log by their versions, and each expiry behind the changes up to its moment."""
        logged = sorted([one for one in changes if one.version], key=lambda change: (change.version, change.key))
        expiries = sorted([one for one in changes if not one.version], key=attrgetter("at", "key"), reverse=True)
        if not expiries:
            return logged
        ordered: list[LoggedChange] = []
        for change in logged:
            while expiries and expiries[-1].at < change.at:
                ordered.append(expiries.pop())
            ordered.append(change)
        return [*ordered, *reversed(expiries)]

    async def _report(self, changes: Sequence[LoggedChange], up_to: int) -> tuple[list[LoggedChange], int]:
        """Report all changes at once: none has a value."""
        expiring = [change.key for change in changes if not change.version]
        if len(self._expiries or ()) + len(expiring) > limits.WATCH_PENDING_KEYS:
            await self._forget_expiries()
        # If the key has an entry, it has not expired, or was written again meanwhile, and the log has that.
        self._checked = frozenset(expiring)
        absent = await self._absent(expiring)
        latest = _latest_changes([change for change in changes if change.version >= max(self._newest, 1)])
        # Not below that of a change before it, which the rest of its version may still follow. And not above the one
        # that was reached when it was noticed: a reader that continues from there must get the expiries behind it.
        version = max(self._newest, self.reported_to or 0)
        noticed_at = 0 if self._backlog is not None else self._noticed_at or 0
        last = max([at for at, change in enumerate(changes) if change.version], default=-1) if noticed_at else 0
        reported: list[LoggedChange] = []
        for at, change in enumerate(changes):
            if 0 < change.version < self._newest:
                continue
            version = max(version, change.version)
            if noticed_at and at > last:
                version = max(version, noticed_at)
            if not change.version:
                if change.key in absent:
                    reported.append(replace(change, version=version))
                if change.key in absent or change.key not in latest:
                    self._note_expiry(change.key, change.key in absent)
            elif change.kind is ChangeKind.TOUCH:
                if latest[change.key] is change:
                    self._forget_expiry(change.key)
                    reported.append(replace(change, kind=ChangeKind.PUT))
            elif not self._forget_expiry(change.key) or change.kind is not ChangeKind.EXPIRED:
                reported.append(change)
        self._newest = version
        self._checked = frozenset()
        if not self._pending:
            self._noticed_at = None  # otherwise it is the same or an earlier version, which is safe
        return reported, len(changes)

    async def _absent(self, keys: Sequence[Key]) -> set[Key]:
        """Those of the keys that have no entry now."""
        absent: set[Key] = set()
        for first in range(0, len(keys), limits.WATCH_READ_KEYS):
            some = keys[first : first + limits.WATCH_READ_KEYS]
            records = await self._feed.reader.read(*[Get(self._space, key) for key in some])
            self._expire_again(records)
            absent.update([key for key, record in zip(some, records, strict=True) if record is None])
        return absent

    def _note_expiry(self, key: Key, was_reported: bool) -> None:
        if self._expiries is None:  # most watches never have any
            self._expiries = {}
        self._expiries[key] = was_reported

    def _forget_expiry(self, key: Key) -> bool:
        """Returns whether it was reported."""
        return self._expiries is not None and self._expiries.pop(key, False)

    async def _forget_expiries(self) -> None:
        """Forget which expiries were reported: some are reported a second time, and so are touches of such entries."""
        [now] = await self._feed.reader.read(Now())
        self._expiries, self._remembers_from = None, max(now, self._feed.late_touches.newest_time)


def _slot_of_expiry(key: Key) -> Hashable:
    return 0, key, False


def _latest_changes(logged: Iterable[LoggedChange]) -> dict[Key, LoggedChange]:
    """The latest change of each key. If a commit has put an entry and touched it, the put says more."""
    latest: dict[Key, LoggedChange] = {}
    for change in logged:
        before = latest.get(change.key)
        if change.kind is not ChangeKind.TOUCH or before is None or before.version < change.version:
            latest[change.key] = change
    return latest


def _may_have_expired(change: LoggedChange, expired_to: int) -> bool:
    """Whether the entry may have expired unnoticed: expiries up to a later moment were read before its commit was seen.

    The time of a commit is fixed before it syncs. If its process is slow or stopped in between, an entry may expire
    before anyone sees it.
    """
    return change.at < expired_to and change.kind in (ChangeKind.PUT, ChangeKind.TOUCH)
