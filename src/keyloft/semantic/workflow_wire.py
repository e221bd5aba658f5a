"""Requests and replies of `audit`, `locks` and `dead_letters`, as they travel; `wire.py` has those about entries."""

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw, Struct

from keyloft import errors, limits
from keyloft.core import json_text
from keyloft.core.lazy import check_limit
from keyloft.nats import payloads
from keyloft.semantic import rules, wire
from keyloft.semantic.audit import POSITION_BYTES, AuditRecord
from keyloft.semantic.dead_letters import DeadLetter, StoredDeadLetter
from keyloft.semantic.envelope import Envelope, Semantics, to_json
from keyloft.semantic.intents import Intent, WriteRequest, put_of_json
from keyloft.semantic.keys import Project
from keyloft.semantic.rules import ExpectedVersion, wrong

_AUDIT: Final = ("key", "after", "limit", "reverse", "cursor")
"""The fields of a request for audit records."""
_LOCKS: Final = {
    "list": ("values", "limit", "after"),
    "acquire": ("key", "value", "lastWriter", "semantics", "requestId", "specRef"),
    "renew": ("key", "fence", "ttlSeconds"),
    "release": ("key", "fence", "lastWriter", "requestId"),
}
"""The fields of a request about locks besides `action`, by action."""
_DEAD_LETTERS: Final = {
    "list": ("values", "limit", "after"),
    "keep": ("id", "operations", "batch", "requestId", "errorCode", "error", "attempts"),
    "retry": ("id", "expectedVersion"),
    "drop": ("id",),
}
"""The fields of a request about dead letters besides `action`, by action."""


# Requests


class AuditRequest(Struct, frozen=True, kw_only=True):
    """What an audit asks for: the records of a key, or of a project."""

    about: str
    after: int | None
    limit: int
    reverse: bool
    beyond: bytes | None
    """The position of the last record in the reply that this request continues."""


class LocksRequest(Struct, frozen=True, kw_only=True):
    """Asks for the locks that are held."""

    values: bool
    limit: int
    after: int | None


class LockAcquisition(Struct, frozen=True):
    """Asks for a lock that is free."""

    request: WriteRequest


class LockRenewal(Struct, frozen=True):
    """Asks for a later expiry of a lock."""

    key: str
    fence: int
    ttl_seconds: int


class LockRelease(Struct, frozen=True):
    """Asks to release a lock."""

    key: str
    fence: int
    writer: str
    request_id: str | None


LockRequest: TypeAlias = LocksRequest | LockAcquisition | LockRenewal | LockRelease


class DeadLettersRequest(Struct, frozen=True, kw_only=True):
    """Asks for dead letters."""

    values: bool
    limit: int
    after: str | None


class DeadLetterToKeep(Struct, frozen=True):
    """Asks to keep a request that was given up."""

    id: str
    given_up: StoredDeadLetter


class DeadLetterRetry(Struct, frozen=True):
    """Asks to carry out the request of a dead letter."""

    id: str
    expected_version: ExpectedVersion | None


class DeadLetterDrop(Struct, frozen=True):
    """Asks to remove a dead letter."""

    id: str


DeadLetterRequest: TypeAlias = DeadLettersRequest | DeadLetterToKeep | DeadLetterRetry | DeadLetterDrop


def read_audit(project: Project, data: bytes) -> AuditRequest:
    """What a request for audit records asks for."""
    try:
        with json_text.collecting_no_garbage(data):
            return _audit_request(project, _read(data)[0])
    except errors.InvalidInput as error:
        raise wire.as_sent(error) from None


def _audit_request(project: Project, fields: Mapping[str, Any]) -> AuditRequest:
    wire.check_names(fields, _AUDIT)
    key, after, limit, reverse, cursor = [fields.get(name) for name in _AUDIT]
    rules.check_number(after, "after", "the sequence of an audit record", 2**63 - 1)
    return AuditRequest(
        about=project.prefix.removesuffix("/") if key is None else wire.key_within(project, key),
        after=after,
        limit=_limit(limit),
        reverse=_is_true(reverse, "reverse"),
        beyond=None if cursor is None else _position(cursor),
    )


def read_locks(project: Project, data: bytes) -> LockRequest:
    """What a request about locks asks for."""
    try:
        with json_text.collecting_no_garbage(data):
            fields, text = _read(data)
            return _lock_request(project, _action(fields, _LOCKS), fields, text)
    except errors.InvalidInput as error:
        raise wire.as_sent(error) from None


def _lock_request(project: Project, action: str, fields: Mapping[str, Any], text: bytes) -> LockRequest:
    if action == "list":
        after = fields.get("after")
        rules.check_number(after, "after", "the fencing token of a lock", 2**63 - 1)
        values = _is_true(fields.get("values"), "values")
        return LocksRequest(values=values, limit=_limit(fields.get("limit")), after=after)
    key = wire.key_within(project, payloads.field(fields, "key"))
    if action == "acquire":
        return LockAcquisition(WriteRequest(intents=(_lock(key, fields, text),), request_id=fields.get("requestId")))
    fence = payloads.field(fields, "fence")
    if fence is None:
        raise wrong("fence", "the fencing token of the lock, a whole number", fence)
    rules.check_number(fence, "fence", "the fencing token of the lock")
    if action == "renew":
        ttl = payloads.field(fields, "ttlSeconds")
        rules.check_ttl(ttl, "ttlSeconds")
        return LockRenewal(key, fence, ttl)
    writer, request_id = rules.check_text(payloads.field(fields, "lastWriter"), "writer"), fields.get("requestId")
    if request_id is not None:
        rules.check_text(request_id, "request_id")
    return LockRelease(key, fence, writer, request_id)


def _lock(key: str, fields: Mapping[str, Any], text: bytes) -> Intent:
    writer, semantics = payloads.field(fields, "lastWriter"), wire.read_semantics(payloads.field(fields, "semantics"))
    if semantics.purpose != rules.LOCK:
        raise errors.InvalidArgument("semantics.purpose: expected lock")
    value, spec_ref = wire.value_text(text).value, fields.get("specRef")
    value = value if isinstance(value, Raw) else Raw(b"null")
    return put_of_json(key, value, expected_version=0, writer=writer, semantics=semantics, spec_ref=spec_ref)


def read_dead_letters(project: Project, data: bytes) -> DeadLetterRequest:
    """What a request about dead letters asks for."""
    try:
        with json_text.collecting_no_garbage(data):
            fields, text = ({}, b"{}") if payloads.is_empty(data) else wire.read_operations(data)
            return _dead_letter_request(project, _action(fields, _DEAD_LETTERS), fields, text)
    except errors.InvalidInput as error:
        raise wire.as_sent(error) from None


def _dead_letter_request(project: Project, action: str, fields: Mapping[str, Any], text: bytes) -> DeadLetterRequest:
    if action == "list":
        after, values = fields.get("after"), _is_true(fields.get("values"), "values")
        after = None if after is None else rules.check_dead_letter_id(after, "after")
        return DeadLettersRequest(values=values, limit=_limit(fields.get("limit")), after=after)
    name = rules.check_dead_letter_id(payloads.field(fields, "id"))
    if action == "drop":
        return DeadLetterDrop(name)
    if action == "retry":
        expected = fields.get("expectedVersion")
        if expected is not None:
            rules.check_expected_version(expected)
        return DeadLetterRetry(name, expected)
    attempts = payloads.field(fields, "attempts")
    if type(attempts) is not int or not 1 <= attempts < 2**31:
        raise wrong("attempts", "how often it was tried, a whole number of at least 1", attempts, int)
    intents = wire.operations_in(project, fields, text, ("put", "delete", "restore"))
    is_batch = _is_true(fields.get("batch"), "batch")
    if len(intents) > 1 and not is_batch:
        raise errors.InvalidArgument("batch: expected true, since there are several operations")
    return DeadLetterToKeep(
        name,
        StoredDeadLetter(
            intents=intents,
            request_id=fields.get("requestId"),
            is_batch=is_batch,
            error_code=rules.check_text(payloads.field(fields, "errorCode"), "errorCode"),
            error=rules.check_text(payloads.field(fields, "error"), "error", limits.DEAD_LETTER_ERROR_CHARACTERS),
            attempts=attempts,
        ),
    )


def _read(data: bytes) -> tuple[dict[str, Any], bytes]:
    return ({}, b"{}") if payloads.is_empty(data) else wire.read_one(data)


def _action(fields: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> str:
    action = fields.get("action")
    if action is None:
        action = "list"
    if not isinstance(action, str) or action not in known:
        *others, last = known
        raise wrong("action", f"{', '.join(others)} or {last}", action, str)
    wire.check_names(fields, ("action", *known[action]))
    return action


def _limit(limit: object) -> int:
    return check_limit(limit, limits.LISTED_KEYS, limits.MOST_LISTED_KEYS)


def _is_true(given: object, argument: str) -> bool:
    if given is not None and type(given) is not bool:
        raise wrong(argument, "true or false", given)
    return bool(given)


def _position(cursor: object) -> bytes:
    try:
        position = bytes.fromhex(cursor) if isinstance(cursor, str) else b""
    except ValueError:
        position = b""
    if len(position) != POSITION_BYTES:
        raise wrong("cursor", "the cursor of an earlier reply", cursor, str)
    return position


# Replies


async def audited(records: AsyncIterable[tuple[bytes, AuditRecord]], request: AuditRequest, most_bytes: int) -> bytes:
    """The reply to an audit: records, and the cursor that continues it if there are more."""
    positions: list[bytes] = []

    async def shown() -> AsyncIterator[bytes]:
        async for position, record in records:
            positions.append(position)
            yield to_json(record)

    found, truncated = await wire.page_of(shown(), request.limit, most_bytes)
    cursor = {"cursor": positions[len(found) - 1].hex()} if truncated else {}
    return wire.success(records=found, truncated=truncated, **cursor)


async def locks(held: AsyncIterable[Envelope], request: LocksRequest, most_bytes: int) -> bytes:
    """The reply to a list of locks."""
    show = wire.shown if request.values else wire.valueless
    found, truncated = await wire.page_of((to_json(show(one)) async for one in held), request.limit, most_bytes)
    return wire.success(locks=found, truncated=truncated)


def renewed(expires_at: datetime) -> bytes:
    """The reply to a renewal of a lock."""
    return wire.success(expiresAt=expires_at)


async def dead_letters(found: AsyncIterable[DeadLetter], request: DeadLettersRequest, most_bytes: int) -> bytes:
    """The reply to a list of dead letters. It ends early if they are so large that reading more would take long."""
    room, left = most_bytes - 256, limits.DEAD_LETTERS_READ_BYTES

    async def shown() -> AsyncIterator[bytes]:
        nonlocal left
        async for letter in found:
            yield _fitting(letter, request.values, room)
            left -= sum([len(bytes(intent.value_json)) for intent in letter.intents])
            if left < 0:
                return

    page, truncated = await wire.page_of(shown(), request.limit, most_bytes)
    return wire.success(deadLetters=page, truncated=truncated or left < 0)


def _fitting(letter: DeadLetter, values: bool, room: int) -> bytes:
    """As much of a dead letter as fits."""
    operations = [wire.fields_of_intent(intent) for intent in letter.intents]
    if values and len(data := to_json(_on_the_wire(letter, operations))) <= room:
        return data
    for operation in operations:
        operation.pop("value", None)
    data = to_json(_on_the_wire(letter, operations, truncated=values))
    return data if len(data) <= room else to_json(_on_the_wire(letter, [], truncated=True))


class WireDeadLetter(Struct, frozen=True, kw_only=True, rename="camel"):
    """A dead letter as it travels."""

    id: str
    at: datetime
    error_code: str
    error: str
    attempts: int
    request_id: str | None
    batch: bool
    operations: list[dict[str, Any]]
    truncated: bool
    """Whether operations, or their values, are left out because one message can't hold them."""


def _on_the_wire(letter: DeadLetter, operations: list[dict[str, Any]], *, truncated: bool = False) -> WireDeadLetter:
    return WireDeadLetter(
        id=letter.id,
        at=letter.at,
        error_code=letter.error_code,
        error=letter.error,
        attempts=letter.attempts,
        request_id=letter.request_id,
        batch=letter.is_batch,
        operations=operations,
        truncated=truncated,
    )


# Replies, as the client reads them


def dead_letter_of(fields: Mapping[str, Any], project: Project) -> DeadLetter:
    """A dead letter of a reply; the value of a put is null where the reply shows none."""
    letter = msgspec.convert(fields, WireDeadLetter)
    return DeadLetter(
        intents=tuple([_intent_of(operation) for operation in letter.operations]),
        request_id=letter.request_id,
        is_batch=letter.batch,
        error_code=letter.error_code,
        error=letter.error,
        attempts=letter.attempts,
        id=letter.id,
        tenant=project.tenant,
        project=project.name,
        at=letter.at,
    )


def _intent_of(fields: Mapping[str, Any]) -> Intent:
    about = {"writer": fields["lastWriter"], "spec_ref": fields["specRef"]}
    if fields["operation"] == "restore":
        return Intent.restore(fields["key"], **about)
    about |= {"expected_version": fields["expectedVersion"], "fence": fields["fence"]}
    if fields["operation"] == "delete":
        return Intent.delete(fields["key"], **about)
    semantics = msgspec.convert(fields["semantics"], Semantics)
    return Intent.put(fields["key"], fields.get("value"), semantics=semantics, **about)
