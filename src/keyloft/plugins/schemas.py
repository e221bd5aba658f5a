"""What the messages of the plugins' storage look like, operation by operation."""

from collections.abc import Mapping
from typing import Final

from keyloft import limits
from keyloft.nats.many import many_messages
from keyloft.nats.schemas import (
    ANY_JSON,
    BOOLEAN,
    COUNT,
    TTL,
    Messages,
    Schema,
    array_of,
    either,
    reply_of,
    request_of,
)
from keyloft.plugins.rules import UNFIT_FOR_MANY

KEY: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.PLUGIN_KEY_CHARACTERS}
VALUE: Final[Schema] = {"description": f"any JSON of at most {limits.PLUGIN_VALUE_BYTES} bytes"}
PREFIX: Final[Schema] = {"type": "string", "maxLength": limits.PLUGIN_KEY_CHARACTERS}
LIMIT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": limits.MOST_LISTED_KEYS}

_SINGLE: Final[Mapping[str, Messages]] = {
    "set": Messages(
        summary="Store a value.",
        request=request_of({"key": KEY, "value": VALUE}, {"ttl": TTL, "ttl_seconds": TTL}, ignores_unknown=True),
        reply=reply_of(),
        examples=({"key": "score", "value": {"points": [1, 2.5, None]}, "ttl": 60}, {"key": "lives", "value": 3}),
    ),
    "get": Messages(
        summary="Read the value at a key.",
        request=request_of({"key": KEY}, ignores_unknown=True),
        reply=either(
            reply_of({"exists": {"const": True}, "value": ANY_JSON}),
            reply_of({"exists": {"const": False}}),
        ),
        examples=({"key": "score"}, {"key": "absent"}),
    ),
    "delete": Messages(
        summary="Remove an entry.",
        request=request_of({"key": KEY}, ignores_unknown=True),
        reply=reply_of({"deleted": BOOLEAN}),
        examples=({"key": "score"}, {"key": "score"}),
    ),
    "list": Messages(
        summary="List keys in their order, page by page.",
        request=request_of({}, {"prefix": PREFIX, "limit": LIMIT, "after": PREFIX}, ignores_unknown=True),
        reply=reply_of({"keys": array_of(KEY), "count": COUNT, "truncated": BOOLEAN}),
        examples=({}, {"prefix": "s", "limit": 1, "after": None}),
    ),
}

MESSAGES: Final[Mapping[str, Messages]] = {
    **_SINGLE,
    "many": many_messages({name: one for name, one in _SINGLE.items() if name not in UNFIT_FOR_MANY}),
}
"""The messages of each operation."""
