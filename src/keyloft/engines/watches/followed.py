"""Reports the changes of a range, or of some keys, one by one as the change log has them, without their entries."""

from collections.abc import Hashable, Iterable, Sequence

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import ChangeKind, Get, Key, LoggedChange, LogSlice
from keyloft.engines.watches.watch import Backlog, LogFollowingWatch, Portion


class FollowedLog(LogFollowingWatch[LoggedChange]):
    """Every single put, delete and expiry, in the order of their versions. Touches are left out.

    The log has no version for an expiry until it is swept: it is reported with the version up to which all changes were
    reported before it.
    """

    _reads_log_first = True
    _reported_expiries: set[Key] | None = None
    """Keys whose expiry was reported before the log had it, so that it is not reported again once they are swept."""
    _newest = 0
    """The version of the last change that was reported. A watch that fell behind may read earlier changes again."""

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
            self.expired(change.key)

    async def _next_portion(self, backlog: Backlog) -> Portion:
        portion = await super()._next_portion(backlog)
        if (moment := backlog.expired_to) is not None and isinstance(portion.read, LogSlice):
            late = {change.key for change in portion.changes if _may_have_expired(change, moment)}
            portion.changes = [*portion.changes, *map(self._expiry, sorted(late))]
        return portion

    def _slot(self, change: LoggedChange) -> Hashable:
        # A long batch that puts an entry and touches it may be logged in parts: the touch must not replace the put.
        return change.version, change.key, change.kind is ChangeKind.TOUCH

    def _ordered(self, changes: Iterable[LoggedChange]) -> list[LoggedChange]:
        return sorted(changes, key=lambda change: (not change.version, change.version, change.key))

    async def _report(self, changes: Sequence[LoggedChange], up_to: int) -> tuple[list[LoggedChange], int]:
        """Report all changes at once: none has a value."""
        # If the key has an entry, it has not expired, or was written again meanwhile, and the log has that.
        absent = await self._absent([change.key for change in changes if not change.version])
        newest = max([self._newest, *[change.version for change in changes]])
        reported: list[LoggedChange] = []
        for change in changes:
            if 0 < change.version < self._newest:
                continue
            if not change.version:
                if change.key in absent:
                    self._note_expiry(change.key)
                    # Not below that of a change before it, which the rest of its version may still follow.
                    reported.append(replace(change, version=max(up_to, newest, self.reported_to or 0)))
            elif change.kind is ChangeKind.EXPIRED and change.key in (self._reported_expiries or ()):
                self._reported_expiries.discard(change.key)  # type: ignore[union-attr]
            elif change.kind is not ChangeKind.TOUCH:
                if self._reported_expiries:
                    self._reported_expiries.discard(change.key)
                reported.append(change)
        self._newest = newest
        return reported, len(changes)

    async def _absent(self, keys: Sequence[Key]) -> set[Key]:
        """Those of the keys that have no entry now."""
        absent: set[Key] = set()
        for first in range(0, len(keys), limits.WATCH_READ_KEYS):
            some = keys[first : first + limits.WATCH_READ_KEYS]
            records = await self._feed.reader.read(*[Get(self._space, key) for key in some])
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
