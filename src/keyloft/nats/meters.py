"""Counts the requests of a service, cheaply enough to do it for every request."""

from bisect import bisect_left
from collections import Counter
from typing import Final

from msgspec import Struct, field

from keyloft import limits

OTHER: Final = "other"
"""The name under which owners without a label of their own are counted."""

_BOUNDS: Final = limits.LATENCY_BOUNDS


def _empty() -> list[int]:
    return [0] * (len(_BOUNDS) + 1)


class Histogram:
    """How often something took how long; the last bucket has no upper bound."""

    __slots__ = ("buckets", "seconds")

    def __init__(self, buckets: list[int] | None = None, seconds: float = 0.0) -> None:
        self.buckets = _empty() if buckets is None else buckets
        self.seconds = seconds

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def copied(self) -> tuple[tuple[int, ...], float]:
        return tuple(self.buckets), self.seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Timing:  # no Struct: every request adds to one, and a struct's fields are slower to set
    """How many operations of one kind an owner had, and how long they took; all owners share the buckets."""

    __slots__ = ("_buckets", "count", "seconds")

    def __init__(self, buckets: list[int]) -> None:
        self._buckets = buckets
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self._buckets[bisect_left(_BOUNDS, seconds)] += 1

    def add_several(self, seconds: float, count: int) -> None:
        """Add operations that took so long each."""
        self.count += count
        self.seconds += count * seconds
        self._buckets[bisect_left(_BOUNDS, seconds)] += count


class _Buckets(dict[str, list[int]]):
    """The buckets of each operation."""

    def __missing__(self, operation: str) -> list[int]:
        buckets = self[operation] = _empty()
        return buckets


class _Timings(dict[str, Timing]):
    """An owner's operations."""

    def __init__(self, buckets: _Buckets) -> None:
        super().__init__()
        self._buckets = buckets

    def __missing__(self, operation: str) -> Timing:
        timing = self[operation] = Timing(self._buckets[operation])
        return timing


class Meter:
    """The requests of one owner, a plugin or a tenant."""

    __slots__ = ("dropped", "durations", "errors", "events", "gathered")

    def __init__(self, buckets: _Buckets | None = None) -> None:
        self.durations = _Timings(_Buckets() if buckets is None else buckets)
        """By operation, the requests that were carried out."""
        self.errors: Counter[str] = Counter()
        """By code, requests that were refused or failed."""
        self.dropped = 0
        """How many messages without a reply subject were dropped, because too much was waiting."""
        self.gathered = 0
        """How many requests arrived together with others, in a `many`."""
        self.events = 0
        """How many messages were published for its watches."""


class ServiceMeters(Struct):
    """All requests since the service started. Owners beyond the first thousand are counted together.

    Example:
        meter = meters.of("trivia")                 # once, and kept
        meter.durations["get"].add(seconds)         # for each request that was carried out
        meter.errors["BUSY"] += 1
    """

    owners: dict[str, Meter] = field(default_factory=dict)
    leases: int = 0
    """How many watches clients have now, whichever instance publishes for them."""
    _buckets: _Buckets = field(default_factory=_Buckets)

    def of(self, owner: str) -> Meter:
        """The meter of an owner, or the common one for those beyond the first thousand."""
        name = owner if owner in self.owners or len(self.owners) < limits.PLUGIN_LABELS else OTHER
        meter = self.owners.get(name)
        if meter is None:
            meter = self.owners[name] = Meter(self._buckets)
        return meter

    def histogram(self, operation: str) -> Histogram:
        """How long an operation took, for all owners together."""
        timings = [meter.durations[operation] for meter in self.owners.values() if operation in meter.durations]
        return Histogram(list(self._buckets[operation]), sum([timing.seconds for timing in timings]))
