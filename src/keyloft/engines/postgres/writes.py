"""Commits groups of batches to PostgreSQL, each group in one transaction.

Every transaction begins by locking the row of the version counter, so commits of all processes happen one after the
other, and their versions grow in that order. A group of plain sets depends on nothing that is stored: one statement
advances the counter and writes the rows. Any other group first locks the counter, then loads the records that decide in
a later statement: a statement that waited for the lock would still see the state from before it waited.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import Address, Append, Batch, Committed, Record, Space
from keyloft.engines.commit.outcomes import Outcome, failed, joined
from keyloft.engines.commit.settle import PutRow, SetExpiry, Settled, Verdict, Write, deciding, removes_row, settle
from keyloft.engines.postgres.connections import Slot, Transaction
from keyloft.engines.postgres.errors import Failure, is_locked, is_lost
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, LOCK_VERSION, READ_VERSION, WRITE_VERSION_AND_COMMIT
from keyloft.errors import Busy, CommitUnknown, DatabaseError, DiskFull, ReadOnly, Unreachable

# Failures of the server as a whole: batch by batch, every one would fail.
_FAILS_WHOLE_GROUP: Final = (DiskFull, ReadOnly, CommitUnknown)
# Failures of a group that was tried until its time was up.
_TIMED_OUT: Final = (Unreachable, Busy)


class PostgresWriter:
    """Commits groups on a connection of its own."""

    def __init__(self, server: PostgresServer, slot: Slot) -> None:
        self._server = server
        self.slot = slot
        self._last_version = 0
        self._last_failure: DatabaseError | None = None
        self._held_back: set[Address] = set()
        """The keys of batches that met a lock of another client."""
        self._retry_at = 0.0
        self._is_committing = False

    async def commit(self, group: list[Batch], arrived: Sequence[float]) -> Outcome:
        """Decide a group, whose batches arrived at these times of the event loop, in their order; never raises."""
        held_back = [self._is_held_back(batch) for batch in group] if self._held_back else [False]
        if any(held_back):
            return await self._commit_apart(group, arrived, held_back)
        try:
            return await self._commit_until(group, arrived[0] + self._server.patience)
        except DatabaseError as error:
            failure = error
        except Exception as error:  # without a verdict, all callers would wait for ever
            self.slot.drop()
            failure = DatabaseError(f"{self._server.name}: a write failed unexpectedly: {type(error).__name__}")
            if self._is_committing:
                failure = self._unknown()
            failure.__cause__ = error
        if is_locked(failure):
            self._last_failure = failure
            if len(group) > 1:
                return await self._commit_each(group, arrived)
            self._hold_back(group[0])
        if isinstance(failure, _TIMED_OUT):
            # The first has waited long enough; those that arrived later have time left, and join the next group.
            overdue = sum(not self._has_time(moment) for moment in arrived)
            if not is_locked(failure):
                overdue = max(1, overdue)
            verdicts = [*failed(group[:overdue], failure, 0).verdicts, *[None] * (len(group) - overdue)]
            return Outcome(verdicts, self._last_version, self._last_version)
        if isinstance(failure, _FAILS_WHOLE_GROUP) or len(group) == 1:
            return failed(group, failure, self._last_version)
        return await self._commit_each(group, arrived)

    def cancelled(self, group: list[Batch]) -> Outcome:
        """The outcome of a group whose commit was cancelled."""
        failure = self._unknown() if self._is_committing else self._server.unreachable()
        return failed(group, failure, self._last_version)

    async def _commit_each(self, group: Sequence[Batch], arrived: Sequence[float]) -> Outcome:
        """Commit batch by batch: one that the database refuses, or that meets a lock, must not harm the others."""
        outcomes: list[Outcome] = []
        locked = 0
        for batch, moment in zip(group, arrived, strict=True):
            if locked > 1 or self._is_held_back(batch):
                # It would wait for the same lock, or for one that blocks all writes.
                outcomes.append(self._later(moment))
                continue
            outcomes.append(await self.commit([batch], [moment]))
            locked = locked + 1 if self._is_held_back(batch) else 0
        return joined(outcomes)

    async def _commit_apart(self, group: list[Batch], arrived: Sequence[float], held_back: list[bool]) -> Outcome:
        """Commit the batches that meet no known lock together; try the others at intervals, one by one."""
        free = [at for at, is_held_back in enumerate(held_back) if not is_held_back]
        rest = [at for at, is_held_back in enumerate(held_back) if is_held_back]
        outcomes = []
        if free:
            outcomes.append(await self.commit([group[at] for at in free], [arrived[at] for at in free]))
        if asyncio.get_running_loop().time() >= self._retry_at:
            self._held_back.clear()
            outcomes.append(await self._commit_each([group[at] for at in rest], [arrived[at] for at in rest]))
        else:
            if not free:
                await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)
            outcomes += [self._later(arrived[at]) for at in rest]
        both = joined(outcomes)
        verdicts = dict(zip([*free, *rest], both.verdicts, strict=True))
        return replace(both, verdicts=[verdicts[at] for at in range(len(group))])

    def _later(self, moment: float) -> Outcome:
        """Let a batch join a later group, if it still has time."""
        verdict = None
        if not self._has_time(moment):
            verdict = Busy(f"{self._server.name}: another client holds a lock; nothing was written: try again")
        return Outcome([verdict], self._last_version, self._last_version)

    def _has_time(self, moment: float) -> bool:
        return asyncio.get_running_loop().time() < moment + self._server.patience - self._server.lock_seconds

    def _hold_back(self, batch: Batch) -> None:
        self._retry_at = asyncio.get_running_loop().time() + limits.POSTGRES_LOCKED_SECONDS
        self._held_back.update((mutation.space, mutation.key) for mutation in batch.mutations)

    def _is_held_back(self, batch: Batch) -> bool:
        return any((mutation.space, mutation.key) in self._held_back for mutation in batch.mutations)

    async def _commit_until(self, group: list[Batch], deadline: float) -> Outcome:
        """Try until the group is committed or refused, or until the deadline.

        No attempt begins that could not end in time if it meets a lock: then the server cancels it before this process
        stops waiting, and what the server cancels is known not to be written.
        """
        loop, locks = asyncio.get_running_loop(), self._server.lock_seconds
        failure: DatabaseError | None = None
        while True:
            self._is_committing = False
            if loop.time() >= deadline - locks:
                raise failure or self._last_failure or self._server.unreachable()
            try:
                async with asyncio.timeout_at(deadline - locks):
                    await self.slot.connected()
                async with asyncio.timeout_at(max(deadline, loop.time() + 1.2 * locks)):
                    try:
                        return await self._commit(group)
                    except Failure as error:
                        is_unknown = self._is_committing and is_lost(error)
                        failure = self._unknown() if is_unknown else self._server.explain(error)
                        failure.__cause__ = error
                        may_succeed = self._server.may_succeed_after(error) and not is_locked(failure)
                        if is_unknown or not may_succeed:
                            raise failure from error
            except TimeoutError:
                self.slot.drop()
                raise (self._unknown() if self._is_committing else failure or self._server.unreachable()) from None
            if not isinstance(failure, Busy):
                self.slot.drop()  # another connection may lead to another server
            await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)

    def _unknown(self) -> CommitUnknown:
        return CommitUnknown(
            f"the connection to {self._server.name} was lost during a commit: all of it is written, or nothing, or the "
            "server may still write it; once it answers again, read the entries to find out"
        )

    async def _commit(self, group: list[Batch]) -> Outcome:
        addresses = deciding(group)
        # The key of an Append contains the version, which then must be known before anything is written.
        appends = any(type(mutation) is Append for batch in group for mutation in batch.mutations)
        if not addresses and not appends:
            settled = settle(group, {}, 0, 0)
            spaces = {space for space, _ in settled.writes}
            if len(spaces) == 1:
                return await self._set(spaces.pop(), settled)
        return await self._decide(group, addresses)

    async def _set(self, space: Space, settled: Settled) -> Outcome:
        """Write the rows of a group over whatever is stored. It was settled as if version counter and time were 0."""
        layout, writes, server = LAYOUTS[space], settled.writes, self._server
        puts = layout.bind_puts([write.record for at in sorted(writes) if isinstance(write := writes[at], PutRow)])
        await self.slot.connected()
        self._is_committing = True
        rows = await self.slot.fetch(layout.set, server.now(), settled.version, server.process, *puts)
        base, now, _ = server.counter_row(rows)
        verdicts = [_moved(verdict, base, now) for verdict in settled.verdicts]
        return self._done(Outcome(verdicts, base, base + settled.version, writes))

    async def _decide(self, group: list[Batch], addresses: set[Address]) -> Outcome:
        async with self.slot.transaction(f"{self._server.begin}; {LOCK_VERSION}") as transaction:
            before, now, current = await self._load(transaction, addresses)
            settled = settle(group, current, before, now)
            if settled.version != before:
                await self._apply(transaction, settled.writes, now)
                self._is_committing = True
                # In one round trip.
                end = WRITE_VERSION_AND_COMMIT.format(version=settled.version, name=self._server.process)
                await transaction.execute(end)
        return self._done(Outcome(settled.verdicts, before, settled.version, settled.writes))

    def _done(self, outcome: Outcome) -> Outcome:
        self._last_failure = None
        self._is_committing = False
        self._last_version = outcome.version_after
        return outcome

    async def _load(self, transaction: Transaction, addresses: set[Address]) -> tuple[int, int, dict[Address, Record]]:
        """The version counter, the time, and what is stored at some keys, expired or not."""
        now = self._server.now()
        version, current = None, dict[Address, Record]()
        for space in sorted({space for space, _ in addresses}):
            layout = LAYOUTS[space]
            keys = sorted(key for at, key in addresses if at is space)
            rows = await transaction.fetch(layout.load, now, *layout.bind_keys(keys))
            version, now = self._server.counter_row(rows)[:2]
            current |= {(space, key): record for key, record in layout.loaded(rows).items()}
        if version is None:
            version, now = self._server.counter_row(await transaction.fetch(READ_VERSION, now))
        assert now is not None
        return version, now, current

    async def _apply(self, transaction: Transaction, writes: dict[Address, Write], now: int) -> None:
        for space in sorted({space for space, _ in writes}):
            layout = LAYOUTS[space]
            some = {key: writes[at, key] for at, key in sorted(writes) if at is space}
            puts = [write.record for write in some.values() if isinstance(write, PutRow)]
            expiries = {key: write.expires_at for key, write in some.items() if isinstance(write, SetExpiry)}
            if removed := [key for key, write in some.items() if removes_row(write)]:
                await transaction.fetch(layout.remove, *layout.bind_keys(removed))
            if puts:
                await transaction.fetch(layout.put, now, *layout.bind_puts(puts))
            if expiries:
                await transaction.fetch(layout.set_expiries, list(expiries.values()), *layout.bind_keys(list(expiries)))


def _moved(verdict: Verdict, base: int, now: int) -> Verdict:
    return replace(verdict, version=base + verdict.version, at=now) if isinstance(verdict, Committed) else verdict
