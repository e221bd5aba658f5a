"""Decides which calls must not be sent again, because a later request for the same keys was sent meanwhile."""

from collections.abc import Collection, Iterable
from typing import Any, Final

import msgspec

_READS: Final = frozenset({"get", "get_many", "list", "count", "usage", "watch"})

Sent = tuple[str, bytes]
"""The operation of a request, and its fields as JSON."""


def is_overtaken(call: Sent, later: Iterable[Sent]) -> bool:
    """Whether one of the later requests must be carried out after a call: they share a key, and one of them writes."""
    keys = _keys(call)
    return any([_are_in_order(call, keys, other) for other in later])


def _are_in_order(call: Sent, keys: Collection[str] | None, other: Sent) -> bool:
    if call[0] in _READS and other[0] in _READS:
        return False
    others = _keys(other)
    return keys is None or others is None or not set(keys).isdisjoint(others)


def _keys(request: Sent) -> Collection[str] | None:
    """The keys that a request is about; None for any."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(request[1])
    except msgspec.MsgspecError:
        return None
    if "key" in fields:
        return (fields["key"],)
    keys: Collection[str] | None = fields.get("keys") or fields.get("entries")
    return keys
