"""Requests of plugins that a service has accepted, what they wait for, and what it remembers of each plugin."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Optional

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import PluginKey, Scan, Set
from keyloft.plugins.meters import Meter


class Plugin:
    """A plugin that has sent something, and its unanswered requests."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.gets = meter.durations["get"]
        self.unanswered = 0
        """How many requests are not yet answered."""
        self.writing: dict[PluginKey, PluginWrite] = {}
        """The keys that are being written, each with its last write, in the order of these writes."""


class PluginRequest(Struct, gc=False):
    """A message that was accepted, or refused and not yet answered."""

    plugin: Plugin
    operation: str
    reply: str
    content: Any
    """What `wire.READERS` made of the message: Set, Get, Delete or Scan; None if it was refused."""
    arrived: float

    @property
    def key(self) -> str:
        """The key that a line of the log names."""
        return "" if self.content is None or type(self.content) is Scan else str(self.content.key[1])

    def write_before(self) -> Optional["PluginWrite"]:
        """The unfinished write that a read waits for: a get for that of its key, a list for the plugin's last one."""
        writing = self.plugin.writing
        if self.operation == "get":
            return writing.get(self.content.key)
        return next(reversed(writing.values()), None)


class PluginWrite(PluginRequest, gc=False):
    """A set or delete that was accepted."""

    waiting: list[PluginRequest] = []
    """The reads that wait for this write."""


class WriteQueue:
    """The writes that wait for their commit, in the order in which they arrived."""

    def __init__(self) -> None:
        self._writes: deque[PluginWrite] = deque()
        self._arrived = asyncio.Event()

    def add(self, write: PluginWrite) -> None:
        writing = write.plugin.writing
        writing.pop(write.content.key, None)  # the plugin's last write is at the end
        writing[write.content.key] = write
        self._writes.append(write)
        self._arrived.set()

    async def next_group(self) -> list[PluginWrite]:
        """Wait for writes; take as many as one commit may have."""
        while not self._writes:
            self._arrived.clear()
            await self._arrived.wait()
        group, size = list[PluginWrite](), 0
        while self._writes and len(group) < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            write = self._writes.popleft()
            group.append(write)
            size += len(write.content.value) if type(write.content) is Set else 0
        return group

    def overdue(self, group: Iterable[PluginWrite], late: float) -> list[PluginRequest]:
        """Take out the requests that wait for a stalled group, or behind it, and arrived no later than this."""
        writes: list[PluginWrite] = []
        while self._writes and self._writes[0].arrived <= late:
            writes.append(self._writes.popleft())
        overdue = [*writes, *end(writes)]
        for write in group:
            overdue += [read for read in write.waiting if read.arrived <= late]
            write.waiting = [read for read in write.waiting if read.arrived > late]
        return overdue


def end(writes: Iterable[PluginWrite]) -> list[PluginRequest]:
    """Note that writes have ended, with or without success; returns the reads that waited for them."""
    waited: list[PluginRequest] = []
    for write in writes:
        if write.plugin.writing.get(write.content.key) is write:
            del write.plugin.writing[write.content.key]
        waited += write.waiting
    return waited
