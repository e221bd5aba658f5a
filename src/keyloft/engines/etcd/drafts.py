"""The writes of a commit: their size in a request, and which values are stored before it because they don't fit."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import LogRow
from keyloft.core.records import Address, Batch, Head, Record, Set
from keyloft.engines.commit.long_batches import divided
from keyloft.engines.commit.settle import PutRow, SetExpiry, Write
from keyloft.engines.etcd import large_values, layout, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.layout import Chunks, KeyLayout, StoredRow
from keyloft.engines.etcd.transactions import OPERATION_BYTES
from keyloft.errors import InvalidArgument

StoredChunks: TypeAlias = dict[tuple[bytes, bytes], Chunks]
"""Where values were stored before a commit, by key of etcd and value, so that a repeated try uses them again."""


def _too_large(cluster: EtcdCluster, operations: int, size: int, most: int) -> InvalidArgument:
    return InvalidArgument(
        f"this batch is too large for one commit to {cluster.name}: {operations:,} operations of {size:,} "
        f"bytes, values that are stored apart not counted; {most:,} bytes and {transactions.MOST_OPERATIONS:,} "
        "operations are allowed: write it in several batches"
    )


async def check_size(cluster: EtcdCluster, batch: Batch) -> None:
    """Refuse a batch that is too large whatever is stored, before its rows are read, which takes seconds.

    Raises:
        InvalidArgument: Its Sets alone are too large.
    """
    sizes: dict[Address, int] = {}
    for part in divided(batch):
        for mutation in part.mutations:
            address = mutation.space, mutation.key
            if type(mutation) is Set and not mutation.if_absent:
                key = mutation.key
                sizes[address] = len(key if isinstance(key, bytes) else "".join(key)) + 2 * OPERATION_BYTES
            else:
                sizes.pop(address, None)  # what becomes of it depends on what is stored
        await asyncio.sleep(0)
    size = sum(sizes.values())
    if size > limits.ETCD_TXN_BYTES or len(sizes) >= transactions.MOST_OPERATIONS:
        raise _too_large(cluster, len(sizes), size, limits.ETCD_TXN_BYTES)


class CommitDraft:
    """The operations of a transaction. Values are kept separately until it is known which of them go into chunks."""

    def __init__(self, keys: KeyLayout, stored: Mapping[Address, StoredRow]) -> None:
        """`stored` holds the rows under all keys that will be written, where there are any."""
        self.keys = keys
        self._stored = stored
        self._others: list[Any] = []
        self._others_bytes = 0
        self._puts: dict[bytes, tuple[Callable[[Chunks | None], bytes], bytes]] = {}
        """By key of etcd, the value, and the function that makes a row of it or of its chunks."""
        self._written: dict[Address, Record | None] = {}
        self.chunks: dict[bytes, Chunks] = {}
        """By key of etcd, the chunks of the values that were stored before the commit."""

    def write(self, address: Address, write: Write, now: int) -> None:
        """Add the operations for what `settle` has decided about a key."""
        old = self._stored.get(address)
        before = None if old is None else old.record
        new = None
        if isinstance(write, PutRow):
            new = write.record
            if before is not None and not write.is_new_entry and before.is_alive(now):
                new = replace(new, created_at=before.created_at)
        elif isinstance(write, SetExpiry) and before is not None:
            new = replace(before, expires_at=write.expires_at)
        self._written[address] = new
        self._move_expiry(address, before, new)
        key = self.keys.data(*address)
        if old is not None and old.chunks is not None and not isinstance(write, SetExpiry):
            self._other(large_values.removal(self.keys, old.chunks), 2 * len(self.keys.base))
        if new is None:
            if old is not None:
                self._other(transactions.delete(key), len(key))
        elif isinstance(write, SetExpiry) and old is not None and old.chunks is not None:
            self._other(transactions.put(key, layout.pack_row(new, old.chunks)), len(key) + OPERATION_BYTES)
        else:
            self._puts[key] = partial(layout.pack_row, new), new.value

    def log(self, row: LogRow, commit_id: bytes) -> None:
        """Add a row of the change log."""
        key = self.keys.log(row.version, row.part)
        self._puts[key] = partial(layout.pack_log_row, row, commit_id), row.changes

    def _move_expiry(self, address: Address, before: Record | None, new: Record | None) -> None:
        old_expiry = None if before is None else before.expires_at
        new_expiry = None if new is None else new.expires_at
        if old_expiry == new_expiry:
            return
        space, key = address
        if old_expiry is not None:
            removed = self.keys.index(space, old_expiry, key)
            self._other(transactions.delete(removed), len(removed))
        if new_expiry is not None:
            added = self.keys.index(space, new_expiry, key)
            self._other(transactions.put(added, b""), len(added))

    def _other(self, operation: Any, size: int) -> None:
        self._others.append(operation)
        self._others_bytes += size + OPERATION_BYTES

    async def store_large(
        self, cluster: EtcdCluster, most: int, now: int, arrived: float, before: StoredChunks | None = None
    ) -> None:
        """Store large values before the commit, and others until the rest of it takes no more than this many bytes.

        Raises:
            InvalidArgument: The rest is too large.
        """
        before = {} if before is None else before
        values = self._largest(most)
        size = self._size - sum(map(len, values.values()))
        operations = len(self._others) + len(self._puts)
        if size > most or operations >= transactions.MOST_OPERATIONS:
            raise _too_large(cluster, operations, size, most)
        missing = {key: value for key, value in values.items() if (key, value) not in before}
        if missing:
            stored = await large_values.store(cluster, self.keys, missing, now, arrived)
            before.update({(key, missing[key]): chunks for key, chunks in stored.items()})
        self.chunks = {key: before[key, value] for key, value in values.items()}

    @property
    def _size(self) -> int:
        """About how many bytes the operations take, with all values."""
        puts = sum([len(key) + len(value) + 2 * OPERATION_BYTES for key, (_, value) in self._puts.items()])
        return self._others_bytes + puts

    def _largest(self, most: int) -> dict[bytes, bytes]:
        """The values that go into chunks: all large ones, and as many others as it takes for the rest to fit."""
        size = self._size
        taken: dict[bytes, bytes] = {}
        if size > min(most, limits.ETCD_INLINE_BYTES):
            for key, (_, value) in sorted(self._puts.items(), key=lambda item: len(item[1][1]), reverse=True):
                longest = limits.ETCD_INLINE_BYTES if size <= most else limits.ETCD_SMALLEST_CHUNKED_BYTES - 1
                if len(value) <= longest:
                    break
                taken[key] = value
                size -= len(value)
        return taken

    def rows(self) -> dict[Address, StoredRow | None]:
        """The rows under all keys that were written, without their values; None for those that are removed."""
        return {address: self._row(address, new) for address, new in self._written.items()}

    def _row(self, address: Address, new: Record | None) -> StoredRow | None:
        if new is None:
            return None
        head = Head(new.key, b"", new.encoding, new.version, new.expires_at, new.created_at, new.updated_at)
        key = self.keys.data(*address)
        if key in self._puts:
            return StoredRow(head, self.chunks.get(key))
        return StoredRow(head, self._stored[address].chunks)  # only the expiry has changed

    def operations(self) -> list[Any]:
        """The operations of the transaction."""
        puts = [transactions.put(key, pack(self.chunks.get(key))) for key, (pack, _) in self._puts.items()]
        return self._others + puts
