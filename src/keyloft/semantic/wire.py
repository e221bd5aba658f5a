"""Requests and replies of the semantic service, as they travel: JSON in camelCase.

The key of a request is the path behind the project: tenant and project come from the subject alone. The key of an entry
in a reply is whole.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.values import encode_json
from keyloft.errors import InvalidArgument, InvalidKey, KeyloftError, StaleFence, ValueTooLarge, VersionConflict
from keyloft.nats import errors as wire_errors
from keyloft.nats import payloads
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.keys import key_of
from keyloft.semantic.planning import Delete, FailedWrite, Put

# A character takes six bytes as an escape; more than that, and the names around it, no allowed request needs.
_LARGEST: Final = 6 * limits.SEMANTIC_VALUE_BYTES + 32_768
_WHOLE_KEY: Final = re.compile(r"tenant/[^/]*/project/")
_DELETE: Final = ("key", "expectedVersion", "lastWriter", "requestId", "specRef", "fence")
_PUT: Final = (*_DELETE, "value", "semantics")
_SEMANTICS: Final = ("purpose", "producer", "consumerHints", "ttlSeconds")


# Requests


class Spot(Struct, frozen=True):
    """Whose request it is: the tenant and the project of its subject."""

    tenant: str
    project: str

    @property
    def prefix(self) -> str:
        return f"tenant/{self.tenant}/project/{self.project}/"

    def key(self, path: object) -> str:
        """The whole key of a path.

        Raises:
            InvalidKey: It breaks a rule.
        """
        if not isinstance(path, str):
            raise InvalidKey("key: it must be a string, the path behind the project")
        if _WHOLE_KEY.match(path):
            raise InvalidKey("key: it is the path behind the project; tenant and project come from the subject alone")
        return key_of(self.tenant, self.project, path)


class Listing(Struct, frozen=True):
    """What a list asks for."""

    prefix: str
    values: bool
    limit: int
    after: str | None


def getting(spot: Spot, data: bytes) -> str:
    """The key that a get asks for."""
    return spot.key(payloads.field(_read(data), "key"))


def putting(spot: Spot, data: bytes) -> tuple[Put, str | None]:
    """What a put asks for, and its requestId."""
    fields = _read(data)
    _check_names(fields, _PUT)
    return _put(spot, fields), fields.get("requestId")


def deleting(spot: Spot, data: bytes) -> tuple[Delete, str | None]:
    """What a delete asks for, and its requestId."""
    fields = _read(data)
    _check_names(fields, _DELETE)
    return _delete(spot, fields), fields.get("requestId")


def batching(spot: Spot, data: bytes) -> tuple[list[Put | Delete], str | None]:
    """What a batch asks for, and its requestId."""
    fields = payloads.read(data)  # as large as NATS lets it be
    _check_names(fields, ("operations", "requestId"))
    operations = payloads.field(fields, "operations")
    if not isinstance(operations, list):
        raise InvalidArgument("operations: a list of puts and deletes")
    return [_operation(spot, number, operation) for number, operation in enumerate(operations)], fields.get("requestId")


def listing(spot: Spot, data: bytes) -> Listing:
    """What a list asks for."""
    fields = _read(data)
    _check_names(fields, ("prefix", "values", "limit", "after"))
    prefix, values, limit, after = [fields.get(name) for name in ("prefix", "values", "limit", "after")]
    if prefix is not None and not isinstance(prefix, str):
        raise InvalidArgument("prefix: it must be a string, what the paths begin with")
    if prefix is not None and _WHOLE_KEY.match(prefix):
        raise InvalidArgument("prefix: it is of the path behind the project, which comes from the subject alone")
    if values is not None and type(values) is not bool:
        raise InvalidArgument("values: it must be true or false")
    if limit is not None and (type(limit) is not int or not 1 <= limit <= limits.MOST_LISTED_KEYS):
        raise InvalidArgument(f"limit: it must be a whole number from 1 to {limits.MOST_LISTED_KEYS}")
    return Listing(
        spot.prefix + (prefix or ""),
        bool(values),
        limits.LISTED_KEYS if limit is None else limit,
        None if after is None else spot.key(after),
    )


def _operation(spot: Spot, number: int, fields: object) -> Put | Delete:
    try:
        if not isinstance(fields, dict):
            raise InvalidArgument('it must be an object, as in {"operation": "put", "key": …}')
        kind = payloads.field(fields, "operation")
        if fields.get("requestId") is not None:
            raise InvalidArgument("requestId: it belongs to the whole batch, beside operations")
        _check_names(fields, ("operation", *(_PUT if kind == "put" else _DELETE)))
        if kind == "put":
            return _put(spot, fields)
        if kind == "delete":
            return _delete(spot, fields)
        raise InvalidArgument("operation: it must be put or delete")
    except ValueTooLarge as error:
        raise ValueTooLarge(error.size, error.limit, f"operations[{number}]: {error}") from None
    except KeyloftError as error:
        raise type(error)(f"operations[{number}]: {error}") from None


def _put(spot: Spot, fields: Mapping[str, Any]) -> Put:
    return Put(
        spot.key(payloads.field(fields, "key")),
        payloads.field(fields, "value"),
        payloads.field(fields, "expectedVersion"),
        payloads.field(fields, "lastWriter"),
        _semantics(payloads.field(fields, "semantics")),
        fields.get("specRef"),
        fields.get("fence"),
    )


def _delete(spot: Spot, fields: Mapping[str, Any]) -> Delete:
    return Delete(
        spot.key(payloads.field(fields, "key")),
        payloads.field(fields, "expectedVersion"),
        payloads.field(fields, "lastWriter"),
        fields.get("specRef"),
        fields.get("fence"),
    )


def _check_names(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """A name that is nearly right would be overlooked, and with it what it was to say: a fence, a request id.

    Raises:
        InvalidArgument: There is one.
    """
    for name in fields:
        if name in known:
            continue
        if name in (*_SEMANTICS, "ttl"):
            raise InvalidArgument(f"{name}: it belongs into semantics")
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
    if hints is not None and not isinstance(hints, list):
        raise InvalidArgument("semantics.consumerHints: a list of texts")
    return Semantics(fields["purpose"], fields.get("producer"), tuple(hints or ()), fields.get("ttlSeconds"))


def _read(data: bytes) -> dict[str, Any]:
    """To read a megabyte carefully takes a third of a second: what is too large by far is not read at all."""
    if len(data) > _LARGEST:
        payloads.check_json(data)
        raise ValueTooLarge(len(data), limits.SEMANTIC_VALUE_BYTES)
    return payloads.read(data)


# Replies

_to_json = msgspec.json.Encoder().encode


def entry(envelope: Envelope | None) -> bytes:
    """The reply to a get, put or delete."""
    return _to_json({"success": True, "entry": _shown(envelope)})


def entries(envelopes: Sequence[Envelope | None], most_bytes: int) -> bytes:
    """The reply to a batch; one that would be over the most bytes of a message shows less, and says so."""

    def reply(show: "_Show") -> bytes:
        return _to_json({"success": True, "entries": list(map(show, envelopes)), **_cut(show)})

    return _fitting(reply, most_bytes) or _to_json({"success": True, "entries": [], "truncated": True})


class ListReply:
    """The reply to a list, as far as one message can hold it."""

    def __init__(self, most_bytes: int, *, values: bool) -> None:
        self._values = values
        self._left = most_bytes - 64  # what stands around the entries
        self._entries: list[Raw] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, envelope: Envelope) -> bool:
        """Show an entry, if there is room for it; there is for the first."""
        data = _to_json(_shown(envelope) if self._values else _valueless(envelope))
        self._left -= len(data) + 1
        if self._left < 0 and self._entries:
            return False
        self._entries.append(Raw(data))
        return True

    def data(self, *, truncated: bool) -> bytes:
        return _to_json({"success": True, "entries": self._entries, "truncated": truncated})


def refusal(error: Exception, most_bytes: int) -> bytes:
    """The reply that tells of an error; of a conflict, with what is there, as far as a message can hold it."""
    if not isinstance(error, (VersionConflict, StaleFence)):
        return wire_errors.refusal(error)

    def reply(show: "_Show") -> bytes:
        return wire_errors.refusal(
            error,
            {
                "current": show(error.current),
                "conflicts": [
                    {
                        "key": failed.key,
                        "expectedVersion": failed.expected_version,
                        "reason": failed.reason,
                        "current": show(failed.current),
                    }
                    for failed in error.conflicts
                ],
                "correlationId": error.correlation_id,
                **_cut(show),
            },
        )

    return _fitting(reply, most_bytes) or wire_errors.refusal(
        error, {"current": None, "conflicts": [], "truncated": True}
    )


_Show: TypeAlias = Callable[[Envelope | None], dict[str, Any] | None]


def _shown(envelope: Envelope | None) -> dict[str, Any] | None:
    """An entry as it travels."""
    if envelope is None:
        return None
    # The value as it is stored: an int of any length survives.
    value = {"value": Raw(encode_json(envelope.value, limits.SEMANTIC_VALUE_BYTES))}
    return {"key": envelope.key} | value | _without_value(envelope)


def _valueless(envelope: Envelope | None) -> dict[str, Any] | None:
    """An entry without its value."""
    return None if envelope is None else {"key": envelope.key} | _without_value(envelope)


def _outlined(envelope: Envelope | None) -> dict[str, Any] | None:
    """An entry without whatever may be long."""
    if envelope is None:
        return None
    brief = replace(
        envelope, semantics=Semantics(envelope.semantics.purpose, ttl_seconds=envelope.semantics.ttl_seconds)
    )
    return _valueless(replace(brief, request_id=None, spec_ref=None))


def _without_value(envelope: Envelope) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "version": envelope.version,
        "lastWriter": envelope.last_writer,
        "semantics": envelope.semantics,
        "requestId": envelope.request_id,
        "specRef": envelope.spec_ref,
        "updatedAt": envelope.updated_at,
    }
    if envelope.expires_at is not None:
        shown["expiresAt"] = envelope.expires_at
    if envelope.fence is not None:
        shown["fence"] = envelope.fence
    return shown


def _cut(show: _Show) -> dict[str, bool]:
    return {} if show is _shown else {"truncated": True}


def _fitting(reply: Callable[[_Show], bytes], most_bytes: int) -> bytes | None:
    """A reply that shows as much of its entries as fits into one message."""
    for show in (_shown, _valueless, _outlined):
        data = reply(show)
        if len(data) <= most_bytes:
            return data
    return None


# Replies, read again

_REFUSED: Final[Mapping[str, type[VersionConflict] | type[StaleFence]]] = {
    kind.code: kind for kind in (VersionConflict, StaleFence)
}


def envelope_of(fields: object) -> Envelope | None:
    """The entry of a reply; where it shows no value, with None."""
    return None if not isinstance(fields, dict) else msgspec.convert({"value": None} | fields, Envelope)


def refused(reply: Mapping[str, Any]) -> KeyloftError:
    """The error that a reply tells of."""
    kind = _REFUSED.get(str(reply.get("error_code")))
    if kind is None:
        return wire_errors.refused(reply)
    conflicts = tuple(
        FailedWrite(one["key"], one["expectedVersion"], envelope_of(one["current"]), one["reason"])
        for one in reply.get("conflicts", ())
    )
    return kind(
        str(reply.get("message")),
        current=envelope_of(reply.get("current")),
        conflicts=conflicts,
        correlation_id=reply.get("correlationId"),
    )


READERS: Final[Mapping[str, Callable[[Spot, bytes], Any]]] = {
    "put": putting,
    "get": getting,
    "delete": deleting,
    "list": listing,
    "batch": batching,
}
"""What a request asks for, by operation."""
