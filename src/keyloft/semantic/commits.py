"""Carries out write requests and expiries: reads what is stored, refuses a conflict, or commits what was planned.

A request takes this path: what is stored is read, or guessed from this process's last write or read of the key. A
conflict is recorded, logged and raised. Otherwise a `CommitPlan` says what to check and to write, and the engine makes
all of it or nothing. If a check fails, the request starts again with a thorough read.
"""

import asyncio
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from keyloft import limits
from keyloft.core.engine import Engine, catch_up
from keyloft.core.records import Ask, Batch, Check, Committed, Conflict, Get, Now, Record, Set, Space
from keyloft.core.sweeper import Swept, purge, sweep
from keyloft.core.values import Encoding
from keyloft.errors import Closed, DatabaseError, InvalidArgument, NothingToRestore, Undecodable
from keyloft.semantic import keys, replays
from keyloft.semantic.audit import Hasher
from keyloft.semantic.background import BackgroundJobs
from keyloft.semantic.envelope import Envelope, StoredEntry, read_entry
from keyloft.semantic.intents import ConflictReason, FailedWrite, Intent, WriteRequest, conflict_error
from keyloft.semantic.keys import SPACE, EntryKey, Project
from keyloft.semantic.monitoring import Signals, logger
from keyloft.semantic.planning import NO_ENTRY, CommitPlan, EntryHead, PendingWrite, Retention

T = TypeVar("T")

_AUDIT_KEY_BYTES: Final = 32

DEAD_LETTER_GONE: Final = "this dead letter is gone; another caller has retried or dropped it meanwhile"


class Committer:
    """Commits write requests to a database."""

    def __init__(self, engine: Engine, signals: Signals, retention: Retention, hasher: Hasher | None) -> None:
        """Without a hasher, a random key that is kept in the database makes the audit's hashes."""
        self._engine = engine
        self._signals = signals
        self._retention = retention
        self._hasher = hasher
        self._recent: OrderedDict[bytes, EntryHead] = OrderedDict()
        self._locks_by_fence: dict[tuple[Project, int], EntryKey] = {}
        self.background = BackgroundJobs()
        self.is_closed = False

    @property
    def shown(self) -> str:
        """Where the data is, and whether the store or the database is closed, for `repr`."""
        return f"{self._engine.location}, {'closed' if self.is_closed or self._engine.is_closed else 'open'}"

    def open_engine(self) -> Engine:
        """The database.

        Raises:
            Closed: The store is closed.
        """
        if self.is_closed:
            raise Closed("this semantic store is closed: make another one to continue")
        return self._engine

    async def carry_out(
        self, request: WriteRequest, *, quiet: bool = False, dead_letter: Record | None = None
    ) -> list[Envelope | None]:
        """Carry out all intents of a request, or none; a conflict is recorded, logged and raised.

        Args:
            request: What to do. A request id makes it harmless to repeat the request.
            quiet: Raise a conflict, but neither record nor log it: the caller expects conflicts.
            dead_letter: The row of a dead letter, which the same commit removes.
        """
        intents, row = request.intents, request.memory_row
        digest = "" if row is None else request.digest
        hasher = self._hasher or await self._make_hasher()
        thoroughly = any([intent.action == "restore" for intent in intents])
        is_current = False
        writes, remembered = self._guess(intents), None
        while True:
            if not writes:
                writes, remembered = await self._read(intents, row, thoroughly)
            plan = CommitPlan(hasher, self._retention, request.request_id)
            if remembered is not None:
                memory = replays.read_memory(remembered)
                if memory.digest != digest:
                    await self._refuse(request, [(write, "request_id") for write in writes], None if quiet else plan)
                if dead_letter is not None:
                    plan.drop(dead_letter)
                    await self.commit(plan.batch())
                return replays.replay(request, memory, remembered)
            refused = [(write, reason) for write in writes if (reason := write.refusal())]
            if refused and not is_current:
                # What was read may be old, if a standby has answered.
                await self.catch_up()
                writes, is_current = (), True
                continue
            if refused:
                await self._refuse(request, refused, None if quiet else plan)
            for write in writes:
                plan.write(write)
            if row is not None:
                plan.remember(row, replays.memory_of(digest, writes))
            if dead_letter is not None:
                plan.drop(dead_letter)
            done = await self.commit(plan.batch())
            if isinstance(done, Committed):
                self._report(writes, request.request_id, done.version)
                return [write.outcome(done) for write in writes]
            if dead_letter is not None and any(failed.check.key == dead_letter.key for failed in done.failed):
                raise InvalidArgument(DEAD_LETTER_GONE)
            # Another writer was faster, or an entry has expired, which only a thorough read finds.
            writes, thoroughly = (), True

    def _guess(self, intents: Sequence[Intent]) -> Sequence[PendingWrite]:
        """Writes planned from the entries that this process wrote or read last, without a read; the commit checks them.

        Empty unless this is possible for all intents.
        """
        writes = []
        for intent in intents:
            if intent.action != "put" or intent.fence is not None:
                return ()
            key, known = intent.entry_key, NO_ENTRY
            if intent.expected != 0:
                known = self._recent.get(key.entry, NO_ENTRY)
                if known is NO_ENTRY or intent.expected not in (None, known.version):
                    return ()
            writes.append(PendingWrite(intent, key, known))
        return writes

    def remember_entry(self, key: EntryKey, stored: StoredEntry, version: int) -> None:
        """Remember what is stored at a key, for its next write."""
        recent = self._recent
        if (known := recent.get(key.entry)) is not None and known.version == version:
            return
        recent[key.entry] = EntryHead.of(stored, version)
        if len(recent) > limits.RECENT_ENTRIES:
            recent.popitem(last=False)

    async def _read(
        self, intents: Sequence[Intent], row: bytes | None, thoroughly: bool
    ) -> tuple[Sequence[PendingWrite], Record | None]:
        """What is stored at the keys of intents, and the row that remembers their request, as of one moment.

        A thorough read also finds expired entries, and entries that can be restored.
        """
        writes = [PendingWrite(intent, intent.entry_key) for intent in intents]
        locks = [await self.lock_of(write.key.project, write.intent.fence) for write in writes]
        rows = {lock.entry for lock in locks if lock is not None} | ({row} if row is not None else set())
        asks: list[Get | Now] = [Get(SPACE, each) for each in rows] + ([Now()] if thoroughly else [])
        for write in writes:
            asks.append(Get(SPACE, write.key.entry))
            if thoroughly:
                asks.append(Get(SPACE, write.key.entry, include_expired=True))
            if write.intent.action == "restore":
                asks.append(Get(SPACE, write.key.deleted))
        found = dict(zip(asks, await self.read(*asks), strict=True))
        remembered = None if row is None else found[Get(SPACE, row)]
        for write, lock in zip(writes, locks, strict=True):
            key = write.key
            write.lock = None if lock is None else found[Get(SPACE, lock.entry)]
            write.record = found[Get(SPACE, key.entry)]
            write.deleted = found.get(Get(SPACE, key.deleted))
            if write.record is not None:
                write.alive = EntryHead.of(read_entry(write.record), write.record.version)
            elif thoroughly:
                write.expired = found[Get(SPACE, key.entry, include_expired=True)]
                write.overdue = 0 if write.expired is None else found[Now()] - write.expired.expires_at
            is_restore = write.intent.action == "restore" and write.record is None and remembered is None
            if is_restore and not write.can_restore(self._retention.deleted):
                raise NothingToRestore(
                    f"nothing to restore at {key.key}: no entry was deleted or has expired there "
                    f"within the last {self._retention.deleted // 1000} s"
                )
        return writes, remembered

    async def lock_of(self, project: Project, fence: int | None) -> EntryKey | None:
        """The lock of a fencing token, held or not; None if the project has none."""
        if fence is None:
            return None
        if (known := self._locks_by_fence.get((project, fence))) is not None:
            return known
        [record] = await self.read(Get(SPACE, project.fence(fence)))
        if record is None:
            return None
        if len(self._locks_by_fence) >= limits.KNOWN_FENCES:
            self._locks_by_fence.clear()
        lock = self._locks_by_fence[project, fence] = keys.parse(project.prefix + record.value.decode())
        return lock

    async def _refuse(
        self, request: WriteRequest, refused: Sequence[tuple[PendingWrite, ConflictReason]], plan: CommitPlan | None
    ) -> NoReturn:
        """Raise a conflict; with a plan, which must be empty, record and log it first."""
        correlation_id = request.request_id or uuid.uuid4().hex
        failed = [
            FailedWrite(write.intent.key, write.intent.expected_version, write.current, reason)
            for write, reason in refused
        ]
        if plan is not None:
            for write, reason in refused:
                plan.refuse(write, reason, correlation_id)
            await self.commit(plan.batch())
            for (write, _), one in zip(refused, failed, strict=True):
                self._signals.conflict(write.intent, one, request.request_id, correlation_id)
        raise conflict_error(failed, correlation_id)

    def _report(self, writes: Sequence[PendingWrite], request_id: str | None, version: int) -> None:
        for write in writes:
            if write.stored is not None:
                self.remember_entry(write.key, write.stored, version)
            if write.expired is not None:
                self._signals.expiry(write.key.key, read_entry(write.expired), write.expired.version)
            self._signals.success(write.intent, write.semantics, request_id, version)

    # Expiry

    async def sweep(self) -> int:
        """Keep expired entries for a restore, with audit records, and remove other expired rows, in slices.

        Returns how many entries expired.
        """
        expired = 0

        async def remove(engine: Engine, space: Space, due: Sequence[Record]) -> Swept:
            nonlocal expired
            entries = [record for record in due if keys.is_entry(record.key)]
            done = await asyncio.gather(*[self._expire(record) for record in entries])
            swept = [one for one in done if one is not None]
            expired += len(swept)
            if rest := [record for record in due if not keys.is_entry(record.key)]:
                swept.append(await self._purge(rest))
            return Swept(sum([one.rows for one in swept]), len(swept), max([one.version for one in swept], default=0))

        await self._answer(sweep(self.open_engine(), SPACE, remove, limits.SWEEP_SLICE))
        return expired

    async def _expire(self, due: Record) -> Swept | None:
        """Expire one entry; None if it is no longer the one that was due."""
        record, now = await self.read(Get(SPACE, due.key, include_expired=True), Now())
        if record is None or record.version != due.version or record.is_alive(now):
            return None
        plan = CommitPlan(self._hasher or await self._make_hasher(), self._retention)
        try:
            key, was = keys.parse(keys.key_of_row(record.key)), read_entry(record)
        except (Undecodable, ValueError) as error:
            logger.error("[KV] a damaged entry has expired and is removed: %s", error)
            return await self._purge([record])
        plan.expire(key, record, now - record.expires_at)
        done = await self.commit(plan.batch())
        if isinstance(done, Conflict):
            return None
        self._signals.expiry(key.key, was, record.version)
        return Swept(1, 1, done.version)

    async def _purge(self, expired: Sequence[Record]) -> Swept:
        return await self._answer(purge(self.open_engine(), SPACE, expired))

    # The database

    # These are not coroutine functions, so that a get needs one frame less.

    def read(self, *asks: Ask) -> Awaitable[list[Any]]:
        return self._answer(self.open_engine().read(*asks))

    def catch_up(self) -> Awaitable[None]:
        """Let later reads show all that is committed now."""
        return self._answer(catch_up(self.open_engine()))

    def commit(self, batch: Batch) -> Awaitable[Committed | Conflict]:
        return self._answer(self.open_engine().commit(batch))

    async def _answer(self, asking: Awaitable[T]) -> T:
        """Wait for the database, and note whether it answers, for the alert about an outage."""
        try:
            answer = await asking
        except DatabaseError:
            self._signals.failure()
            raise
        self._signals.answered()
        return answer

    async def _make_hasher(self) -> Hasher:
        """Read the audit key that is kept in the database; the first caller makes it."""
        while self._hasher is None:
            [record] = await self.read(Get(SPACE, keys.AUDIT_KEY))
            if record is not None:
                self._hasher = Hasher(record.value)
                break
            made = Set(SPACE, keys.AUDIT_KEY, secrets.token_bytes(_AUDIT_KEY_BYTES), Encoding.BYTES)
            await self.commit(Batch((made,), (Check(SPACE, keys.AUDIT_KEY, None),)))
        return self._hasher
