"""The transactions in which operators' commands store rows with their versions and times."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import LogRow
from keyloft.core.records import Address, Key, Record, Space
from keyloft.engines.commit.settle import PutRow
from keyloft.engines.etcd import layout, scans, transactions
from keyloft.engines.etcd.drafts import CommitDraft
from keyloft.engines.etcd.layout import KeyLayout, StoredRow, StoreState
from keyloft.engines.etcd.snapshots import explained
from keyloft.engines.etcd.views import RevisionView
from keyloft.errors import Busy


class CommittedLoad:
    """Rows that are stored by one commit, if no other process commits meanwhile."""

    def __init__(self, view: RevisionView, now: int) -> None:
        self._view = view
        self.version = view.counter.version
        self.now = now
        self.log_size = view.counter.log_size
        self._rows: dict[Address, StoredRow] = {}
        self._draft = CommitDraft(view.keys, self._rows)
        self._counter = replace(view.counter, at=now, writer="")
        self._cleared: list[Any] = []

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        view, keys = self._view, list({row.key for row in rows})
        found = await explained(view, view.gets([view.keys.data(space, key) for key in keys]))
        stored = {
            key: view.keys.row(space, kvs[0].key, kvs[0].value) for key, kvs in zip(keys, found, strict=True) if kvs
        }
        self._rows.update({(space, key): row for key, row in stored.items()})
        records = await explained(view, scans.records_of(view, list(stored.values())))
        return dict(zip(stored, records, strict=True))

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        for row in rows:
            self._draft.write((space, row.key), PutRow(row, is_new_entry=True), self.now)

    async def clear(self) -> None:
        raise NotImplementedError("all rows are replaced by another generation")

    async def log(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            self._draft.log(row, layout.NO_COMMIT)
        self._counter = replace(self._counter, log_size=rows[-1].size)

    async def clear_log(self) -> None:
        keys = self._view.keys
        self._cleared = [transactions.delete(keys.log_range[0], keys.log(self.version + 1))]

    async def name_store(self, store_id: str) -> None:
        self._counter = replace(self._counter, store_id=store_id)

    async def commit(self, version: int) -> bool:
        """Store all rows; returns False, and stores nothing, if another process has committed first."""
        view, loop = self._view, asyncio.get_running_loop()
        await self._draft.store_large(view.cluster, limits.ETCD_TXN_BYTES, self.now, loop.time())
        counter = layout.pack_state(replace(self._counter, version=version))
        operations = [*self._cleared, *self._draft.operations(), transactions.put(view.keys.counter, counter)]
        compare = [transactions.is_unchanged(view.keys.counter, view.counter_revision)]
        # Repeated after a lost reply, the transaction fails its comparison; the next try then meets its own rows, and
        # keeps them.
        request = transactions.transaction(compare, operations)
        return bool((await view.cluster.ask("Txn", request)).succeeded)


class GenerationLoad:
    """Rows that are stored below another generation, which then replaces the current one as a whole."""

    @classmethod
    async def begin(cls, view: RevisionView) -> "GenerationLoad":
        """Take the number of a generation that no other restore uses."""
        owner = secrets.token_bytes(16)
        generation = max(view.counter.generation + 1, view.now)
        while not await _take(view, keys := KeyLayout(view.cluster.address.prefix, generation), owner):
            generation += 1
        return cls(view, keys)

    def __init__(self, view: RevisionView, keys: KeyLayout) -> None:
        self._cluster = view.cluster
        self.keys = keys
        self.version = view.counter.version
        self.now = view.cluster.clock.now()
        self.log_size = 0
        self._store_id = view.counter.store_id
        self._at = self.now

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        return {}

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        for first in range(0, len(rows), limits.ETCD_KEYS_PER_READ):
            draft = CommitDraft(self.keys, {})
            for row in rows[first : first + limits.ETCD_KEYS_PER_READ]:
                draft.write((space, row.key), PutRow(row, is_new_entry=True), self.now)
            await self._store(draft)

    async def clear(self) -> None:
        """Does nothing, because a new generation has no rows."""

    async def log(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            draft = CommitDraft(self.keys, {})
            draft.log(row, layout.NO_COMMIT)
            await self._store(draft)
        self.log_size, self._at = rows[-1].size, rows[-1].at

    async def clear_log(self) -> None:
        """Remove the log of this generation: a new one has none, unless its first version was too low."""
        await self._send([transactions.delete(*self.keys.log_range)])

    async def name_store(self, store_id: str) -> None:
        self._store_id = store_id

    async def commit(self, version: int, view: RevisionView) -> bool:
        """Replace the generation of a view; returns False if another process has committed since.

        Raises:
            Busy: A compaction has removed the rows, because it took this restore for an abandoned one.
        """
        counter = StoreState(
            version=version,
            at=self._at,
            log_size=self.log_size,
            generation=self.keys.generation,
            store_id=self._store_id,
        )
        compare = [transactions.is_unchanged(view.keys.counter, view.counter_revision)]
        operations = [
            transactions.put(view.keys.counter, layout.pack_state(counter)),
            transactions.delete(self.keys.under_way),
        ]
        request = transactions.transaction(
            [*compare, transactions.exists(self.keys.under_way)], operations, [transactions.read(self.keys.under_way)]
        )
        response = await self._cluster.ask("Txn", request)
        if response.succeeded:
            return True
        [under_way] = transactions.replies(response)
        if not under_way.kvs:
            current = await self._cluster.ask(
                "Txn", transactions.transaction((), [transactions.read(view.keys.counter)])
            )
            [reply] = transactions.replies(current)
            if layout.unpack_state(self._cluster.name, reply.kvs[0].value).generation == self.keys.generation:
                return True  # an earlier try was carried out, and its reply lost
            raise Busy(f"{self._cluster.name}: a compaction removed what was restored so far: try again")
        return False

    async def _store(self, draft: CommitDraft) -> None:
        loop = asyncio.get_running_loop()
        await draft.store_large(self._cluster, limits.ETCD_TXN_BYTES, self.now, loop.time())
        await self._send(draft.operations())

    async def _send(self, operations: list[Any]) -> None:
        await self._cluster.ask("Txn", transactions.transaction((), operations))


async def _take(view: RevisionView, keys: KeyLayout, owner: bytes) -> bool:
    """Mark a generation as this owner's; returns False if it can't be: another restore fills it, or has filled it."""
    reads = [transactions.read(keys.under_way), transactions.read(keys.counter)]
    request = transactions.transaction(
        [transactions.is_unchanged(keys.under_way, 0)], [transactions.put(keys.under_way, owner), *reads], reads
    )
    [*_, marked, counter] = transactions.replies(await view.cluster.ask("Txn", request))
    if marked.kvs[0].value != owner:  # by its value, because a request whose reply was lost is repeated
        return False
    if layout.unpack_state(view.cluster.name, counter.kvs[0].value).generation != keys.generation:
        return True
    # Another restore has filled it meanwhile, and removed its own mark.
    await view.cluster.ask("Txn", transactions.transaction((), [transactions.delete(keys.under_way)]))
    return False
