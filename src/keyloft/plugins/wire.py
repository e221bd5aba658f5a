"""Requests of the plugin service as JSON, and what they mean to the engine.

msgspec reads an ordinary request. A large or unusual one (an unknown field, a wrong type, an error) goes through
`payloads.read`, which finds out exactly what is wrong.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from keyloft import limits
from keyloft.core import json_text
from keyloft.core.records import Add, Count, Delete, Get, Scan, Set, Space, Touch
from keyloft.core.values import Encoding
from keyloft.errors import InvalidArgument, MissingField, ValueTooLarge
from keyloft.nats import payloads
from keyloft.nats.requests import Variant
from keyloft.plugins import rules
from keyloft.plugins.rules import ConditionalSet, ManyKeys, ManyValues, PrefixDelete

T = TypeVar("T", Get, Delete)

CONDITIONAL: Final = "conditional"
META: Final = "meta"
PREFIX: Final = "prefix"
"""Variants of set, get and delete_many."""

# `in` finds an int in bytes in a fifth of the time that it takes to find bytes, and each request is searched.
_BACKSLASH: Final = ord("\\")
# Looking up a member of an enum takes longer than making a Get.
_PLUGINS: Final = Space.PLUGINS
_JSON: Final = Encoding.JSON

# A character takes up to six bytes as an escape; the rest is for the key and the names of the fields.
LARGEST_SET: Final = 6 * limits.PLUGIN_VALUE_BYTES + limits.PLUGIN_REQUEST_BYTES
# No value of such a set nests too deep: it has no room for the brackets.
_LARGEST_ORDINARY_SET: Final = 2 * limits.PLUGIN_VALUE_DEPTH
_KEY_FRAME: Final = len('{"key":""}')
_SET_FRAME: Final = len('{"key":"","value":}')
"""How many bytes the shortest request has besides its key, or its key and value."""
_SET_FIELDS: Final = ("key", "value", "ttl", "ttl_seconds", "if_absent", "expected_version", "keep_ttl")


_Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=limits.PLUGIN_KEY_CHARACTERS)]


class _Keyed(Struct):
    key: str


class _Valued(Struct):
    key: _Key
    value: Any
    ttl: int | UnsetType | None = UNSET
    ttl_seconds: int | UnsetType | None = UNSET


class _WithValue(Struct):
    value: Raw


class _WithKeys(Struct, forbid_unknown_fields=True):
    keys: list[_Key]


class _WithEntries(Struct):
    entries: dict[_Key, Raw]


class _Counted(_Keyed, forbid_unknown_fields=True):
    by: int | UnsetType = UNSET
    ttl: int | UnsetType = UNSET


class _GetOfMany(Struct, forbid_unknown_fields=True, tag_field="op", tag="get"):
    key: _Key


class _ManyGets(Struct, forbid_unknown_fields=True):
    requests: list[_GetOfMany]
    parts: bool
    short: bool | UnsetType = UNSET


class _SetOfMany(Struct, forbid_unknown_fields=True, tag_field="op", tag="set"):
    key: _Key
    value: Any


class _ManySets(Struct, forbid_unknown_fields=True):
    requests: list[_SetOfMany]
    parts: bool
    short: bool | UnsetType = UNSET


_read_keyed = msgspec.json.Decoder(_Keyed).decode
_read_valued = msgspec.json.Decoder(_Valued).decode
_read_value = msgspec.json.Decoder(_WithValue).decode
_read_keys = msgspec.json.Decoder(_WithKeys).decode
_read_entries = msgspec.json.Decoder(_WithEntries).decode
_read_gets = msgspec.json.Decoder(_ManyGets).decode
_read_sets = msgspec.json.Decoder(_ManySets).decode
_read_counted = msgspec.json.Decoder(_Counted).decode


def _reader_of_a_key(make: type[T], carefully: Callable[[str, bytes], T]) -> Callable[[str, bytes], T]:
    """A reader of requests that mostly have a key, and nothing else."""

    def read(plugin: str, data: bytes) -> T:
        try:
            key = _read_keyed(data).key if len(data) <= limits.PLUGIN_KEY_CHARACTERS else ""
        except (msgspec.MsgspecError, ValueError, RecursionError):
            key = ""
        # Nothing else fits into so few bytes, nor an escape. Many clients send no spaces; this check is the fastest.
        if key and len(data) == len(key) + _KEY_FRAME:
            return make(_PLUGINS, (plugin, key))
        # Most keys need no further check. They are short, since the request is; without an escape, JSON has no NUL, and
        # ASCII no surrogates; with four quotes, there is one field.
        if not key or not key.isascii() or _BACKSLASH in data or data.count(b'"') != 4:
            return carefully(plugin, data)
        return make(_PLUGINS, (plugin, key))

    return read


def get_carefully(plugin: str, data: bytes) -> Get:
    fields = _read(data, "key", "meta")
    at = (plugin, _key(fields))
    if rules.switch(fields.get("meta"), "meta"):
        raise Variant(META, rules.entry_scan(at))
    return Get(_PLUGINS, at)


def delete_carefully(plugin: str, data: bytes) -> Delete:
    return Delete(_PLUGINS, (plugin, _key(_read(data, "key"))))


getting = _reader_of_a_key(Get, get_carefully)
"""The read that a get requests; a Variant, if it asks for more than the value."""
deleting = _reader_of_a_key(Delete, delete_carefully)
"""The write that a delete requests."""


def getting_each(plugin: str, data: bytes) -> list[Get] | None:
    """The reads that the gets of a `many` request, if they are ordinary ones and in parts; None for other messages."""
    if _BACKSLASH in data or not data.isascii() or data.count(b",") > limits.MANY_REQUESTS * 2:
        return None
    try:
        many = _read_gets(data)
    except msgspec.MsgspecError:
        return None
    gets, names = many.requests, 2 if many.short is UNSET else 3
    # As for a get: without an escape, no key has NUL; with this many quotes, no field is doubled.
    if data.count(b'"') != 8 * len(gets) + 2 * names or len(gets) > limits.MANY_REQUESTS:
        return None
    return [Get(_PLUGINS, (plugin, get.key)) for get in gets]


def setting(plugin: str, data: bytes) -> Set:
    """The write that a set requests; a Variant, if it has a condition."""
    if len(data) > _LARGEST_ORDINARY_SET:
        return _large_set(plugin, data)
    try:
        request = _read_valued(data)
        stored = payloads.to_json(request.value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return set_carefully(plugin, data)
    ttl, alias = request.ttl, request.ttl_seconds
    names = 3 if ttl is UNSET else 4
    # As for a key: if the value was sent as it is stored, and nothing else fits, there are no more checks to make.
    size = len(stored)
    if len(data) == len(request.key) + size + _SET_FRAME and data[-size - 1 : -1] == stored:
        return Set(_PLUGINS, (plugin, request.key), stored, _JSON)
    # If the quotes of all strings are accounted for, no name is doubled and none is unknown.
    if is_escaped := _BACKSLASH in data:
        unaccounted = json_text.quotes(data) - json_text.quotes(stored)
    else:
        unaccounted = data.count(b'"') - stored.count(b'"')
    if unaccounted != 2 * names or alias is not UNSET:
        return set_carefully(plugin, data)
    expire_in = None if ttl is UNSET else rules.ttl(ttl, none="null")
    key = rules.key(request.key) if is_escaped else request.key  # without an escape, it has neither NUL nor surrogates
    return Set(_PLUGINS, (plugin, key), stored, _JSON, expire_in)


def setting_each(plugin: str, data: bytes) -> list[Set] | None:
    """The writes that the sets of a `many` request, if they are ordinary ones and in parts; None for other messages."""
    if len(data) > limits.SETS_READ_AT_ONCE_BYTES or _BACKSLASH in data:
        return None
    try:
        with json_text.collecting_no_garbage(data):
            many = _read_sets(data)
            sets = many.requests
            stored = [payloads.to_json(one.value) for one in sets]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # As for a set: if the quotes of all strings are accounted for, no name is doubled in any of them.
    names = 2 if many.short is UNSET else 3
    if data.count(b'"') != 10 * len(sets) + 2 * names + b"".join(stored).count(b'"'):
        return None
    if len(sets) > limits.MANY_REQUESTS or max(map(len, stored), default=0) > _LARGEST_ORDINARY_SET:
        return None
    return [Set(_PLUGINS, (plugin, one.key), value, _JSON) for one, value in zip(sets, stored, strict=True)]


def listing(plugin: str, data: bytes) -> Scan:
    """The scan that a list requests."""
    fields = _read(_or_empty_object(data), "prefix", "limit", "after", "values")
    return rules.listing(plugin, *[fields.get(name) for name in ("prefix", "limit", "after", "values")])


def incrementing(plugin: str, data: bytes) -> Add:
    """The addition that an incr requests."""
    try:
        if len(data) <= limits.PLUGIN_KEY_CHARACTERS and _BACKSLASH not in data:
            request = _read_counted(data)
            # As for a get: with this many quotes, no field is doubled.
            names = 1 + (request.by is not UNSET) + (request.ttl is not UNSET)
            if request.key.isascii() and data.count(b'"') == 2 * names + 2:
                by = 1 if request.by is UNSET else rules.increment(request.by)
                expire_in = None if request.ttl is UNSET else rules.ttl(request.ttl)
                return Add(_PLUGINS, (plugin, rules.key(request.key)), by, expire_in)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # the careful reader finds out what is wrong
    return increment_carefully(plugin, data)


def increment_carefully(plugin: str, data: bytes) -> Add:
    fields = _read_strictly(data, "key", "by", "ttl", "ttl_seconds")
    return Add(_PLUGINS, (plugin, _key(fields)), rules.increment(fields.get("by")), _ttl(fields))


def touching(plugin: str, data: bytes) -> Touch:
    """The change of an expiry that a touch requests."""
    fields = _read_strictly(data, "key", "ttl", "ttl_seconds")
    if "ttl" not in fields and "ttl_seconds" not in fields:
        raise MissingField("Missing required field: ttl; null is for an entry that never expires")
    return Touch(_PLUGINS, (plugin, _key(fields)), _ttl(fields))


def counting(plugin: str, data: bytes) -> Count:
    """The count that a count requests."""
    return rules.counting(plugin, _read_strictly(_or_empty_object(data), "prefix").get("prefix"))


def using(plugin: str, data: bytes) -> str:
    """The plugin whose usage is requested."""
    _read_strictly(_or_empty_object(data))
    return plugin


def getting_many(plugin: str, data: bytes) -> ManyKeys:
    """The keys that a get_many reads."""
    if (names := _plain_names(data)) is not None:
        return ManyKeys(plugin, names)
    with json_text.collecting_no_garbage(data):
        keys = _array(payloads.field(_read_strictly(data, "keys", most=limits.KEYS_REQUEST_BYTES), "keys"))
        if (count := len(keys)) > limits.KEYS_AT_ONCE:
            keys = []  # freed here, in this block, not later with the error
    rules.number(count, "keys")
    return rules.many_keys(plugin, keys, "null")


def deleting_many(plugin: str, data: bytes) -> ManyKeys:
    """The keys that a delete_many removes; a Variant, if it names a prefix."""
    if (names := _plain_names(data)) is not None:
        return ManyKeys(plugin, names)
    fields = _read_strictly(data, "keys", "prefix", "limit", most=limits.KEYS_REQUEST_BYTES)
    keys, prefix, limit = [fields.get(name) for name in ("keys", "prefix", "limit")]
    if keys is None and prefix is None:
        raise MissingField("Missing required field: keys, or prefix")
    if keys is None:
        raise Variant(PREFIX, PrefixDelete(rules.prefix_scan(plugin, prefix), rules.removal_limit(limit)))
    if prefix is not None or limit is not None:
        raise InvalidArgument("keys: send either keys, or a prefix and perhaps a limit")
    return rules.many_keys(plugin, _array(keys), "null")


def _plain_names(data: bytes) -> list[str] | None:
    """The keys of a request that has nothing else, each once; None if it is to be read carefully."""
    if len(data) > limits.KEYS_REQUEST_BYTES or _BACKSLASH in data or not data.isascii():
        return None
    try:
        names = _read_keys(data).keys
    except msgspec.MsgspecError:
        return None
    # As for a get: without an escape, no key has NUL; with this many quotes, there is one field.
    if len(names) > limits.KEYS_AT_ONCE or data.count(b'"') != 2 * len(names) + 2:
        return None
    return list(dict.fromkeys(names))


def setting_many(plugin: str, data: bytes) -> ManyValues:
    """The values that a set_many stores."""
    with json_text.collecting_no_garbage(data):
        return _set_many(plugin, data)


def _set_many(plugin: str, data: bytes) -> ManyValues:
    fields, text = payloads.read(data, 1 + payloads.LEVELS)
    payloads.refuse_unknown(fields, ("entries", "ttl", "ttl_seconds"))
    entries = payloads.field(fields, "entries")
    if not isinstance(entries, dict):
        raise InvalidArgument("entries must be an object with a value for each key")
    rules.number(len(entries), "entries")
    ttl = _ttl(fields)
    try:
        values = json_text.on_any_stack(_read_entries, text).entries
    except msgspec.ValidationError:
        values = {}  # a key is too short or too long
    if not values or _BACKSLASH in text:
        for key in entries:
            rules.key(key, argument="a key of entries")
    if len(text) > limits.PLUGIN_VALUE_BYTES:
        _check_sizes(values)
    return ManyValues(plugin, values, ttl)


def _check_sizes(values: Mapping[str, Raw]) -> None:
    for key, value in values.items():
        if (size := memoryview(value).nbytes) > (most := limits.PLUGIN_VALUE_BYTES):
            raise ValueTooLarge(size, most, f"entries[{key!a}]: {ValueTooLarge(size, most)}")


def set_too_large(size: int) -> ValueTooLarge:
    """The error of a set that has so many bytes that its value is too large, whatever it is."""
    most = limits.PLUGIN_VALUE_BYTES
    return ValueTooLarge(size, most, f"value size exceeds 64KB limit: {size:,} bytes as sent, {most:,} allowed")


def _large_set(plugin: str, data: bytes) -> Set:
    if len(data) > LARGEST_SET:
        raise set_too_large(len(data))
    with json_text.collecting_no_garbage(data):
        return set_carefully(plugin, data)


def set_carefully(plugin: str, data: bytes) -> Set:
    fields, text = payloads.read(data)
    payloads.refuse_misspelt(fields, _SET_FIELDS)
    key, _ = payloads.field(fields, "key"), payloads.field(fields, "value")
    ttl = _ttl(fields)
    at = (plugin, rules.key(key, "null"))
    stored = bytes(json_text.on_any_stack(_read_value, text).value)
    if len(stored) > limits.PLUGIN_VALUE_BYTES:
        raise ValueTooLarge(len(stored), limits.PLUGIN_VALUE_BYTES)
    expected = rules.expected_version(fields.get("if_absent"), fields.get("expected_version"))
    keep_ttl = rules.keep_ttl(fields.get("keep_ttl"), ttl)
    content = Set(_PLUGINS, at, stored, Encoding.JSON, ttl, keep_expiry=keep_ttl)
    if expected is not None or keep_ttl:
        raise Variant(CONDITIONAL, ConditionalSet(content, expected))
    return content


def _key(fields: Mapping[str, Any]) -> str:
    return rules.key(payloads.field(fields, "key"), "null")


def _ttl(fields: Mapping[str, Any]) -> int | None:
    return rules.ttl_under_either_name(fields.get("ttl_seconds"), fields.get("ttl"), "null")


def _or_empty_object(data: bytes) -> bytes:
    """The message of an operation without required fields, which may be empty."""
    return b"{}" if payloads.is_empty(data) else data


def _array(keys: object) -> list[Any]:
    if not isinstance(keys, list):
        raise InvalidArgument("keys must be an array of strings")
    return keys


def _read(data: bytes, *known: str) -> dict[str, Any]:
    """The fields of a request without a value; unknown ones are ignored."""
    fields = _read_fields(data, limits.PLUGIN_REQUEST_BYTES)
    payloads.refuse_misspelt(fields, known)
    return fields


def _read_strictly(data: bytes, *known: str, most: int = limits.PLUGIN_REQUEST_BYTES) -> dict[str, Any]:
    """The fields of a request without a value; unknown ones are refused."""
    with json_text.collecting_no_garbage(data):
        fields = _read_fields(data, most)
        payloads.refuse_unknown(fields, known)
        return fields


def _read_fields(data: bytes, most: int) -> dict[str, Any]:
    """The fields of a request. A far too large request is not read, so that it does not delay others."""
    if len(data) > most:
        raise payloads.too_large(len(data), most)
    fields, _ = payloads.read(data)
    return fields
