"""Watches of a range: the keys that changed, each with what is stored there now."""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from keyloft import limits
from keyloft.core.records import Change, Get, LoggedChange, Record
from keyloft.engines.watches.watch import LogFollowingWatch


class RangeWatch(LogFollowingWatch[Change]):
    """A watch of a range: reports the keys that changed, each with what is stored there now."""

    _fitting = limits.WATCH_FIRST_KEYS
    """How many keys to read at a time, which depends on the size of the values that were read last."""
    _interrupted: tuple[Sequence[LoggedChange], list[Change], int, int] | None = None
    """What a cancelled reader had read: of which changes, what to report, its bytes, and for how many changes."""

    def _slot(self, change: LoggedChange) -> Hashable:
        slot: Hashable = change.key
        return slot

    def _ordered(self, changes: Iterable[LoggedChange]) -> list[LoggedChange]:
        return sorted(changes, key=lambda change: (change.version, change.key))

    async def _report(self, changes: Sequence[LoggedChange], up_to: int) -> tuple[list[Change], int]:
        """What is stored at the first keys now, in the order of their changes, until the values have enough bytes.

        If a later commit, which this watch has not reached yet, has changed an entry again, the entry is left out: it
        will be reported with that commit. So a reader that continues from the last versionstamp it has seen misses
        nothing in between.
        """
        reported: list[Change] = []
        size = count = 0
        if self._interrupted is not None and self._interrupted[0] is changes:
            _, reported, size, count = self._interrupted
        self._interrupted = None
        while count < min(len(changes), limits.WATCH_REPORT_KEYS) and size < limits.WATCH_REPORT_BYTES:
            some = changes[count : count + self._fitting]
            try:
                records: list[Record | None] = await self._feed.reader.read(
                    *[Get(self._space, change.key) for change in some]
                )
            except BaseException:
                # A reader that is cancelled in each step gets on nevertheless.
                self._interrupted = changes, reported, size, count
                raise
            self._expire_again(records)
            sizes = [0 if record is None else len(record.value) for record in records]
            read = sum(sizes)
            if size + read > limits.WATCH_REPORT_BYTES:
                # The rest will be read again: how large values are is not known before they are read.
                ends = list(accumulate(sizes, initial=size))
                records = records[: bisect_left(ends, limits.WATCH_REPORT_BYTES)]
            reported += [
                Change(change.key, record)
                for change, record in zip(some, records, strict=False)
                if record is None or record.version <= max(up_to, change.version)
            ]
            fitting = max(1, limits.WATCH_REPORT_BYTES * len(some) // max(1, read))
            self._fitting = min(fitting, limits.WATCH_GROWTH * self._fitting, limits.WATCH_READ_KEYS)
            count += len(records)
            size += read
        return reported, count
