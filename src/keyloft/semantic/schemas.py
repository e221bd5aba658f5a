"""What the messages of the semantic store look like, operation by operation."""

from collections.abc import Mapping
from typing import Any, Final

from keyloft import limits
from keyloft.nats.schemas import (
    ANY_JSON,
    BOOLEAN,
    TEXT,
    TIME,
    TTL,
    VERSION,
    Messages,
    Schema,
    array_of,
    either,
    nullable,
    object_of,
    reply_of,
    request_of,
    watch_messages,
)
from keyloft.semantic.rules import ANY

PATH: Final[Schema] = {
    "type": "string",
    "pattern": "^([a-z0-9._-]+/)*[a-z0-9._-]+$",
    "maxLength": limits.SEMANTIC_KEY_CHARACTERS,
    "description": "the path within the project",
}
PREFIX: Final[Schema] = {**PATH, "pattern": "^([a-z0-9._-]+/)*[a-z0-9._-]*$"}
WRITER: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.WRITER_CHARACTERS}
SPEC_REF: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.SPEC_REF_CHARACTERS}
FENCE: Final[Schema] = {"type": "integer", "minimum": 0, "description": "the fencing token of a lock"}
EXPECTED: Final[Schema] = either(
    {"type": "integer", "minimum": 0, "description": "the version of the stored entry; 0: there is none"},
    {"const": ANY, "description": "whatever is stored"},
)
SEMANTICS: Final[Schema] = request_of(
    {"purpose": {"type": "string", "pattern": "^[a-z][a-z0-9_]*$", "maxLength": limits.PURPOSE_CHARACTERS}},
    {"producer": WRITER, "consumerHints": array_of(WRITER, limits.CONSUMER_HINTS), "ttlSeconds": TTL},
)
ENTRY: Final[Schema] = object_of(
    {
        "key": {"type": "string", "description": "the whole key: tenant/…/project/…/<path>"},
        "version": VERSION,
        "lastWriter": WRITER,
        "semantics": SEMANTICS,
        "requestId": nullable(WRITER),
        "specRef": nullable(SPEC_REF),
        "updatedAt": TIME,
    },
    {"value": ANY_JSON, "expiresAt": TIME, "fence": FENCE},
)
CONFLICT: Final[Schema] = object_of(
    {"key": TEXT, "expectedVersion": EXPECTED, "current": nullable(ENTRY), "reason": TEXT}
)
CONFLICT_FIELDS: Final[Mapping[str, Schema]] = {
    "current": nullable(ENTRY),
    "conflicts": array_of(CONFLICT),
    "correlationId": nullable(TEXT),
    "truncated": BOOLEAN,
}
"""What a refusal with VERSION_CONFLICT or STALE_FENCE shows of what is stored."""

_DELETE: Final[Mapping[str, Schema]] = {"key": PATH, "expectedVersion": EXPECTED, "lastWriter": WRITER}
_PUT: Final[Mapping[str, Schema]] = {**_DELETE, "value": ANY_JSON, "semantics": SEMANTICS}
_ABOUT: Final[Mapping[str, Schema]] = {"specRef": SPEC_REF, "fence": FENCE}

_CURSOR: Final[Mapping[str, Any]] = {
    "key": "docs/delta",
    "value": {"token": "t1"},
    "expectedVersion": 0,
    "lastWriter": "harvester:sync",
    "semantics": {"purpose": "cursor", "producer": "harvester", "ttlSeconds": 86400},
    "requestId": "sync-2026-11-17T12:00",
}
_OTHER: Final[Mapping[str, Any]] = {"key": "docs/other", "expectedVersion": ANY, "lastWriter": "harvester:sync"}

MESSAGES: Final[Mapping[str, Messages]] = {
    "put": Messages(
        summary="Store an entry, if the stored one is the expected one.",
        request=request_of(_PUT, {**_ABOUT, "requestId": WRITER}),
        reply=reply_of({"entry": ENTRY}),
        examples=(_CURSOR,),
        refusal_fields=CONFLICT_FIELDS,
    ),
    "get": Messages(
        summary="Read the entry at a key.",
        request=request_of({"key": PATH}),
        reply=reply_of({"entry": nullable(ENTRY)}),
        examples=({"key": "docs/delta"}, {"key": "docs/absent"}),
    ),
    "delete": Messages(
        summary="Remove an entry, if it is the expected one.",
        request=request_of(_DELETE, {**_ABOUT, "requestId": WRITER}),
        reply=reply_of({"entry": nullable(ENTRY)}),
        examples=({"key": "docs/delta", "expectedVersion": ANY, "lastWriter": "harvester:sync"},),
        refusal_fields=CONFLICT_FIELDS,
    ),
    "list": Messages(
        summary="List entries in the order of their keys, page by page; with values where asked.",
        request=request_of(
            {},
            {
                "prefix": PREFIX,
                "values": BOOLEAN,
                "limit": {"type": "integer", "minimum": 1, "maximum": limits.MOST_LISTED_KEYS},
                "after": PATH,
            },
        ),
        reply=reply_of({"entries": array_of(ENTRY), "truncated": BOOLEAN}),
        examples=({}, {"prefix": "docs/", "values": True, "limit": 10}),
    ),
    "batch": Messages(
        summary="Carry out puts and deletes, all or none.",
        request=request_of(
            {
                "operations": array_of(
                    either(
                        request_of({"operation": {"const": "put"}, **_PUT}, _ABOUT),
                        request_of({"operation": {"const": "delete"}, **_DELETE}, _ABOUT),
                    ),
                    limits.BATCH_OPERATIONS,
                    least=1,
                )
            },
            {"requestId": WRITER},
        ),
        reply=reply_of({"entries": array_of(nullable(ENTRY))}, {"truncated": BOOLEAN}),
        examples=(
            {
                "operations": [
                    {"operation": "put", **_OTHER, "value": [1], "semantics": {"purpose": "config"}},
                    {"operation": "delete", **_OTHER, "key": "docs/gone"},
                ]
            },
        ),
        refusal_fields=CONFLICT_FIELDS,
    ),
    "watch": watch_messages(PATH, PREFIX, ({"prefix": "docs/"}, {"keys": ["docs/delta"], "since": 0})),
}
"""The messages of each operation."""
