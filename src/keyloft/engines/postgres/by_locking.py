"""Commits a group in a transaction that takes its locks first: where functions can't be made, and after lost races.

The server ends the transaction if this process leaves it idle for a second, so a process that is stopped within it
delays others by a second at most.
"""

from collections.abc import Sequence
from typing import Final

from keyloft import limits
from keyloft.core.records import Address, Batch, Record
from keyloft.engines import change_log
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome, committed
from keyloft.engines.commit.settle import PutRow, SetExpiry, Settled, deciding, removes_row, settle, unread, with_values
from keyloft.engines.postgres import log
from keyloft.engines.postgres.attempts import (
    Attempted,
    CommitAttempt,
    LostRace,
    by_space,
    clock_set_back,
    load_values,
    written_keys,
)
from keyloft.engines.postgres.connections import Slot, Transaction
from keyloft.engines.postgres.log import LogEnd
from keyloft.engines.postgres.server import PostgresServer, timeout
from keyloft.engines.postgres.tables import LAYOUTS

_OF_COUNTER: Final = (log.LOG, log.TRIM, log.FIND_COMMIT)
_OF_SPACE: Final = {
    space: (layout.lock, layout.load_heads, layout.load_values, layout.remove, layout.put, layout.set_expiries)
    for space, layout in LAYOUTS.items()
}
"""The statements of a transaction, by the space that they concern."""


class ByLocking:
    """Commits groups in transactions that lock the version counter, then read."""

    def __init__(self, server: PostgresServer, history: KeptHistory) -> None:
        self._server = server
        self._history = history

    async def commit(self, slot: Slot, attempt: CommitAttempt) -> Attempted:
        group = attempt.group
        spaces = {each.space for batch in group for each in (*batch.mutations, *batch.checks)}
        await slot.prepare([*self.of_counter, *[statement for space in spaces for statement in _OF_SPACE[space]]])
        async with slot.transaction(self._server.begin_commit_of(attempt.operations)) as transaction:
            end = await self.lock_counter(transaction)
            # Don't wait for a row: every other commit waits for the counter that this one holds.
            for space, keys in written_keys(group).items():
                layout = LAYOUTS[space]
                [[stored, locked]] = await transaction.fetch(layout.lock, *layout.bind_keys(keys))
                if locked != stored:
                    await transaction.execute("ROLLBACK")
                    return LostRace.LOCKED
            current = await self._load(transaction, group)
            settled = settle(group, current, end.version, end.now)
            if shown := unread(settled):
                settled = with_values(settled, await load_values(transaction, shown))
            if settled.version != end.version:
                await self._apply(transaction, settled, end.now)
                parts = change_log.pack(settled.changes, end.version)
                await self.write_log(transaction, end, settled.version, attempt.commit_id, parts)
                attempt.completed = lambda base, now: committed(settled, base)
                await self.write_version_and_commit(transaction, settled.version, end.now)
        return committed(settled, end.version)

    @property
    def of_counter(self) -> list[str]:
        """The statements of the version counter and the log, which are prepared before it is locked."""
        return [log.read_counter(self._server.timeline), *_OF_COUNTER]

    async def lock_counter(self, transaction: Transaction) -> LogEnd:
        """Lock the version counter; returns the last commit and the size of the log.

        Raises:
            ClockSetBack: The last commit is far ahead of the clock.
            DatabaseError: There is no counter.
        """
        first = f"SET LOCAL lock_timeout = {timeout(self._server.lock_seconds)}"
        then = f"SET LOCAL lock_timeout = {timeout(limits.POSTGRES_INSERT_SECONDS)}"
        await transaction.execute(f"{first}; {log.LOCK_VERSION}; {then}")
        rows = await transaction.fetch(log.read_counter(self._server.timeline), self._server.now())
        version, last_at, clock, size = self._server.counter_row(rows)
        if last_at - clock > 1000 * limits.CLOCK_AHEAD_SECONDS:
            raise clock_set_back(self._server.name, last_at - clock)
        return LogEnd(version, max(clock, last_at), size or 0)

    async def write_log(
        self, transaction: Transaction, end: LogEnd, version: int, commit_id: bytes, parts: Sequence[bytes | None]
    ) -> None:
        """Log a group that takes the versions up to this one, and trim the log now and then."""
        size, sizes = end.size, list[int]()
        for part in parts:
            size += len(part or b"")
            sizes.append(size)
        ids = [commit_id, *[None] * (len(parts) - 1)]
        await transaction.fetch(log.LOG, version, end.version, end.now, list(range(len(parts))), sizes, ids, parts)
        if len(parts) > 1 or end.version // limits.TRIM_EVERY != version // limits.TRIM_EVERY:
            await transaction.fetch(log.TRIM, end.now, size, self._history.milliseconds, self._history.bytes)

    async def write_version_and_commit(self, transaction: Transaction, version: int, now: int) -> None:
        """Write the version counter, notify other processes, and commit, in one round trip."""
        statements = [log.write_version(self._server.timeline, version, now)]
        if (announcer := self._server.announcer) is not None:
            statements.append(log.NOTIFY.format(name=announcer, version=version))
        await transaction.execute("; ".join((*statements, "COMMIT")))

    async def _load(self, transaction: Transaction, group: Sequence[Batch]) -> dict[Address, Record]:
        """What is stored at the keys that decide something, with the value where it is needed."""
        wanted = deciding(group)
        found = await load_values(transaction, [address for address, with_value in wanted.items() if with_value])
        for space, keys in by_space([address for address, with_value in wanted.items() if not with_value]).items():
            layout = LAYOUTS[space]
            rows = await transaction.fetch(layout.load_heads, *layout.bind_keys(keys))
            found |= {(space, key): record for key, record in layout.heads(rows).items()}
        return found

    async def _apply(self, transaction: Transaction, settled: Settled, now: int) -> None:
        for space in sorted({space for space, _ in settled.writes}):
            layout = LAYOUTS[space]
            some = {key: settled.writes[at, key] for at, key in sorted(settled.writes) if at is space}
            puts = [write.record for write in some.values() if isinstance(write, PutRow)]
            expiries = {key: write.expires_at for key, write in some.items() if isinstance(write, SetExpiry)}
            if removed := [key for key, write in some.items() if removes_row(write)]:
                await transaction.fetch(layout.remove, *layout.bind_keys(removed))
            if puts:
                await transaction.fetch(layout.put, now, *layout.bind_puts(puts))
            if expiries:
                keys = layout.bind_keys(list(expiries))
                await transaction.fetch(layout.set_expiries, *keys, list(expiries.values()))


async def outcome_of(slot: Slot, server: PostgresServer, locking: ByLocking, attempt: CommitAttempt) -> Outcome | None:
    """What became of an attempt whose reply was lost; None if it was not made, and then it never will be.

    A read alone is not enough: it could be answered before the commit reaches the counter. So, unless the log has the
    id of the attempt, the id is logged as abandoned. If the commit arrives later, it finds the id, and is refused.
    """
    await slot.prepare(locking.of_counter)
    async with slot.transaction(server.begin_commit) as transaction:
        end = await locking.lock_counter(transaction)
        for base, at, is_made in await transaction.fetch(log.FIND_COMMIT, attempt.commit_id):
            assert attempt.completed is not None
            return attempt.completed(base, at) if is_made else None
        version = end.version + 1
        await locking.write_log(transaction, end, version, attempt.commit_id, [None])
        await locking.write_version_and_commit(transaction, version, end.now)
    return None
