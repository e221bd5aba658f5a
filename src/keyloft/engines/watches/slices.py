"""Slices of the change log that several watches read: each is read and unpacked once, and searched by key."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

from keyloft.core.engine import Reader
from keyloft.core.records import Changes, Key, LoggedChange, LogPosition, LogSlice, Space
from keyloft.engines.watches.interest import Registration

_key = attrgetter("key")


class SharedSlice:
    """A slice of the log, and an index of its keys once a second watch searches it."""

    __slots__ = ("__weakref__", "_by_space", "_is_used", "piece")

    def __init__(self, piece: LogSlice) -> None:
        self.piece = piece
        self._is_used = False
        self._by_space: dict[Space, tuple[list[Key], list[LoggedChange]]] | None = None

    def of(self, registration: Registration[Any], space: Space) -> Iterable[LoggedChange]:
        """The changes of a space that concern a watch; changes of one key are in their order."""
        if not self._is_used:
            self._is_used = True
            changes = self.piece.changes
            return [one for one in changes if one.space is space and registration.contains(space, one.key)]
        keys, sorted_changes = self._indexed(space)
        if (scan := registration.scan) is not None:
            return sorted_changes[bisect_left(keys, scan.start) : bisect_left(keys, scan.end)]
        wanted = [key for within, key in registration.addresses if within is space]
        return [one for key in wanted for one in sorted_changes[bisect_left(keys, key) : bisect_right(keys, key)]]

    def _indexed(self, space: Space) -> tuple[Sequence[Key], Sequence[LoggedChange]]:
        if self._by_space is None:
            self._by_space = {}
        if (found := self._by_space.get(space)) is None:
            changes = sorted([one for one in self.piece.changes if one.space is space], key=_key)
            found = self._by_space[space] = [one.key for one in changes], changes
        return found


class SharedSlices:
    """The slices that watches are reading now; after a disconnection, thousands of watches may read the same slices."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._read: WeakValueDictionary[LogPosition, SharedSlice] = WeakValueDictionary()
        """The slices that a watch refers to."""

    async def after(self, position: LogPosition, dispatched: LogPosition | None) -> SharedSlice:
        """The slice after a position. If it is the last one, it has all changes that the feed has dispatched.

        Raises:
            HistoryGone: The log no longer has it.
        """
        found = self._read.get(position)
        if found is None or (found.piece.is_last and (dispatched is None or found.piece.end < dispatched)):
            [piece] = await self._reader.read(Changes(position))
            found = self._read[position] = SharedSlice(piece)
        return found
