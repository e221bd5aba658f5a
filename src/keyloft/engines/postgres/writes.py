"""Decides groups of batches on PostgreSQL: attempts, lost races, locked rows, lost connections, and how long to wait.

`by_function` and `by_locking` make one attempt each. Both lock the version counter before they write, so commits of all
processes happen one after the other, and their versions grow in that order.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import Address, Batch, Space
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.long_batches import is_long
from keyloft.engines.commit.outcomes import Outcome, failed, joined
from keyloft.engines.postgres import by_locking, log, setup
from keyloft.engines.postgres.attempts import CommitAttempt, CommitWay, LostRace, written_keys
from keyloft.engines.postgres.by_function import ByFunction
from keyloft.engines.postgres.by_locking import ByLocking
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.errors import (
    Failure,
    is_denied,
    is_locked,
    is_lost,
    is_missing_function,
    is_stale,
    is_too_slow,
    may_be_full_queue,
)
from keyloft.engines.postgres.listeners import ListenerLookup
from keyloft.engines.postgres.locked_rows import LockedRows, addresses_of, spaces_of
from keyloft.engines.postgres.server import PostgresServer, ServerClock
from keyloft.engines.postgres.tables import LAYOUTS
from keyloft.errors import Busy, ClockSetBack, CommitUnknown, DatabaseError, DiskFull, ReadOnly, Unreachable

# Failures of the server as a whole: each batch alone would fail, too.
_FAILS_WHOLE_GROUP: Final = (DiskFull, ReadOnly, CommitUnknown, ClockSetBack)
# Failures of a group that was tried until its time was up.
_TIMED_OUT: Final = (Unreachable, Busy)


class _RowsLocked(Exception):
    """Other clients have locked these rows."""

    def __init__(self, locked: set[Address]) -> None:
        self.locked = locked


class PostgresWriter:
    """Commits groups on a connection of its own."""

    def __init__(
        self,
        server: PostgresServer,
        slot: Slot,
        clock: ServerClock,
        history: KeptHistory,
        wants_changes: Callable[[], bool],
    ) -> None:
        self._server = server
        self.slot = slot
        self.by_function = ByFunction(server, history, clock, wants_changes)
        self._by_locking = ByLocking(server, history)
        self._listeners = ListenerLookup(server)
        self._locked_rows = LockedRows()
        self.attempt: CommitAttempt | None = None
        """The attempt that is under way."""
        self._has_written = False
        """Whether a part of the current group is committed: groups are divided where rows are locked."""
        self._last_version = 0
        self._last_failure: DatabaseError | None = None
        self.set_up: Callable[[], Awaitable[object]] | None = None
        """What has to be done at the primary before the first commit, if the store was opened on a standby."""
        self.unknown = 0
        """How many callers got CommitUnknown."""

    async def commit(self, group: list[Batch], arrived: Sequence[float]) -> Outcome:
        """Decide a group, whose batches arrived at these times of the event loop, in their order; never raises."""
        outcome = await self._commit(group, arrived)
        self._forget_attempt()  # if this is cancelled, `cancelled` does so
        return outcome

    async def _commit(self, group: list[Batch], arrived: Sequence[float]) -> Outcome:
        """Decide a group: first the batches that meet no lock that is known."""
        waits = self._locked_rows.waits(group)
        if not any(waits):
            self._locked_rows.forget()
            return await self._decide(group, arrived)
        free = [at for at, waiting in enumerate(waits) if not waiting]
        rest = [at for at, waiting in enumerate(waits) if waiting]
        outcomes: list[Outcome] = []
        if free:
            outcomes.append(await self._decide([group[at] for at in free], [arrived[at] for at in free]))
        held, moments = [group[at] for at in rest], [arrived[at] for at in rest]
        # Batches that were held back may share keys with a batch of this group that has to wait, too, and came earlier.
        is_next = not any([verdict is None for outcome in outcomes for verdict in outcome.verdicts])
        if is_next and self._locked_rows.is_due:
            outcomes.append(await self._try_again(held, moments))
        else:
            if not free:
                await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)
            outcomes.append(self._later(moments))
        return _in_order(outcomes, [*free, *rest])

    async def _try_again(self, group: list[Batch], arrived: Sequence[float]) -> Outcome:
        """Decide batches that were held back, except batches whose tables are still locked."""
        locked = await self._find_locked_tables(self._locked_rows.spaces)
        self._locked_rows.release()
        if locked:
            return await self._without_locked(group, arrived, spaces=locked)
        return await self._decide(group, arrived, waits=True)

    def is_held_back(self, batch: Batch) -> bool:
        """Whether a batch has to wait for rows or tables that other clients have locked."""
        return self._locked_rows.waits([batch])[0]

    def cancelled(self, group: list[Batch]) -> Outcome:
        """The outcome of a group whose commit was cancelled."""
        is_unknown = self._has_written or (self.attempt is not None and self.attempt.completed is not None)
        self._forget_attempt()
        unsent = Unreachable(f"{self._server.name}: the event loop ended before a commit was sent; nothing was written")
        return failed(group, self._unknown() if is_unknown else unsent, self._last_version)

    def _forget_attempt(self) -> None:
        self.attempt, self._has_written = None, False

    async def _decide(self, group: list[Batch], arrived: Sequence[float], *, waits: bool = False) -> Outcome:
        """Decide a group whose batches meet no lock that is known; with `waits`, one that has met a lock before."""
        if len(group) > 1 and any(map(is_long, group)):
            return await self._decide_apart(group, arrived, waits=waits)
        try:
            return await self._commit_until(group, arrived[0] + self._server.patience, waits=waits)
        except _RowsLocked as lock:
            return await self._without_locked(group, arrived, rows=lock.locked)
        except DatabaseError as error:
            failure = error
        except Exception as error:  # without a verdict, all callers would wait for ever
            self.slot.drop()
            failure = DatabaseError(f"{self._server.name}: a write failed unexpectedly: {type(error).__name__}")
            if self.attempt is not None and self.attempt.completed is not None:
                failure = self._unknown()
            failure.__cause__ = error
        if is_locked(failure):
            self._last_failure = failure
            if tables := await self._find_locked_tables({space for batch in group for space in spaces_of(batch)}):
                return await self._without_locked(group, arrived, spaces=tables)
            if len(group) > 1:
                return await self._decide_each(group, arrived)
            self._locked_rows.hold(addresses_of(group[0]))
            return self._later(arrived)
        if isinstance(failure, _TIMED_OUT) and not (is_too_slow(failure) and len(group) > 1):
            # The first batch has waited long enough; later ones have time left, and join the next group.
            overdue = max(1, sum(not self._has_time(moment) for moment in arrived))
            verdicts = [*failed(group[:overdue], failure, 0).verdicts, *[None] * (len(group) - overdue)]
            return Outcome(verdicts, self._last_version, self._last_version)
        self.unknown += len(group) if isinstance(failure, CommitUnknown) else 0
        if isinstance(failure, _FAILS_WHOLE_GROUP) or len(group) == 1:
            return failed(group, failure, self._last_version)
        return await self._decide_each(group, arrived)

    async def _decide_apart(self, group: list[Batch], arrived: Sequence[float], *, waits: bool) -> Outcome:
        """Decide a group with long batches: each of them alone, in the order of the group."""
        outcomes: list[Outcome] = []
        positions: list[int] = []
        for _, run in groupby(range(len(group)), key=lambda at: at if is_long(group[at]) else -1):
            some = list(run)
            # An earlier one may have met a lock.
            held = self._locked_rows.waits(group[: some[-1] + 1])
            if rest := [at for at in some if held[at]]:
                outcomes.append(self._later([arrived[at] for at in rest]))
            if free := [at for at in some if not held[at]]:
                outcomes.append(
                    await self._decide([group[at] for at in free], [arrived[at] for at in free], waits=waits)
                )
            positions += [*rest, *free]
        return _in_order(outcomes, positions)

    async def _without_locked(
        self,
        group: list[Batch],
        arrived: Sequence[float],
        *,
        rows: Iterable[Address] = (),
        spaces: Iterable[Space] = (),
    ) -> Outcome:
        """Hold the batches back that meet locked rows or tables, and decide the others."""
        self._locked_rows.hold(rows, spaces)
        waits = self._locked_rows.waits(group)
        rest = [at for at, waiting in enumerate(waits) if waiting]
        free = [at for at, waiting in enumerate(waits) if not waiting]
        outcomes = [self._later([arrived[at] for at in rest])]
        if free:
            outcomes.append(await self._decide([group[at] for at in free], [arrived[at] for at in free]))
        return _in_order(outcomes, [*rest, *free])

    async def _decide_each(self, group: Sequence[Batch], arrived: Sequence[float]) -> Outcome:
        """Commit batch by batch, so that a batch that is refused, or meets a lock, does not harm the others."""
        outcomes: list[Outcome] = []
        locked = 0
        for batch, moment in zip(group, arrived, strict=True):
            if self.is_held_back(batch):
                self._locked_rows.hold(addresses_of(batch))
                outcomes.append(self._later([moment]))
                continue
            if locked > 1:
                # Perhaps a lock blocks all writes, and each batch would wait for it. The rest begins the next group.
                outcomes.append(self._later([moment]))
                continue
            outcomes.append(await self._decide([batch], [moment]))
            locked = locked + 1 if self.is_held_back(batch) else 0
        return joined(outcomes)

    def _later(self, moments: Sequence[float]) -> Outcome:
        """Let batches join a later group, if they still have time."""
        verdicts: list[Verdict | None] = [
            None if self._has_time(moment) else Busy(self._locked_message) for moment in moments
        ]
        return Outcome(verdicts, self._last_version, self._last_version)

    @property
    def _locked_message(self) -> str:
        return f"{self._server.name}: another client holds a lock; nothing was written: try again"

    def _has_time(self, moment: float) -> bool:
        return asyncio.get_running_loop().time() < moment + 0.75 * self._server.patience

    async def _commit_until(self, group: list[Batch], deadline: float, *, waits: bool) -> Outcome:
        """Try until the group is committed or refused, or until the deadline.

        A quarter of the time is left for learning what became of an attempt that got no reply. No attempt begins that
        could not end before that if it meets a lock.

        Raises:
            _RowsLocked: Other clients have locked rows; nothing was written.
            DatabaseError: Nothing was written, unless it is CommitUnknown.
        """
        loop, reserve = asyncio.get_running_loop(), self._server.patience / 4
        failure: DatabaseError | None = None
        cause: Exception
        lost, was_stale, was_slow = 0, False, False
        if self.set_up is not None:
            await self.slot.retry(self.set_up, deadline - self._server.patience)
            self.set_up = None
        while True:
            if loop.time() >= deadline - reserve - self._server.lock_seconds:
                waited = loop.time() - deadline + self._server.patience
                failure = failure or self._last_failure or (Busy(self._locked_message) if waits else None)
                raise self._server.unreachable(waited, failure)
            attempt = self.attempt = CommitAttempt(group)
            way = self._way(lost)
            try:
                async with asyncio.timeout_at(deadline - reserve):
                    await self.slot.connected()
                    await self._listeners.refresh(self.slot)
                    attempted = await way.commit(self.slot, attempt)
                if isinstance(attempted, Outcome):
                    return self._done(attempted)
                attempt.completed = None
                lost += 1
                await self._after_lost_race(attempted, lost, group, waits=waits)
                continue
            except TimeoutError as error:
                self.slot.drop()
                waited = loop.time() - deadline + self._server.patience
                failure = self._server.unreachable(waited, self._last_failure)
                cause, is_unknown = error, attempt.completed is not None
            except Failure as error:
                failure, cause = self._server.explain(error), error
                is_unknown = attempt.completed is not None and is_lost(error)
            failure.__cause__ = cause
            if is_unknown:
                self.slot.drop()
                if (outcome := await self._learn(attempt, max(deadline, loop.time() + reserve))) is not None:
                    return self._done(outcome)
                continue
            attempt.completed = None  # the server has refused it
            if isinstance(cause, TimeoutError):
                raise failure
            if may_be_full_queue(cause) and self._listeners.pause():
                continue
            if self._server.has_function and (is_missing_function(cause) or is_denied(cause)):
                await self._make_functions()
                if is_missing_function(cause) or not self._server.has_function:
                    continue
            if is_stale(cause) and not was_stale:
                was_stale = True
            elif is_too_slow(cause) and not was_slow:
                was_slow = True  # once more: the server may have been stopped for a moment
            elif not self._server.may_succeed_after(cause) or is_locked(cause):
                raise failure from cause
            if not isinstance(failure, Busy):
                self.slot.drop()  # another connection may lead to another server
            await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)

    def _way(self, lost: int) -> CommitWay:
        if lost >= limits.POSTGRES_LOST_RACES or not self._server.has_function:
            return self._by_locking
        return self.by_function

    async def _after_lost_race(self, reason: LostRace, lost: int, group: list[Batch], *, waits: bool) -> None:
        """Pause before the next attempt.

        Raises:
            _RowsLocked: Rows are locked for longer than races last.
        """
        is_longer = waits or lost >= limits.POSTGRES_LOST_RACES
        if reason is LostRace.LOCKED and is_longer and (locked := await self._find_locked(group)):
            raise _RowsLocked(locked)
        if reason is not LostRace.REFUSED:
            await asyncio.sleep(random.uniform(*limits.POSTGRES_RACE_PAUSES))

    async def _find_locked(self, group: list[Batch]) -> set[Address]:
        locked: set[Address] = set()
        async with self.slot.transaction(self._server.begin_commit) as transaction:
            for space, keys in written_keys(group).items():
                layout = LAYOUTS[space]
                for row in await transaction.fetch(layout.find_locked, *layout.bind_keys(keys)):
                    locked.add((space, tuple(row) if len(layout.key) > 1 else row[0]))
        return locked

    async def _find_locked_tables(self, spaces: Collection[Space]) -> set[Space]:
        """The spaces whose tables other clients have locked."""
        if not spaces:
            return set()
        names = {LAYOUTS[space].table: space for space in spaces}
        try:
            async with asyncio.timeout(limits.POSTGRES_PING_SECONDS):
                return {names[row[0]] for row in await self.slot.fetch(log.LOCKED_TABLES, list(names))}
        except (*Failure, TimeoutError, DatabaseError):
            self.slot.drop()
            return set()  # the next attempt finds out what is wrong

    async def _make_functions(self) -> None:
        """Make the functions again, which a restore may have left out, or find out that this user may not call them."""
        await setup.make_functions(self._server, await self.slot.connected())

    async def _learn(self, attempt: CommitAttempt, deadline: float) -> Outcome | None:
        """What became of an attempt whose reply was lost; None if it was not made, and never will be.

        Raises:
            CommitUnknown: No server can be asked.
        """
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        outcome = await by_locking.outcome_of(self.slot, self._server, self._by_locking, attempt)
                        attempt.completed = None
                        return outcome
                    except Failure as error:
                        cause = error
                        self.slot.drop()
                        if not self._server.may_succeed_after(error):
                            break
                        await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)
        except (TimeoutError, DatabaseError) as error:
            self.slot.drop()
            raise self._unknown() from error
        raise self._unknown() from cause

    def _unknown(self) -> CommitUnknown:
        return CommitUnknown(
            f"the connection to {self._server.name} was lost during a commit, and no server could be asked in time "
            f"what became of it{self._server.last_answers}: all of it is written, or nothing, or the server may still "
            "write it; once it answers again, read the entries to find out"
        )

    def _done(self, outcome: Outcome) -> Outcome:
        self._last_failure = None
        self.attempt = None
        self._has_written = self._has_written or outcome.version_after != outcome.version_before
        self._last_version = outcome.version_after
        return outcome


def _in_order(outcomes: Sequence[Outcome], positions: Sequence[int]) -> Outcome:
    """One outcome of several; `positions` are those of their verdicts in the group."""
    both = joined(outcomes)
    verdicts = dict(zip(positions, both.verdicts, strict=True))
    return replace(both, verdicts=[verdicts[at] for at in range(len(positions))])
