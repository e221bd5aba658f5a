"""What the messages of the semantic store look like, operation by operation."""

from collections.abc import Mapping
from typing import Any, Final

from keyloft import limits
from keyloft.nats.schemas import (
    BOOLEAN,
    Messages,
    array_of,
    either,
    nullable,
    reply_of,
    request_of,
    watch_messages,
)
from keyloft.semantic.entry_schemas import (
    ABOUT_FIELDS,
    CONFLICT_FIELDS,
    DELETE_FIELDS,
    ENTRY,
    LIMIT,
    PATH,
    PREFIX,
    PUT_FIELDS,
    WRITER,
)
from keyloft.semantic.rules import ANY
from keyloft.semantic.workflow_schemas import WORKFLOW_MESSAGES

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
        request=request_of(PUT_FIELDS, {**ABOUT_FIELDS, "requestId": WRITER}),
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
        request=request_of(DELETE_FIELDS, {**ABOUT_FIELDS, "requestId": WRITER}),
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
                "limit": LIMIT,
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
                        request_of({"operation": {"const": "put"}, **PUT_FIELDS}, ABOUT_FIELDS),
                        request_of({"operation": {"const": "delete"}, **DELETE_FIELDS}, ABOUT_FIELDS),
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
    **WORKFLOW_MESSAGES,
}
"""The messages of each operation."""
