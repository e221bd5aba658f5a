"""A model of the plugin service: plans requests and the reply that each must get."""

import bisect
from collections.abc import Sequence
from typing import Any, TypeAlias

from bench.arms.nats.requests import Ask, deleting, getting, getting_many, incrementing, listing, setting
from bench.harness.data import Key, Value, fresh_pair, key_of, value_of

Planned: TypeAlias = tuple[Ask, dict[str, Any]]
"""A request, and the fields that its reply must have."""


class Model:
    """What the service must hold. Each plugin has one request in flight, so requests arrive in the order planned."""

    def __init__(self, stored: int) -> None:
        self._values: dict[Key, Value] = {key_of(index): value_of(index) for index in range(stored)}
        self._names: dict[str, list[str]] = {}
        for plugin, name in self._values:
            self._names.setdefault(plugin, []).append(name)

    def get(self, index: int) -> Planned:
        key = key_of(index)
        if key in self._values:
            return getting(key), {"exists": True, "value": self._values[key]}
        return getting(key), {"exists": False}

    def set(self, index: int, plugin: str | None = None) -> Planned:
        """A new value at a key of the data, or at the same key of another plugin."""
        (group, name), value = fresh_pair(index)
        key = plugin or group, name
        if key not in self._values:
            bisect.insort(self._names.setdefault(key[0], []), name)
        self._values[key] = value
        return setting(key, value), {"success": True}

    def increment(self, index: int) -> Planned:
        """Of a counter beside the data; the order of several at once is open, and so is the number."""
        plugin, name = key_of(index)
        return incrementing((f"counters-{plugin}", name)), {"success": True}

    def get_many(self, indexes: Sequence[int]) -> Planned:
        """Of keys of one plugin."""
        keys = [key_of(index) for index in indexes]
        names = [name for _, name in keys]
        return getting_many(keys[0][0], names), {"values": {name: self._values[keys[0][0], name] for name in names}}

    def delete(self, index: int) -> Planned:
        key = key_of(index)
        existed = self._values.pop(key, None) is not None
        if existed:
            self._names[key[0]].remove(key[1])
        return deleting(key), {"success": True, "deleted": existed}

    def list(self, plugin: str, limit: int) -> Planned:
        names = self._names[plugin]
        shown = names[:limit]
        return listing(plugin, limit), {"keys": shown, "count": len(shown), "truncated": len(names) > limit}
