"""Requests and replies of the plugin service, as they travel: JSON in, vocabulary out, and back.

An ordinary request is read by msgspec in a microsecond. Whatever is unusual (an escape, a field too many, a type that
does not fit, an error) goes through `payloads.read`, which is slow and says exactly what is wrong.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from keyloft import limits
from keyloft.core.records import Delete, Record, Scan, Set, Space
from keyloft.core.values import Encoding, decode_json, may_be_deep
from keyloft.errors import InvalidArgument, Undecodable, ValueTooLarge
from keyloft.nats import payloads
from keyloft.plugins import rules
from keyloft.plugins.store import report_broken

OPERATIONS: Final = ("set", "get", "delete", "list")

STORED: Final = b'{"success":true}'
DELETED: Final = b'{"success":true,"deleted":true}'
NOT_DELETED: Final = b'{"success":true,"deleted":false}'
ABSENT: Final = b'{"success":true,"exists":false}'


# A character takes six bytes as an escape; more than that, and the names around it, no allowed request needs.
_LARGEST_SET: Final = 6 * limits.PLUGIN_VALUE_BYTES + 16_384
_LARGEST_KEYED: Final = 16_384
_USUAL_KEYED: Final = limits.PLUGIN_KEY_CHARACTERS


class _Keyed(Struct):
    key: str


class _Valued(Struct):
    key: str
    value: Any
    ttl: int | UnsetType | None = UNSET
    ttl_seconds: int | UnsetType | None = UNSET


_read_keyed = msgspec.json.Decoder(_Keyed).decode
_read_valued = msgspec.json.Decoder(_Valued).decode
_to_json = msgspec.json.Encoder().encode
_skim = msgspec.json.Decoder(msgspec.Raw).decode


def deleting(plugin: str, data: bytes) -> Delete:
    """The write that a delete asks for."""
    return Delete(Space.PLUGINS, (plugin, key(data)))


def setting(plugin: str, data: bytes) -> Set:
    """The write that a set asks for."""
    if len(data) > _LARGEST_SET:
        payloads.check_json(data)
        raise ValueTooLarge(len(data), limits.PLUGIN_VALUE_BYTES)
    try:
        asked = _read_valued(data)
        stored = _to_json(asked.value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _set_carefully(plugin, data)
    if len(stored) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(stored), limits.PLUGIN_VALUE_BYTES)
    ttl, alias = asked.ttl, asked.ttl_seconds
    names = 3 + (ttl is not UNSET) + (alias is not UNSET)
    # Without escapes, each text has two quotes. If all are accounted for, no name was there twice and none was unknown.
    if b"\\" in data or data.count(b'"') != stored.count(b'"') + 2 * names or may_be_deep(stored) or alias is not UNSET:
        return _set_carefully(plugin, data)
    return Set(
        Space.PLUGINS,
        (plugin, rules.key(asked.key)),
        stored,
        Encoding.JSON,
        None if ttl is UNSET else rules.ttl(ttl),
    )


MUTATIONS: Final[Mapping[str, Callable[[str, bytes], Set | Delete]]] = {"set": setting, "delete": deleting}
"""The write that a request asks for, by operation."""


def listing(plugin: str, data: bytes) -> Scan:
    """The scan that a list asks for."""
    _check_size(data)
    fields = payloads.read(data)
    return rules.listing(plugin, fields.get("prefix"), fields.get("limit"), fields.get("after"))


def got(record: Record | None) -> bytes:
    """The reply to a get."""
    if record is None:
        return ABSENT
    try:
        # Somebody may have written to the table by hand. To skim costs a third of reading, but overlooks broken UTF-8.
        if record.value.isascii():
            _skim(record.value)
        else:
            decode_json(record.value)
    except (Undecodable, msgspec.MsgspecError):
        report_broken(record)
        return ABSENT
    return b'{"success":true,"exists":true,"value":%b}' % record.value


def listed(keys: list[str], truncated: bool, most_bytes: int) -> bytes:
    """The reply to a list; one that would be over the most bytes of a message shows fewer keys, and says so."""
    while True:
        reply = _to_json({"success": True, "keys": keys, "count": len(keys), "truncated": truncated})
        if len(reply) <= most_bytes or len(keys) <= 1:
            return reply
        # In proportion, and a little less: keys differ in length.
        keys = keys[: max(1, len(keys) * most_bytes * 9 // (len(reply) * 10))]
        truncated = True


def key(data: bytes) -> str:
    """The key that a get or delete is about."""
    try:
        name = _read_keyed(data).key if len(data) <= _USUAL_KEYED else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        name = ""
    # Most keys need no second look: in so short a request they are short, JSON has no NUL without an escape, and ASCII
    # no surrogates.
    if name and name.isascii() and b"\\" not in data and data.count(b'"') == 4:
        return name
    _check_size(data)
    return rules.key(payloads.field(payloads.read(data), "key"))


def _set_carefully(plugin: str, data: bytes) -> Set:
    fields = payloads.read(data)
    name, content = payloads.field(fields, "key"), payloads.field(fields, "value")
    ttl, alias = fields.get("ttl"), fields.get("ttl_seconds")
    if rules.ttl(ttl) is not None and rules.ttl(alias) is not None and ttl != alias:
        raise InvalidArgument("ttl and ttl_seconds mean the same, and here they differ: send one of them")
    return rules.setting(plugin, name, content, alias if ttl is None else ttl)


def _check_size(data: bytes) -> None:
    """To read a megabyte carefully takes a third of a second: what is too large by far is not read at all."""
    if len(data) > _LARGEST_KEYED:
        payloads.check_json(data)
        raise InvalidArgument(f"the payload has {len(data)} bytes; this operation takes at most {_LARGEST_KEYED}")
