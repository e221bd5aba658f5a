"""Requests of plugins that a service has accepted, and what it remembers of each plugin."""

from typing import TypeAlias

from msgspec import Struct

from keyloft.core.records import Delete, Scan, Set
from keyloft.plugins.meters import Meter


class Plugin:
    """A plugin that has sent something, and its unanswered requests."""

    __slots__ = ("gets", "meter", "name", "unanswered", "writing")

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.gets = meter.durations["get"]
        self.unanswered = 0
        """How many requests are not yet answered."""
        self.writing: dict[str, int] = {}
        """The keys that are being written, and the number of the last write of each."""


class PluginRequest(Struct, gc=False):
    """A message that was accepted."""

    plugin: Plugin
    operation: str
    reply: str
    key: str
    arrived: float


Write: TypeAlias = tuple[PluginRequest, Set | Delete, int]
"""A request, what it writes, and its number among all writes."""

Read: TypeAlias = tuple[PluginRequest, Scan | None]
"""A list and what it scans, or a get."""
