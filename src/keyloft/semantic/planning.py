"""Plans a commit: what it has to check and to write to carry out intents, with their audit records."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import Append, Batch, Check, Committed, Delete, Mutation, Purge, Record, Set
from keyloft.core.values import Encoding
from keyloft.errors import InvalidArgument
from keyloft.semantic.audit import POSITION_BYTES, Hasher, StoredAuditRecord, position, rows_for
from keyloft.semantic.envelope import Envelope, Semantics, StoredEntry, envelope_of, read_entry, to_json
from keyloft.semantic.intents import ConflictReason, Intent, stored_entry
from keyloft.semantic.keys import SPACE, EntryKey
from keyloft.semantic.rules import LOCK

SWEEPER: Final = "keyloft:expiry"
"""The writer that audit records name for an expiry."""


# What is stored


class EntryHead(Struct, frozen=True, gc=False):
    """The part of a stored entry that the plan of its next change needs."""

    version: int = 0
    """Versions begin at 1; 0 stands for no entry."""
    hash: str | None = None
    fence: int | None = None
    semantics: Semantics | None = None
    history: bytes = b""
    """The positions of this entry's audit records that no index row lists; the record of its last change comes last."""

    @classmethod
    def of(cls, stored: StoredEntry, version: int) -> "EntryHead":
        semantics, history = stored.semantics, stored.unindexed + position(version, stored.number)
        return cls(version, stored.hash, stored.fence(version, semantics), semantics, history)


NO_ENTRY: Final = EntryHead()


class PendingWrite(Struct):
    """An intent, and what the plan needs to know about what is stored at its key."""

    intent: Intent
    key: EntryKey
    alive: EntryHead = NO_ENTRY
    record: Record | None = None
    """The row of `alive`, if it was read."""
    expired: Record | None = None
    """An entry that has expired and was not yet swept."""
    overdue: int = 0
    """For how many milliseconds that entry has been expired."""
    deleted: Record | None = None
    """The entry that a restore would bring back."""
    lock: Record | None = None
    """The lock of the intent's fencing token, if it is held."""
    stored: StoredEntry | None = None
    """What a put or restore stores, once it is planned."""

    def refusal(self) -> ConflictReason | None:
        """Why the intent can't be carried out."""
        fence, lock = self.intent.fence, self.lock
        if fence is not None and (lock is None or read_entry(lock).fence(lock.version) != fence):
            return "fence"
        return "version" if self.intent.expected not in (None, self.alive.version) else None

    def can_restore(self, within: int) -> bool:
        if self.expired is None:
            return self.deleted is not None
        return self.overdue < within

    @property
    def semantics(self) -> Semantics | None:
        """The semantics of the entry that is to be stored; for a delete, those of the stored entry."""
        return self.intent.semantics or (self.stored or self.alive).semantics

    @property
    def current(self) -> Envelope | None:
        return None if self.record is None else envelope_of(self.record)

    def outcome(self, done: Committed) -> Envelope | None:
        """The entry that is stored now; for a delete, the one that was."""
        if self.stored is None:
            return self.current
        return self.stored.new_envelope(self.intent.key, done.version, done.at)


# What is to be written


class Retention(Struct, frozen=True):
    """How long audit records, deleted entries and remembered requests are kept, in milliseconds."""

    requests: int
    deleted: int
    audit: int


class CommitPlan:
    """Collects what one commit has to check and to write."""

    def __init__(self, hasher: Hasher, retention: Retention, request_id: str | None = None) -> None:
        self._hasher = hasher
        self._retention = retention
        self._request_id = request_id
        self._checks: list[Check] = []
        self._mutations: list[Mutation] = []
        self._recorded = 0
        """How many audit records the commit has."""
        self._acquiring: set[bytes] = set()

    def batch(self) -> Batch:
        return Batch(tuple(self._mutations), tuple(self._checks))

    def write(self, write: PendingWrite) -> None:
        """Carry out an intent, if what is stored is still what was read."""
        self._check_unchanged(write.key, write.alive, write.expired)
        if write.lock is not None:
            self._checks.append(Check(SPACE, write.lock.key, write.lock.version))
        if write.expired is not None:
            self._record_expiry(write.key, write.expired)
        if write.intent.action == "delete":
            self._delete(write)
        elif write.intent.semantics is None:
            self._restore(write)
        else:
            self._put(write, write.intent.semantics)

    def expire(self, key: EntryKey, record: Record, overdue: int) -> None:
        """Remove an entry that has been expired for this many milliseconds."""
        self._check_unchanged(key, NO_ENTRY, record)
        self._record_expiry(key, record)
        self._purge(key, record, overdue)

    def refuse(self, write: PendingWrite, reason: ConflictReason, correlation_id: str) -> None:
        """Record that an intent met a conflict."""
        record, expected = self._audit_record(write), write.intent.expected_version
        record = replace(
            record, action="conflict", expected_version=expected, reason=reason, correlation_id=correlation_id
        )
        self._record(write.key, record)

    def remember(self, row: bytes, memory: bytes) -> None:
        """Remember a request, unless another commit has done so meanwhile."""
        self._checks.append(Check(SPACE, row, None))
        self._mutations.append(Set(SPACE, row, memory, Encoding.JSON, self._retention.requests))

    def drop(self, row: Record) -> None:
        """Remove a row, if it still has this version."""
        self._checks.append(Check(SPACE, row.key, row.version))
        self._mutations.append(Delete(SPACE, row.key))

    def _check_unchanged(self, key: EntryKey, alive: EntryHead, expired: Record | None) -> None:
        if alive is not NO_ENTRY:
            self._checks.append(Check(SPACE, key.entry, alive.version))
        elif expired is not None:
            # Both checks: if the machine's clock was set back, the same version is alive again.
            self._checks.append(Check(SPACE, key.entry, expired.version, include_expired=True))
            self._checks.append(Check(SPACE, key.entry, None))
        else:
            self._checks.append(Check(SPACE, key.entry, None, include_expired=True))

    def _put(self, write: PendingWrite, semantics: Semantics) -> None:
        intent, held, history = write.intent, write.alive.fence, write.alive.history
        # A put of a lock with the lock's own token renews it; any other put of a lock acquires it.
        kept = held if semantics.purpose == LOCK and held is not None and held == intent.fence else None
        is_full = len(history) >= limits.AUDIT_UNINDEXED * POSITION_BYTES
        hashed = self._hasher.of(write.key, bytes(intent.value_json))
        unindexed = b"" if is_full else history
        write.stored = stored_entry(intent, hashed, self._request_id, kept, self._recorded, unindexed)
        self._store(write.key, write.stored, semantics)
        if kept is None:
            self._drop_fence(write.key, held)
        self._record(write.key, self._audit_record(write), history if is_full else None)

    def _restore(self, write: PendingWrite) -> None:
        intent, old = write.intent, write.expired or write.deleted
        assert old is not None, "the commit refuses a restore of nothing before it is planned"
        if write.deleted is not None:
            self.drop(write.deleted)
        was = read_entry(old)
        write.stored = replace(
            was,
            writer=intent.writer,
            request_id=self._request_id,
            spec_ref=intent.spec_ref or was.spec_ref,
            kept_fence=None,
            number=self._recorded,
            unindexed=b"",
        )
        self._store(write.key, write.stored, was.semantics)
        self._record(write.key, self._audit_record(write))

    def _store(self, key: EntryKey, stored: StoredEntry, semantics: Semantics) -> None:
        self._mutations.append(Set(SPACE, key.entry, to_json(stored), Encoding.JSON, semantics.expire_in))
        if semantics.purpose == LOCK and stored.kept_fence is None:
            # The fencing token is the commit's version, so one commit can acquire only one lock of a project.
            fences = key.project.fences
            if fences in self._acquiring:
                raise InvalidArgument("operations: expected at most one new lock of a project, got two")
            self._acquiring.add(fences)
            self._mutations.append(Append(SPACE, fences, key.path.encode(), Encoding.BYTES))

    def _delete(self, write: PendingWrite) -> None:
        key = write.key
        if write.record is not None:
            self._mutations.append(Delete(SPACE, key.entry))
            self._drop_fence(key, write.alive.fence)
            self._keep_deleted(key, write.record, self._retention.deleted)
        elif write.expired is not None:
            self._purge(key, write.expired, write.overdue)
        self._record(key, self._audit_record(write), write.alive.history)

    def _purge(self, key: EntryKey, expired: Record, overdue: int) -> None:
        self._mutations.append(Purge(SPACE, key.entry, expired.version))
        self._keep_deleted(key, expired, self._retention.deleted - overdue)

    def _keep_deleted(self, key: EntryKey, record: Record, milliseconds: int) -> None:
        """Keep an entry for as long as it can be restored."""
        if milliseconds > 0:
            self._mutations.append(Set(SPACE, key.deleted, record.value, Encoding.JSON, milliseconds))

    def _drop_fence(self, key: EntryKey, fence: int | None) -> None:
        if fence is not None:
            self._mutations.append(Delete(SPACE, key.project.fence(fence)))

    def _record_expiry(self, key: EntryKey, expired: Record) -> None:
        was = read_entry(expired)
        head = EntryHead.of(was, expired.version)
        self._drop_fence(key, head.fence)
        record = StoredAuditRecord(
            action="expire",
            path=key.path,
            writer=SWEEPER,
            purpose=was.semantics.purpose,
            request_id=was.request_id,
            spec_ref=was.spec_ref,
            version_before=expired.version,
            before_hash=was.hash,
            reason=f"written by {was.writer}",
        )
        self._record(key, record, head.history)

    def _audit_record(self, write: PendingWrite) -> StoredAuditRecord:
        intent, semantics = write.intent, write.semantics
        return StoredAuditRecord(
            action=intent.action,
            path=write.key.path,
            writer=intent.writer,
            purpose=None if semantics is None else semantics.purpose,
            request_id=self._request_id,
            spec_ref=intent.spec_ref,
            version_before=write.alive.version or None,
            before_hash=write.alive.hash,
            after_hash=None if write.stored is None else write.stored.hash,
        )

    def _record(self, key: EntryKey, record: StoredAuditRecord, index: bytes | None = None) -> None:
        """Add an audit record to the commit; `index` as in `rows_for`."""
        self._mutations += rows_for(key, record, self._recorded, expire_in=self._retention.audit, index=index)
        self._recorded += 1
