"""Counts what plugins store, in the order of their keys, a slice at a time.

A slice is one short read of a bounded number of rows, and shows the state at one version. A write of this service
changes the counts at once if its key was read before; a key that the walk has not yet reached is counted later.
"""

from bisect import bisect_left
from time import monotonic
from typing import Any, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Reader
from keyloft.core.records import PluginKey, Record, Usage, Used


class KeyGrowth(Struct, frozen=True, gc=False):
    """By how much a write of one key changes what its plugin stores."""

    key: str
    keys: int
    """1, 0 or -1."""
    bytes: int


def growth(key: str, old: Record | None, size: int | None) -> KeyGrowth:
    """By how much a write changes what is stored.

    Args:
        key: The plugin's key.
        old: The live entry that is stored there, or None.
        size: The size of the new value; None for a delete.
    """
    stored = 0 if old is None else len(old.value)
    return KeyGrowth(key, (size is not None) - (old is not None), (size or 0) - stored)


class PluginCount:
    """What a plugin stores: read slice by slice, and kept up by the writes since."""

    __slots__ = ("began", "bytes", "ends", "keys", "seconds", "versions")

    def __init__(self, began: float) -> None:
        self.began = began
        self.seconds = 0.0
        self.keys = self.bytes = 0
        self.versions: list[int] = []
        """The version that each slice shows."""
        self.ends: list[_Part] = []
        """The last key of each slice; the last slice of a finished count has no end."""

    def used(self, plugin: str) -> Used:
        return Used(plugin, self.keys, self.bytes)

    def add(self, keys: int, size: int) -> None:
        self.keys = max(0, self.keys + keys)
        self.bytes = max(0, self.bytes + size)

    def lacks(self, key: str, version: int) -> bool:
        """Whether the count lacks a write, because its key was read before the write was made."""
        at = bisect_left(self.ends, _part(key))
        return at < len(self.versions) and version > self.versions[at]


class CountingWalk:
    """Counts plugins in the order of their keys, from one key on, a slice at a time."""

    def __init__(self, after: PluginKey) -> None:
        self.seconds = 0.0
        """How long the last slice took."""
        self.is_done = False
        self._rows = limits.USAGE_FEWEST_ROWS
        self._after = after
        self._open = PluginCount(monotonic())
        """The plugin to which the last key belongs; it may have more keys."""
        self._meanwhile: list[tuple[str, KeyGrowth, int]] = []
        """Writes of keys that were not yet read when the current slice began: plugin, growth, version."""

    def wrote(self, plugin: str, one: KeyGrowth, version: int) -> None:
        """Count a write of this service, which was committed as this version."""
        if not _is_up_to(self._after, plugin, one.key):
            self._meanwhile.append((plugin, one, version))
        elif plugin == self._after[0] and self._open.lacks(one.key, version):
            self._open.add(one.keys, one.bytes)

    async def step(self, engine: Reader) -> dict[str, PluginCount]:
        """Read the next slice; returns the plugins whose last key it has read."""
        self._meanwhile = []
        began = monotonic()
        [found] = await engine.read(Usage(self._after, self._rows))
        self.seconds = monotonic() - began
        if self.seconds > limits.USAGE_SLICE_SECONDS:
            self._rows = max(self._rows // 2, limits.USAGE_FEWEST_ROWS)
        elif self.seconds < limits.USAGE_SLICE_SECONDS / 2:
            self._rows = min(self._rows * 2, limits.USAGE_ROWS)
        counts = {self._after[0]: self._open}
        for used in found.used:
            counts.setdefault(used.plugin, PluginCount(began)).add(used.entries, used.value_bytes)
        for plugin, one, version in self._meanwhile:
            if version > found.version and (found.end is None or _is_up_to(found.end, plugin, one.key)):
                counts.setdefault(plugin, PluginCount(began)).add(one.keys, one.bytes)
        for count in counts.values():
            count.versions.append(found.version)
            count.seconds += self.seconds
        if found.end is None:
            self.is_done = True
        else:
            self._after = found.end
            self._open = counts.pop(found.end[0])
            self._open.ends.append(_part(found.end[1]))
        counts.pop("", None)
        return {str(plugin): count for plugin, count in counts.items()}


_Part: TypeAlias = tuple[bool, Any]


def _part(text: str | bytes) -> _Part:
    """A plugin's name or a key, as SQLite sorts it: what was written by hand may be bytes, which follow all texts."""
    return isinstance(text, bytes), text


def _is_up_to(end: PluginKey, plugin: str, key: str) -> bool:
    return (_part(plugin), _part(key)) <= (_part(end[0]), _part(end[1]))
