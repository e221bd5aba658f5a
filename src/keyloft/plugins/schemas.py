"""The schemas of the messages of the plugins' storage, by operation."""

from collections.abc import Mapping
from typing import Final

from keyloft import limits
from keyloft.nats.schemas import (
    ANY_JSON,
    BOOLEAN,
    COUNT,
    TIME,
    TTL,
    VERSION,
    Messages,
    Schema,
    array_of,
    either,
    many_messages,
    map_of,
    nullable,
    object_of,
    reply_of,
    request_of,
    watch_messages,
    with_any_of,
)

KEY: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.PLUGIN_KEY_CHARACTERS}
VALUE: Final[Schema] = {"description": f"any JSON of at most {limits.PLUGIN_VALUE_BYTES} bytes"}
PREFIX: Final[Schema] = {"type": "string", "maxLength": limits.PLUGIN_KEY_CHARACTERS}
LIMIT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": limits.MOST_LISTED_KEYS}
KEYS: Final[Schema] = array_of(KEY, limits.KEYS_AT_ONCE)

_TTLS: Final[Mapping[str, Schema]] = {"ttl": TTL, "ttl_seconds": TTL}
_STEP: Final[Schema] = {"type": "integer", "minimum": -limits.LARGEST_INCREMENT, "maximum": limits.LARGEST_INCREMENT}
_META: Final[Mapping[str, Schema]] = {
    "version": VERSION,
    "ttl": {"type": ["integer", "null"], "description": "seconds left"},
    "created_at": TIME,
    "updated_at": TIME,
}
_SINGLE: Final[Mapping[str, Messages]] = {
    "set": Messages(
        summary="Store a value; with if_absent or expected_version, only if that is what is stored.",
        request=request_of(
            {"key": KEY, "value": VALUE},
            {**_TTLS, "keep_ttl": BOOLEAN, "if_absent": BOOLEAN, "expected_version": VERSION},
            ignores_unknown=True,
        ),
        reply=reply_of({}, {"version": VERSION}),
        examples=(
            {"key": "score", "value": {"points": [1, 2.5, None]}, "ttl": 60},
            {"key": "lives", "value": 3, "keep_ttl": True},
            {"key": "owner:1", "value": "alice", "if_absent": True},
            {"key": "owner:2", "value": "bob", "expected_version": 0},
        ),
        refusal_fields={"current": nullable(object_of({"value": ANY_JSON, "version": VERSION}))},
    ),
    "get": Messages(
        summary="Read the value at a key; with meta, its version and times, too.",
        request=request_of({"key": KEY}, {"meta": BOOLEAN}, ignores_unknown=True),
        reply=either(
            reply_of({"exists": {"const": True}, "value": ANY_JSON}, _META),
            reply_of({"exists": {"const": False}}),
        ),
        examples=({"key": "score"}, {"key": "absent"}, {"key": "score", "meta": True}),
    ),
    "delete": Messages(
        summary="Remove an entry.",
        request=request_of({"key": KEY}, ignores_unknown=True),
        reply=reply_of({"deleted": BOOLEAN}),
        examples=({"key": "score"}, {"key": "score"}),
    ),
    "list": Messages(
        summary="List keys in their order, page by page; with values where asked.",
        request=request_of(
            {}, {"prefix": PREFIX, "limit": LIMIT, "after": PREFIX, "values": BOOLEAN}, ignores_unknown=True
        ),
        reply=either(
            reply_of({"keys": array_of(KEY), "count": COUNT, "truncated": BOOLEAN}),
            reply_of(
                {"entries": array_of(object_of({"key": KEY, "value": ANY_JSON})), "count": COUNT, "truncated": BOOLEAN}
            ),
        ),
        examples=({}, {"prefix": "o", "limit": 1, "after": None}, {"values": True}),
    ),
    "incr": Messages(
        summary="Add to an integer, and return the new one; an absent one counts as 0.",
        request=request_of({"key": KEY}, {"by": _STEP, **_TTLS}),
        reply=reply_of({"value": {"type": "integer"}}),
        examples=({"key": "games"}, {"key": "games", "by": -2}, {"key": "visits", "ttl": 60}),
    ),
    "get_many": Messages(
        summary="Read the values of several keys; `rest` has those that did not fit into the reply.",
        request=request_of({"keys": KEYS}),
        reply=reply_of({"values": map_of(ANY_JSON, KEY), "missing": array_of(KEY)}, {"rest": array_of(KEY)}),
        examples=({"keys": ["owner:1", "absent"]},),
    ),
    "set_many": Messages(
        summary="Store several values, all or none.",
        request=request_of({"entries": map_of(VALUE, KEY, limits.KEYS_AT_ONCE)}, _TTLS),
        reply=reply_of({"count": COUNT}),
        examples=({"entries": {"a:1": 1, "a:2": [None]}, "ttl": 60},),
    ),
    "delete_many": Messages(
        summary="Remove several entries: those of some keys, all or none, or those below a prefix, in slices.",
        request=with_any_of(request_of({}, {"keys": KEYS, "prefix": PREFIX, "limit": LIMIT}), "keys", "prefix"),
        reply=reply_of({"count": COUNT}, {"truncated": BOOLEAN}),
        examples=({"keys": ["a:1", "absent"]}, {"prefix": "a:"}, {"prefix": "b:", "limit": 10}),
    ),
    "count": Messages(
        summary="Count the keys that begin with a prefix.",
        request=request_of({}, {"prefix": PREFIX}),
        reply=reply_of({"count": COUNT}),
        examples=({}, {"prefix": "owner:"}),
    ),
    "touch": Messages(
        summary="Give an entry another TTL; null removes it.",
        request=with_any_of(request_of({"key": KEY}, _TTLS), *_TTLS),
        reply=reply_of({"exists": BOOLEAN}),
        examples=({"key": "owner:1", "ttl": 60}, {"key": "owner:1", "ttl": None}, {"key": "absent", "ttl": 1}),
    ),
    "usage": Messages(
        summary="Return how much the plugin stores, and its quota if it has one.",
        request=request_of({}),
        reply=reply_of(
            {"keys": COUNT, "bytes": COUNT}, {"quota": object_of({"keys": nullable(COUNT), "bytes": nullable(COUNT)})}
        ),
        examples=({},),
    ),
}

MESSAGES: Final[Mapping[str, Messages]] = {
    **_SINGLE,
    "watch": watch_messages(KEY, PREFIX, ({"prefix": "user:"}, {"keys": ["score"], "since": 0})),
    "many": many_messages(_SINGLE),
}
"""The messages of each operation."""
