"""What the messages of `restore`, `audit`, `locks` and `dead_letters` look like; `schemas.py` has the others."""

from collections.abc import Mapping
from typing import Final

from keyloft import limits
from keyloft.nats.schemas import (
    ANY_JSON,
    BOOLEAN,
    COUNT,
    TEXT,
    TIME,
    TTL,
    Messages,
    Schema,
    array_of,
    either,
    nullable,
    object_of,
    reply_of,
    request_by_action,
    request_of,
)
from keyloft.semantic.entry_schemas import (
    ABOUT_FIELDS,
    CONFLICT_FIELDS,
    DELETE_FIELDS,
    ENTRY,
    EXPECTED,
    FENCE,
    LIMIT,
    PATH,
    PUT_FIELDS,
    SEMANTICS,
    SPEC_REF,
    WRITER,
)

_SEQUENCE: Final[Schema] = {"type": "integer", "minimum": 0}
_DEAD_LETTER_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{24}$"}
_RESTORE_FIELDS: Final[Mapping[str, Schema]] = {"key": PATH, "lastWriter": WRITER}
_RECORD: Final[Schema] = object_of(
    {
        **dict.fromkeys(("action", "key", "writer", "directive"), TEXT),
        **{name: nullable(TEXT) for name in ("purpose", "requestId", "specRef", "beforeHash", "afterHash")},
        **{name: nullable(COUNT) for name in ("versionBefore", "versionAfter")},
        "at": TIME,
        "sequence": _SEQUENCE,
        "expectedVersion": nullable(EXPECTED),
        "reason": nullable(TEXT),
        "correlationId": nullable(TEXT),
    }
)
_KEPT_OPERATION: Final[Schema] = either(
    request_of({"operation": {"const": "put"}, **PUT_FIELDS}, ABOUT_FIELDS),
    request_of({"operation": {"const": "delete"}, **DELETE_FIELDS}, ABOUT_FIELDS),
    request_of({"operation": {"const": "restore"}, **_RESTORE_FIELDS}, {"specRef": SPEC_REF}),
)
_LETTER: Final[Schema] = object_of(
    {
        "id": _DEAD_LETTER_ID,
        "at": TIME,
        "errorCode": TEXT,
        "error": TEXT,
        "attempts": COUNT,
        "requestId": nullable(WRITER),
        "batch": BOOLEAN,
        "operations": array_of({"type": "object"}),
        "truncated": BOOLEAN,
    }
)
_ID: Final = "0123456789abcdef01234567"

WORKFLOW_MESSAGES: Final[Mapping[str, Messages]] = {
    "restore": Messages(
        summary="Restore an entry that was deleted or has expired.",
        request=request_of(_RESTORE_FIELDS, {"specRef": SPEC_REF, "requestId": WRITER}),
        reply=reply_of({"entry": ENTRY}),
        examples=({"key": "docs/delta", "lastWriter": "operator:undo"},),
        refusal_fields=CONFLICT_FIELDS,
    ),
    "audit": Messages(
        summary="List what happened to an entry, or in the project.",
        request=request_of({}, {"key": PATH, "after": _SEQUENCE, "limit": LIMIT, "reverse": BOOLEAN, "cursor": TEXT}),
        reply=reply_of({"records": array_of(_RECORD), "truncated": BOOLEAN}, {"cursor": TEXT}),
        examples=({}, {"key": "docs/delta", "limit": 1, "reverse": True}),
    ),
    "locks": Messages(
        summary="List the locks that are held; acquire, renew or release one.",
        request=request_by_action(
            {
                "list": ({}, {"values": BOOLEAN, "limit": LIMIT, "after": _SEQUENCE}),
                "acquire": (
                    {"key": PATH, "lastWriter": WRITER, "semantics": SEMANTICS},
                    {"value": ANY_JSON, "requestId": WRITER, "specRef": SPEC_REF},
                ),
                "renew": ({"key": PATH, "fence": FENCE, "ttlSeconds": TTL}, {}),
                "release": ({"key": PATH, "fence": FENCE, "lastWriter": WRITER}, {"requestId": WRITER}),
            }
        ),
        reply=either(
            reply_of({"locks": array_of(ENTRY), "truncated": BOOLEAN}),
            reply_of({"entry": ENTRY}),
            reply_of({"expiresAt": TIME}),
            reply_of(),
        ),
        examples=(
            {},
            {
                "action": "acquire",
                "key": "locks/import",
                "lastWriter": "importer:run",
                "semantics": {"purpose": "lock", "ttlSeconds": 30},
            },
            {"action": "list", "values": True},
        ),
        refusal_fields=CONFLICT_FIELDS,
    ),
    "dead_letters": Messages(
        summary="List the writes that were given up; keep, retry or drop one.",
        request=request_by_action(
            {
                "list": ({}, {"values": BOOLEAN, "limit": LIMIT, "after": _DEAD_LETTER_ID}),
                "keep": (
                    {
                        "id": _DEAD_LETTER_ID,
                        "operations": array_of(_KEPT_OPERATION, limits.BATCH_OPERATIONS, least=1),
                        "errorCode": WRITER,
                        "error": {
                            "type": "string",
                            "minLength": 1,
                            "maxLength": limits.DEAD_LETTER_ERROR_CHARACTERS,
                        },
                        "attempts": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
                    },
                    {"batch": BOOLEAN, "requestId": WRITER},
                ),
                "retry": ({"id": _DEAD_LETTER_ID}, {"expectedVersion": EXPECTED}),
                "drop": ({"id": _DEAD_LETTER_ID}, {}),
            }
        ),
        reply=either(
            reply_of({"deadLetters": array_of(_LETTER), "truncated": BOOLEAN}),
            reply_of({"id": _DEAD_LETTER_ID}),
            reply_of({"entries": array_of(nullable(ENTRY))}, {"truncated": BOOLEAN}),
            reply_of({"dropped": BOOLEAN}),
        ),
        examples=(
            {},
            {
                "action": "keep",
                "id": _ID,
                "operations": [
                    {
                        "operation": "delete",
                        "key": "docs/gone",
                        "expectedVersion": "*",
                        "lastWriter": "harvester:sync",
                    }
                ],
                "errorCode": "TIMED_OUT",
                "error": "no answer within 5 s",
                "attempts": 3,
            },
            {"values": True},
            {"action": "drop", "id": _ID},
        ),
        refusal_fields=CONFLICT_FIELDS,
    ),
}
"""The messages of these operations."""
