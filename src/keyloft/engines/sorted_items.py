"""Items in order, in chunks: to add or remove one takes no longer the more there are, as it would in one list."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any, Final

_CHUNK: Final = 512


class SortedItems:
    """Items that are all different. Bounds may be anything that compares with them."""

    def __init__(self) -> None:
        self._chunks: list[list[Any]] = []
        self._firsts: list[Any] = []
        """The first item of each chunk."""

    def add(self, item: Any) -> None:
        """Add an item that is not there."""
        if not self._chunks:
            self._chunks, self._firsts = [[item]], [item]
            return
        at = self._chunk_of(item)
        chunk = self._chunks[at]
        insort(chunk, item)
        self._firsts[at] = chunk[0]
        if len(chunk) > 2 * _CHUNK:
            self._chunks[at : at + 1] = chunk[:_CHUNK], chunk[_CHUNK:]
            self._firsts.insert(at + 1, chunk[_CHUNK])

    def remove(self, item: Any) -> None:
        """Remove an item that is there."""
        at = self._chunk_of(item)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, item)]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def ascending(self, start: Any, end: Any = None, *, after: bool = False) -> Iterator[Any]:
        """The items in `[start, end)`, without `start` itself if `after`; up to the last one if `end` is None."""
        if not self._chunks:
            return
        number = self._chunk_of(start)
        first = self._position(number, start, after)
        for chunk in self._chunks[number:]:
            last = len(chunk) if end is None or chunk[-1] < end else bisect_left(chunk, end)
            yield from chunk[first:last]
            if last < len(chunk):
                return
            first = 0

    def count(self, start: Any, end: Any) -> int:
        """How many items there are in `[start, end)`, without going through them."""
        if not self._chunks or end <= start:
            return 0
        first, last = self._chunk_of(start), self._chunk_of(end)
        before = sum(map(len, self._chunks[first:last]))
        return before + bisect_left(self._chunks[last], end) - bisect_left(self._chunks[first], start)

    def descending(self, start: Any, end: Any, *, after: bool = False) -> Iterator[Any]:
        """The same items from the last to the first."""
        if not self._chunks:
            return
        lowest = self._chunk_of(start)
        for number in range(self._chunk_of(end), lowest - 1, -1):
            chunk = self._chunks[number]
            first = self._position(number, start, after) if number == lowest else 0
            yield from reversed(chunk[first : bisect_left(chunk, end)])

    def _chunk_of(self, bound: Any) -> int:
        """The number of the chunk where an item stands, or would be added."""
        return max(bisect_right(self._firsts, bound) - 1, 0)

    def _position(self, number: int, start: Any, after: bool) -> int:
        return (bisect_right if after else bisect_left)(self._chunks[number], start)
