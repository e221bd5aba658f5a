"""Requests and replies of the semantic service, as they travel: JSON in camelCase.

The key of a request is a path within the project: tenant and project are part of the subject alone. The key of an entry
in a reply is whole.
"""

import difflib
import re
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.lazy import check_limit
from keyloft.core.values import encode_json
from keyloft.errors import InvalidArgument, InvalidKey, KeyloftError, StaleFence, ValueTooLarge, VersionConflict
from keyloft.nats import errors as wire_errors
from keyloft.nats import payloads
from keyloft.semantic.envelope import Envelope, Semantics, to_json
from keyloft.semantic.intents import FailedWrite, Intent, WriteRequest
from keyloft.semantic.keys import Project, key_of

# A character takes up to six bytes as an escape; the rest is for the other fields.
_LARGEST: Final = 6 * limits.SEMANTIC_VALUE_BYTES + limits.SEMANTIC_REQUEST_BYTES
_WHOLE_KEY: Final = re.compile(r"tenant/[^/]*/project/")
_DELETE: Final = ("key", "expectedVersion", "lastWriter", "requestId", "specRef", "fence")
_NAMES: Final = {
    "put": (*_DELETE, "value", "semantics"),
    "delete": _DELETE,
    "list": ("prefix", "values", "limit", "after"),
    "batch": ("operations", "requestId"),
}
"""The fields of a request, by operation."""
_SEMANTICS: Final = ("purpose", "producer", "consumerHints", "ttlSeconds")

_ARGUMENT: Final = re.compile(r"((?:operations\[\d+\]: )?)([a-z_.]+): ")
"""How an error begins that names an argument."""


# Requests


class ListRequest(Struct, frozen=True, kw_only=True):
    """What a list asks for."""

    prefix: str
    values: bool
    limit: int
    after: str | None


def key_within(project: Project, path: object) -> str:
    """The whole key of a path within a project.

    Raises:
        InvalidKey: The path breaks a rule, which the message names.
    """
    if not isinstance(path, str):
        raise InvalidKey("key: it must be a string, the path within the project")
    if _WHOLE_KEY.match(path):
        raise InvalidKey("key: it is the path within the project; tenant and project are part of the subject alone")
    return key_of(project.tenant, project.name, path)


def read(operation: str, project: Project, data: bytes) -> str | ListRequest | WriteRequest:
    """What a request asks for; a get asks for a key."""
    fields = payloads.read(data) if operation == "batch" else _read(data)  # a batch may fill the largest message
    if operation == "get":
        return key_within(project, payloads.field(fields, "key"))
    _check_names(fields, _NAMES[operation])
    if operation == "list":
        return _list_request(project, fields)
    intents = _operations(project, fields) if operation == "batch" else (_intent(project, operation, fields),)
    return WriteRequest(intents=intents, request_id=fields.get("requestId"), is_batch=operation == "batch")


def _list_request(project: Project, fields: Mapping[str, Any]) -> ListRequest:
    prefix, values, limit, after = [fields.get(name) for name in _NAMES["list"]]
    if prefix is not None and not isinstance(prefix, str):
        raise InvalidArgument("prefix: it must be a string, the beginning of paths")
    if prefix is not None and _WHOLE_KEY.match(prefix):
        raise InvalidArgument("prefix: it is of the path within the project; the project is part of the subject alone")
    if values is not None and type(values) is not bool:
        raise InvalidArgument("values: it must be true or false")
    return ListRequest(
        prefix=project.prefix + (prefix or ""),
        values=bool(values),
        limit=check_limit(limit, limits.LISTED_KEYS, limits.MOST_LISTED_KEYS),
        after=None if after is None else key_within(project, after),
    )


def _operations(project: Project, fields: Mapping[str, Any]) -> tuple[Intent, ...]:
    operations = payloads.field(fields, "operations")
    if not isinstance(operations, list):
        raise InvalidArgument("operations: a list of puts and deletes")
    return tuple([_operation(project, number, operation) for number, operation in enumerate(operations)])


def _operation(project: Project, number: int, fields: object) -> Intent:
    try:
        if not isinstance(fields, dict):
            raise InvalidArgument('it must be an object, as in {"operation": "put", "key": …}')
        action = payloads.field(fields, "operation")
        if fields.get("requestId") is not None:
            raise InvalidArgument("requestId: it belongs to the whole batch, beside operations")
        _check_names(fields, ("operation", *_NAMES["put" if action == "put" else "delete"]))
        if action not in ("put", "delete"):
            raise InvalidArgument("operation: it must be put or delete")
        return _intent(project, action, fields)
    except ValueTooLarge as error:
        raise ValueTooLarge(error.size, error.limit, f"operations[{number}]: {error}") from None
    except KeyloftError as error:
        raise type(error)(f"operations[{number}]: {error}") from None


def _intent(project: Project, action: str, fields: Mapping[str, Any]) -> Intent:
    key = key_within(project, payloads.field(fields, "key"))
    about = {
        "expected_version": payloads.field(fields, "expectedVersion"),
        "writer": payloads.field(fields, "lastWriter"),
        "spec_ref": fields.get("specRef"),
        "fence": fields.get("fence"),
    }
    if action == "delete":
        return Intent.delete(key, **about)
    value, semantics = payloads.field(fields, "value"), _semantics(payloads.field(fields, "semantics"))
    return Intent.put(key, value, semantics=semantics, **about)


def fields_of(request: WriteRequest) -> tuple[str, dict[str, Any]]:
    """The operation and the fields of a request, as they travel; its keys are paths within the project."""
    intents, request_id = request.intents, {"requestId": request.request_id}
    if request.is_batch:
        return "batch", {"operations": [{"operation": one.action, **_fields(one)} for one in intents], **request_id}
    [intent] = intents
    return intent.action, _fields(intent) | request_id


def _fields(intent: Intent) -> dict[str, Any]:
    fields = {
        "key": intent.key,
        "expectedVersion": intent.expected_version,
        "lastWriter": intent.writer,
        "specRef": intent.spec_ref,
        "fence": intent.fence,
    }
    return fields if intent.semantics is None else fields | {"value": intent.value_json, "semantics": intent.semantics}


def _check_names(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a misspelt name: its field, such as a fence or a request id, would be ignored.

    Raises:
        InvalidArgument: There is one.
    """
    for name in fields:
        if name in known:
            continue
        if name in (*_SEMANTICS, "ttl"):
            raise InvalidArgument(f"{name}: it is a field of semantics")
        if near := difflib.get_close_matches(name, known, 1):
            raise InvalidArgument(f"there is no field {ascii(name)[:60]}; is {near[0]} meant?")


def _semantics(fields: object) -> Semantics:
    if not isinstance(fields, dict):
        raise InvalidArgument('semantics: an object, as in {"purpose": "cursor"}')
    for name in fields:
        if name not in _SEMANTICS:
            raise InvalidArgument(f"semantics: there are {', '.join(_SEMANTICS)}, and no {ascii(name)[:60]}")
    if "purpose" not in fields:
        payloads.field({}, "semantics.purpose")
    hints = fields.get("consumerHints")
    return Semantics(
        fields["purpose"], fields.get("producer"), () if hints is None else hints, fields.get("ttlSeconds")
    )


def _read(data: bytes) -> dict[str, Any]:
    """The fields of a request. A request far over the limit is not parsed, which would take long."""
    if len(data) > _LARGEST:
        payloads.check_json(data)
        raise ValueTooLarge(len(data), limits.SEMANTIC_VALUE_BYTES)
    return payloads.read(data)


# Replies


def _success(**fields: Any) -> bytes:
    return to_json({"success": True, **fields})


def entry(envelope: Envelope | None) -> bytes:
    """The reply to a get, put or delete."""
    return _success(entry=envelope and _shown(envelope))


def entries(envelopes: Sequence[Envelope | None], most_bytes: int) -> bytes:
    """The reply to a batch. Where a message can't hold it, it shows less of the entries and has `truncated`."""

    def reply(show: "_Show", **truncated: bool) -> bytes:
        return _success(entries=[envelope and show(envelope) for envelope in envelopes], **truncated)

    return _fitting(reply, most_bytes) or _success(entries=[], truncated=True)


async def listed(envelopes: AsyncIterable[Envelope], request: ListRequest, most_bytes: int) -> bytes:
    """The reply to a list, with as many entries as were asked for, or one message can hold; at least one."""
    show = _shown if request.values else _valueless
    left = most_bytes - 64  # for the other fields
    found: list[Raw] = []
    async for envelope in envelopes:
        data = to_json(show(envelope))
        left -= len(data) + 1
        if len(found) == request.limit or (left < 0 and found):
            return _success(entries=found, truncated=True)
        found.append(Raw(data))
    return _success(entries=found, truncated=False)


def refusal(error: Exception, most_bytes: int) -> bytes:
    """The reply for an error; for a conflict with the stored entries, as far as one message can hold them."""
    if not isinstance(error, (VersionConflict, StaleFence)):
        return wire_errors.refusal(error)

    def reply(show: "_Show", **truncated: bool) -> bytes:
        current = error.current and show(error.current)
        conflicts = [replace(one, current=one.current and show(one.current)) for one in error.conflicts]
        fields = {"current": current, "conflicts": conflicts, "correlationId": error.correlation_id}
        return wire_errors.refusal(error, fields | truncated)

    least: dict[str, Any] = {"current": None, "conflicts": [], "truncated": True}
    return _fitting(reply, most_bytes) or wire_errors.refusal(error, least)


def as_sent(error: Exception) -> Exception:
    """An error that names a field as the request has it, instead of the argument as a Python caller writes it."""
    if not isinstance(error, InvalidArgument) or (found := _ARGUMENT.match(str(error))) is None:
        return error
    before, argument = found.groups()
    name = "lastWriter" if argument == "writer" else re.sub("_(.)", lambda letter: letter[1].upper(), argument)
    return type(error)(f"{before}{name}: {str(error)[found.end() :]}")


_Show: TypeAlias = Callable[[Envelope], Envelope]


def _shown(envelope: Envelope) -> Envelope:
    """An entry as it travels. Its value is encoded here: msgspec can't encode ints over 64 bits."""
    return replace(envelope, value=Raw(encode_json(envelope.value, limits.SEMANTIC_VALUE_BYTES)))


def _valueless(envelope: Envelope) -> Envelope:
    """An entry without its value."""
    return replace(envelope, value=UNSET)


def _outlined(envelope: Envelope) -> Envelope:
    """An entry without the fields that may be long."""
    brief = Semantics(envelope.semantics.purpose, ttl_seconds=envelope.semantics.ttl_seconds)
    return replace(envelope, value=UNSET, semantics=brief, request_id=None, spec_ref=None)


def _fitting(reply: Callable[..., bytes], most_bytes: int) -> bytes | None:
    """The reply that shows the most of its entries among those that fit into one message."""
    for show in (_shown, _valueless, _outlined):
        data = reply(show) if show is _shown else reply(show, truncated=True)
        if len(data) <= most_bytes:
            return data
    return None


# Replies, as the client reads them


def envelope_of(fields: object) -> Envelope | None:
    """The entry of a reply; its value is None where the reply shows none."""
    return None if not isinstance(fields, dict) else msgspec.convert({"value": None} | fields, Envelope)


def refused(reply: Mapping[str, Any]) -> KeyloftError:
    """The exception for a reply that reports an error."""
    error = wire_errors.refused(reply)
    if isinstance(error, (VersionConflict, StaleFence)):
        error.current = envelope_of(reply.get("current"))
        error.conflicts = tuple(
            FailedWrite(one["key"], one["expectedVersion"], envelope_of(one["current"]), one["reason"])
            for one in reply.get("conflicts", ())
        )
        error.correlation_id = reply.get("correlationId")
    return error
