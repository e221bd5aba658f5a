"""Makes changes: looks at what is stored, refuses what stands against it, commits the rest with its audit records.

A change takes this way: what is stored is read, or guessed from what was last written or read here; whatever stands
against the change is recorded and told; else a `Plan` says what the commit has to check and to write, and the engine
makes all of it or nothing. If all was not as it was seen, the change looks again.
"""

import asyncio
import logging
import os
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from msgspec import Struct

from keyloft.core.engine import Engine
from keyloft.core.records import Ask, Batch, Check, Committed, Conflict, Get, Now, Purge, Record, Set, Space
from keyloft.core.values import Encoding
from keyloft.errors import (
    Closed,
    DatabaseError,
    InvalidArgument,
    NothingToRestore,
    StaleFence,
    Undecodable,
    VersionConflict,
)
from keyloft.semantic import envelope as rules
from keyloft.semantic import keys, planning
from keyloft.semantic.audit import Hasher
from keyloft.semantic.envelope import Envelope, Stored, read_stored
from keyloft.semantic.keys import Place, place
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.planning import Change, FailedWrite, Known, Made, Plan, Reason, Seen

logger = logging.getLogger(__name__)

_SEMANTIC: Final = Space.SEMANTIC
_KEY_BYTES: Final = 32
_KNOWN_FENCES: Final = 1024
_LATELY: Final = 16_384
"""Of how many entries is remembered what was last written or read, without the value: 5.6 MiB at the most."""


class Retention(Struct, frozen=True):
    """How long things are kept, in milliseconds."""

    requests: int
    deleted: int
    audit: int


class Attempt:
    """The last write that failed of somebody who may have to give up: it is kept then, as a dead letter."""

    def __init__(self) -> None:
        self.changes: Sequence[Change] = ()
        self.request_id: str | None = None
        self.row: bytes | None = None


attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
"""Who wants to know which write failed, if anybody."""


class Writer:
    """Makes changes in a database."""

    def __init__(self, engine: Engine, signals: Signals, keep: Retention, audit_key: bytes | str | None) -> None:
        self._engine = engine
        self._signals = signals
        self._keep = keep
        self._hashes = _given_hasher(audit_key)
        self._lately: OrderedDict[bytes, Known] = OrderedDict()
        self._known_fences: dict[tuple[bytes, int], Place] = {}
        self._asides: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def see_to(self, job: Coroutine[Any, Any, None]) -> None:
        """Do something beside, that whoever began it can't wait for."""
        task = asyncio.create_task(job)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def finish(self) -> None:
        """Wait for what is done beside."""
        if self._asides:
            await asyncio.wait(self._asides)

    def close(self) -> None:
        """Take no more calls."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raises:
        Closed: It is not.
        """
        if self._is_closed:
            raise Closed("this semantic store is closed: make another one to go on")

    async def carry_out(
        self,
        wanted: Sequence[Change],
        request_id: str | None,
        row: bytes | None = None,
        letter: tuple[bytes, int] | None = None,
        *,
        quiet: bool = False,
    ) -> Sequence[Envelope | None]:
        """Make changes, all or none; what stands against them is recorded, told and raised.

        Args:
            wanted: The changes.
            request_id: Who asks for the same again gets the first outcome.
            row: Where the request is remembered, unless that is with the key of the only change.
            letter: The row of a dead letter, and its version, that is gone once the changes are made.
            quiet: What stands against them is raised and nothing else, for whoever takes that for an answer.
        """
        try:
            return await self._carry_out(wanted, request_id, row, letter, quiet)
        except Exception:
            if (trying := attempt.get()) is not None:
                trying.changes, trying.request_id, trying.row = wanted, request_id, row
            raise

    async def _carry_out(
        self,
        wanted: Sequence[Change],
        request_id: str | None,
        row: bytes | None,
        letter: tuple[bytes, int] | None,
        quiet: bool,
    ) -> Sequence[Envelope | None]:
        if rules.request_name(request_id) is not None and row is None:
            row = wanted[0].place.request(str(request_id))
        digest = "" if row is None else planning.digest_of(wanted)
        hasher = self._hashes or await self._make_hasher()
        recorder = None if quiet else hasher
        thoroughly = any([change.action == "restore" for change in wanted])
        # What was written or read here lately is mostly still there, and the commit finds out.
        guess = self._guess(wanted)
        while True:
            seen, record = (guess, None) if guess else await self._look(wanted, row, thoroughly)
            guess = ()
            if record is not None:
                memory = planning.remembered(record)
                if memory.digest == digest:
                    if letter is not None:
                        plan = self._plan(hasher)
                        plan.drop(*letter)
                        await self.commit(plan.batch())
                    return planning.replay(wanted, memory, record, request_id)
                await self._refuse(wanted, seen, ["request_id"] * len(wanted), request_id, recorder)
            objections = [sight.objection(change) for change, sight in zip(wanted, seen, strict=True)]
            if any(objections):
                await self._refuse(wanted, seen, objections, request_id, recorder)
            plan = self._plan(hasher)
            made = [plan.make(change, sight, request_id) for change, sight in zip(wanted, seen, strict=True)]
            if row is not None:
                plan.remember(row, planning.memory_of(digest, made), self._keep.requests)
            if letter is not None:
                plan.drop(*letter)
            done = await self.commit(plan.batch())
            if isinstance(done, Committed):
                self._tell(made, request_id, done.version)
                return [one.outcome(done) for one in made]
            if letter is not None and any(failed.check.key == letter[0] for failed in done.failed):
                raise InvalidArgument("this dead letter is gone: somebody has retried or dropped it meanwhile")
            # Somebody was faster, or something has expired that a plain look does not show.
            thoroughly = True

    def _plan(self, hasher: Hasher) -> Plan:
        return Plan(hasher, keep_audit=self._keep.audit, keep_deleted=self._keep.deleted)

    def _guess(self, wanted: Sequence[Change]) -> Sequence[Seen]:
        """What is stored at the keys of changes, as far as we remember; nothing, unless all can be made of that."""
        seen = []
        for change in wanted:
            known = self._lately.get(change.place.entry)
            if change.action != "put" or change.fence is not None:
                return ()
            if change.expected == 0:
                known = None
            elif known is None or (change.expected is not None and known.version != change.expected):
                return ()
            seen.append(Seen(known))
        return seen

    def saw(self, at: Place, stored: Stored, version: int) -> None:
        """Remember what is stored at a key, for its next change."""
        lately = self._lately
        if (known := lately.get(at.entry)) is not None and known.version == version:
            return
        lately[at.entry] = Known.of(stored, version)
        if len(lately) > _LATELY:
            lately.popitem(last=False)

    async def _look(
        self, wanted: Sequence[Change], row: bytes | None, thoroughly: bool
    ) -> tuple[Sequence[Seen], Record | None]:
        """What is stored at the keys of changes, and what is remembered of their request; all as of one moment."""
        asks: list[Ask] = [Get(_SEMANTIC, change.place.entry) for change in wanted]
        locks = [None if change.fence is None else await self._lock_of(change.place, change.fence) for change in wanted]
        fenced = [number for number, lock in enumerate(locks) if lock is not None]
        asks += [Get(_SEMANTIC, lock.entry) for lock in locks if lock is not None]
        if row is not None:
            asks.append(Get(_SEMANTIC, row))
        if thoroughly:
            asks.append(Now())
            asks += [Get(_SEMANTIC, change.place.entry, include_expired=True) for change in wanted]
            asks += [Get(_SEMANTIC, change.place.deleted) for change in wanted if change.action == "restore"]
        found = iter(await self.read(*asks))
        seen = [Seen.of(next(found)) for _ in wanted]
        for number in fenced:
            seen[number].lock = next(found)
        record = None if row is None else next(found)
        if thoroughly:
            now = next(found)
            for sight in seen:
                stored = next(found)
                if sight.alive is None and stored is not None:
                    sight.expired, sight.overdue = stored, now - stored.expires_at
            for change, sight in zip(wanted, seen, strict=True):
                if change.action == "restore":
                    sight.deleted = next(found)
                    if sight.alive is None and record is None and not sight.restorable(self._keep.deleted):
                        raise NothingToRestore(
                            f"nothing to restore at {change.place.key}: nothing was deleted or expired there "
                            f"within the last {self._keep.deleted // 1000} s"
                        )
        return seen, record

    async def _lock_of(self, at: Place, fence: int) -> Place | None:
        """The lock of a fencing token, held or not; None where there is none in this project."""
        known = self._known_fences.get((at.inside, fence))
        if known is None:
            [record] = await self.read(Get(_SEMANTIC, at.fence(fence)))
            if record is None:
                return None
            known = place(keys.key_of(at.tenant, at.project, record.value.decode()))
            if len(self._known_fences) >= _KNOWN_FENCES:
                self._known_fences.clear()
            self._known_fences[at.inside, fence] = known
        return known

    async def _refuse(
        self,
        wanted: Sequence[Change],
        seen: Sequence[Seen],
        objections: Sequence[Reason | None],
        request_id: str | None,
        hasher: Hasher | None,
    ) -> NoReturn:
        """Raise what tells that a write was not made; with a hasher, record it before."""
        correlation_id = request_id or uuid.uuid4().hex
        refused = [
            (change, sight, reason)
            for change, sight, reason in zip(wanted, seen, objections, strict=True)
            if reason is not None
        ]
        if hasher is not None:
            plan = self._plan(hasher)
            for change, sight, reason in refused:
                plan.refuse(change, sight, reason, request_id, correlation_id)
            await self.commit(plan.batch())
            for change, sight, reason in refused:
                self._signals.conflict(
                    change.action,
                    change.place.key,
                    change.writer,
                    change.semantics or sight.semantics,
                    request_id,
                    sight.version,
                    reason=reason,
                    correlation_id=correlation_id,
                )
        failed = [FailedWrite(one.place.key, one.expected_version, at.current, why) for one, at, why in refused]
        told = "; ".join([_told(one) for one in failed[:3]]) + (f" … {len(failed)} in all" if len(failed) > 3 else "")
        kind = StaleFence if "fence" in objections else VersionConflict
        raise kind(
            f"{told}; nothing was written",
            current=failed[0].current,
            conflicts=tuple(failed),
            correlation_id=correlation_id,
        )

    def _tell(self, made: Sequence[Made], request_id: str | None, version: int) -> None:
        for one in made:
            change = one.change
            if one.stored is not None:
                self.saw(change.place, one.stored, version)
            if one.expired is not None:
                self._tell_expiry(change.place, one.expired)
            self._signals.success(change.action, change.place.key, change.writer, one.semantics, request_id, version)

    def _tell_expiry(self, at: Place, record: Record) -> None:
        was = read_stored(record)
        self._signals.expiry(at.key, was.writer, was.semantics, was.request_id, record.version)

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

    async def _make_hasher(self) -> Hasher:
        """Where no key is configured, one that is kept in the database makes the audit's hashes."""
        while self._hashes is None:
            [record] = await self.read(Get(_SEMANTIC, keys.AUDIT_KEY))
            if record is not None:
                self._hashes = Hasher(record.value)
                break
            made = Set(_SEMANTIC, keys.AUDIT_KEY, secrets.token_bytes(_KEY_BYTES), Encoding.BYTES)
            await self.commit(Batch((made,), (Check(_SEMANTIC, keys.AUDIT_KEY, None),)))
        return self._hashes

    async def expire(self, due: Record) -> bool:
        """Put one entry aside; returns whether it was still the one that was due."""
        record, now = await self.read(Get(_SEMANTIC, due.key, include_expired=True), Now())
        if record is None or record.version != due.version or record.is_alive(now):
            return False
        plan = self._plan(self._hashes or await self._make_hasher())
        try:
            at = place(keys.key_of_row(record.key))
            plan.expire(at, record, now - record.expires_at)
        except (Undecodable, ValueError) as error:
            logger.error("[KV] a damaged entry has expired and is removed: %s", error)
            await self.commit(Batch((Purge(_SEMANTIC, record.key, record.version),)))
            return True
        done = await self.commit(plan.batch())
        if isinstance(done, Conflict):
            return False
        self._tell_expiry(at, record)
        return True


def _told(failed: FailedWrite) -> str:
    there = "nothing" if failed.current is None else f"version {failed.current.version} by {failed.current.last_writer}"
    match failed.reason:
        case "fence":
            return f"{failed.key}: no lock of this project is held under this fencing token any more; {there} is there"
        case "request_id":
            return f"{failed.key}: this requestId was used for another request; {there} is there"
    wanted = "nothing" if failed.expected_version == 0 else f"version {failed.expected_version}"
    return f"{failed.key}: {wanted} was expected, and {there} is there"


def _given_hasher(key: bytes | str | None) -> Hasher | None:
    given = key if key is not None else os.environ.get("KEYLOFT_AUDIT_KEY")
    if not given:
        if key is not None:
            raise InvalidArgument("audit_key: it must not be empty")
        return None
    if not isinstance(given, (str, bytes)):
        raise InvalidArgument(f"audit_key: bytes or a text, not {type(given).__name__}")
    return Hasher(given.encode() if isinstance(given, str) else given)
