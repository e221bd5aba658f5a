"""Reports the changes of a range, or of some keys, one by one as the change log has them, without their entries."""

from collections.abc import Hashable, Iterable, Sequence

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import ChangeKind, Get, Key, LoggedChange
from keyloft.engines.watches.watch import LogFollowingWatch


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
        if self._backlog is None and not self._pending and not self._is_reading and self._started_at is not None:
            return max(self._feed.dispatched_to, self.reported_to or 0)  # a backlog may end beyond the feed
        return self.reported_to

    def changed(self, change: LoggedChange) -> None:
        if change.kind is not ChangeKind.TOUCH:
            super().changed(change)

    def _slot(self, change: LoggedChange) -> Hashable:
        return change.version, change.key

    def _ordered(self, changes: Iterable[LoggedChange]) -> list[LoggedChange]:
        return sorted(changes, key=lambda change: (not change.version, change.version, change.key))

    async def _report(self, changes: Sequence[LoggedChange], up_to: int) -> tuple[list[LoggedChange], int]:
        """Report all changes at once: none has a value."""
        reported: list[LoggedChange] = []
        for change in changes:
            if 0 < change.version < self._newest:
                continue
            if not change.version:
                # If the key has an entry, it was written again meanwhile, and the log has that.
                [record] = await self._feed.reader.read(Get(self._space, change.key))
                if record is None:
                    self._note_expiry(change.key)
                    reported.append(replace(change, version=max(up_to, self.reported_to or 0)))
            elif change.kind is ChangeKind.EXPIRED and change.key in (self._reported_expiries or ()):
                self._reported_expiries.discard(change.key)  # type: ignore[union-attr]
            elif change.kind is not ChangeKind.TOUCH:
                if self._reported_expiries:
                    self._reported_expiries.discard(change.key)
                reported.append(change)
        self._newest = max([self._newest, *[change.version for change in changes]])
        return reported, len(changes)

    def _note_expiry(self, key: Key) -> None:
        if self._reported_expiries is None or len(self._reported_expiries) >= limits.WATCH_PENDING_KEYS:
            self._reported_expiries = set()  # bounded: a forgotten expiry is reported a second time
        self._reported_expiries.add(key)
