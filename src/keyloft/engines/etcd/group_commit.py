"""Commits a group of batches: reads the rows that decide, settles, and writes if the version counter is unchanged.

A try whose reply was lost may be repeated: if it has landed, the repeat loses its comparison. A row of the change log
carries the id of the try that wrote it, so the writer finds there whether a lost try was carried out.
"""

import asyncio
import random
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import check_version
from keyloft.core.records import Address, Batch, Record, Set
from keyloft.engines import change_log
from keyloft.engines.commit.outcomes import Outcome, committed
from keyloft.engines.commit.settle import Settled, deciding, settle, unread, with_values
from keyloft.engines.etcd import errors, layout, row_cache, scans, transactions
from keyloft.engines.etcd.drafts import CommitDraft, StoredChunks
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.followed_commits import FollowedCommits
from keyloft.engines.etcd.layout import Chunks, KeyLayout, StoredRow
from keyloft.engines.etcd.row_cache import RowCache
from keyloft.engines.etcd.transactions import OPERATION_BYTES
from keyloft.engines.etcd.views import RevisionView, RevisionViews
from keyloft.engines.etcd.writer_queue import WriterQueue
from keyloft.errors import KeyloftError


class _Try(Struct, eq=False):
    """A transaction that was sent, and may have been carried out."""

    commit_id: bytes
    keys: KeyLayout
    counter_revision: int
    outcome: Outcome
    chunks: Collection[Chunks]

    @property
    def log_key(self) -> bytes:
        return self.keys.log(self.outcome.version_after)


class _DecidingRows(Struct, frozen=True):
    """What was read, or guessed, to decide a group."""

    view: RevisionView
    rows: dict[Address, StoredRow]
    absent: Sequence[Address] = ()
    """Keys that are guessed to be absent."""


class GroupCommit:
    """The commit of some batches as one transaction."""

    def __init__(
        self,
        views: RevisionViews,
        queue: WriterQueue,
        followed: FollowedCommits,
        cache: RowCache,
        group: Sequence[Batch],
        arrived: float,
    ) -> None:
        self._views = views
        self._queue = queue
        self._followed = followed
        self._cache = cache
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
        self._has_waited = False
        """Whether the member to be asked has just reported the newest commit."""
        self._seconds = limits.ETCD_TRY_SECONDS
        self._chunks: StoredChunks = {}

    async def run(self) -> Outcome:
        """Try until the batches are decided.

        Raises:
            KeyloftError: Nothing was written; or CommitUnknown.
        """
        landed: _Try | None = None
        try:
            decided = await self._decide()
            if isinstance(decided, Outcome):
                return decided
            landed = decided
            return landed.outcome
        except KeyloftError as error:
            if self._lost:
                raise errors.commit_unknown(self._cluster.name) from error
            raise
        finally:
            if self._chunks and not self._lost:
                await self._remove_unused(() if landed is None else landed.chunks)

    async def _decide(self) -> "Outcome | _Try":
        """The try that has landed, or the outcome if nothing is to be written."""
        loaded: _DecidingRows | None = None
        if self._queue.has_to_wait:
            await self._wait_for_turn()
        while True:
            try:
                loaded = loaded or self._remember()
                if loaded is None:
                    loaded, landed = await self._load()
                    if landed is not None:
                        return landed
                assert loaded is not None
                settled, now = await self._settle(loaded)
                if settled.version == loaded.view.counter.version:
                    if not self._lost:
                        return committed(settled, settled.version)
                    await self._prevent_lost(loaded.view)
                    loaded = None
                    continue
                landed, loaded = await self._write(loaded, settled, now)
                if landed is not None:
                    return landed
                if self._races and await self._has_paused_after_race():
                    loaded = None
            except Failure as error:
                loaded = None
                if not errors.is_compacted(error):
                    await self._pause_after(error)

    async def _wait_for_turn(self) -> None:
        """Wait until others have committed, and meanwhile read the rows that are not in the cache."""
        unknown = [] if self._needs or self._lost else self._cache.known(self._addresses)[1]
        if unknown and self._followed.is_live and self._cache.reads_first(unknown):
            reading = self._loop.create_task(self._read_ahead(unknown), name="keyloft turns")
            try:
                await self._queue.wait(self._arrived)
                await reading
            finally:
                reading.cancel()
        else:
            await self._queue.wait(self._arrived)
        self._has_waited = True

    async def _read_ahead(self, addresses: Sequence[Address]) -> None:
        """Read rows that are not in the cache; the watch reports what others write meanwhile."""
        revision, forgotten = self._cache.counter_revision, self._cache.forgotten
        some = addresses[: limits.ETCD_KEYS_PER_READ]

        def reads(keys: KeyLayout) -> list[Any]:
            return [transactions.read(keys.data(*address), serializable=True) for address in some]

        with suppress(KeyloftError):  # then they are read later
            view, found = await self._views.fetch(reads, self._arrived, serializable=True)
            rows = _rows(view, some, [reply.kvs for reply in found])
            self._cache.read(rows)
            if view.counter_revision >= revision:
                self._cache.learn(view, rows, some, forgotten)

    def _remember(self) -> _DecidingRows | None:
        """What decides a group of sets, from the cache, if no other process has written since it was up to date.

        Returns:
            None if the rows are to be read.
        """
        if self._needs or self._lost or not self._queue.knows_newest:
            return None
        found = self._cache.find(self._addresses, self._arrived)
        return None if found is None else _DecidingRows(*found)

    async def _load(self) -> tuple[_DecidingRows | None, _Try | None]:
        """Read what decides, or find out that a lost try has landed.

        Raises:
            Busy: Time is up, and the cache was newer each time, or had lost rows.
        """
        uses_cache = not self._needs and not self._lost
        # A group of sets may be decided by old rows: then its comparison fails, and the reply has the new ones.
        is_known_here = self._has_waited or (not self._races and self._queue.knows_newest)
        serializable = uses_cache and is_known_here
        self._has_waited = False
        while True:
            wanted = self._cache.known(self._addresses)[1] if uses_cache else self._addresses
            some = wanted[: limits.ETCD_KEYS_PER_READ]
            view, others, found = await self._read(some, uses_cache=uses_cache, serializable=serializable)
            for one, reply in zip(self._lost, others, strict=False):
                if reply.kvs and layout.commit_id_of(reply.kvs[0].value) == one.commit_id:
                    self._lost = []
                    return None, one
                if view.counter.generation != one.keys.generation:
                    raise errors.commit_unknown(self._cluster.name)
            if not uses_cache:
                break
            self._cache.catch_up(view, others)
            if self._cache.shows(view) and set(self._cache.known(self._addresses)[1]) <= set(wanted):
                break
            # Rows that were not read have left the cache, or were written meanwhile; or the member that was asked
            # lacks commits that the cache has, and may lack them for long.
            serializable = False
            if self._loop.time() > self._arrived + self._cluster.patience:
                raise errors.lost_races(self._cluster.name)
        # A try that compares an older counter can't be carried out any more.
        self._lost = [one for one in self._lost if one.counter_revision == view.counter_revision]
        stored = [reply.kvs for reply in found]
        stored += await view.gets([view.keys.data(*address) for address in wanted[len(some) :]])
        rows = _rows(view, wanted, stored)
        if uses_cache:
            if wanted:
                self._cache.read(rows)
            rows |= self._cache.known(self._addresses)[0]
        return _DecidingRows(view, rows), None

    async def _read(
        self, addresses: Sequence[Address], *, uses_cache: bool, serializable: bool
    ) -> tuple[RevisionView, list[Any], list[Any]]:
        """Read some rows; before them, what the cache lacks, or the rows of the log that lost tries would have."""

        def before(keys: KeyLayout) -> list[Any]:
            if uses_cache:
                return self._cache.news(keys, serializable=serializable)
            return [transactions.read(one.log_key) for one in self._lost]

        def reads(keys: KeyLayout) -> list[Any]:
            rows = [transactions.read(keys.data(*address), serializable=serializable) for address in addresses]
            return before(keys) + rows

        view, found = await self._views.fetch(reads, self._arrived, serializable=serializable)
        first = len(found) - len(addresses)
        return view, found[:first], found[first:]

    async def _settle(self, loaded: _DecidingRows) -> tuple[Settled, int]:
        view = loaded.view
        now = change_log.commit_time(self._cluster.clock.now(), view.counter.at, self._cluster.name)
        current = {address: row.record for address, row in loaded.rows.items()}
        current |= await self._values(loaded, [address for address in current if self._needs.get(address)])
        settled = settle(self._group, current, view.counter.version, now)
        if addresses := unread(settled):
            settled = with_values(settled, await self._values(loaded, addresses))
        return settled, now

    async def _values(self, loaded: _DecidingRows, addresses: Collection[Address]) -> dict[Address, Record]:
        """Rows with their values."""
        records = await scans.records_of(loaded.view, [loaded.rows[address] for address in addresses])
        return dict(zip(addresses, records, strict=True))

    async def _write(
        self, loaded: _DecidingRows, settled: Settled, now: int
    ) -> tuple[_Try | None, _DecidingRows | None]:
        """Try to commit; returns the try that has landed, or what decides the next try, if it is known."""
        view, keys = loaded.view, loaded.view.keys
        check_version(settled.version)
        commit_id = secrets.token_bytes(16)
        base = view.counter.version
        rows = change_log.rows_of(settled.changes, base, settled.version, now, view.counter.log_size)
        counter = replace(
            view.counter,
            version=settled.version,
            at=now,
            log_size=rows[-1].size,
            writer=self._views.writer,
            turn_left=0,
            queue=self._queue.after(view.counter, self._arrived, len(self._group)),
        )
        draft = CommitDraft(keys, loaded.rows)
        for address, write in settled.writes.items():
            draft.write(address, write, now)
        for row in rows:
            draft.log(row, commit_id)
        uses_cache = not self._needs and not self._lost and self._cache.shows(view)
        reading = sum([len(keys.data(*address)) + OPERATION_BYTES for address in self._addresses])
        reload = uses_cache or (
            len(self._addresses) <= limits.ETCD_RELOADED_KEYS
            and reading <= limits.ETCD_RELOADED_BYTES
            and not self._lost
        )
        reads = []
        if uses_cache:
            reading, reads = 0, self._cache.news(keys)
        elif reload:
            reads = [transactions.read(keys.data(*address)) for address in self._addresses]
        reads.insert(0, transactions.read(keys.counter))
        most = limits.ETCD_TXN_BYTES - (reading if reload else 0)
        await draft.store_large(self._cluster, most, now, self._arrived, self._chunks)
        operations = [*draft.operations(), transactions.put(keys.counter, layout.pack_state(counter))]
        written = draft.rows()
        if self._queue.others_write:
            operations += row_cache.note(view, settled.version, written)
        operations.append(self._queue.asking(keys, since=view.counter_revision))
        compare = [transactions.is_unchanged(keys.counter, view.counter_revision)]
        if loaded.absent:
            if len(operations) > transactions.FLAT:
                return None, None
            compare += [transactions.is_unchanged(keys.data(*address), 0) for address in loaded.absent]
        request = transactions.transaction(compare, operations, [*reads, self._queue.ask(keys)])
        if self._followed.revision > view.counter_revision:
            self._races += 1  # this try would lose: another commit was reported meanwhile
            return None, None
        attempt = _Try(commit_id, keys, view.counter_revision, committed(settled, base), draft.chunks.values())
        self._lost.append(attempt)
        try:
            response = await self._cluster.call("Txn", request, self._seconds)
        except Failure as error:
            if not errors.is_lost(error) or not errors.was_sent(error):
                self._lost.remove(attempt)
            raise
        self._lost.remove(attempt)
        if response.succeeded:
            self._queue.committed(response.header.revision, counter)
            self._queue.saw_asking(transactions.replies(response)[-1].kvs)
            self._cache.committed(view, counter, response.header.revision, written)
            if loaded.absent:
                self._cache.confirm()
            return attempt, None
        if loaded.absent:
            self._cache.refute()
        newer, found = self._views.of(keys, response, self._arrived)
        if newer is None or newer.counter_revision != view.counter_revision:
            self._races += 1
        if newer is None:  # a restore has replaced the store
            self._cache.clear()
            return None, None
        self._followed.saw(newer.counter_revision, newer.counter)
        self._queue.lost(newer.counter)
        if not reload:
            return None, None
        if uses_cache:
            if self._cache.catch_up(newer, found) and (known := self._cache.find(self._addresses, self._arrived)):
                return None, _DecidingRows(*known)
            return None, None
        return None, _DecidingRows(newer, _rows(newer, self._addresses, [reply.kvs for reply in found]))

    async def _prevent_lost(self, view: RevisionView) -> None:
        """Write the counter unchanged: a lost try, which compares its revision, can't be carried out any more."""
        compare = [transactions.is_unchanged(view.keys.counter, view.counter_revision)]
        same = transactions.put(view.keys.counter, layout.pack_state(view.counter))
        await self._cluster.call("Txn", transactions.transaction(compare, [same]), self._seconds)

    async def _remove_unused(self, used: Collection[Chunks]) -> None:
        """Remove chunks that the commit does not refer to after all; a sweep removes those that are left."""
        unused = {chunks.id for chunks in self._chunks.values()} - {chunks.id for chunks in used}
        removals = [transactions.delete(*self._views.keys.all_chunks(identity)) for identity in unused]
        if removals:
            with suppress(Failure, KeyloftError):
                await self._cluster.call("Txn", transactions.transaction((), removals), self._seconds)

    async def _has_paused_after_race(self) -> bool:
        """After a lost race, wait until this process is next, or for some time if races are lost often.

        Returns:
            Whether what decides may have changed.
        """
        if self._loop.time() > self._arrived + self._cluster.patience:
            raise errors.lost_races(self._cluster.name)
        if self._queue.has_to_wait:
            await self._wait_for_turn()
            return True
        shortest, longest = limits.ETCD_RACE_PAUSES
        if (beyond := self._races - limits.ETCD_FREE_RACES) > 0:
            await asyncio.sleep(random.uniform(0, min(shortest * 2 ** min(beyond, 16), longest)))
        return False

    async def _pause_after(self, error: Any) -> None:
        """Wait before the next try.

        Raises:
            DatabaseError: Time is up, or a repeat would not help.
        """
        self._seconds = min(2 * self._seconds, limits.ETCD_LONGEST_TRY_SECONDS)
        await self._cluster.pause(error, self._arrived)


def _rows(view: RevisionView, addresses: Iterable[Address], stored: Iterable[Any]) -> dict[Address, StoredRow]:
    return {
        address: view.keys.row(address[0], kvs[0].key, kvs[0].value)
        for address, kvs in zip(addresses, stored, strict=True)
        if kvs
    }
