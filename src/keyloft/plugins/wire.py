"""Requests and replies of the plugin service, as they travel: JSON in, vocabulary out, and back.

An ordinary request is read by msgspec in a microsecond. Whatever is unusual (an escape, a field too many, a type that
does not fit, an error) goes through `_read_carefully`, which is slow and says exactly what is wrong.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import msgspec
from msgspec import UNSET, Struct, UnsetType

from keyloft import limits, longints
from keyloft.errors import InvalidArgument, InvalidJson, MissingField, Undecodable, ValueTooLarge
from keyloft.plugins import rules
from keyloft.plugins.store import report_broken
from keyloft.records import Delete, Record, Scan, Set, Space
from keyloft.values import Encoding, decode_json

OPERATIONS: Final = ("set", "get", "delete", "list")

STORED: Final = b'{"success":true}'
DELETED: Final = b'{"success":true,"deleted":true}'
NOT_DELETED: Final = b'{"success":true,"deleted":false}'
ABSENT: Final = b'{"success":true,"exists":false}'


# A character takes six bytes as an escape; more than that, and the names around it, no allowed request needs.
_LARGEST_SET: Final = 6 * limits.PLUGIN_VALUE_BYTES + 16_384
_LARGEST_KEYED: Final = 16_384
_USUAL_KEYED: Final = limits.PLUGIN_KEY_CHARACTERS
_TOO_DEEP: Final = f"the payload nests too deep; a value may nest {limits.VALUE_DEPTH} levels"


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
        _check_json(data)
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
    if (
        b"\\" in data
        or data.count(b'"') != stored.count(b'"') + 2 * names
        or stored.count(b"[") + stored.count(b"{") > limits.VALUE_DEPTH
        or alias is not UNSET
    ):
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
    fields = _read_carefully(data)
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
    return rules.key(_field(_read_carefully(data), "key"))


def _set_carefully(plugin: str, data: bytes) -> Set:
    fields = _read_carefully(data)
    name, content = _field(fields, "key"), _field(fields, "value")
    ttl, alias = fields.get("ttl"), fields.get("ttl_seconds")
    if rules.ttl(ttl) is not None and rules.ttl(alias) is not None and ttl != alias:
        raise InvalidArgument("ttl and ttl_seconds mean the same, and here they differ: send one of them")
    return rules.setting(plugin, name, content, alias if ttl is None else ttl)


def _check_size(data: bytes) -> None:
    """To read a megabyte carefully takes a third of a second: what is too large by far is not read at all."""
    if len(data) > _LARGEST_KEYED:
        _check_json(data)
        raise InvalidArgument(f"the payload has {len(data)} bytes; this operation takes at most {_LARGEST_KEYED}")


def _check_json(data: bytes) -> None:
    try:
        _skim(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise InvalidArgument(_TOO_DEEP) from None
        raise InvalidJson("the payload is not JSON") from None


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise MissingField(f"Missing required field: {name}")
    return fields[name]


def _read_carefully(data: bytes) -> dict[str, Any]:
    """The fields of a request.

    Raises:
        InvalidJson: It is not JSON, or a name stands twice in one object: one of the two values would get lost.
        InvalidArgument: It is JSON and no object.
    """
    if not data.strip():
        raise InvalidJson("the payload is empty: send a JSON object, {} at the least")
    try:
        fields = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except UnicodeDecodeError:
        raise InvalidJson("the payload is not JSON: it is no UTF-8 text") from None
    except RecursionError:
        raise InvalidArgument(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"the payload is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument('the payload must be a JSON object, as in {"key": …}')
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidJson("the payload is ambiguous: a name stands twice in one object")
    return fields


def _integer(digits: str) -> int:
    """An int of any length, unless it alone is over the limit: a megabyte of digits would take a second."""
    if len(digits) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(digits), limits.PLUGIN_VALUE_BYTES)
    return longints.parse(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the payload is not JSON: JSON has no {name}")
