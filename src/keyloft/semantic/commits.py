"""Carries out write requests: reads what is stored, refuses a conflict, or commits what was planned.

A request takes this path: what is stored is read, or guessed from the last write or read here. What conflicts with it
is recorded, logged and raised. Otherwise a `CommitPlan` says what to check and to write, and the engine makes all of
it or nothing. If a check fails, the request starts again with a thorough read.
"""

import asyncio
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NoReturn

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Ask, Batch, Check, Committed, Conflict, Get, Now, Record, Set, Space
from keyloft.core.values import Encoding
from keyloft.errors import Closed, DatabaseError, InvalidArgument, NothingToRestore, StaleFence, VersionConflict
from keyloft.semantic import keys, replays
from keyloft.semantic.audit import Hasher
from keyloft.semantic.envelope import Envelope, StoredEntry, read_stored
from keyloft.semantic.intents import ConflictReason, FailedWrite, Intent, WriteRequest
from keyloft.semantic.keys import EntryKey, Project
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.planning import CommitPlan, EntryHead, EntryState, PlannedWrite, Retention

_SEMANTIC: Final = Space.SEMANTIC
_AUDIT_KEY_BYTES: Final = 32

DEAD_LETTER_GONE: Final = "letter: this dead letter is gone; another caller has retried or dropped it meanwhile"


class Committer:
    """Commits write requests to a database."""

    def __init__(self, engine: Engine, signals: Signals, keep: Retention, hasher: Hasher | None) -> None:
        """Without a hasher, a random key that is kept in the database makes the audit's hashes."""
        self._engine = engine
        self._signals = signals
        self._keep = keep
        self._hasher = hasher
        self._recent: OrderedDict[bytes, EntryHead] = OrderedDict()
        self._locks_by_fence: dict[tuple[Project, int], EntryKey] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def in_background(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job that its caller can't wait for."""
        task = asyncio.create_task(job)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def finish(self) -> None:
        """Wait for the jobs in the background."""
        if self._background:
            await asyncio.wait(self._background)

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed("this semantic store is closed: make another one to go on")

    async def carry_out(
        self, request: WriteRequest, *, quiet: bool = False, dead_letter: tuple[bytes, int] | None = None
    ) -> list[Envelope | None]:
        """Carry out all intents of a request, or none; a conflict is recorded, logged and raised.

        Args:
            request: Its request id makes a repetition harmless.
            quiet: A conflict is raised and nothing else, for a caller that expects it.
            dead_letter: The row of a dead letter, and its version, which the same commit removes.
        """
        intents, row = request.intents, request.row
        digest = "" if row is None else request.digest
        hasher = self._hasher or await self._make_hasher()
        recorder = None if quiet else hasher
        thoroughly = any([intent.action == "restore" for intent in intents])
        states, remembered = self._guess(intents), None
        while True:
            if not states:
                states, remembered = await self._read_states(intents, row, thoroughly)
            plan = CommitPlan(hasher, self._keep, request.request_id)
            if remembered is not None:
                memory = replays.read_memory(remembered)
                if memory.digest != digest:
                    await self._refuse(request, states, ["request_id"] * len(intents), recorder)
                if dead_letter is not None:
                    plan.drop(*dead_letter)
                    await self.commit(plan.batch())
                return replays.replay(request, memory, remembered)
            reasons = [state.refusal(intent) for intent, state in zip(intents, states, strict=True)]
            if any(reasons):
                await self._refuse(request, states, reasons, recorder)
            planned = plan.write(intents, states)
            if row is not None:
                plan.remember(row, replays.memory_of(digest, planned))
            if dead_letter is not None:
                plan.drop(*dead_letter)
            done = await self.commit(plan.batch())
            if isinstance(done, Committed):
                self._report(planned, request.request_id, done.version)
                return [write.outcome(done) for write in planned]
            if dead_letter is not None and any(failed.check.key == dead_letter[0] for failed in done.failed):
                raise InvalidArgument(DEAD_LETTER_GONE)
            # Another writer was faster, or an entry has expired, which only a thorough read finds.
            states, thoroughly = (), True

    def _guess(self, intents: Sequence[Intent]) -> Sequence[EntryState]:
        """What was last written or read here is mostly still stored, and the commit checks it.

        Returns nothing unless all intents can be planned by it.
        """
        states = []
        for intent in intents:
            if intent.action != "put" or intent.fence is not None:
                return ()
            key, known = intent.entry_key, None
            if intent.expected != 0:
                known = self._recent.get(key.entry)
                if known is None or (intent.expected is not None and known.version != intent.expected):
                    return ()
            states.append(EntryState(key, known))
        return states

    def saw(self, key: EntryKey, stored: StoredEntry, version: int) -> None:
        """Remember what is stored at a key, for its next write."""
        recent = self._recent
        if (known := recent.get(key.entry)) is not None and known.version == version:
            return
        recent[key.entry] = EntryHead.of(stored, version)
        if len(recent) > limits.RECENT_ENTRIES:
            recent.popitem(last=False)

    async def _read_states(
        self, intents: Sequence[Intent], row: bytes | None, thoroughly: bool
    ) -> tuple[Sequence[EntryState], Record | None]:
        """What is stored at the keys of intents, and the row that remembers their request; all of one moment.

        A thorough read also finds what has expired, and what can be restored.
        """
        locks = {
            (project, intent.fence): await self._lock_of(project, intent.fence)
            for intent in intents
            if intent.fence is not None and (project := intent.entry_key.project)
        }
        found: dict[Ask, Any] = {Get(_SEMANTIC, lock.entry): None for lock in locks.values() if lock is not None}
        for intent in intents:
            key = intent.entry_key
            found[Get(_SEMANTIC, key.entry)] = None
            if thoroughly:
                found[Now()] = found[Get(_SEMANTIC, key.entry, include_expired=True)] = None
            if intent.action == "restore":
                found[Get(_SEMANTIC, key.deleted)] = None
        if row is not None:
            found[Get(_SEMANTIC, row)] = None
        found = dict(zip(found, await self.read(*found), strict=True))
        remembered = None if row is None else found[Get(_SEMANTIC, row)]
        states = []
        for intent in intents:
            key = intent.entry_key
            state = EntryState.of(key, found[Get(_SEMANTIC, key.entry)])
            if intent.fence is not None and (lock := locks[key.project, intent.fence]) is not None:
                state.lock = found[Get(_SEMANTIC, lock.entry)]
            if thoroughly and state.alive is None:
                state.expired = found[Get(_SEMANTIC, key.entry, include_expired=True)]
                if state.expired is not None:
                    state.overdue = found[Now()] - state.expired.expires_at
            if intent.action == "restore":
                state.deleted = found[Get(_SEMANTIC, key.deleted)]
                if state.alive is None and remembered is None and not state.can_restore(self._keep.deleted):
                    raise NothingToRestore(
                        f"nothing to restore at {key.key}: no entry was deleted or has expired there "
                        f"within the last {self._keep.deleted // 1000} s"
                    )
            states.append(state)
        return states, remembered

    async def _lock_of(self, project: Project, fence: int) -> EntryKey | None:
        """The lock of a fencing token, held or not; None if the project has none."""
        known = self._locks_by_fence.get((project, fence))
        if known is None:
            [record] = await self.read(Get(_SEMANTIC, project.fence(fence)))
            if record is None:
                return None
            known = keys.parse(project.prefix + record.value.decode())
            if len(self._locks_by_fence) >= limits.KNOWN_FENCES:
                self._locks_by_fence.clear()
            self._locks_by_fence[project, fence] = known
        return known

    async def _refuse(
        self,
        request: WriteRequest,
        states: Sequence[EntryState],
        reasons: Sequence[ConflictReason | None],
        hasher: Hasher | None,
    ) -> NoReturn:
        """Raise a conflict; with a hasher, record and log it first."""
        correlation_id = request.request_id or uuid.uuid4().hex
        refused = [
            (intent, state, reason)
            for intent, state, reason in zip(request.intents, states, reasons, strict=True)
            if reason is not None
        ]
        if hasher is not None:
            plan = CommitPlan(hasher, self._keep, request.request_id)
            for intent, state, reason in refused:
                plan.refuse(intent, state, reason, correlation_id)
            await self.commit(plan.batch())
            for intent, state, reason in refused:
                semantics, found = intent.semantics or state.semantics, (request.request_id, state.version)
                self._signals.conflict(intent, semantics, *found, reason=reason, correlation_id=correlation_id)
        failed = [FailedWrite(one.key, one.expected_version, state.current, reason) for one, state, reason in refused]
        text = "; ".join([_text(one) for one in failed[:3]]) + (f" … {len(failed)} in all" if len(failed) > 3 else "")
        kind = StaleFence if "fence" in reasons else VersionConflict
        raise kind(
            f"{text}; nothing was written",
            current=failed[0].current,
            conflicts=tuple(failed),
            correlation_id=correlation_id,
        )

    def _report(self, planned: Sequence[PlannedWrite], request_id: str | None, version: int) -> None:
        for write in planned:
            intent = write.intent
            if write.stored is not None:
                self.saw(write.key, write.stored, version)
            if write.expired is not None:
                self.report_expiry(intent.key, write.expired)
            self._signals.success(intent, write.semantics, request_id, version)

    def report_expiry(self, key: str, record: Record) -> None:
        was = read_stored(record)
        self._signals.expiry(key, was.writer, was.semantics, was.request_id, record.version)

    # The database

    async def read(self, *asks: Ask) -> list[Any]:
        self.check_open()
        try:
            found = await self._engine.read(*asks)
        except DatabaseError:
            self._signals.failure()
            raise
        self._signals.answered()
        return found

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self.check_open()
        try:
            done = await self._engine.commit(batch)
        except DatabaseError:
            self._signals.failure()
            raise
        self._signals.answered()
        return done

    async def new_plan(self) -> CommitPlan:
        """A plan for a commit that no request asked for."""
        return CommitPlan(self._hasher or await self._make_hasher(), self._keep)

    async def _make_hasher(self) -> Hasher:
        """Read the audit key that is kept in the database; the first caller makes it."""
        while self._hasher is None:
            [record] = await self.read(Get(_SEMANTIC, keys.AUDIT_KEY))
            if record is not None:
                self._hasher = Hasher(record.value)
                break
            made = Set(_SEMANTIC, keys.AUDIT_KEY, secrets.token_bytes(_AUDIT_KEY_BYTES), Encoding.BYTES)
            await self.commit(Batch((made,), (Check(_SEMANTIC, keys.AUDIT_KEY, None),)))
        return self._hasher


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
