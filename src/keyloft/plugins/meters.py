"""Counts what a plugin service does."""

from msgspec import field

from keyloft.nats.meters import Histogram, ServiceMeters


class Meters(ServiceMeters):
    """All requests of plugins since the service started, and the removals of expired entries."""

    cleanups: Histogram = field(default_factory=Histogram)
    cleaned: int = 0
    """How many expired entries were removed."""
