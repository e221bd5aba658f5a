"""What a commit has to check and to write so that a put, a delete or a restore is made, with its audit record."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from keyloft.core.records import Append, Batch, Check, Committed, Mutation, Purge, Record, Set, Space
from keyloft.core.records import Delete as Remove
from keyloft.core.values import Encoding, decode_json
from keyloft.errors import InvalidArgument, Undecodable
from keyloft.semantic import envelope as rules
from keyloft.semantic.audit import Fact, Hasher, appends
from keyloft.semantic.envelope import (
    ANY,
    LOCK,
    Envelope,
    ExpectedVersion,
    Semantics,
    Stored,
    envelope_of,
    read_stored,
    semantics_json,
    write_stored,
)
from keyloft.semantic.keys import Place, place

_SEMANTIC: Final = Space.SEMANTIC

SWEEPER: Final = "keyloft:expiry"
"""Who is said to have let an entry expire."""

Reason: TypeAlias = Literal["version", "fence", "request_id"]


# What can be asked for


class Put(Struct, frozen=True):
    """A put of a batch."""

    key: str
    value: Any
    expected_version: ExpectedVersion
    writer: str
    semantics: Semantics
    spec_ref: str | None = None
    fence: int | None = None

    def __repr__(self) -> str:
        # As with an envelope: whoever logs it does not mean to log a secret.
        return f"<put of {self.key} by {self.writer}, expected version {self.expected_version}>"


class Delete(Struct, frozen=True):
    """A delete of a batch."""

    key: str
    expected_version: ExpectedVersion
    writer: str
    spec_ref: str | None = None
    fence: int | None = None


class FailedWrite(Struct, frozen=True):
    """A put or delete that stood against what is stored."""

    key: str
    expected_version: ExpectedVersion
    current: Envelope | None
    reason: Reason


class Change(Struct, frozen=True):
    """A write that keeps to the rules."""

    action: Literal["put", "delete", "restore"]
    place: Place
    expected: int | None
    writer: str
    semantics: Semantics | None
    value: bytes
    spec_ref: str | None
    fence: int | None

    @property
    def expected_version(self) -> ExpectedVersion:
        return ANY if self.expected is None else self.expected


def putting(asked: Put) -> Change:
    """The change that a put asks for.

    Raises:
        InvalidInput: It breaks a rule, which the message names.
    """
    if not isinstance(asked.semantics, Semantics):
        raise InvalidArgument(
            f'semantics: a Semantics, as in Semantics("config"), not {type(asked.semantics).__name__}'
        )
    return Change(
        "put",
        place(asked.key),
        rules.expected(asked.expected_version),
        rules.writer_name(asked.writer),
        asked.semantics,
        rules.value_json(asked.value),
        rules.spec_name(asked.spec_ref),
        rules.fence_token(asked.fence),
    )


def deleting(asked: Delete) -> Change:
    """The change that a delete asks for."""
    return Change(
        "delete",
        place(asked.key),
        rules.expected(asked.expected_version),
        rules.writer_name(asked.writer),
        None,
        b"",
        rules.spec_name(asked.spec_ref),
        rules.fence_token(asked.fence),
    )


def restoring(key: str, writer: str, spec_ref: str | None) -> Change:
    """The change that a restore asks for."""
    name = rules.writer_name(writer)
    return Change("restore", place(key), 0, name, None, b"", rules.spec_name(spec_ref), None)


# What is there


class Known(Struct, frozen=True, gc=False):
    """What a change has to know of an entry that is stored."""

    version: int
    hash: str
    fence: int | None
    semantics: Semantics
    number: int

    @classmethod
    def of(cls, stored: Stored, version: int) -> "Known":
        semantics = stored.semantics
        return cls(version, stored.hash, stored.fence_of(semantics, version), semantics, stored.number)


class Seen(Struct):
    """What is stored, as far as a change has to know."""

    alive: Known | None
    record: Record | None = None
    """The row of what is alive, where it was read."""
    expired: Record | None = None
    """What has expired, but was not yet put aside."""
    overdue: int = 0
    """For how many milliseconds it has been expired."""
    deleted: Record | None = None
    """What was put aside, for a restore."""
    lock: Record | None = None
    """The lock of a fencing token, if it is held."""

    @classmethod
    def of(cls, record: Record | None) -> "Seen":
        return cls(None if record is None else Known.of(read_stored(record), record.version), record)

    def objection(self, change: Change) -> Reason | None:
        """Why a change can't be made."""
        if change.fence is not None and (
            self.lock is None or read_stored(self.lock).fence(self.lock.version) != change.fence
        ):
            return "fence"
        # Versions begin at 1, and 0 stands for nothing.
        found = 0 if self.alive is None else self.alive.version
        return "version" if change.expected is not None and change.expected != found else None

    def restorable(self, keep_deleted: int) -> bool:
        """Whether there is something that a restore can bring back."""
        if self.expired is None:
            return self.deleted is not None
        return self.overdue < keep_deleted

    @property
    def version(self) -> int | None:
        return None if self.alive is None else self.alive.version

    @property
    def semantics(self) -> Semantics | None:
        return None if self.alive is None else self.alive.semantics

    @property
    def current(self) -> Envelope | None:
        return None if self.record is None else envelope_of(self.record)


# What is to be written


class Made(Struct, frozen=True):
    """What a change comes to, once it is committed."""

    change: Change
    stored: Stored | None
    """What a put or restore stores."""
    removed: Record | None
    """What a delete removes."""
    expired: Record | None
    """What was found expired on the way."""

    @property
    def semantics(self) -> Semantics | None:
        if self.stored is not None:
            return self.stored.semantics
        return None if self.removed is None else read_stored(self.removed).semantics

    def outcome(self, done: Committed) -> Envelope | None:
        """The entry that is stored now; of a delete, the one that was."""
        if self.stored is None:
            return None if self.removed is None else envelope_of(self.removed)
        return _new_envelope(self.change.place, self.stored, done.version, done.at)


def _new_envelope(at: Place, stored: Stored, version: int, now: int) -> Envelope:
    lives = stored.semantics.expire_in
    return stored.envelope(at.key, version, now, None if lives is None else now + lives, value=True)


class Plan:
    """Collects what one commit has to check and to write."""

    def __init__(self, hasher: Hasher, *, keep_audit: int, keep_deleted: int) -> None:
        """Both are times in milliseconds."""
        self._hasher = hasher
        self._keep_audit = keep_audit
        self._keep_deleted = keep_deleted
        self._checks: list[Check] = []
        self._mutations: list[Mutation] = []
        self._facts = 0
        self._acquiring: set[bytes] = set()

    def batch(self) -> Batch:
        return Batch(tuple(self._mutations), tuple(self._checks))

    def make(self, change: Change, seen: Seen, request_id: str | None) -> Made:
        """Make a change, if all is still as it was seen."""
        self._pin(change.place, seen)
        if seen.lock is not None:
            self._checks.append(Check(_SEMANTIC, seen.lock.key, seen.lock.version))
        if seen.expired is not None:
            self._record_expiry(change.place, seen.expired)
        if change.action == "delete":
            return Made(change, None, self._delete(change, seen, request_id), seen.expired)
        if change.semantics is None:
            stored = self._restore(change, seen, request_id)
        else:
            stored = self._put(change, seen, change.semantics, request_id)
        return Made(change, stored, None, seen.expired)

    def expire(self, at: Place, record: Record, overdue: int) -> None:
        """Put an entry aside that has been expired for so many milliseconds."""
        self._pin(at, Seen(None, expired=record))
        self._record_expiry(at, record)
        self._put_aside(at, record, overdue)

    def refuse(self, change: Change, seen: Seen, reason: Reason, request_id: str | None, correlation_id: str) -> None:
        """Record that a change was not made."""
        semantics = change.semantics or seen.semantics
        self._record(
            change.place,
            Fact(
                "conflict",
                change.place.path,
                change.writer,
                None if semantics is None else semantics.purpose,
                request_id,
                change.spec_ref,
                *_before(seen.alive),
                None,
                change.expected_version,
                reason,
                correlation_id,
            ),
        )

    def remember(self, row: bytes, memory: bytes, keep: int) -> None:
        """Remember a request for so many milliseconds, unless somebody else does so by now."""
        self._checks.append(Check(_SEMANTIC, row, None))
        self._mutations.append(Set(_SEMANTIC, row, memory, Encoding.JSON, keep))

    def drop(self, row: bytes, version: int) -> None:
        """Remove a row, if it is still this version."""
        self._checks.append(Check(_SEMANTIC, row, version))
        self._mutations.append(Remove(_SEMANTIC, row))

    def _pin(self, at: Place, seen: Seen) -> None:
        if seen.alive is not None:
            self._checks.append(Check(_SEMANTIC, at.entry, seen.alive.version))
        elif seen.expired is not None:
            # Both: a machine's clock may be set back, and what had expired is alive again.
            self._checks.append(Check(_SEMANTIC, at.entry, seen.expired.version, include_expired=True))
            self._checks.append(Check(_SEMANTIC, at.entry, None))
        else:
            self._checks.append(Check(_SEMANTIC, at.entry, None, include_expired=True))

    def _put(self, change: Change, seen: Seen, semantics: Semantics, request_id: str | None) -> Stored:
        at, before, value = change.place, seen.alive, change.value
        held = None if before is None else before.fence
        is_lock = semantics.purpose == LOCK
        # Whoever shows the token of the very lock that it writes renews it; all others acquire it.
        kept = held if is_lock and held is not None and held == change.fence else None
        stored = self._store(change, semantics, value, self._hasher.of(at, value), request_id, kept)
        if held is not None and kept is None:
            self._mutations.append(Remove(_SEMANTIC, at.fence(held)))
        self._record_change(change, before, request_id, semantics, stored.hash)
        return stored

    def _restore(self, change: Change, seen: Seen, request_id: str | None) -> Stored:
        old = seen.expired or seen.deleted
        assert old is not None, "whether there is something to restore was looked at before"
        if seen.deleted is not None:
            self.drop(change.place.deleted, seen.deleted.version)
        was = read_stored(old)
        stored = self._store(change, was.semantics, bytes(was.value), was.hash, request_id, None, was.spec_ref)
        self._record_change(change, None, request_id, was.semantics, was.hash)
        return stored

    def _store(
        self,
        change: Change,
        semantics: Semantics,
        value: bytes,
        hashed: str,
        request_id: str | None,
        kept_fence: int | None,
        spec_ref: str | None = None,
    ) -> Stored:
        at = change.place
        stored = Stored(
            change.writer,
            semantics_json(semantics),
            Raw(value),
            hashed,
            request_id,
            change.spec_ref or spec_ref,
            kept_fence,
            self._facts,  # it is recorded next
        )
        self._mutations.append(Set(_SEMANTIC, at.entry, write_stored(stored), Encoding.JSON, semantics.expire_in))
        if semantics.purpose == LOCK and kept_fence is None:
            # A commit has one version to give as a token, and a token stands for one lock.
            if at.inside in self._acquiring:
                raise InvalidArgument("operations: a batch acquires one lock of a project at most")
            self._acquiring.add(at.inside)
            self._mutations.append(Append(_SEMANTIC, at.fences, at.path.encode(), Encoding.BYTES))
        return stored

    def _delete(self, change: Change, seen: Seen, request_id: str | None) -> Record | None:
        at, record = change.place, seen.record
        if record is not None:
            self._mutations.append(Remove(_SEMANTIC, at.entry))
            self._let_go(at, record)
            self._keep(at, record, self._keep_deleted)
        elif seen.expired is not None:
            self._put_aside(at, seen.expired, seen.overdue)
        self._record_change(change, seen.alive, request_id, seen.semantics, None)
        return record

    def _put_aside(self, at: Place, expired: Record, overdue: int) -> None:
        self._mutations.append(Purge(_SEMANTIC, at.entry, expired.version))
        self._keep(at, expired, self._keep_deleted - overdue)

    def _keep(self, at: Place, record: Record, milliseconds: int) -> None:
        """Keep what can be restored, for as long as it can."""
        if milliseconds > 0:
            self._mutations.append(Set(_SEMANTIC, at.deleted, record.value, Encoding.JSON, milliseconds))

    def _let_go(self, at: Place, record: Record) -> None:
        """A lock is no longer held: its token means nothing any more."""
        if (fence := read_stored(record).fence(record.version)) is not None:
            self._mutations.append(Remove(_SEMANTIC, at.fence(fence)))

    def _record_expiry(self, at: Place, expired: Record) -> None:
        self._let_go(at, expired)
        was = read_stored(expired)
        self._record(
            at,
            Fact(
                "expire",
                at.path,
                SWEEPER,
                was.semantics.purpose,
                was.request_id,
                was.spec_ref,
                expired.version,
                was.number,
                was.hash,
                None,
                None,
                f"written by {was.writer}",
            ),
        )

    def _record_change(
        self,
        change: Change,
        before: Known | None,
        request_id: str | None,
        semantics: Semantics | None,
        hashed: str | None,
    ) -> None:
        at = change.place
        self._record(
            at,
            Fact(
                change.action,
                at.path,
                change.writer,
                None if semantics is None else semantics.purpose,
                request_id,
                change.spec_ref,
                *_before(before),
                hashed,
            ),
        )

    def _record(self, at: Place, fact: Fact) -> None:
        self._mutations += appends(at, fact, self._facts, self._keep_audit)
        self._facts += 1


def _before(known: Known | None) -> tuple[int | None, int, str | None]:
    """What a record tells of what was there."""
    return (None, 0, None) if known is None else (known.version, known.number, known.hash)


# Requests that come again


class _Removed(Struct, frozen=True):
    """What a delete removed."""

    row: bytes
    value: Raw
    version: int
    updated_at: int
    expires_at: int | None


class _Outcome(Struct, frozen=True, omit_defaults=True):
    """What came of one change, as far as the request itself does not tell."""

    kept_fence: int | None = None
    removed: _Removed | None = None
    restored: Stored | None = None


class Memory(Struct, frozen=True):
    """What is remembered of a request: what it asked for, and what came of it."""

    digest: str
    outcomes: tuple[_Outcome, ...]


_to_json = msgspec.json.Encoder().encode
_to_sorted_json = msgspec.json.Encoder(order="sorted").encode
_read_memory = msgspec.json.Decoder(Memory).decode


def digest_of(changes: Sequence[Change]) -> str:
    """What tells whether two requests ask for the same."""
    told = [
        (c.action, c.place.key, c.expected, c.writer, c.semantics, _sorted(c.value), c.spec_ref, c.fence)
        for c in changes
    ]
    return hashlib.blake2b(_to_json(told), digest_size=16).hexdigest()


def _sorted(value: bytes) -> bytes:
    """A value with the names of its objects in order: a retry may have built them in another one."""
    if b"{" not in value:
        return value
    try:
        return _to_sorted_json(decode_json(value))
    except (msgspec.MsgspecError, OverflowError, ValueError):
        return value  # an int that is too long for it


def memory_of(digest: str, made: Sequence[Made]) -> bytes:
    """What is to be remembered of a request."""
    return _to_json(Memory(digest, tuple([_outcome(one) for one in made])))


def _outcome(made: Made) -> _Outcome:
    if made.stored is not None:
        return _Outcome(made.stored.kept_fence, None, made.stored if made.change.action == "restore" else None)
    was = made.removed
    if was is None:
        return _Outcome()
    return _Outcome(None, _Removed(was.key, Raw(was.value), was.version, was.updated_at, was.expires_at))


def remembered(record: Record) -> Memory:
    """What a row holds.

    Raises:
        Undecodable: It is none of ours.
    """
    try:
        return _read_memory(record.value)
    except msgspec.MsgspecError as error:
        raise Undecodable(f"the row {record.key!r} is damaged: it remembers no request") from error


def replay(changes: Sequence[Change], memory: Memory, record: Record, request_id: str | None) -> list[Envelope | None]:
    """What came of a request when it came first; `record` is what remembers it, written by the same commit."""
    found: list[Envelope | None] = []
    for change, outcome in zip(changes, memory.outcomes, strict=True):
        if change.action == "delete":
            was = outcome.removed
            found.append(
                None
                if was is None
                else envelope_of(
                    Record(was.row, bytes(was.value), Encoding.JSON, was.version, was.expires_at, 0, was.updated_at)
                )
            )
            continue
        stored = outcome.restored
        if stored is None:
            assert change.semantics is not None
            stored = Stored(
                change.writer,
                semantics_json(change.semantics),
                Raw(change.value),
                "",
                request_id,
                change.spec_ref,
                outcome.kept_fence,
            )
        found.append(_new_envelope(change.place, stored, record.version, record.updated_at))
    return found
