"""JSON Schemas of requests and replies: with these, each operation of a service describes itself.

They keep to the keywords of draft 7, which AsyncAPI 3 and most validators understand.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft import limits

Schema: TypeAlias = Mapping[str, Any]

ANY_JSON: Final[Schema] = {}
TEXT: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
VERSION: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
TTL: Final[Schema] = {
    "type": "integer",
    "minimum": 1,
    "maximum": limits.LONGEST_TTL_SECONDS,
    "description": "seconds until the entry expires",
}


class Messages(Struct, frozen=True, kw_only=True):
    """The messages of one operation, for the AsyncAPI document and for clients in other languages."""

    summary: str
    """What the operation does: one sentence."""
    request: Schema
    """The message that asks for it. It is never narrower than what the service takes."""
    reply: Schema
    """The reply to a request that was carried out; `refusal` is that of all others."""
    examples: tuple[Mapping[str, Any], ...]
    """Requests that the service carries out one after the other, on an empty store; a test sends them."""
    refusal_fields: Mapping[str, Schema] = {}
    """Fields of a refusal beyond those that every refusal has."""
    event: Schema | None = None
    """The messages that the service publishes later because of the request."""


def request_of(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, ignores_unknown: bool = False
) -> Schema:
    """The schema of a request.

    Args:
        required: Its fields by name.
        optional: Fields that may be absent, or null.
        ignores_unknown: Whether other fields are ignored; otherwise they are refused.
    """
    may_be_absent = {name: nullable(schema) for name, schema in (optional or {}).items()}
    return object_of(required, may_be_absent, others=ignores_unknown)


def reply_of(required: Mapping[str, Schema] | None = None, optional: Mapping[str, Schema] | None = None) -> Schema:
    """The schema of a reply that reports success, and of all its fields."""
    return object_of({"success": {"const": True}, **(required or {})}, optional)


def refusal_of(codes: list[str], more: Mapping[str, Schema]) -> Schema:
    """The schema of a reply that reports an error with one of these codes."""
    return object_of({"success": {"const": False}, "error_code": {"enum": codes}, "message": TEXT}, more)


def object_of(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, others: bool = False
) -> Schema:
    """The schema of an object with these fields; `others` says whether it may have more."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": others,
    }


def request_by_action(actions: Mapping[str, tuple[Mapping[str, Schema], Mapping[str, Schema]]]) -> Schema:
    """The schema of a request whose field `action` decides which other fields it has.

    Args:
        actions: The required and the optional fields of each action; the first one needs no `action`.
    """
    first, *others = actions
    fields = {name: nullable(one) for parts in actions.values() for part in parts for name, one in part.items()}
    required = {
        name: {"properties": {"action": {"const": name}}, "required": ["action", *actions[name][0]]} for name in others
    }
    default = {"properties": {"action": {"enum": [first, None]}}, "required": list(actions[first][0])}
    schema = object_of({}, {"action": {"enum": [*actions, None]}, **fields})
    return {**schema, "anyOf": [default, *required.values()]}


def with_any_of(schema: Schema, *fields: str) -> Schema:
    """The schema of an object that has at least one of these fields, too."""
    return {**schema, "anyOf": [{"required": [field]} for field in fields]}


def either(*schemas: Schema) -> Schema:
    """The schema of what fits at least one of several."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """The schema of the same value, or null."""
    if not schema:
        return schema
    return (
        {**schema, "type": [schema["type"], "null"]}
        if isinstance(schema.get("type"), str)
        else either(schema, {"type": "null"})
    )


def array_of(items: Schema, most: int | None = None, least: int = 0) -> Schema:
    """The schema of an array with this many items."""
    bounds = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    return {"type": "array", "items": items, **bounds}


def map_of(values: Schema, names: Schema | None = None, most: int | None = None) -> Schema:
    """The schema of an object with names of the caller's."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": values}
    if names is not None:
        schema["propertyNames"] = names
    return schema if most is None else {**schema, "maxProperties": most}


def watch_messages(key: Schema, prefix: Schema, examples: tuple[Mapping[str, Any], ...]) -> Messages:
    """The messages of `watch`, for a service with such keys and prefixes."""
    return Messages(
        summary="Watch keys, or what begins with a prefix; with a subject, go on watching, or end it.",
        request=request_of(
            {},
            {
                "prefix": prefix,
                "keys": array_of(key, limits.LEASE_KEYS, least=1),
                "since": {**VERSION, "maximum": 2**63 - 1},
                "subject": {**TEXT, "description": "of the watch that is renewed or ended"},
                "end": BOOLEAN,
            },
        ),
        reply=either(
            reply_of({"subject": TEXT, "version": VERSION, "run": COUNT, "expires_in": {"type": "number"}}),
            reply_of({"existed": BOOLEAN}),
        ),
        examples=examples,
        event=object_of(
            {"version": VERSION, "run": COUNT, "sequence": COUNT},
            {"key": TEXT, "deleted": BOOLEAN, "more": BOOLEAN, "error_code": TEXT, "message": TEXT},
        ),
    )


def many_messages(operations: Mapping[str, Messages]) -> Messages:
    """What the messages of `many` look like, with those of the operations that it can hold."""
    requests = [_with_op(name, one.request) for name, one in operations.items()]
    refused: dict[str, Schema] = {"success": {"const": False}, "error_code": TEXT, "message": TEXT}
    reply = either(*[one.reply for one in operations.values()], object_of(refused, others=True))
    position = {"type": "array", "items": [COUNT, reply], "minItems": 2, "maxItems": 2}
    return Messages(
        summary="Carry out several requests, each as if sent alone, in their order.",
        request=request_of(
            {"requests": array_of(either(*requests), limits.MANY_REQUESTS)}, {"parts": BOOLEAN, "short": BOOLEAN}
        ),
        reply=either(
            reply_of({"replies": array_of(reply, limits.MANY_REQUESTS)}),
            reply_of({"replies": array_of(position, limits.MANY_REQUESTS), "left": COUNT}),
            reply_of({"values": array_of(ANY_JSON, limits.MANY_REQUESTS), "left": COUNT}),
            reply_of({"reply": reply, "count": COUNT, "left": COUNT}),
        ),
        examples=(
            {"requests": [{"op": name, **request} for name, one in operations.items() for request in one.examples]},
        ),
    )


def _with_op(name: str, request: Schema) -> Schema:
    """The schema of a request as a part of `many`."""
    return {
        **request,
        "properties": {"op": {"const": name}, **request["properties"]},
        "required": ["op", *request["required"]],
    }
