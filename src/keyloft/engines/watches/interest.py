"""Finds the watches that a key concerns, in a time that does not grow with the number of the others."""

import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from keyloft.core.records import Address, Get, Key, Scan, Space

W = TypeVar("W")


class Registration(Generic[W]):
    """What one watch is interested in. It refers weakly to the watch: one that its user dropped is collected."""

    __slots__ = ("__weakref__", "addresses", "scan", "watch")

    def __init__(self, watch: W, asks: Iterable[Get | Scan], dropped: "Callable[[Registration[W]], None]") -> None:
        self.addresses = {(ask.space, ask.key) for ask in asks if isinstance(ask, Get)}
        self.scan = next((ask for ask in asks if isinstance(ask, Scan)), None)
        self.watch = weakref.ref(watch, lambda _: dropped(self))

    def contains(self, space: Space, key: Key) -> bool:
        """Whether it is interested in a key."""
        if (scan := self.scan) is not None:
            return bool(space is scan.space and scan.start <= key < scan.end)
        return (space, key) in self.addresses

    @property
    def spaces(self) -> set[Space]:
        return {space for space, _ in self.addresses} if self.scan is None else {self.scan.space}


class Interest(Generic[W]):
    """The registered watches, by key and by range."""

    def __init__(self) -> None:
        self._all: set[Registration[W]] = set()
        self._spaces: Counter[Space] = Counter()
        self._by_key: dict[Address, set[Registration[W]]] = {}
        self._ranges: dict[Space, _Segments[W]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, watch: W, asks: Iterable[Get | Scan]) -> Registration[W]:
        registration = Registration(watch, asks, self.remove)
        self._all.add(registration)
        self._spaces.update(registration.spaces)
        for address in registration.addresses:
            self._by_key.setdefault(address, set()).add(registration)
        if (scan := registration.scan) is not None:
            self._ranges.setdefault(scan.space, _Segments()).add(scan.start, scan.end, registration)
        return registration

    def remove(self, registration: Registration[W]) -> None:
        if registration not in self._all:
            return
        self._all.remove(registration)
        self._spaces.subtract(registration.spaces)
        for address in registration.addresses:
            registrations = self._by_key[address]
            registrations.remove(registration)
            if not registrations:
                del self._by_key[address]
        if (scan := registration.scan) is not None:
            self._ranges[scan.space].remove(scan.start, scan.end, registration)

    def watches(self) -> list[W]:
        return [watch for registration in self._all if (watch := registration.watch()) is not None]

    def spaces(self) -> list[Space]:
        """The key spaces in which something is watched."""
        return [space for space, watches in self._spaces.items() if watches]

    def of(self, space: Space, key: Key) -> list[W]:
        """The watches that a key concerns."""
        by_key = self._by_key.get((space, key))
        within = ranges.at(key) if (ranges := self._ranges.get(space)) is not None else None
        if not by_key and not within:  # most changes concern none
            return []
        registrations = [*(by_key or ()), *(within or ())]
        return [watch for registration in registrations if (watch := registration.watch()) is not None]


class _Segments(Generic[W]):
    """Ranges, cut where any of them begins or ends: within a segment, the same ones hold for every key."""

    def __init__(self) -> None:
        self._starts: list[Key] = []
        self._sets: list[set[Registration[W]]] = []

    def at(self, key: Key) -> set[Registration[W]] | None:
        segment = bisect_right(self._starts, key) - 1
        return self._sets[segment] if segment >= 0 else None

    def add(self, start: Key, end: Key, registration: Registration[W]) -> None:
        if start < end:
            for segment in range(self._cut(start), self._cut(end)):
                self._sets[segment].add(registration)

    def remove(self, start: Key, end: Key, registration: Registration[W]) -> None:
        if start < end:
            for segment in range(bisect_left(self._starts, start), bisect_left(self._starts, end)):
                self._sets[segment].discard(registration)
            self._join(end)
            self._join(start)

    def _cut(self, key: Key) -> int:
        """Make a segment begin at a key; returns its index."""
        segment = bisect_left(self._starts, key)
        if segment == len(self._starts) or self._starts[segment] != key:
            before = self._sets[segment - 1] if segment > 0 else set[Registration[W]]()
            self._starts.insert(segment, key)
            self._sets.insert(segment, before.copy())
        return segment

    def _join(self, key: Key) -> None:
        """Drop the cut at a key if the same ranges hold on both sides."""
        segment = bisect_left(self._starts, key)
        before = self._sets[segment - 1] if segment > 0 else set()
        if self._sets[segment] == before:
            del self._starts[segment], self._sets[segment]
