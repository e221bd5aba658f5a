"""Finds the watches that a key concerns, in a time that does not grow with the number of other watches."""

import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from keyloft.core.records import Address, Get, Key, Scan, Space

W = TypeVar("W")


class Registration(Generic[W]):
    """The keys and ranges of one watch. It refers to the watch weakly: a watch that its user dropped is collected."""

    __slots__ = ("__weakref__", "addresses", "scan", "watch")

    def __init__(self, watch: "weakref.ref[W]", asks: Iterable[Get | Scan]) -> None:
        self.addresses = {(ask.space, ask.key) for ask in asks if isinstance(ask, Get)}
        self.scan = next((ask for ask in asks if isinstance(ask, Scan)), None)
        self.watch = watch

    def contains(self, space: Space, key: Key) -> bool:
        """Whether it is interested in a key."""
        if (scan := self.scan) is not None:
            return bool(space is scan.space and scan.start <= key < scan.end)
        return (space, key) in self.addresses

    @property
    def spaces(self) -> set[Space]:
        return {space for space, _ in self.addresses} if self.scan is None else {self.scan.space}


class Interest(Generic[W]):
    """The registered watches, by key and by range.

    A signal's handler may raise between any two steps. So a registration is added to `_all` first and removed from it
    last, and each step of a removal can be repeated.
    """

    def __init__(self) -> None:
        self._all: dict[weakref.ref[W], Registration[W]] = {}
        self._dropped: deque[weakref.ref[W]] = deque()
        """Registrations of watches that their users dropped. The garbage collector, which may run in any thread at any
        time, only adds to this list; the next call of a method removes the registrations."""
        self._by_space: dict[Space, set[Registration[W]]] = {}
        self._by_key: dict[Address, set[Registration[W]]] = {}
        self._ranges: dict[Space, _Segments[W]] = {}

    def __bool__(self) -> bool:
        self._forget_dropped()
        return bool(self._all)

    def add(self, watch: W, asks: Iterable[Get | Scan]) -> Registration[W]:
        self._forget_dropped()
        registration = Registration(weakref.ref(watch, self._dropped.append), asks)
        self._all[registration.watch] = registration
        for space in registration.spaces:
            self._by_space.setdefault(space, set()).add(registration)
        for address in registration.addresses:
            self._by_key.setdefault(address, set()).add(registration)
        if (scan := registration.scan) is not None:
            self._ranges.setdefault(scan.space, _Segments()).add(scan.start, scan.end, registration)
        return registration

    def remove(self, registration: Registration[W]) -> None:
        if registration.watch not in self._all:
            return
        for space in registration.spaces:
            self._by_space.get(space, set()).discard(registration)
        for address in registration.addresses:
            registrations = self._by_key.get(address, set())
            registrations.discard(registration)
            if not registrations:
                self._by_key.pop(address, None)
        if (scan := registration.scan) is not None and (ranges := self._ranges.get(scan.space)) is not None:
            ranges.remove(scan.start, scan.end, registration)
        self._all.pop(registration.watch, None)

    def _forget_dropped(self) -> None:
        while self._dropped:
            if (registration := self._all.get(self._dropped[0])) is not None:
                self.remove(registration)
            self._dropped.popleft()

    def watches(self) -> list[W]:
        return [watch for dropped in self._all.copy() if (watch := dropped()) is not None]

    def spaces(self) -> list[Space]:
        """The key spaces in which something is watched."""
        self._forget_dropped()
        return [space for space, registrations in self._by_space.items() if registrations]

    def of(self, space: Space, key: Key) -> list[W]:
        """The watches that a key concerns."""
        by_key = self._by_key.get((space, key))
        within = ranges.at(key) if (ranges := self._ranges.get(space)) is not None else None
        if not by_key and not within:  # most changes concern none
            return []
        registrations = [*(by_key or ()), *(within or ())]
        return [watch for registration in registrations if (watch := registration.watch()) is not None]


class _Segments(Generic[W]):
    """Ranges, divided into segments where any of them begins or ends: all keys of a segment are in the same ranges.

    The beginnings of segments, and their sets of ranges, are two lists, which are replaced together.
    """

    def __init__(self) -> None:
        self._segments: tuple[list[Key], list[set[Registration[W]]]] = [], []

    def at(self, key: Key) -> set[Registration[W]] | None:
        starts, sets = self._segments
        segment = bisect_right(starts, key) - 1
        return sets[segment] if segment >= 0 else None

    def add(self, start: Key, end: Key, registration: Registration[W]) -> None:
        if start < end:
            self._cut(start)
            self._cut(end)
            for within in self._between(start, end):
                within.add(registration)

    def remove(self, start: Key, end: Key, registration: Registration[W]) -> None:
        if start < end:
            for within in self._between(start, end):
                within.discard(registration)
            self._join(end)
            self._join(start)

    def _between(self, start: Key, end: Key) -> list[set[Registration[W]]]:
        starts, sets = self._segments
        return sets[bisect_left(starts, start) : bisect_left(starts, end)]

    def _cut(self, key: Key) -> None:
        """Make a segment begin at a key."""
        starts, sets = self._segments
        segment = bisect_left(starts, key)
        if segment == len(starts) or starts[segment] != key:
            before = sets[segment - 1] if segment > 0 else set[Registration[W]]()
            self._segments = (
                [*starts[:segment], key, *starts[segment:]],
                [*sets[:segment], before.copy(), *sets[segment:]],
            )

    def _join(self, key: Key) -> None:
        """Join the segments before and after a key, if the same ranges cover both."""
        starts, sets = self._segments
        segment = bisect_left(starts, key)
        if segment < len(starts) and starts[segment] == key:
            before = sets[segment - 1] if segment > 0 else set()
            if sets[segment] == before:
                self._segments = (
                    [*starts[:segment], *starts[segment + 1 :]],
                    [*sets[:segment], *sets[segment + 1 :]],
                )
