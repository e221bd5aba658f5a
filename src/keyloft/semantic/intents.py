"""What a caller asks for: an intent is one put, delete or restore; a write request is intents that belong together."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeAlias

import msgspec
from msgspec import Raw, Struct

from keyloft import limits
from keyloft.core.json_text import on_any_stack
from keyloft.core.values import decode_json
from keyloft.errors import InvalidArgument, StaleFence, VersionConflict
from keyloft.semantic import rules
from keyloft.semantic.envelope import Envelope, Semantics, StoredEntry, semantics_json, to_json
from keyloft.semantic.keys import EntryKey, parse
from keyloft.semantic.rules import ANY, ExpectedVersion

IntentAction: TypeAlias = Literal["put", "delete", "restore"]
ConflictReason: TypeAlias = Literal["version", "fence", "request_id"]


class Intent(Struct, frozen=True, kw_only=True):
    """One write that a caller asks for. Make one with `Intent.put` or `Intent.delete`, for `SemanticStore.batch`.

    Dead letters hold intents unchanged.
    """

    action: IntentAction
    key: str
    expected: int | None
    """The version that the entry must have; 0 for no entry, None for any version or none."""
    writer: str
    semantics: Semantics | None = None
    """For a put."""
    value_json: Raw = msgspec.field(name="value", default=Raw(b"null"))
    """For a put: the value, as it is stored."""
    spec_ref: str | None = None
    fence: int | None = None

    @classmethod
    def put(
        cls,
        key: str,
        value: Any,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        semantics: Semantics,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Self:
        """Store a value; the arguments are those of `SemanticStore.put`.

        Raises:
            InvalidInput: An argument breaks a rule, which the message names.
        """
        if not isinstance(semantics, Semantics):
            raise rules.wrong("semantics", 'a Semantics, as in Semantics("config")', semantics)
        return cls(
            action="put",
            key=key,
            expected=rules.check_expected_version(expected_version),
            writer=writer,
            semantics=semantics,
            value_json=Raw(rules.value_json(value)),
            spec_ref=spec_ref,
            fence=fence,
        )

    @classmethod
    def delete(
        cls,
        key: str,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Self:
        """Remove an entry; the arguments are those of `SemanticStore.delete`."""
        expected = rules.check_expected_version(expected_version)
        return cls(action="delete", key=key, expected=expected, writer=writer, spec_ref=spec_ref, fence=fence)

    @classmethod
    def restore(cls, key: str, *, writer: str, spec_ref: str | None = None) -> Self:
        """Restore an entry where there is none; the arguments are those of `SemanticStore.restore`."""
        return cls(action="restore", key=key, expected=0, writer=writer, spec_ref=spec_ref)

    def __post_init__(self) -> None:
        # The key is checked where it is used: a client over NATS takes a path, a store a whole key.
        rules.check_text(self.writer, "writer")
        if self.spec_ref is not None:
            rules.check_text(self.spec_ref, "spec_ref", limits.SPEC_REF_CHARACTERS)
        rules.check_number(self.fence, "fence", "the fencing token of a lock")

    @property
    def value(self) -> Any:
        """The value to put; None for a delete or a restore."""
        return decode_json(bytes(self.value_json)) if self.action == "put" else None

    @property
    def expected_version(self) -> ExpectedVersion:
        return ANY if self.expected is None else self.expected

    @property
    def entry_key(self) -> EntryKey:
        return parse(self.key)

    def __repr__(self) -> str:
        # Without the value: an intent in a log must not show a secret.
        return f"<{self.action} {self.key} by {self.writer}, expected version {self.expected_version}>"


def put_of_json(key: str, value: Raw, *, expected_version: ExpectedVersion, **others: Any) -> Intent:
    """What `Intent.put` returns, for a value that is compact JSON already."""
    expected = rules.check_expected_version(expected_version)
    return Intent(action="put", key=key, expected=expected, value_json=Raw(rules.check_size(bytes(value))), **others)


def stored_entry(
    put: Intent, hashed: str, request_id: str | None, kept_fence: int | None, number: int = 0, unindexed: bytes = b""
) -> StoredEntry:
    """The entry that a put stores, with the hash of its value."""
    assert put.semantics is not None
    return StoredEntry(
        writer=put.writer,
        semantics_json=semantics_json(put.semantics),
        value=put.value_json,
        hash=hashed,
        request_id=request_id,
        spec_ref=put.spec_ref,
        kept_fence=kept_fence,
        number=number,
        unindexed=unindexed,
    )


class WriteRequest(Struct, frozen=True, kw_only=True):
    """Intents that are committed together or not at all."""

    intents: tuple[Intent, ...] = msgspec.field(name="operations")
    request_id: str | None = None
    is_batch: bool = False

    def __post_init__(self) -> None:
        if self.request_id is not None:
            rules.check_text(self.request_id, "request_id")

    @property
    def memory_row(self) -> bytes | None:
        """The row that remembers the request; None if it has no request id."""
        if self.request_id is None:
            return None
        first = self.intents[0].entry_key
        return first.project.batch_request(self.request_id) if self.is_batch else first.request(self.request_id)

    @property
    def digest(self) -> str:
        """A hash that is equal for two requests that ask for the same."""
        fields = [
            (i.action, i.key, i.expected, i.writer, i.semantics, _sorted_value(i), i.spec_ref, i.fence)
            for i in self.intents
        ]
        return hashlib.blake2b(to_json(fields), digest_size=16).hexdigest()


def check_batch(operations: Sequence[object]) -> None:
    """Refuse a batch of too few or too many operations."""
    most = limits.BATCH_OPERATIONS
    if not 1 <= len(operations) <= most:
        raise InvalidArgument(f"operations: expected 1 to {most:,} puts and deletes, got {len(operations):,}")


class FailedWrite(Struct, frozen=True, rename="camel"):
    """A put, delete or restore that was refused because of what is stored."""

    key: str
    expected_version: ExpectedVersion
    current: Envelope | None
    reason: ConflictReason


def conflict_error(failed: Sequence[FailedWrite], correlation_id: str) -> VersionConflict | StaleFence:
    """The error for a request whose writes were refused."""
    text = "; ".join([_text(one) for one in failed[:3]]) + (f" … {len(failed)} in all" if len(failed) > 3 else "")
    text += "; nothing was written"
    kind = StaleFence if any(one.reason == "fence" for one in failed) else VersionConflict
    return kind(text, current=failed[0].current, conflicts=tuple(failed), correlation_id=correlation_id)


def _text(failed: FailedWrite) -> str:
    current = failed.current
    stored = "no entry" if current is None else f"version {current.version} by {current.last_writer}"
    match failed.reason:
        case "fence":
            return f"{failed.key}: no lock of this project is held under this fencing token any more; found {stored}"
        case "request_id":
            return f"{failed.key}: this request id was used for another request; found {stored}"
    expected = "no entry" if failed.expected_version == 0 else f"version {failed.expected_version}"
    return f"{failed.key}: expected {expected}, found {stored}"


_to_sorted_json = msgspec.json.Encoder(order="sorted").encode


def _sorted_value(intent: Intent) -> bytes:
    """The value of a put, with the names in its objects sorted: a retry may have built them in another order."""
    data = bytes(intent.value_json) if intent.action == "put" else b""
    if b"{" not in data:
        return data
    try:
        return on_any_stack(_to_sorted_json, decode_json(data))
    except (msgspec.MsgspecError, OverflowError, ValueError):
        return data  # msgspec can't encode ints this long
