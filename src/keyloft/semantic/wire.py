"""Requests and replies of the semantic service, as they travel: JSON in camelCase.

The key in a request is a path within the project: tenant and project are in the subject only. The key of an entry in a
reply is whole.
"""

import asyncio
import re
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from keyloft import errors, limits
from keyloft.core import json_text
from keyloft.core.lazy import check_limit
from keyloft.core.values import encode_json
from keyloft.nats import errors as wire_errors
from keyloft.nats import payloads
from keyloft.semantic import keys
from keyloft.semantic.envelope import Envelope, Semantics, to_json
from keyloft.semantic.intents import FailedWrite, Intent, WriteRequest, check_batch, put_of_json
from keyloft.semantic.keys import Project
from keyloft.semantic.rules import got, too_large, wrong

# A character takes up to six bytes as an escape; the rest is for the other fields.
LARGEST: Final = 6 * limits.SEMANTIC_VALUE_BYTES + limits.SEMANTIC_REQUEST_BYTES
_WHOLE_KEY: Final = re.compile(r"tenant/[^/]*/project/")
_DELETE: Final = ("key", "expectedVersion", "lastWriter", "requestId", "specRef", "fence")
_NAMES: Final = {
    "put": (*_DELETE, "value", "semantics"),
    "get": ("key",),
    "delete": _DELETE,
    "restore": ("key", "lastWriter", "requestId", "specRef"),
    "list": ("prefix", "values", "limit", "after"),
    "batch": ("operations", "requestId"),
}
"""The fields of a request, by operation."""
_SEMANTICS: Final = ("purpose", "producer", "consumerHints", "ttlSeconds")

_BATCH_LEVELS: Final = 3 + limits.PLUGIN_VALUE_DEPTH
"""How deep a batch may nest: a value, the operation, the list of operations, and the object that it is a field of."""

_JSON_KINDS: Final = {
    "None": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a string",
    "list": "an array",
    "dict": "an object",
}


# Requests


class ListRequest(Struct, frozen=True, kw_only=True):
    """What a list asks for."""

    prefix: str
    values: bool
    limit: int
    after: str | None


class _PutText(Struct):
    """The value of a put as JSON; UNSET for a delete."""

    value: Raw | UnsetType = UNSET


class _BatchText(Struct):
    operations: list[_PutText]


_read_put = msgspec.json.Decoder(_PutText).decode
_read_batch = msgspec.json.Decoder(_BatchText).decode


def value_text(request: bytes) -> _PutText:
    """The value of a request, as JSON."""
    return json_text.on_any_stack(_read_put, request)


def key_within(project: Project, path: object, argument: str = "key") -> str:
    """The whole key of a path within a project.

    Raises:
        InvalidKey: The path breaks a rule, which the message names.
    """
    return keys.parse(project.prefix + _path_within(path, argument), argument).key


def prefix_within(project: Project, path: object) -> str:
    """The whole prefix of a path's beginning within a project."""
    prefix = project.prefix + _path_within(path, "prefix")
    keys.parse_prefix(prefix)
    return prefix


def _path_within(path: object, argument: str) -> str:
    if not isinstance(path, str):
        raise errors.InvalidKey(f"{argument}: expected a str, the path within the project{got(path)}")
    if _WHOLE_KEY.match(path):
        raise errors.InvalidKey(
            f"{argument}: expected the path within the project, got more; leave tenant/…/project/…/ out"
        )
    return path


def read(operation: str, project: Project, data: bytes) -> str | ListRequest | WriteRequest:
    """What a request asks for; a get asks for a key."""
    try:
        with json_text.collecting_no_garbage(data):
            return _request(operation, project, *_read(operation, data))
    except errors.InvalidInput as error:
        raise as_sent(error) from None


def _request(operation: str, project: Project, fields: dict[str, Any], text: bytes) -> str | ListRequest | WriteRequest:
    check_names(fields, _NAMES[operation])
    if operation == "get":
        return key_within(project, payloads.field(fields, "key"))
    if operation == "list":
        return _list_request(project, fields)
    is_batch = operation == "batch"
    if is_batch:
        intents = operations_in(project, fields, text)
    else:
        intents = (_intent(project, operation, fields, value_text(text)),)
    return WriteRequest(intents=intents, request_id=fields.get("requestId"), is_batch=is_batch)


def _list_request(project: Project, fields: Mapping[str, Any]) -> ListRequest:
    prefix, values, limit, after = [fields.get(name) for name in _NAMES["list"]]
    if values is not None and type(values) is not bool:
        raise wrong("values", "true or false", values)
    return ListRequest(
        prefix=project.prefix if prefix is None else prefix_within(project, prefix),
        values=bool(values),
        limit=check_limit(limit, limits.LISTED_KEYS, limits.MOST_LISTED_KEYS),
        after=None if after is None else key_within(project, after, "after"),
    )


def operations_in(
    project: Project, fields: Mapping[str, Any], text: bytes, actions: Sequence[str] = ("put", "delete")
) -> tuple[Intent, ...]:
    """The intents that the field `operations` of a request asks for; `text` is the request as compact JSON."""
    operations = payloads.field(fields, "operations")
    if not isinstance(operations, list):
        raise wrong("operations", "an array of puts and deletes", operations)
    if operations:  # the store refuses an empty batch, after the other fields were checked
        check_batch(operations)
    for number, operation in enumerate(operations):
        if not isinstance(operation, dict):
            rule = f'expected an object, as in {{"operation": "put", "key": …}}{got(operation)}'
            raise errors.InvalidArgument(f"operations[{number}]: {rule}")
    texts = json_text.on_any_stack(_read_batch, text).operations
    intents = []
    for number, operation in enumerate(operations):
        try:
            intents.append(_operation(project, operation, texts[number], actions))
        except errors.InvalidInput as error:
            raise as_sent(error, f"operations[{number}]: ") from None
    return tuple(intents)


def _operation(project: Project, fields: Mapping[str, Any], text: _PutText, actions: Sequence[str]) -> Intent:
    action = payloads.field(fields, "operation")
    if action not in actions:
        raise wrong("operation", " or ".join(actions), action, str)
    if fields.get("requestId") is not None:
        raise errors.InvalidArgument(
            "requestId: expected beside operations, not in one of them, because it is for the whole batch"
        )
    check_names(fields, ("operation", *_NAMES[action]))
    return _intent(project, action, fields, text)


def _intent(project: Project, action: str, fields: Mapping[str, Any], text: _PutText) -> Intent:
    key = key_within(project, payloads.field(fields, "key"))
    if action == "restore":
        return Intent.restore(key, writer=payloads.field(fields, "lastWriter"), spec_ref=fields.get("specRef"))
    about = {
        "expected_version": payloads.field(fields, "expectedVersion"),
        "writer": payloads.field(fields, "lastWriter"),
        "spec_ref": fields.get("specRef"),
        "fence": fields.get("fence"),
    }
    if action == "delete":
        return Intent.delete(key, **about)
    payloads.field(fields, "value")
    assert text.value is not UNSET
    return put_of_json(key, text.value, semantics=read_semantics(payloads.field(fields, "semantics")), **about)


def fields_of(request: WriteRequest) -> tuple[str, dict[str, Any]]:
    """The operation and the fields of a request, as they travel; its keys are paths within the project."""
    intents, request_id = request.intents, {"requestId": request.request_id}
    if request.is_batch:
        return "batch", {"operations": [fields_of_intent(one) for one in intents], **request_id}
    fields = fields_of_intent(intents[0])
    return fields.pop("operation"), fields | request_id


def fields_of_intent(intent: Intent) -> dict[str, Any]:
    """The fields of an intent, as an operation of a batch has them."""
    fields: dict[str, Any] = {
        "operation": intent.action,
        "key": intent.key,
        "lastWriter": intent.writer,
        "specRef": intent.spec_ref,
    }
    if intent.action != "restore":
        fields |= {"expectedVersion": intent.expected_version, "fence": intent.fence}
    return fields if intent.semantics is None else fields | {"value": intent.value_json, "semantics": intent.semantics}


def as_sent(error: errors.InvalidInput, prefix: str = "") -> errors.InvalidInput:
    """An error that names fields and types as a request has them, not as a Python caller writes them.

    `writer: expected a str, got int` becomes `lastWriter: expected a string, got a number`.
    """
    if isinstance(error, errors.ValueTooLarge):
        return errors.ValueTooLarge(error.size, error.limit, f"{prefix}{error}")
    name, expected, rest = f"{prefix}{error}".partition(": expected ")
    if expected:
        name = re.sub(r"\bwriter$", "lastWriter", re.sub("_(.)", lambda letter: letter[1].upper(), name))
        rule, got_, found = rest.partition(", got ")
        kind, semicolon, cure = found.partition(";")
        rest = re.sub(r"\bstr\b", "string", rule) + got_ + _JSON_KINDS.get(kind, kind) + semicolon + cure
    return type(error)(f"{name}{expected}{rest}")


def check_names(fields: Mapping[str, Any], known: Sequence[str], within: str = "") -> None:
    """Refuse an unknown field: if it is a misspelt fence or request id, the write would not be protected.

    Raises:
        InvalidArgument: There is an unknown field.
    """
    if "semantics" in known and (found := next((name for name in (*_SEMANTICS, "ttl") if name in fields), None)):
        raise errors.InvalidArgument(f"{within}{found}: there is no such field; it belongs into semantics")
    payloads.refuse_unknown(fields, known, within)


def read_semantics(fields: object) -> Semantics:
    """The semantics of a put."""
    if not isinstance(fields, dict):
        raise wrong("semantics", 'an object, as in {"purpose": "cursor"}', fields)
    check_names(fields, _SEMANTICS, "semantics.")
    if "purpose" not in fields:
        raise errors.MissingField("Missing required field: semantics.purpose")
    hints = () if fields.get("consumerHints") is None else fields["consumerHints"]
    try:
        return Semantics(fields["purpose"], fields.get("producer"), hints, fields.get("ttlSeconds"))
    except errors.InvalidInput as error:
        raise as_sent(error, "semantics.") from None


def _read(operation: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields of a request, and its text. A request far above the limit is not parsed, unless it is a batch."""
    if operation == "batch":
        return read_operations(data)
    if operation == "list" and payloads.is_empty(data):
        return {}, b"{}"
    return read_one(data)


def read_one(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields of a request with at most one value, and its text. A request far above the limit is not parsed."""
    if len(data) > LARGEST:
        raise too_large(len(data))
    try:
        return payloads.read(data)
    except errors.ValueTooLarge as error:
        raise too_large(error.size) from None


def read_operations(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields of a request with operations, and its text."""
    try:
        return payloads.read(data, _BATCH_LEVELS)
    except errors.ValueTooLarge as error:
        raise too_large(error.size) from None


# Replies


def success(**fields: Any) -> bytes:
    """The reply to a request that was carried out."""
    return to_json({"success": True, **fields})


def entry(envelope: Envelope | None) -> bytes:
    """The reply to a get, put or delete."""
    return success(entry=envelope and shown(envelope))


def entries(envelopes: Sequence[Envelope | None], most_bytes: int) -> bytes:
    """The reply to a batch. If it is too long for a message, it leaves fields of entries out and has `truncated`."""

    def reply(show: "_Show", **truncated: bool) -> bytes:
        return success(entries=[envelope and show(envelope) for envelope in envelopes], **truncated)

    return _fitting(reply, most_bytes) or success(entries=[], truncated=True)


async def listed(envelopes: AsyncIterable[Envelope], request: ListRequest, most_bytes: int) -> bytes:
    """The reply to a list, with as many entries as were asked for, or one message can hold; at least one."""
    show = shown if request.values else valueless
    found, truncated = await page_of((to_json(show(one)) async for one in envelopes), request.limit, most_bytes)
    return success(entries=found, truncated=truncated)


async def page_of(items: AsyncIterable[bytes], limit: int, most_bytes: int) -> tuple[list[Raw], bool]:
    """As many items as one message can hold, at least one and at most `limit`; and whether there are more."""
    left = most_bytes - 128  # for the other fields
    found: list[Raw] = []
    async for data in items:
        left -= len(data) + 1
        if len(found) == limit or (left < 0 and found):
            return found, True
        found.append(Raw(data))
        if not len(found) % limits.FIRST_PAGE_ROWS:
            await asyncio.sleep(0)  # other tasks run between two slices: each takes a millisecond or two
    return found, False


def refusal(error: Exception, most_bytes: int) -> bytes:
    """The reply for an error. For a conflict it has the stored entries, as much of them as one message can hold."""
    if not isinstance(error, (errors.VersionConflict, errors.StaleFence)):
        return wire_errors.refusal(error)

    def reply(show: "_Show", **truncated: bool) -> bytes:
        current = error.current and show(error.current)
        conflicts = [replace(one, current=one.current and show(one.current)) for one in error.conflicts]
        fields = {"current": current, "conflicts": conflicts, "correlationId": error.correlation_id}
        return wire_errors.refusal(error, fields | truncated)

    least: dict[str, Any] = {"current": None, "conflicts": [], "truncated": True}
    return _fitting(reply, most_bytes) or wire_errors.refusal(error, least)


_Show: TypeAlias = Callable[[Envelope], Envelope]


def shown(envelope: Envelope) -> Envelope:
    """An entry as it travels. Its value is encoded here: msgspec can't encode ints over 64 bits."""
    return replace(
        envelope, value=Raw(encode_json(envelope.value, limits.SEMANTIC_VALUE_BYTES, limits.PLUGIN_VALUE_DEPTH))
    )


def valueless(envelope: Envelope) -> Envelope:
    """An entry without its value."""
    return replace(envelope, value=UNSET)


def _outlined(envelope: Envelope) -> Envelope:
    """An entry without the fields that may be long."""
    brief = Semantics(envelope.semantics.purpose, ttl_seconds=envelope.semantics.ttl_seconds)
    return replace(envelope, value=UNSET, semantics=brief, request_id=None, spec_ref=None)


def _fitting(reply: Callable[..., bytes], most_bytes: int) -> bytes | None:
    """The reply that shows as much of its entries as fits into one message; None if even the shortest does not."""
    for show in (shown, valueless, _outlined):
        data = reply(show) if show is shown else reply(show, truncated=True)
        if len(data) <= most_bytes:
            return data
    return None


# Replies, as the client reads them


def envelope_of(fields: object) -> Envelope | None:
    """The entry of a reply; its value is None where the reply shows none."""
    return None if not isinstance(fields, dict) else msgspec.convert({"value": None} | fields, Envelope)


def refused(reply: Mapping[str, Any]) -> errors.KeyloftError:
    """The exception for a reply that reports an error."""
    error = wire_errors.refused(reply)
    if isinstance(error, (errors.VersionConflict, errors.StaleFence)):
        error.current = envelope_of(reply.get("current"))
        error.conflicts = tuple(
            FailedWrite(one["key"], one["expectedVersion"], envelope_of(one["current"]), one["reason"])
            for one in reply.get("conflicts", ())
        )
        error.correlation_id = reply.get("correlationId")
    return error
