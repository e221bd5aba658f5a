"""Reads, loads, checks, backs up and compacts a store in etcd as a whole."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from keyloft import limits
from keyloft.core import maintenance
from keyloft.core.maintenance import Existing, Facts, Loaded, Progress, Snapshot, version_after_jump
from keyloft.core.records import Record, Space
from keyloft.core.slices import by_weight
from keyloft.engines import change_log, loading
from keyloft.engines.etcd import large_values, messages, setup, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.errors import Failure, details, explain, is_compacted, is_lost
from keyloft.engines.etcd.layout import FORMAT, KeyLayout, after_folder, generation_of, raw, store_prefix
from keyloft.engines.etcd.loads import CommittedLoad, GenerationLoad
from keyloft.engines.etcd.snapshots import EtcdSnapshot, explained
from keyloft.engines.etcd.views import RevisionView, RevisionViews
from keyloft.engines.sqlite.maintenance import save_as_file
from keyloft.errors import Busy, Unreachable

_ROW_BYTES: Final = 160
"""About how many bytes a row takes in a commit besides key and value: its head, its expiry, its change in the log."""
_ALARMS: Final = {
    messages.NOSPACE: "a member has used up its quota (alarm NOSPACE): writes are refused",
    messages.CORRUPT: "the data of a member differs from that of the others (alarm CORRUPT): replace that member",
}


class EtcdMaintenance:
    """A store in etcd as a whole."""

    @classmethod
    async def open(cls, cluster: EtcdCluster, *, make: bool) -> "EtcdMaintenance":
        """Connect to a cluster; `make` makes the store if there is none.

        Raises:
            DatabaseError: The store can't be used; the message says why.
        """
        views = RevisionViews(cluster)
        try:
            await (setup.make_store if make else setup.check_store)(views)
        except BaseException:
            await cluster.aclose()
            raise
        return cls(views)

    def __init__(self, views: RevisionViews) -> None:
        self._views = views
        self._cluster = views.cluster

    async def facts(self) -> Facts:
        statuses = (await self._cluster.statuses()).values()
        release = max((status.version for status in statuses), default="")
        return Facts(f"etcd {release}", str(FORMAT), max((status.db_size for status in statuses), default=0), None)

    @asynccontextmanager
    async def snapshot(self, *, held: bool = True) -> AsyncIterator[EtcdSnapshot]:
        view = await self._view()
        yield EtcdSnapshot(view) if held else EtcdSnapshot(view, self._view)

    async def load(
        self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing, *, is_copy: bool = False
    ) -> Loaded:
        """Store rows; if they don't fit into one commit of etcd, in several commits, one after the other."""
        loaded = Loaded()
        for some in by_weight(rows, _weight, limits.ETCD_TXN_BYTES - _ROW_BYTES):
            loaded.add(await self._load(some, version, existing, is_copy=is_copy))
        return loaded

    async def _load(
        self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing, *, is_copy: bool
    ) -> Loaded:
        deadline = asyncio.get_running_loop().time() + limits.BUSY_SECONDS
        while True:
            view = await self._view()
            now = change_log.commit_time(self._cluster.clock.now(), view.counter.at, self._cluster.name)
            transaction = CommittedLoad(view, now)
            loaded, after = await loading.load(transaction, rows, version, existing, is_copy=is_copy)
            if after is None or await transaction.commit(after):
                return loaded
            if asyncio.get_running_loop().time() > deadline:
                raise Busy(f"{self._cluster.name}: other processes were faster each time; try again")

    async def become(
        self,
        source: Snapshot,
        progress: Progress,
        *,
        expected_version: int | None = None,
        with_history: bool = False,
    ) -> int:
        """Fill another generation of keys, and let the counter name that one: readers see all of it or nothing."""
        view = await self._view()
        transaction = await GenerationLoad.begin(view)
        try:
            done, version = await loading.replace_all(
                transaction, source, progress, expected_version=expected_version, with_history=with_history
            )
            while True:
                maintenance.check_unchanged(view.counter.version, expected_version)
                if await transaction.commit(version, view):
                    break
                view = await self._view()
                if version <= view.counter.version:  # another restore was faster
                    version = version_after_jump(view.counter.version)
                    await loading.restart_history(transaction, version)
        except BaseException:
            await self._remove(transaction.keys, transactions.exists(transaction.keys.under_way))
            raise
        await self._remove(view.keys)
        return done

    async def restart_history(self) -> int:
        while True:
            view = await self._view()
            version = version_after_jump(view.counter.version)
            transaction = CommittedLoad(view, self._cluster.clock.now())
            await loading.restart_history(transaction, version)
            if await transaction.commit(version):
                return version

    async def damage(self) -> list[str]:
        """Alarms of the cluster, and entries that the index of expiries does not match."""
        alarms = [_ALARMS[alarm.alarm] for alarm in await self._alarms() if alarm.alarm in _ALARMS]
        view = await self._view()
        return alarms + await explained(view, self._unmatched(view))

    async def _unmatched(self, view: RevisionView) -> list[str]:
        found: list[str] = []
        for space in Space:
            indexed, wrong = 0, 0
            async for page in view.pages(*view.keys.index_range(space)):
                due = [view.keys.expiry_of(space, kv.key) for kv in page]
                stored = await view.gets([view.keys.data(space, key) for _, key in due])
                for (moment, _), kvs in zip(due, stored, strict=True):
                    row = view.keys.row(space, kvs[0].key, kvs[0].value) if kvs else None
                    wrong += row is None or row.record.expires_at != moment
                indexed += len(page)
            expiring = 0
            async for page in view.pages(*view.keys.space_range(space)):
                rows = [view.keys.row(space, kv.key, kv.value) for kv in page]
                expiring += sum(row.record.expires_at is not None for row in rows)
            if wrong or indexed != expiring:
                found.append(f"{space.value}: the index of expiries does not match the entries")
        return found

    async def backup(self, target: str, progress: Progress) -> None:
        async with self.snapshot() as snapshot:
            await save_as_file(snapshot, target, progress)

    async def compact(self) -> None:
        """Remove what nothing refers to, then old revisions, and let each member give the space back.

        Revisions belong to the whole cluster: another program that reads old revisions of its own keys loses them, too.

        Raises:
            Unreachable: Some members did not answer; all others have been compacted.
        """
        view = await self._view()
        await explained(view, large_values.sweep(view))
        await explained(view, self._remove_old_generations(view))
        # A process that misses these notes reads rows before it replaces them.
        notes = [view.keys.written_range, *view.keys.former_written_ranges]
        removals = [transactions.delete(*found) for found in notes]
        await self._cluster.ask("Txn", transactions.transaction((), removals))
        silent: list[str] = []
        try:
            await self._forget_revisions(view.revision)
            for member in self._cluster.members:  # one after the other: a member does not answer meanwhile
                try:
                    await self._cluster.call(
                        "Defragment", messages.DefragmentRequest(), limits.ETCD_COMPACT_SECONDS, member
                    )
                except Failure as error:
                    if not is_lost(error):
                        raise
                    silent.append(f"{member.endpoint} ({details(error)})")
            # If space is still missing, the next write raises the alarm again.
            for alarm in await self._alarms():
                if alarm.alarm == messages.NOSPACE:
                    lifted = messages.AlarmRequest(
                        action=messages.DEACTIVATE, member_id=alarm.member_id, alarm=alarm.alarm
                    )
                    await self._cluster.call("Alarm", lifted, limits.ETCD_TRY_SECONDS)
        except Failure as error:
            raise explain(self._cluster.name, error) from error
        if silent:
            raise Unreachable(
                f"{self._cluster.name} has been compacted, but these members did not answer, and have not given their "
                f"space back: {', '.join(silent)}; compact again once they run"
            )

    async def _forget_revisions(self, revision: int) -> None:
        compaction = messages.CompactionRequest(revision=revision, physical=True)
        try:
            await self._cluster.call("Compact", compaction, limits.ETCD_COMPACT_SECONDS)
        except Failure as error:
            if not is_compacted(error):  # already compacted, by another process, or because nothing was written since
                raise

    async def aclose(self) -> None:
        await self._cluster.aclose()

    async def _alarms(self) -> Sequence[Any]:
        alarms: Sequence[Any] = (await self._cluster.ask("Alarm", messages.AlarmRequest())).alarms
        return alarms

    async def _view(self) -> RevisionView:
        view, _ = await self._views.fetch()
        return view

    async def _remove(self, keys: KeyLayout, *conditions: Any) -> None:
        """Remove all keys of a generation, if these comparisons hold."""
        removals = [transactions.delete(*found) for found in keys.own_ranges]
        await self._cluster.ask("Txn", transactions.transaction(conditions, removals))

    async def _remove_old_generations(self, view: RevisionView) -> None:
        """Remove the rows of an interrupted restore, unless another process commits meanwhile."""
        is_current = transactions.is_unchanged(view.keys.counter, view.counter_revision)
        prefix = self._cluster.address.prefix
        start, end = store_prefix(prefix)
        latest = view.now - round(1000 * limits.ETCD_ORPHAN_SECONDS)
        while kvs := (await view.range(start, end, limit=1, keys_only=True)).kvs:
            generation = generation_of(prefix, kvs[0].key)
            if generation is None:
                is_counter = kvs[0].key == view.keys.counter
                start = view.keys.written_range[1] if is_counter else after_folder(prefix, kvs[0].key)
                continue
            keys = KeyLayout(prefix, generation)
            if generation != view.keys.generation and generation < latest:
                await self._remove(keys, is_current)
            start = keys.folder_end


def _weight(row: tuple[Space, Record]) -> int:
    """About how many bytes a row takes in a commit; a large value is stored before it."""
    space, record = row
    return 2 * len(raw(space, record.key)) + _ROW_BYTES + min(len(record.value), limits.ETCD_SMALLEST_CHUNKED_BYTES)
