"""The progress of a watch that reads the change log itself, and how expiries come between the changes of the log.

The log has no row for an expiry until it is swept, so expiries are read from their index, a page at a time. No change
is reported before the expiries that lie LATE_EXPIRY_SECONDS before it: a reader that is ended at any change, and
continues from its version, gets later expiries only. No expiry is reported before the changes up to its moment: the
entry that expired was written by one of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import WHOLE, DuePage, Key, LoggedChange, LogPosition
from keyloft.engines.watches.slices import SharedSlice

LATE: Final = round(1000 * limits.LATE_EXPIRY_SECONDS)
"""No change is reported before expiries that lie so many milliseconds before it."""
_READS: Final = 8
"""How many reads of expiries are distinguished; beyond that, the two oldest count as one."""

Expiry = tuple[int, Key]


class Portion(Struct):
    """Changes of a backlog that are reported together or in parts."""

    changes: Sequence[LoggedChange]
    """The changes that are not yet reported, in the order in which they will be."""
    up_to: int
    """The version up to which all is reported once these are; the rest of it may be in the next slice."""


class _ExpiriesRead(Struct, frozen=True):
    """Expiries up to a moment were read; what was committed after a version was not seen."""

    version: int
    moment: int


class Backlog:
    """What a watch has read and not yet reported, until it has caught up with the feed."""

    def __init__(self, position: LogPosition, expired_to: int | None) -> None:
        """Changes up to the position, and expiries up to the moment, were reported; None stands for the moment from
        which a reader that continues from this position needs them."""
        self.position = position
        """Up to which slice of the log all is reported."""
        self.expired_to = 0 if expired_to is None else expired_to
        """Up to which moment expiries were read."""
        self.has_read_expiries = False
        """Whether the page that was read last has all entries that had expired by then."""
        self.has_caught_up = False
        """Whether all that was committed and had expired was reported, twice in a row: in between, the last slice is
        kept for other watches that read it."""
        self.seen = LogPosition(0)
        """The end of the log when expiries were read last."""
        self.slice: SharedSlice | None = None
        """The slice that is being reported, if there is one."""
        self.portion: Portion | None = None
        """The portion that is being reported in parts."""
        self._shared: SharedSlice | None = None
        """The slice that was read last, kept for other watches that read the same one."""
        self._starts_at_position = expired_to is None
        self._changes: Sequence[LoggedChange] = ()
        """The changes of the slice that concern the watch and are not yet reported."""
        self._was_at_end = False
        self._reports_rest = False
        """Whether the portion has all changes of the slice that were not yet reported."""
        self._expiries: list[Expiry] = []
        """The expiries that were read and not yet reported, in their order."""
        self._reads: list[_ExpiriesRead] = []
        """Which changes of the log the reads of expiries did not see."""
        if expired_to is not None:
            # The rest of a version may be committed at that moment, and be read from the next part of the log.
            version = position.version if position.part == WHOLE else position.version - 1
            self._reads.append(_ExpiriesRead(version, expired_to))

    # The log

    def begin_slice(self, shared: SharedSlice, changes: Sequence[LoggedChange]) -> None:
        """Report this slice next: of its changes, those that concern the watch, in the order of their versions."""
        self.slice = self._shared = shared
        self.has_caught_up = False
        self._changes = changes
        if self._starts_at_position:
            self.expired_to = shared.piece.began - LATE
            self._starts_at_position = False

    @property
    def _may_report_whole(self) -> bool:
        """Whether the whole slice may be reported, after the expiries that were read."""
        assert self.slice is not None, "a slice is being reported"
        shown = self.has_read_expiries and self.slice.piece.end <= self.seen  # whatever its clock says
        return shown or self.slice.piece.ended <= self.expired_to + LATE

    @property
    def _is_at_end(self) -> bool:
        """Whether the log ends with the slice, and has all entries whose expiries were read."""
        assert self.slice is not None, "a slice is being reported"
        return self.slice.piece.is_last and self.slice.piece.end >= self.seen

    @property
    def needs_expiries(self) -> bool:
        """Whether expiries must be read before anything else can be reported."""
        assert self.slice is not None, "a slice is being reported"
        if self._may_report_whole:
            return self._is_at_end and not self.has_read_expiries and not self._expiries
        first = self._changes[0].at if self._changes else self.slice.piece.ended
        return first > self.expired_to + LATE

    def ready(self, reported_to: int) -> tuple[Sequence[LoggedChange], Sequence[Expiry], int]:
        """The changes and the expiries to report next, and the version up to which all is reported then."""
        assert self.slice is not None, "a slice is being reported"
        piece, changes = self.slice.piece, self._changes
        self._reports_rest = self._may_report_whole
        if self._reports_rest:
            self._changes = ()
            due = len(self._expiries) if self._is_at_end else bisect_right(self._expiries, (piece.ended,))
            up_to = piece.end.version if piece.is_last or not piece.changes else piece.changes[-1].version
        else:
            count = bisect_right(changes, self.expired_to + LATE, key=attrgetter("at"))
            changes, self._changes = changes[:count], changes[count:]
            due = len(self._expiries)
            up_to = changes[-1].version if changes else reported_to
        expiries, self._expiries = self._expiries[:due], self._expiries[due:]
        return changes, expiries, up_to

    def pass_portion(self) -> int:
        """Note that the portion is reported; returns the version up to which all is reported now."""
        assert self.slice is not None, "a slice is being reported"
        assert self.portion is not None, "a portion is being reported"
        up_to, piece, self.portion = self.portion.up_to, self.slice.piece, None
        if self._reports_rest:
            is_at_end = self._is_at_end and self.has_read_expiries and not self._expiries
            self.has_caught_up, self._was_at_end = is_at_end and self._was_at_end, is_at_end
            self.position, self.slice = piece.end, None
            if not piece.is_last:
                return up_to - 1  # the rest of the last version may be in the next slice
        return up_to

    # Expiries

    @property
    def has_expiries(self) -> bool:
        """Whether there are expiries that were read and are not yet reported."""
        return bool(self._expiries)

    def add_page(self, page: DuePage, found: Sequence[Expiry]) -> None:
        """Note a page of expiries, and which of them concern the watch."""
        self.expired_to, self.has_read_expiries, self.seen = page.up_to, page.is_last, LogPosition(page.version)
        self._expiries = sorted([*self._expiries, *found])
        self._reports_rest = False
        reads = [*self._reads, _ExpiriesRead(page.version, page.up_to)]
        while len(reads) > 1 and reads[1].version < self.position.version:
            del reads[0]  # all that it did not see is reported, or was seen by the next one
        if len(reads) > _READS:
            reads[:2] = [_ExpiriesRead(reads[0].version, reads[1].moment)]
        self._reads = reads

    def read_again(self, moment: int) -> None:
        """Read expiries again after this moment."""
        self.expired_to, self.has_read_expiries, self.has_caught_up = min(self.expired_to, moment), False, False
        self._reads = [_ExpiriesRead(one.version, min(one.moment, moment)) for one in self._reads]

    def missed_before(self, version: int) -> int:
        """Up to which moment expiries were read without seeing this version."""
        return max([read.moment for read in self._reads if read.version < version], default=0)
