"""Requests and replies of the plugin service as JSON, and what they mean to the engine.

msgspec reads an ordinary request. An unusual one (an escape, an unknown field, a wrong type, an error) goes through
`payloads.read`, which is many times slower and finds out exactly what is wrong.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from keyloft import limits
from keyloft.core.records import Delete, Get, Record, Scan, Set, Space
from keyloft.core.values import Encoding, decode_json, may_be_deep
from keyloft.errors import InvalidArgument, Undecodable, ValueTooLarge
from keyloft.nats import payloads
from keyloft.plugins import rules
from keyloft.plugins.store import report_broken

STORED: Final = b'{"success":true}'
DELETED: Final = b'{"success":true,"deleted":true}'
NOT_DELETED: Final = b'{"success":true,"deleted":false}'
ABSENT: Final = b'{"success":true,"exists":false}'

_PLUGINS: Final = Space.PLUGINS  # to look it up takes longer than to make a Get

# A character takes up to six bytes as an escape; the rest is for the key and the names of the fields.
_LARGEST_SET: Final = 6 * limits.PLUGIN_VALUE_BYTES + limits.PLUGIN_REQUEST_BYTES


class _Keyed(Struct):
    key: str


class _Valued(_Keyed):
    value: Any
    ttl: int | UnsetType | None = UNSET
    ttl_seconds: int | UnsetType | None = UNSET


_read_keyed = msgspec.json.Decoder(_Keyed).decode
_read_valued = msgspec.json.Decoder(_Valued).decode


def getting(plugin: str, data: bytes) -> Get:
    """The read that a get requests."""
    try:
        key = _read_keyed(data).key if len(data) <= limits.PLUGIN_KEY_CHARACTERS else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        key = ""
    # Most keys need no further check: they are short, as the request is; JSON has no NUL without an escape, ASCII has
    # no surrogates.
    if not key or not key.isascii() or b"\\" in data or data.count(b'"') != 4:
        key = rules.key(payloads.field(_read(data, "key"), "key"), "null")
    return Get(_PLUGINS, (plugin, key))


def deleting(plugin: str, data: bytes) -> Delete:
    """The write that a delete requests."""
    return Delete(_PLUGINS, getting(plugin, data).key)


def setting(plugin: str, data: bytes) -> Set:
    """The write that a set requests."""
    if len(data) > _LARGEST_SET:
        payloads.check_json(data)
        raise ValueTooLarge(len(data), limits.PLUGIN_VALUE_BYTES)
    try:
        request = _read_valued(data)
        stored = payloads.to_json(request.value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _set_carefully(plugin, data)
    if len(stored) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(stored), limits.PLUGIN_VALUE_BYTES)
    ttl, alias = request.ttl, request.ttl_seconds
    names = 3 + (ttl is not UNSET) + (alias is not UNSET)
    # Without escapes, each text has two quotes. If all are accounted for, no name is doubled and none is unknown.
    if b"\\" in data or data.count(b'"') != stored.count(b'"') + 2 * names or may_be_deep(stored) or alias is not UNSET:
        return _set_carefully(plugin, data)
    expire_in = None if ttl is UNSET else rules.ttl(ttl, none="null")
    return Set(_PLUGINS, (plugin, rules.key(request.key)), stored, Encoding.JSON, expire_in)


def listing(plugin: str, data: bytes) -> Scan:
    """The scan that a list requests."""
    fields = _read(data, "prefix", "limit", "after")
    return rules.listing(plugin, fields.get("prefix"), fields.get("limit"), fields.get("after"))


Reader: TypeAlias = Callable[[str, bytes], Set | Get | Delete | Scan]
READERS: Final[Mapping[str, Reader]] = {"set": setting, "get": getting, "delete": deleting, "list": listing}
"""What a plugin's message requests of the engine, by operation."""
OPERATIONS: Final = tuple(READERS)


def got(record: Record | None) -> bytes:
    """The reply to a get."""
    if record is None:
        return ABSENT
    try:
        # Another program may have written to the table. Skimming is faster than decoding, but overlooks broken UTF-8.
        decode = payloads.skim if record.value.isascii() else decode_json
        decode(record.value)
    except (Undecodable, msgspec.MsgspecError, RecursionError):
        report_broken(record)
        return ABSENT
    return b'{"success":true,"exists":true,"value":%b}' % record.value


def listed(keys: list[str], truncated: bool, most_bytes: int) -> bytes:
    """The reply to a list; with fewer keys, and marked as truncated, if it would be too large for a message."""
    while True:
        reply = payloads.to_json({"success": True, "keys": keys, "count": len(keys), "truncated": truncated})
        if len(reply) <= most_bytes or len(keys) <= 1:
            return reply
        # In proportion, less a tenth: keys differ in length.
        keys = keys[: max(1, len(keys) * most_bytes * 9 // (len(reply) * 10))]
        truncated = True


def _set_carefully(plugin: str, data: bytes) -> Set:
    fields = payloads.read(data)
    payloads.refuse_misspelt(fields, ("key", "value", "ttl", "ttl_seconds"))
    key, value = payloads.field(fields, "key"), payloads.field(fields, "value")
    ttl, alias = [rules.ttl(fields.get(name), name, "null") for name in ("ttl", "ttl_seconds")]
    if ttl and alias and ttl != alias:
        raise InvalidArgument("ttl and ttl_seconds are names of one field, and their values differ: send one of them")
    return Set(_PLUGINS, (plugin, rules.key(key, "null")), rules.value(value), Encoding.JSON, ttl or alias)


def _read(data: bytes, *known: str) -> dict[str, Any]:
    """The fields of a request without a value. One that is far too large is not read, to delay no other request."""
    if len(data) > (most := limits.PLUGIN_REQUEST_BYTES):
        payloads.check_json(data)
        raise InvalidArgument(f"the payload has {len(data)} bytes; this operation takes at most {most}")
    fields = payloads.read(data)
    payloads.refuse_misspelt(fields, known)
    return fields
