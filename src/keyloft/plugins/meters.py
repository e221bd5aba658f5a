"""Counts what a plugin service does, cheaply enough to do it for every request."""

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Final

from msgspec import Struct, field

from keyloft import limits

OTHER: Final = "other"
"""The name under which plugins without a label of their own are counted."""


class Histogram:  # no Struct: every request adds to one, and a struct's fields are slower to set
    """How often something took how long; the last bucket has no upper bound."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(limits.LATENCY_BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(limits.LATENCY_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def copied(self) -> tuple[tuple[int, ...], float]:
        return tuple(self.buckets), self.seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Meter(Struct):
    """One plugin's requests: durations by operation, and errors by code."""

    durations: dict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    errors: Counter[str] = field(default_factory=Counter)


class Meters(Struct):
    """All requests since the service started. Plugins beyond the first thousand are counted together."""

    plugins: dict[str, Meter] = field(default_factory=lambda: defaultdict(Meter))
    cleanups: Histogram = field(default_factory=Histogram)
    cleaned: int = 0

    def of(self, plugin: str) -> Meter:
        """The meter of a plugin, or the common one for those beyond the first thousand."""
        has_label = plugin in self.plugins or len(self.plugins) < limits.PLUGIN_LABELS
        return self.plugins[plugin if has_label else OTHER]
