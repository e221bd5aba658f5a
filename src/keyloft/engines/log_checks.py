"""Finds what is wrong with the change log: rows out of order, holes, times that fall, changes that can't be read."""

from collections.abc import Iterator

from keyloft import limits
from keyloft.core.maintenance import LogRow
from keyloft.engines import change_log
from keyloft.errors import Undecodable


class LogChecker:
    """Checks the rows of a change log, which arrive oldest first."""

    def __init__(self) -> None:
        self._before: LogRow | None = None

    def defects(self, row: LogRow) -> Iterator[str]:
        """What is wrong with the next row, beginning with the row's position in the log."""
        name = f"version {row.version}, part {row.part}"
        if not all([type(number) is int for number in (row.version, row.part, row.base, row.at, row.size)]):
            yield f"{name}: a number of the row is not a number"
            return
        before, self._before = self._before, row
        if row.base >= row.version:
            yield f"{name}: it begins after version {row.base}, which is not below its own"
        if before is None:
            if row.part:
                yield f"{name}: the log begins in the middle of a version"
        elif row.part:
            if (row.version, row.part, row.base) != (before.version, before.part + 1, before.base):
                yield f"{name}: it does not continue the row before it, part {before.part} of version {before.version}"
        elif row.base != before.version and not _is_jump(before.version, row.base):
            yield f"{name}: it begins after version {row.base}, but the row before it ends with {before.version}"
        if before is not None and row.at < before.at:
            yield f"{name}: it is older than the row before it"
        if before is not None and row.size < before.size:
            yield f"{name}: its size is below that of the row before it"
        try:
            changes = change_log.unpack(row.base, row.at, row.changes)
        except Undecodable:
            yield f"{name}: its changes don't match their checksum"
            return
        if any([not row.base < change.version <= row.version for change in changes]):
            yield f"{name}: it lists a change of another version"

    def defects_at_end(self, counter: int, now: int, clock: int) -> Iterator[str]:
        """What is wrong once all rows were checked.

        Args:
            counter: The version counter of the database.
            now: The database's time, which is never before its last commit.
            clock: This machine's time.
        """
        if self._before is None:
            yield "it has no row"
        elif self._before.version != counter:
            yield f"it ends with version {self._before.version}, and the version counter stands at {counter}"
        elif now <= self._before.at and (ahead := (now - clock) / 1000) > limits.CLOCK_AHEAD_SECONDS:
            yield f"it ends {ahead:.0f} s ahead of this machine's clock, so writes are refused: is the clock right?"


def _is_jump(before: int, base: int) -> bool:
    """Whether versions have jumped: PostgreSQL's do so on a new timeline."""
    return base == (before // limits.VERSION_JUMP + 1) * limits.VERSION_JUMP
