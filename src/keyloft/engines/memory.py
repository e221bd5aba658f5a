"""Keeps everything in memory: for caches, for tests, and as the plainest example of an engine."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core import records
from keyloft.core.engine import LogWatch, Submission, Verdict, Watch
from keyloft.core.records import (
    Address,
    Batch,
    Committed,
    Conflict,
    Key,
    LoggedChange,
    LogPosition,
    Page,
    Record,
    Space,
)
from keyloft.core.schema import VERSION_BY_HAND
from keyloft.core.slices import free_in_slices, in_slices
from keyloft.engines import change_log
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.commit.long_batches import GatheredVerdict, divided, is_long
from keyloft.engines.commit.outcomes import committed
from keyloft.engines.commit.settle import PutRow, SetExpiry, Write, deciding, settle
from keyloft.engines.commit.submitted import WRITTEN, report
from keyloft.engines.lifetime import ClosableEngine
from keyloft.engines.loop_iteration import LoopIteration
from keyloft.engines.sorted_items import SortedItems
from keyloft.engines.watches.feed import ChangeFeed, Start
from keyloft.errors import Closed, DatabaseError, KeyloftError


class MemoryEngine(ClosableEngine):
    """An engine whose data ends with its process."""

    reads_at_once = True

    def __init__(self, clock: Clock, history: KeptHistory | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._tables = {space: _SortedRecords() for space in Space}
        self._version = VERSION_BY_HAND
        self._log = _ChangeLog(history or KeptHistory())
        self._feed = ChangeFeed(self, clock)
        self.location = "memory"
        self._store_id = secrets.token_hex(16)
        self._iteration = LoopIteration()
        self._batcher = Batcher(self._start)
        self._task: asyncio.Task[None] | None = None
        self._long_call = asyncio.Lock()
        """Held by a long read and by commits in parts: what one of them sees, no other changes."""
        self._is_half_written = False
        """Whether a part of a long batch was written, and the rest was not yet: reads wait."""

    async def read(self, *asks: records.Ask) -> list[Any]:
        self._check_open()
        if self._iteration.enter():
            await asyncio.sleep(0)
            self._iteration.enter()
            self._check_open()
        if len(asks) > limits.SLICE_ITEMS:
            async with self._long_call:
                now = self._now()
                return await in_slices(lambda ask: self._answer(ask, now), asks)
        if self._is_half_written:
            async with self._long_call:
                pass
        now = self._now()
        return [self._answer(ask, now) for ask in asks]

    async def commit(self, batch: Batch) -> Committed | Conflict:
        self._check_open()
        # After a long iteration, it waits where later batches queue behind it.
        if self._iteration.enter() or self._must_wait(batch):
            return await self._batcher.commit(batch)
        verdict = self._commit(batch)
        if isinstance(verdict, KeyloftError):
            raise verdict
        return verdict

    def submit(self, batch: Batch, done: Callable[[Verdict], None]) -> Submission:
        self.check_usable()
        if self._must_wait(batch):
            return self._batcher.submit(batch, done)
        asyncio.get_running_loop().call_soon(report, done, self._commit(batch))
        return WRITTEN

    def watch(self, *asks: records.Get | records.Scan, since: int | None = None) -> Watch:
        self.check_usable()
        return self._feed.watch(asks, since, Start(self._version, self._now()))

    def follow(
        self, *asks: records.Get | records.Scan, woken: Callable[[], None], since: int | None = None
    ) -> LogWatch:
        self.check_usable()
        return self._feed.follow(asks, since, woken, Start(self._version, self._now()))

    async def _close(self) -> None:
        await self._batcher.close()
        self._feed.close()

    def _must_wait(self, batch: Batch) -> bool:
        """Whether a batch is too long to be written at once, or must wait for a long call."""
        return is_long(batch) or self._long_call.locked() or not self._batcher.idle

    def _start(self, group: list[Batch]) -> None:
        self._task = asyncio.create_task(self._commit_group(group))

    async def _commit_group(self, group: list[Batch]) -> None:
        verdicts: list[Verdict] = []
        async with self._long_call:
            for batch in group:
                try:
                    verdicts.append(await self._commit_long(batch) if is_long(batch) else self._commit(batch))
                except Exception as error:  # in this task no one else would catch it, and the callers would wait
                    failure = DatabaseError(f"memory: a write failed unexpectedly: {type(error).__name__}")
                    failure.__cause__ = error
                    verdicts.append(failure)
        self._batcher.finished(verdicts)

    async def _commit_long(self, batch: Batch) -> Verdict:
        now, before = self._now(), self._version
        gathered = GatheredVerdict(before, now)
        changes: list[LoggedChange] = []
        # Not one list of pairs: the garbage collector would follow each of them.
        replaced: tuple[list[Space], list[Key], list[Record | None]] = [], [], []
        self._is_half_written = True
        try:
            for part in divided(batch):
                if gathered.refuses(part):
                    break
                settled = settle([part], self._stored(part), before, now)
                gathered.add(settled)
                for (space, key), write in settled.writes.items():
                    replaced[0].append(space)
                    replaced[1].append(key)
                    replaced[2].append(self._tables[space].apply(key, write, now))
                changes += settled.changes
                await asyncio.sleep(0)
            outcome = gathered.outcome()
            if outcome.version_after == before:
                await in_slices(self._put_back, *[column[::-1] for column in replaced])
            else:
                self._version = outcome.version_after
                self._log.add(self._version, now, changes)
        finally:
            self._is_half_written = False
        self._feed.committed(outcome)
        for column in replaced:
            await free_in_slices(column)
        return gathered.verdict

    def _put_back(self, space: Space, key: Key, record: Record | None) -> None:
        self._tables[space].put(key, record)

    def _stored(self, batch: Batch) -> dict[Address, Record]:
        """What decides a batch."""
        return {
            address: record
            for address in deciding([batch])
            if (record := self._tables[address[0]].records.get(address[1])) is not None
        }

    def _commit(self, batch: Batch) -> Verdict:
        now, before = self._now(), self._version
        settled = settle([batch], self._stored(batch), before, now)
        self._version = settled.version
        for (space, key), write in settled.writes.items():
            self._tables[space].apply(key, write, now)
        if settled.version != before:
            self._log.add(settled.version, now, settled.changes)
            self._feed.committed(committed(settled, before))
        return settled.verdicts[0]

    def _now(self) -> int:
        # A clock that was set back must not bring back to life what had expired at the last commit.
        now = max(self._clock.now(), self._log.last_commit_at)
        if now < self._feed.latest_time:
            self._feed.note_time(now)
        return now

    def _check_open(self) -> None:
        if self.refusal is not None:
            raise Closed(self.refusal)

    def _answer(self, ask: records.Ask, now: int) -> object:
        match ask:
            case records.Latest():
                return self._version
            case records.Now():
                return now
            case records.StoreId():
                return self._store_id
            case records.Usage():
                return self._usage(ask, now)
            case records.Changes():
                return self._log.read(ask.after)
        table = self._tables[ask.space]
        match ask:
            case records.Get():
                record = table.records.get(ask.key)
                return record if record is None or ask.include_expired or record.is_alive(now) else None
            case records.Scan():
                return table.scan(ask, now)
            case records.Count():
                return table.count(ask.start, ask.end, now)
            case records.Expired():
                return [replace(table.records[key], value=b"") for key in table.due(now, ask.limit)]
            case records.Due():
                return table.due_after(ask, now, self._version)

    def _usage(self, ask: records.Usage, now: int) -> records.UsageSlice:
        found = list(islice(self._tables[Space.PLUGINS].behind(ask.after), ask.limit))
        sizes: dict[str, list[int]] = {}
        for record in found:
            sizes.setdefault(record.key[0], []).extend([len(record.value)] if record.is_alive(now) else [])
        used = [records.Used(plugin, len(some), sum(some)) for plugin, some in sizes.items()]
        return records.UsageSlice(used, found[-1].key if len(found) == ask.limit else None, self._version)


class _LoggedCommit(Struct, frozen=True, gc=False):
    version: int
    base: int
    """The version before it."""
    at: int
    size: int
    """Of the log up to and including this row."""
    changes: Sequence[LoggedChange]


class _ChangeLog:
    """The changes of the last commits, one row each; the last row is never removed."""

    def __init__(self, kept: KeptHistory) -> None:
        self._kept = kept
        self._rows = deque([_LoggedCommit(VERSION_BY_HAND, -1, 0, 0, ())])

    @property
    def last_commit_at(self) -> int:
        return self._rows[-1].at

    def add(self, version: int, at: int, changes: Sequence[LoggedChange]) -> None:
        last = self._rows[-1]
        size = last.size + limits.MEMORY_CHANGE_BYTES * (len(changes) + 1)
        self._rows.append(_LoggedCommit(version, last.version, at, size, changes))
        oldest_time, oldest_size = self._kept.oldest_time(at), self._kept.oldest_size(size)
        # The newest row that may go stays: changes after its version are all kept.
        while len(self._rows) > 1 and (self._rows[1].at < oldest_time or self._rows[1].size <= oldest_size):
            self._rows.popleft()

    def read(self, after: LogPosition) -> records.LogSlice:
        oldest, latest = self._rows[0], self._rows[-1].version
        change_log.check_kept(after, oldest.base, latest)
        first = max(after.version - oldest.version, 0)  # each row is one version, except that of an empty store
        changes: list[LoggedChange] = []
        end = after if after.version >= oldest.version else LogPosition(oldest.version)
        at_row = first if after.part != records.WHOLE else first + 1
        skipped = after.part if after.part != records.WHOLE else 0
        ended = self._rows[first].at
        for row in islice(self._rows, at_row, None):
            some = row.changes[skipped : skipped + limits.MEMORY_SLICE_CHANGES - len(changes)]
            changes += some
            skipped += len(some)
            end = LogPosition(row.version) if skipped == len(row.changes) else LogPosition(row.version, skipped)
            skipped, ended = 0, row.at
            if len(changes) >= limits.MEMORY_SLICE_CHANGES:
                break
        return records.LogSlice(changes, end, end == LogPosition(latest), self._rows[first].at, ended)


class _SortedRecords:
    """The records of one space, their keys in order, and their expiries in order."""

    def __init__(self) -> None:
        self.records: dict[Key, Record] = {}
        self._keys = SortedItems()
        self._expiries = SortedItems()
        """Of pairs: when an entry expires, and its key."""

    def between(self, start: Key, end: Key, *, after: bool = False, reverse: bool = False) -> Iterable[Record]:
        ordered = self._keys.descending if reverse else self._keys.ascending
        return map(self.records.__getitem__, ordered(start, end, after=after))

    def behind(self, key: Key) -> Iterable[Record]:
        return map(self.records.__getitem__, self._keys.ascending(key, after=True))

    def scan(self, ask: records.Scan, now: int) -> Page:
        records = self.between(ask.start, ask.end, after=ask.after, reverse=ask.reverse)
        found = list(islice((record for record in records if record.is_alive(now)), ask.limit))
        if not found:
            return Page()
        keys, values, encodings, versions, expiries, created, updated = zip(*map(astuple, found), strict=True)
        if ask.keys_only:
            values = (b"",) * len(found)
        return Page(keys, values, encodings, versions, expiries, *((created, updated) if ask.times else ()))

    def count(self, start: Key, end: Key, now: int) -> int:
        """How many live entries there are in a range: all but the expired ones, which are few."""
        expired = [key for _, key in self._expiring(0, now) if start <= key < end]
        return self._keys.count(start, end) - len(expired)

    def due(self, now: int, limit: int) -> list[Key]:
        """The keys that have expired, longest overdue first."""
        return [key for _, key in islice(self._expiring(0, now), limit)]

    def due_after(self, ask: records.Due, now: int, version: int) -> records.DuePage:
        some = list(islice(self._expiring(ask.after + 1, now), ask.limit + 1))
        if len(some) > ask.limit:
            up_to = some[ask.limit - 1][0]
            some = list(self._expiring(ask.after + 1, up_to))
            return records.DuePage([key for _, key in some], [at for at, _ in some], up_to, version, False, None)
        upcoming = next(self._expiries.ascending((now + 1,)), None)
        next_expiry = None if upcoming is None else upcoming[0]
        return records.DuePage([key for _, key in some], [at for at, _ in some], now, version, True, next_expiry)

    def _expiring(self, first: int, last: int) -> Iterator[tuple[int, Key]]:
        """The entries that expire from one moment to another, both included."""
        return self._expiries.ascending((first,), (last + 1,))

    def apply(self, key: Key, write: Write, now: int) -> Record | None:
        """Carry out a write; returns the record that was there."""
        old = self.records.get(key)
        new: Record | None = None
        if isinstance(write, PutRow):
            new = write.record
            if old is not None and not write.is_new_entry and old.is_alive(now):
                new = replace(new, created_at=old.created_at)
        elif old is not None and isinstance(write, SetExpiry):
            new = replace(old, expires_at=write.expires_at)
        self.put(key, new)
        return old

    def put(self, key: Key, new: Record | None) -> None:
        """Store a record, or with None remove what is stored."""
        old = self.records.get(key)
        if old is not None and old.expires_at is not None:
            self._expiries.remove((old.expires_at, key))
        if new is None:
            if old is not None:
                del self.records[key]
                self._keys.remove(key)
            return
        if old is None:
            self._keys.add(key)
        self.records[key] = new
        if new.expires_at is not None:
            self._expiries.add((new.expires_at, key))
