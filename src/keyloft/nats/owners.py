"""Finds the owner and the operation of a subject, and bounds how many owners have a queue of their own.

Inventing names costs a sender nothing, so the cost of a name to the service is bounded.
"""

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final

from keyloft import limits
from keyloft.nats.events import EVENTS
from keyloft.nats.meters import OTHER, ServiceMeters
from keyloft.nats.reporting import Route
from keyloft.nats.requests import Owner

_EVENTS: Final = f".{EVENTS}.".encode()
_MANY: Final = b".many"
_STEPS: Final = 8
"""How many owners are examined before a new name gets no queue: if these are all busy, most others are, too."""


class Owners:
    """The owners with a queue of their own, up to OWNERS of them; all others share one queue, and its turns.

    So a flood of names takes no more memory, and no more turns, than that many owners do. An owner that sends again and
    again keeps its queue beside such a flood.
    """

    def __init__(self, route: Callable[[str], Route], words: int, meters: ServiceMeters) -> None:
        """Args:
        route: What a subject means.
        words: How many words of a subject follow its prefix; the first of them is the owner's name.
        meters: Where the requests of each owner are counted.
        """
        self._find_route = route
        self._words = words
        self._meters = meters
        self.routes: dict[bytes, Route] = {}
        """The routes of the subjects that are remembered."""
        self.known: dict[str, Owner] = {}
        """The owners with a queue of their own, by name."""
        self._names: set[bytes] = set()
        """Their names, as they are in a subject."""
        self.others = Owner("", meters.of(OTHER))
        """Stands for all names without a queue of their own."""
        self._ring: deque[Owner] = deque()
        """The owners with a queue of their own, in the order in which they are examined next."""

    def __iter__(self) -> Iterator[Owner]:
        yield from self.known.values()
        yield self.others

    def route(self, subject: bytes) -> Route:
        """The owner's name and the operation, which the subject alone decides.

        Raises:
            UnicodeDecodeError: The subject is not UTF-8.
        """
        if len(self.routes) >= limits.ROUTES:
            self.routes.clear()
        found = self.routes[subject] = self._find_route(subject.decode())
        return found

    def knows(self, subject: bytes) -> bool:
        """Whether the owner that a subject names has a queue of its own: a fast check, for a flood of names."""
        return subject.rsplit(b".", self._words)[-self._words :][0] in self._names

    def shares_queue(self, subject: bytes) -> bool:
        """Whether a request surely belongs into the shared queue, found without understanding its subject.

        False for a `many`, which counts as more bytes, and for events, which are not requests.
        """
        if not self.others.request_bytes or not subject.isascii() or self.knows(subject):
            return False
        return not subject.endswith(_MANY) and _EVENTS not in subject

    def of(self, name: str) -> Owner:
        """A new owner with this name, or the one that stands for all others."""
        # A request of this name may be waiting in the shared queue. It must come before the next one, so no new queue.
        if self.others.request_bytes or (len(self.known) >= limits.OWNERS and not self._forget_one()):
            return self.others
        owner = self.known[name] = Owner(name, self._meters.of(name or OTHER))
        self._names.add(name.encode())
        self._ring.append(owner)
        return owner

    def _forget_one(self) -> bool:
        """Forget an owner that is idle and sends requests seldom; returns whether one was found within a few steps."""
        now = perf_counter()
        for _ in range(_STEPS):
            owner = self._ring.popleft()
            if owner.is_idle:
                if owner.visits <= 1:
                    del self.known[owner.name]
                    self._names.discard(owner.name.encode())
                    return True
                if now - owner.examined_at > limits.OWNER_MEMORY_SECONDS:
                    owner.visits //= 2
                    owner.examined_at = now
            self._ring.append(owner)
        return False
