"""Remembers the outcome of a request with an id, so that the same request again gets the same outcome."""

from collections.abc import Sequence

from msgspec import Raw, Struct

from keyloft.core.records import Record
from keyloft.core.values import Encoding
from keyloft.semantic.envelope import Envelope, StoredEntry, envelope_of, row_reader, to_json
from keyloft.semantic.intents import Intent, WriteRequest, stored_entry
from keyloft.semantic.planning import PendingWrite


class _Removed(Struct, frozen=True):
    """The row that a delete removed."""

    row: bytes
    value: Raw
    version: int
    updated_at: int
    expires_at: int | None


class _IntentOutcome(Struct, frozen=True, omit_defaults=True):
    """The outcome of one intent, without what the intent itself says."""

    kept_fence: int | None = None
    removed: _Removed | None = None
    restored: StoredEntry | None = None


class RequestMemory(Struct, frozen=True):
    """What is remembered of a request: a hash of what it asked for, and its outcome."""

    digest: str
    outcomes: tuple[_IntentOutcome, ...]


read_memory = row_reader(RequestMemory, "the row {!r} is damaged: it remembers no request")
"""The memory of a request that a row holds."""


def memory_of(digest: str, writes: Sequence[PendingWrite]) -> bytes:
    """The stored form of what is to be remembered of a request."""
    return to_json(RequestMemory(digest, tuple([_outcome(write) for write in writes])))


def _outcome(write: PendingWrite) -> _IntentOutcome:
    if write.stored is not None:
        restored = write.stored if write.intent.action == "restore" else None
        return _IntentOutcome(write.stored.kept_fence, None, restored)
    was = write.record
    if was is None:
        return _IntentOutcome()
    return _IntentOutcome(None, _Removed(was.key, Raw(was.value), was.version, was.updated_at, was.expires_at))


def replay(request: WriteRequest, memory: RequestMemory, record: Record) -> list[Envelope | None]:
    """The first outcome of a request; `record` is the row that remembers it, written by the same commit."""
    both, request_id = zip(request.intents, memory.outcomes, strict=True), request.request_id
    return [_replayed(intent, outcome, record, request_id) for intent, outcome in both]


def _replayed(intent: Intent, outcome: _IntentOutcome, record: Record, request_id: str | None) -> Envelope | None:
    if intent.action == "delete":
        if (was := outcome.removed) is None:
            return None
        value = bytes(was.value)
        return envelope_of(Record(was.row, value, Encoding.JSON, was.version, was.expires_at, 0, was.updated_at))
    stored = outcome.restored or stored_entry(intent, "", request_id, outcome.kept_fence)
    return stored.new_envelope(intent.key, record.version, record.updated_at)
