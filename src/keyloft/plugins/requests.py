"""Requests of plugins that a service has accepted, and what it remembers of each plugin."""

from typing import Any

from msgspec import Struct

from keyloft.core.records import PluginKey, Scan
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
        self.writing: dict[PluginKey, PluginRequest] = {}
        """The keys that are being written, each with its last write, in the order of these writes."""


class PluginRequest(Struct, gc=False):
    """A message that was accepted, or refused and not yet answered."""

    plugin: Plugin
    operation: str
    reply: str
    content: Any
    """What `wire.READERS` made of the message: Set, Get, Delete or Scan; None if it was refused."""
    arrived: float
    waiting: list["PluginRequest"] = []
    """The reads that wait for this write."""

    @property
    def key(self) -> str:
        """The key that a line of the log names."""
        return "" if self.content is None or type(self.content) is Scan else str(self.content.key[1])
