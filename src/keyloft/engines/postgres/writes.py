"""Commits groups of batches to PostgreSQL, each group in one transaction.

Every transaction begins by taking the row of the clock, so commits come one after the other, whichever process makes
them, and their versions grow in that order. A group of plain sets needs to know nothing of what is stored: it takes the
clock and writes its rows with one statement. Any other group first takes the clock, then loads the records that decide,
in a later statement: one that waited for the clock would still show the state from before it waited.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from keyloft.core.records import Address, Append, Batch, Committed, Key, Record, Space
from keyloft.engines.commit.outcomes import Outcome, failed, joined
from keyloft.engines.commit.settle import PutRow, RemoveRow, SetExpiry, Verdict, Write, deciding, settle
from keyloft.engines.postgres.connections import PAUSE_SECONDS, Link, Transaction
from keyloft.engines.postgres.server import Failure, PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, LOCK_CLOCK, READ_CLOCK, WRITE_CLOCK_AND_COMMIT
from keyloft.errors import Busy, CommitUnknown, DatabaseError, DiskFull, ReadOnly, Unreachable

# The server as a whole refused: asking again, batch by batch, would get the same answer 64 times.
_HOPELESS: Final = (DiskFull, ReadOnly, CommitUnknown)
# How long what met a lock is kept back before it is tried again: each try holds up all others.
_TRY_AGAIN_SECONDS: Final = 1.0

# It was tried until the time was over.
_TOO_LATE: Final = (Unreachable, Busy)


class PostgresWriter:
    """Commits groups on a connection of its own."""

    def __init__(self, server: PostgresServer, link: Link, now: Callable[[], int | None], name: str) -> None:
        self._server = server
        self._now = now
        self._link = link
        self._name = name
        """How our commits are told from those of other processes."""
        self._last_clock = 0
        self._recent_trouble: DatabaseError | None = None
        self._kept_back: set[Address] = set()
        """The keys of batches that met somebody else's lock."""
        self._try_again_at = 0.0
        self._is_committing = False

    async def commit(self, group: list[Batch], came: Sequence[float]) -> Outcome:
        """Decide a group whose batches came at these times, in their order; never raises, whatever becomes of it."""
        kept_back = [self._is_kept_back(batch) for batch in group] if self._kept_back else [False]
        if any(kept_back):
            return await self._commit_apart(group, came, kept_back)
        try:
            return await self._commit_patiently(group, came[0] + self._server.patience)
        except DatabaseError as error:
            failure = error
        except Exception as error:  # nobody else would hear of it, and all callers would wait
            self._link.drop()
            failure = DatabaseError(f"{self._server.name}: a write failed unexpectedly: {type(error).__name__}")
            if self._is_committing:
                failure = self._unknown()
            failure.__cause__ = error
        if self._server.is_locked(failure):
            self._recent_trouble = failure
            if len(group) > 1:
                return await self._commit_each(group, came)
            self._keep_back(group[0])
        if isinstance(failure, _TOO_LATE):
            # For the first of them; whoever came later has time left, and goes with the next group.
            overdue = sum(not self._has_time(moment) for moment in came)
            if not self._server.is_locked(failure):
                overdue = max(1, overdue)
            verdicts = [*failed(group[:overdue], failure, 0).verdicts, *[None] * (len(group) - overdue)]
            return Outcome(verdicts, self._last_clock, self._last_clock)
        if isinstance(failure, _HOPELESS) or len(group) == 1:
            return failed(group, failure, self._last_clock)
        return await self._commit_each(group, came)

    def given_up(self, group: list[Batch]) -> Outcome:
        """What is to be told if a commit was cancelled."""
        return failed(group, self._unknown() if self._is_committing else self._server.unreachable(), self._last_clock)

    async def _commit_each(self, group: list[Batch], came: Sequence[float]) -> Outcome:
        """Commit batch by batch: one that the database refuses, or that meets a lock, must not harm the others."""
        outcomes: list[Outcome] = []
        locked = 0
        for batch, moment in zip(group, came, strict=True):
            if locked > 1 or self._is_kept_back(batch):
                # It would wait for the same lock, or for one that keeps all from writing.
                outcomes.append(self._later(moment))
                continue
            outcomes.append(await self.commit([batch], [moment]))
            locked = locked + 1 if self._is_kept_back(batch) else 0
        return joined(outcomes)

    async def _commit_apart(self, group: list[Batch], came: Sequence[float], kept_back: list[bool]) -> Outcome:
        """Commit what meets no lock that we know of, together; try the rest now and then, one by one."""
        loop = asyncio.get_running_loop()
        free = [place for place, is_kept_back in enumerate(kept_back) if not is_kept_back]
        rest = [place for place, is_kept_back in enumerate(kept_back) if is_kept_back]
        outcomes = []
        if free:
            outcomes.append(await self.commit([group[place] for place in free], [came[place] for place in free]))
        if loop.time() >= self._try_again_at:
            self._kept_back.clear()
            outcomes.append(await self._commit_each([group[place] for place in rest], [came[place] for place in rest]))
        else:
            if not free:
                await asyncio.sleep(PAUSE_SECONDS)
            outcomes += [self._later(came[place]) for place in rest]
        both = joined(outcomes)
        verdicts = dict(zip([*free, *rest], both.verdicts, strict=True))
        return replace(both, verdicts=[verdicts[place] for place in range(len(group))])

    def _later(self, moment: float) -> Outcome:
        """A batch goes with a later group, if it still has time."""
        if self._has_time(moment):
            return Outcome([None], self._last_clock, self._last_clock)
        locked = Busy(f"{self._server.name}: somebody else holds a lock; nothing was written: try again")
        return Outcome([locked], self._last_clock, self._last_clock)

    def _has_time(self, moment: float) -> bool:
        return asyncio.get_running_loop().time() < moment + self._server.patience - self._server.lock_seconds

    def _keep_back(self, batch: Batch) -> None:
        self._try_again_at = asyncio.get_running_loop().time() + _TRY_AGAIN_SECONDS
        self._kept_back.update((mutation.space, mutation.key) for mutation in batch.mutations)

    def _is_kept_back(self, batch: Batch) -> bool:
        return any((mutation.space, mutation.key) in self._kept_back for mutation in batch.mutations)

    def close(self) -> None:
        self._link.abandon()

    async def _commit_patiently(self, group: list[Batch], deadline: float) -> Outcome:
        """Try until it is done, refused, or too late.

        No try begins that could not end in time even if it meets a lock: the server gives it up before we do, and what
        the server gives up is known not to be written.
        """
        loop, locks = asyncio.get_running_loop(), self._server.lock_seconds
        trouble: DatabaseError | None = None
        while True:
            self._is_committing = False
            if loop.time() >= deadline - locks:
                raise trouble or self._recent_trouble or self._server.unreachable()
            try:
                async with asyncio.timeout_at(deadline - locks):
                    await self._link.connected()
                async with asyncio.timeout_at(max(deadline, loop.time() + 1.2 * locks)):
                    try:
                        return await self._commit(group)
                    except Failure as error:
                        trouble = self._what_is_wrong(error)
                        trouble.__cause__ = error
                        may_succeed = self._server.learn_from(error) and not self._server.is_locked(trouble)
                        if not may_succeed or isinstance(trouble, CommitUnknown):
                            raise trouble from error
            except TimeoutError:
                self._link.drop()
                raise (self._unknown() if self._is_committing else trouble or self._server.unreachable()) from None
            if not isinstance(trouble, Busy):
                self._link.drop()  # another connection may lead to a server that is more willing
            await asyncio.sleep(PAUSE_SECONDS)

    def _what_is_wrong(self, error: Exception) -> DatabaseError:
        return self._unknown() if self._is_committing and self._server.is_lost(error) else self._server.explain(error)

    def _unknown(self) -> CommitUnknown:
        return CommitUnknown(
            f"{self._server.name} was lost during a commit: all of it is written, or nothing, or a server that was "
            "only slow writes it yet; once it answers again, read to find out"
        )

    async def _commit(self, group: list[Batch]) -> Outcome:
        addresses = deciding(group)
        if not addresses and not _names_versions(group):
            settled = settle(group, {}, 0, 0)
            spaces = {space for space, _ in settled.writes}
            if len(spaces) == 1:
                base, now = await self._set(spaces.pop(), settled.writes, settled.version)
                verdicts = [_moved(verdict, base, now) for verdict in settled.verdicts]
                return self._done(Outcome(verdicts, base, base + settled.version, settled.writes))
        return await self._decide(group, addresses)

    async def _set(self, space: Space, writes: dict[Address, Write], count: int) -> tuple[int, int]:
        """Write rows whatever is in their place; returns the clock before them, and the time."""
        layout = LAYOUTS[space]
        puts = [write.record for _, write in sorted(writes.items(), key=_address) if isinstance(write, PutRow)]
        await self._link.connected()
        self._is_committing = True
        rows = await self._link.fetch(layout.set, self._now(), count, self._name, *layout.bind_puts(puts))
        base, now, _ = self._server.clock_of(rows)
        return base, now

    async def _decide(self, group: list[Batch], addresses: set[Address]) -> Outcome:
        async with self._link.transaction(f"{self._server.begin}; {LOCK_CLOCK}") as transaction:
            clock, now, current = await self._load(transaction, addresses)
            settled = settle(group, current, clock, now)
            if settled.version != clock:
                await self._apply(transaction, settled.writes, now)
                self._is_committing = True
                # One trip for all that is left to do.
                await transaction.execute(WRITE_CLOCK_AND_COMMIT.format(clock=settled.version, name=self._name))
        return self._done(Outcome(settled.verdicts, clock, settled.version, settled.writes))

    def _done(self, outcome: Outcome) -> Outcome:
        self._recent_trouble = None
        self._is_committing = False
        self._last_clock = outcome.version_after
        return outcome

    async def _load(self, transaction: Transaction, addresses: set[Address]) -> tuple[int, int, dict[Address, Record]]:
        """The clock, the time, and what is stored at some keys, expired or not."""
        now = self._now()
        clock, current = None, {}
        for space in sorted({space for space, _ in addresses}):
            layout = LAYOUTS[space]
            keys = sorted(key for at, key in addresses if at is space)
            rows = await transaction.fetch(layout.load, now, *layout.bind_keys(keys))
            clock, now = self._server.clock_of(rows)[:2]
            for key, record in layout.found([row[2:] for row in rows if row[2] is not None]).items():
                current[space, key] = record
        if clock is None:
            clock, now = self._server.clock_of(await transaction.fetch(READ_CLOCK, now))
        assert now is not None
        return clock, now, current

    async def _apply(self, transaction: Transaction, writes: dict[Address, Write], now: int) -> None:
        for space in sorted({space for space, _ in writes}):
            layout = LAYOUTS[space]
            puts: list[Record] = []
            removed: list[Key] = []
            retimed: list[tuple[int | None, Key]] = []
            for (at, key), write in sorted(writes.items(), key=_address):
                if at is not space:
                    continue
                match write:
                    case PutRow():
                        puts.append(write.record)
                        if write.is_new_entry:
                            removed.append(key)
                    case RemoveRow():
                        removed.append(key)
                    case SetExpiry():
                        retimed.append((write.expires_at, key))
            if removed:
                await transaction.fetch(layout.remove, *layout.bind_keys(removed))
            if puts:
                await transaction.fetch(layout.put, now, *layout.bind_puts(puts))
            if retimed:
                due, keys = zip(*retimed, strict=True)
                await transaction.fetch(layout.retime, due, *layout.bind_keys(keys))


def _names_versions(group: list[Batch]) -> bool:
    """Whether a key is made of a version, which then has to be known before anything is written."""
    return any(type(mutation) is Append for batch in group for mutation in batch.mutations)


def _moved(verdict: Verdict, base: int, now: int) -> Verdict:
    return replace(verdict, version=base + verdict.version, at=now) if isinstance(verdict, Committed) else verdict


def _address(write: tuple[Address, Write]) -> Address:
    return write[0]
