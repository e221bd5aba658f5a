"""Commits groups of batches to etcd: read what decides, settle in memory, write if the version counter is unchanged.

A try whose reply was lost may be repeated: if it has landed, the repeat loses its comparison. A row of the change log
carries the id of the try that wrote it, so the writer learns there what became of a lost one.
"""

import asyncio
import random
import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import LogRow, check_version
from keyloft.core.records import Address, Batch, Set
from keyloft.core.schema import LAST_MOMENT
from keyloft.engines import change_log
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.commit.outcomes import Outcome, committed, copy, failed, joined
from keyloft.engines.commit.settle import PutRow, SetExpiry, Settled, deciding, settle, unread, with_values
from keyloft.engines.etcd import errors, large_values, layout, log, scans, transactions
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import Chunks, Keys, StoredRow
from keyloft.engines.etcd.views import View, Views
from keyloft.errors import CommitUnknown, DatabaseError, InvalidArgument, KeyloftError

_OPERATION_BYTES = 64
"""About what an operation takes in a request besides its key and its value."""


class _Try(Struct, eq=False):
    """A transaction that was sent, and may have been carried out."""

    commit_id: bytes
    keys: Keys
    counter_revision: int
    outcome: Outcome

    @property
    def log_key(self) -> bytes:
        return self.keys.log(self.outcome.version_after)


class _Loaded(Struct, frozen=True):
    """What decides a group."""

    view: View
    rows: dict[Address, StoredRow]


class EtcdWriter:
    """Commits the groups of one engine, one after the other."""

    def __init__(self, views: Views, history: KeptHistory) -> None:
        self._views = views
        self._cluster = views.cluster
        self._history = history
        self._loop = asyncio.get_running_loop()
        self._last_version = 0
        self._trimming: asyncio.Task[None] | None = None

    async def commit(self, group: list[Batch], arrived: list[float]) -> Outcome:
        """Commit a group: in one transaction, or in several if it is large."""
        outcomes: list[Outcome] = []
        first = 0
        for some in _slices(group):
            try:
                outcomes.append(await _Commit(self._views, some, arrived[first]).run())
            except DatabaseError as error:
                outcomes.append(failed(some, error, self._last_version))
            except KeyloftError as error:
                outcomes.append(Outcome([copy(error) for _ in some], self._last_version, self._last_version))
            except Exception as error:  # in this task no one else would catch it, and the callers would wait
                failure = DatabaseError(f"{self._cluster.name}: a write failed unexpectedly: {type(error).__name__}")
                failure.__cause__ = error
                outcomes.append(failed(some, failure, self._last_version))
            first += len(some)
            self._last_version = outcomes[-1].version_after
        outcome = joined(outcomes) if len(outcomes) > 1 else outcomes[0]
        self._trim_after(outcome)
        return outcome

    def cancelled(self, group: list[Batch]) -> Outcome:
        """The outcome of a group whose task was cancelled."""
        unknown = CommitUnknown("the event loop ended during a commit: it was made or not; read the entry to find out")
        return failed(group, unknown, self._last_version)

    async def aclose(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
            await asyncio.gather(self._trimming, return_exceptions=True)

    def _trim_after(self, outcome: Outcome) -> None:
        """Trim the log now and then, beside the next commits."""
        every = limits.TRIM_EVERY
        is_due = outcome.version_after // every > max(outcome.version_before, 0) // every
        if is_due and (self._trimming is None or self._trimming.done()):
            self._trimming = self._loop.create_task(self._trim(), name="keyloft trimming")

    async def _trim(self) -> None:
        try:
            view, _ = await self._views.fetch()
            await log.trim(view, self._history)
        except (Failure, KeyloftError):
            return  # the next one will do it


class _Commit:
    """The commit of some batches as one transaction."""

    def __init__(self, views: Views, group: Sequence[Batch], arrived: float) -> None:
        self._views = views
        self._cluster = views.cluster
        self._group = group
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._needs = deciding(group)
        # A Set succeeds whatever is stored, but keeps the time of creation, and replaces index entry and chunks.
        sets = {(one.space, one.key) for batch in group for one in batch.mutations if type(one) is Set}
        self._addresses = sorted(self._needs.keys() | sets)
        self._lost: list[_Try] = []
        self._races = 0
        self._seconds = limits.ETCD_TRY_SECONDS
        self._chunks: dict[tuple[bytes, int], Chunks] = {}
        """The values that were stored before the commit, by key of etcd and identity of the value."""

    async def run(self) -> Outcome:
        """Try until the batches are decided.

        Raises:
            KeyloftError: Nothing was written; or CommitUnknown.
        """
        loaded: _Loaded | None = None
        while True:
            try:
                if loaded is None:
                    loaded, outcome = await self._load()
                    if outcome is not None:
                        return outcome
                assert loaded is not None
                settled, now = await self._settle(loaded)
                if settled.version == loaded.view.counter.version:
                    return committed(settled, settled.version)
                outcome, loaded = await self._write(loaded, settled, now)
                if outcome is not None:
                    return outcome
                await self._pause_after_race()
            except Failure as error:
                loaded = None
                if not errors.is_compacted(error):
                    await self._pause_after(error)

    async def _load(self) -> tuple[_Loaded | None, Outcome | None]:
        """Read what decides, or find out that a lost try has landed."""
        some = self._addresses[: limits.ETCD_KEYS_PER_READ]

        def reads(keys: Keys) -> list[Any]:
            lost = [transactions.read(one.log_key) for one in self._lost]
            return lost + [transactions.read(keys.data(*address)) for address in some]

        view, found = await self._views.fetch(reads, self._arrived)
        for one, reply in zip(self._lost, found, strict=False):
            if reply.kvs and layout.commit_id_of(reply.kvs[0].value) == one.commit_id:
                return None, one.outcome
            if view.counter.generation != one.keys.generation:
                raise errors.commit_unknown(self._cluster.name)
        found = found[len(self._lost) :]
        # A try that compares what is no longer so can't land any more.
        self._lost = [one for one in self._lost if one.counter_revision == view.counter_revision]
        stored = [reply.kvs for reply in found]
        stored += await view.gets([view.keys.data(*address) for address in self._addresses[len(some) :]])
        return self._rows(view, stored), None

    def _rows(self, view: View, stored: Sequence[Any]) -> _Loaded:
        rows = {
            address: view.keys.row(address[0], kvs[0].key, kvs[0].value)
            for address, kvs in zip(self._addresses, stored, strict=True)
            if kvs
        }
        return _Loaded(view, rows)

    async def _settle(self, loaded: _Loaded) -> tuple[Settled, int]:
        view = loaded.view
        now = change_log.commit_time(self._cluster.clock.now(), view.counter.at, self._cluster.name)
        current = {
            address: await scans.record_of(view, row) if self._needs.get(address) else row.record
            for address, row in loaded.rows.items()
        }
        settled = settle(self._group, current, view.counter.version, now, latest_expiry=LAST_MOMENT)
        if addresses := unread(settled):
            values = {address: await scans.record_of(view, loaded.rows[address]) for address in addresses}
            settled = with_values(settled, values)
        return settled, now

    async def _write(self, loaded: _Loaded, settled: Settled, now: int) -> tuple[Outcome | None, _Loaded | None]:
        """Try to commit; returns the outcome, or what decides the next try, if it is known."""
        view, keys = loaded.view, loaded.view.keys
        check_version(settled.version)
        commit_id = secrets.token_bytes(16)
        base = view.counter.version
        rows = log.rows_of(settled.changes, base, settled.version, now, view.counter.log_size)
        counter = replace(
            view.counter, version=settled.version, at=now, log_size=rows[-1].size, writer=self._views.writer
        )
        draft = _Draft(keys, loaded.rows)
        for address, write in settled.writes.items():
            draft.write(address, write, now)
        for row in rows:
            draft.log(row, commit_id)
        reload = len(self._addresses) <= limits.ETCD_RELOADED_KEYS and not self._lost
        reads = [transactions.read(keys.data(*address)) for address in self._addresses] if reload else []
        reads.insert(0, transactions.read(keys.counter))
        reading = sum(len(keys.data(*address)) + _OPERATION_BYTES for address in self._addresses) if reload else 0
        await self._store_large(draft, limits.ETCD_TXN_BYTES - reading, now)
        operations = [*draft.operations(), transactions.put(keys.counter, layout.pack_counter(counter))]
        if len(operations) > transactions.MOST_OPERATIONS:
            raise _too_large(self._cluster.name, len(operations), draft.size)
        compare = [transactions.is_unchanged(keys.counter, view.counter_revision)]
        request = transactions.transaction(compare, operations, reads)
        attempt = _Try(commit_id, keys, view.counter_revision, committed(settled, base))
        self._lost.append(attempt)
        try:
            response = await self._cluster.call("Txn", request, self._seconds)
        except Failure as error:
            if not errors.is_lost(error):
                self._lost.remove(attempt)
            raise
        self._lost.remove(attempt)
        if response.succeeded:
            return attempt.outcome, None
        self._races += 1
        if not reload:
            return None, None
        newer, found = self._views.of(keys, response, self._arrived)
        return None, None if newer is None else self._rows(newer, [reply.kvs for reply in found])

    async def _store_large(self, draft: "_Draft", most: int, now: int) -> None:
        """Store the largest values before the commit, until the rest fits into it."""
        values = draft.largest_until(most)
        missing = {key: value for key, value in values.items() if (key, id(value)) not in self._chunks}
        if missing:
            stored = await large_values.store(self._cluster, draft.keys, missing, now, self._arrived)
            self._chunks.update({(key, id(missing[key])): chunks for key, chunks in stored.items()})
        draft.chunks = {key: self._chunks[key, id(value)] for key, value in values.items()}
        if draft.size > most:
            raise _too_large(self._cluster.name, len(draft.puts), draft.size)

    async def _pause_after_race(self) -> None:
        """Another process was faster: leave it some time, the more the more often that happens."""
        if self._loop.time() > self._arrived + self._cluster.patience:
            raise errors.lost_races(self._cluster.name)
        shortest, longest = limits.ETCD_RACE_PAUSES
        if self._races > 1:
            await asyncio.sleep(random.uniform(0, min(shortest * 2 ** min(self._races, 16), longest)))

    async def _pause_after(self, error: Any) -> None:
        """Wait before the next try.

        Raises:
            DatabaseError: Time is up, or a repeat would not help.
        """
        self._seconds = min(2 * self._seconds, limits.ETCD_LONGEST_TRY_SECONDS)
        try:
            await self._cluster.pause(error, self._arrived)
        except DatabaseError:
            if self._lost:
                raise errors.commit_unknown(self._cluster.name) from error
            raise


class _Draft:
    """The operations of a transaction. Values stay apart until it is known which of them go into chunks."""

    def __init__(self, keys: Keys, stored: dict[Address, StoredRow]) -> None:
        self.keys = keys
        self._stored = stored
        self._others: list[Any] = []
        self.puts: dict[bytes, tuple[Any, bytes]] = {}
        """By key of etcd: what packs the value into a row, and the value."""
        self.chunks: dict[bytes, Chunks] = {}
        self._fixed = 0

    def write(self, address: Address, write: Any, now: int) -> None:
        """Carry out what `settle` has decided about a key."""
        old = self._stored.get(address)
        before = None if old is None else old.record
        new = None
        if isinstance(write, PutRow):
            new = write.record
            if before is not None and not write.is_new_entry and before.is_alive(now):
                new = replace(new, created_at=before.created_at)
        elif isinstance(write, SetExpiry) and before is not None:
            new = replace(before, expires_at=write.expires_at)
        self._move_expiry(address, before, new)
        key = self.keys.data(*address)
        if old is not None and old.chunks is not None and not isinstance(write, SetExpiry):
            self._other(large_values.removal(self.keys, old.chunks), 64)
        if new is None:
            if old is not None:
                self._other(transactions.delete(key), len(key))
        elif isinstance(write, SetExpiry) and old is not None and old.chunks is not None:
            self._other(transactions.put(key, layout.pack_row(new, old.chunks)), len(key) + 64)
        else:
            self.puts[key] = (lambda chunks, record=new: layout.pack_row(record, chunks)), new.value

    def log(self, row: LogRow, commit_id: bytes) -> None:
        key = self.keys.log(row.version, row.part)
        self.puts[key] = (lambda chunks: layout.pack_log_row(row, commit_id, chunks)), row.changes

    def _move_expiry(self, address: Address, before: Any, new: Any) -> None:
        old_expiry = None if before is None else before.expires_at
        new_expiry = None if new is None else new.expires_at
        if old_expiry == new_expiry:
            return
        for moment, operation in ((old_expiry, transactions.delete), (new_expiry, None)):
            if moment is not None:
                key = self.keys.index(address[0], moment, address[1])
                self._other(operation(key) if operation else transactions.put(key, b""), len(key))

    def _other(self, operation: Any, size: int) -> None:
        self._others.append(operation)
        self._fixed += size + _OPERATION_BYTES

    @property
    def size(self) -> int:
        """About how many bytes the operations take."""
        values = sum(len(value) for key, (_, value) in self.puts.items() if key not in self.chunks)
        return self._fixed + values + sum(len(key) + 2 * _OPERATION_BYTES for key in self.puts)

    def largest_until(self, most: int) -> dict[bytes, bytes]:
        """The largest values, as many as must go for the rest to take no more than this many bytes."""
        size = self.size
        if size <= most:
            return {}
        taken: dict[bytes, bytes] = {}
        for key, (_, value) in sorted(self.puts.items(), key=lambda item: len(item[1][1]), reverse=True):
            if size <= most or len(value) < limits.ETCD_SMALLEST_CHUNKED_BYTES:
                break
            taken[key] = value
            size -= len(value)
        return taken

    def operations(self) -> list[Any]:
        puts = [transactions.put(key, pack(self.chunks.get(key))) for key, (pack, _) in self.puts.items()]
        return self._others + puts


def _slices(group: Sequence[Batch]) -> list[list[Batch]]:
    """The batches of a group, as many together as one transaction takes."""
    slices: list[list[Batch]] = [[]]
    operations = size = 0
    for batch in group:
        weight = batch.size + sum([2 * _key_bytes(one.key) + 4 * _OPERATION_BYTES for one in batch.mutations])
        is_full = (
            operations + batch.operations > limits.ETCD_SLICE_OPERATIONS or size + weight > limits.ETCD_TXN_BYTES // 2
        )
        if slices[-1] and is_full:
            slices.append([])
            operations = size = 0
        slices[-1].append(batch)
        operations += batch.operations
        size += weight
    return slices


def _key_bytes(key: Any) -> int:
    return len(key) if isinstance(key, bytes) else 4 * sum(map(len, key))


def _too_large(name: str, operations: int, size: int) -> InvalidArgument:
    return InvalidArgument(
        f"this batch is too large for one commit to {name}: {operations:,} writes with {size:,} bytes, values that are "
        f"stored apart not counted; {limits.ETCD_TXN_BYTES:,} bytes are allowed: write it in several batches"
    )
