"""Requests and replies of the plugin service as JSON, and what they mean to the engine.

msgspec reads an ordinary request. A large or unusual one (an unknown field, a wrong type, an error) goes through
`payloads.read`, which finds out exactly what is wrong.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.core import json_text
from keyloft.core.records import Delete, Get, Record, Scan, Set, Space
from keyloft.core.values import Encoding
from keyloft.errors import InvalidArgument, ValueTooLarge
from keyloft.nats import payloads
from keyloft.plugins import rules
from keyloft.plugins.store import report_broken

STORED: Final = b'{"success":true}'
DELETED: Final = b'{"success":true,"deleted":true}'
NOT_DELETED: Final = b'{"success":true,"deleted":false}'
ABSENT: Final = b'{"success":true,"exists":false}'

_PLUGINS: Final = Space.PLUGINS  # a member of an enum takes longer to look up than a Get to make

# A character takes up to six bytes as an escape; the rest is for the key and the names of the fields.
_LARGEST_SET: Final = 6 * limits.PLUGIN_VALUE_BYTES + limits.PLUGIN_REQUEST_BYTES
# No value of such a set nests too deep: it has no room for the brackets.
_LARGEST_ORDINARY_SET: Final = 2 * limits.PLUGIN_VALUE_DEPTH


class _Keyed(Struct):
    key: str


class _Valued(_Keyed):
    value: Any
    ttl: int | UnsetType | None = UNSET
    ttl_seconds: int | UnsetType | None = UNSET


class _WithValue(Struct):
    value: Raw


_read_keyed = msgspec.json.Decoder(_Keyed).decode
_read_valued = msgspec.json.Decoder(_Valued).decode
_read_value = msgspec.json.Decoder(_WithValue).decode


def getting(plugin: str, data: bytes) -> Get:
    """The read that a get requests."""
    try:
        key = _read_keyed(data).key if len(data) <= limits.PLUGIN_KEY_CHARACTERS else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        key = ""
    # Most keys need no further check. They are short, since the request is; without an escape, JSON has no NUL, and
    # ASCII no surrogates; with four quotes, there is one field.
    if not key or not key.isascii() or b"\\" in data or data.count(b'"') != 4:
        key = rules.key(payloads.field(_read(data, "key"), "key"), "null")
    return Get(_PLUGINS, (plugin, key))


def deleting(plugin: str, data: bytes) -> Delete:
    """The write that a delete requests."""
    return Delete(_PLUGINS, getting(plugin, data).key)


def setting(plugin: str, data: bytes) -> Set:
    """The write that a set requests."""
    if len(data) > _LARGEST_ORDINARY_SET:
        return _large_set(plugin, data)
    try:
        request = _read_valued(data)
        stored = payloads.to_json(request.value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _set_carefully(plugin, data)
    ttl, alias = request.ttl, request.ttl_seconds
    names = 3 if ttl is UNSET else 4
    # If the quotes of all strings are accounted for, no name is doubled and none is unknown.
    if b"\\" in data:
        unaccounted = json_text.quotes(data) - json_text.quotes(stored)
    else:
        unaccounted = data.count(b'"') - stored.count(b'"')
    if unaccounted != 2 * names or alias is not UNSET:
        return _set_carefully(plugin, data)
    expire_in = None if ttl is UNSET else rules.ttl(ttl, none="null")
    return Set(_PLUGINS, (plugin, rules.key(request.key)), stored, Encoding.JSON, expire_in)


def listing(plugin: str, data: bytes) -> Scan:
    """The scan that a list requests."""
    fields = _read(b"{}" if payloads.is_empty(data) else data, "prefix", "limit", "after")
    return rules.listing(plugin, fields.get("prefix"), fields.get("limit"), fields.get("after"))


def got(content: Get, record: Record | None) -> bytes:
    """The reply to a get."""
    if record is None:
        return ABSENT
    value = record.value
    try:
        # Another program may have written to the table. Skimming is faster than decoding, but overlooks broken UTF-8.
        if not value.isascii():
            value.decode()
        json_text.skim(value)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        if not json_text.is_json(value):
            report_broken(record)
            return ABSENT
    return b'{"success":true,"exists":true,"value":%b}' % value


def listed(keys: list[str], truncated: bool, most_bytes: int) -> bytes:
    """The reply to a list; with fewer keys, and marked as truncated, if it would be too large for a message."""
    while True:
        reply = payloads.to_json({"success": True, "keys": keys, "count": len(keys), "truncated": truncated})
        if len(reply) <= most_bytes or len(keys) <= 1:
            return reply
        # In proportion, less a tenth: keys differ in length.
        keys = keys[: max(1, len(keys) * most_bytes * 9 // (len(reply) * 10))]
        truncated = True


def _large_set(plugin: str, data: bytes) -> Set:
    if len(data) > _LARGEST_SET:
        payloads.check_json(data)
        raise ValueTooLarge(len(data), limits.PLUGIN_VALUE_BYTES)
    with json_text.collecting_no_garbage(data):
        return _set_carefully(plugin, data)


def _set_carefully(plugin: str, data: bytes) -> Set:
    fields, text = payloads.read(data)
    payloads.refuse_misspelt(fields, ("key", "value", "ttl", "ttl_seconds"))
    key, _ = payloads.field(fields, "key"), payloads.field(fields, "value")
    ttl, alias = [rules.ttl(fields.get(name), name, "null") for name in ("ttl", "ttl_seconds")]
    if ttl and alias and ttl != alias:
        raise InvalidArgument("ttl and ttl_seconds are names of one field, and their values differ: send one of them")
    at = (plugin, rules.key(key, "null"))
    stored = bytes(json_text.on_any_stack(_read_value, text).value)
    if len(stored) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(stored), limits.PLUGIN_VALUE_BYTES)
    return Set(_PLUGINS, at, stored, Encoding.JSON, ttl or alias)


def _read(data: bytes, *known: str) -> dict[str, Any]:
    """The fields of a request without a value. One that is far too large is not read, to delay no other request."""
    if len(data) > (most := limits.PLUGIN_REQUEST_BYTES):
        payloads.check_json(data)
        raise InvalidArgument(f"the payload has {len(data)} bytes; this operation takes at most {most}")
    fields, _ = payloads.read(data)
    payloads.refuse_misspelt(fields, known)
    return fields
