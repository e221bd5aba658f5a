"""Schemas of an entry of the semantic store and of its parts, which several messages share."""

from collections.abc import Mapping
from typing import Final

from keyloft import limits
from keyloft.nats.schemas import (
    ANY_JSON,
    BOOLEAN,
    TEXT,
    TIME,
    TTL,
    VERSION,
    Schema,
    array_of,
    either,
    nullable,
    object_of,
    request_of,
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
LIMIT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": limits.MOST_LISTED_KEYS}
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

DELETE_FIELDS: Final[Mapping[str, Schema]] = {"key": PATH, "expectedVersion": EXPECTED, "lastWriter": WRITER}
PUT_FIELDS: Final[Mapping[str, Schema]] = {**DELETE_FIELDS, "value": ANY_JSON, "semantics": SEMANTICS}
ABOUT_FIELDS: Final[Mapping[str, Schema]] = {"specRef": SPEC_REF, "fence": FENCE}
