"""Reports the changes of a range, or of some keys, one by one as the change log has them, without their entries."""

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import ChangeKind, Get, Key, LoggedChange
from keyloft.engines.watches.backlog import Backlog
from keyloft.engines.watches.watch import LogFollowingWatch


class FollowedLog(LogFollowingWatch[LoggedChange]):
    """Every single put, delete and expiry, in the order of their versions. Touches are left out.

    The log has no version for an expiry until it is swept: it is reported between the changes of the log, where its
    moment lies, with a version up to which all changes were reported before it.
    """

    _reported_expiries: set[Key] | None = None
    """Keys whose expiry was reported before the log had it, so that it is not reported again once they are swept."""
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

    def changed(self, change: LoggedChange) -> None:
        if self._started_at is not None and change.version <= self._started_at:
            return
        if change.kind is not ChangeKind.TOUCH:
            super().changed(change)
        if _may_have_expired(change, self._feed.expired_to.get(self._space, 0)):
            self.expired(change.key, change.at)

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
        # If the key has an entry, it has not expired, or was written again meanwhile, and the log has that.
        absent = await self._absent([change.key for change in changes if not change.version])
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
                    self._note_expiry(change.key)
                    reported.append(replace(change, version=version))
            elif change.kind is ChangeKind.EXPIRED and change.key in (self._reported_expiries or ()):
                self._reported_expiries.discard(change.key)  # type: ignore[union-attr]
            elif change.kind is not ChangeKind.TOUCH:
                if self._reported_expiries:
                    self._reported_expiries.discard(change.key)
                reported.append(change)
        self._newest = version
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

    def _note_expiry(self, key: Key) -> None:
        if self._reported_expiries is None or len(self._reported_expiries) >= limits.WATCH_PENDING_KEYS:
            self._reported_expiries = set()  # bounded: a forgotten expiry is reported a second time
        self._reported_expiries.add(key)


def _may_have_expired(change: LoggedChange, expired_to: int) -> bool:
    """Whether the entry may have expired unnoticed: expiries up to a later moment were read before its commit was seen.

    The time of a commit is fixed before it syncs. If its process is slow or stopped in between, an entry may expire
    before anyone sees it.
    """
    return change.at < expired_to and change.kind in (ChangeKind.PUT, ChangeKind.TOUCH)
