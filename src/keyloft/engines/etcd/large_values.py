"""Values that are too large for a commit: they are stored before it, in chunks, and the commit refers to them."""

import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from keyloft import limits
from keyloft.core.slices import by_weight
from keyloft.engines.etcd import transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.layout import Chunks, KeyLayout

if TYPE_CHECKING:
    from keyloft.engines.etcd.views import RevisionView

_TIME_BYTES: Final = 8
_RANDOM_BYTES: Final = 7


async def store(
    cluster: EtcdCluster, keys: KeyLayout, values: Mapping[bytes, bytes], now: int, arrived: float
) -> dict[bytes, Chunks]:
    """Store the values of some keys of etcd, which a commit is about to write; returns where they are."""
    stored: dict[bytes, Chunks] = {}
    operations: list[Any] = []
    size = 0

    async def add(key: bytes, value: bytes) -> None:
        nonlocal size
        weight = len(key) + len(value) + transactions.OPERATION_BYTES
        if operations and (size + weight > limits.ETCD_TXN_BYTES or len(operations) == limits.ETCD_SLICE_OPERATIONS):
            await send()
        operations.append(transactions.put(key, value))
        size += weight

    async def send() -> None:
        nonlocal size
        await cluster.ask("Txn", transactions.transaction((), operations), arrived)
        operations.clear()
        size = 0

    for key, value in values.items():
        # It does not end with FF, so that there is a first key after all chunks of an id.
        identity = now.to_bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES) + b"\x00"
        await add(keys.chunk(identity, 0), key)
        pieces = range(0, len(value), limits.ETCD_CHUNK_BYTES)
        for number, first in enumerate(pieces, 1):
            await add(keys.chunk(identity, number), value[first : first + limits.ETCD_CHUNK_BYTES])
        stored[key] = Chunks(identity, len(pieces), len(value))
    if operations:
        await send()
    return stored


def removal(keys: KeyLayout, chunks: Chunks) -> Any:
    """The operation that removes a value."""
    return transactions.delete(*keys.all_chunks(chunks.id))


async def load(view: "RevisionView", wanted: Sequence[Chunks]) -> list[bytes | None]:
    """Values as a view shows them, many read at a time; None for a value of which chunks are missing."""
    values: list[bytes | None] = []
    for some in by_weight(wanted, lambda one: one.size, limits.ETCD_REPLY_BYTES):
        found = iter(
            await view.gets([view.keys.chunk(one.id, number) for one in some for number in range(1, one.number + 1)])
        )
        for one in some:
            value = b"".join([kv.value for kvs in islice(found, one.number) for kv in kvs])
            values.append(value if len(value) == one.size else None)
    return values


async def sweep(view: "RevisionView") -> int:
    """Remove old chunks that no row refers to; returns how many values. Younger ones may belong to a commit under way.

    A process that ends between storing a value and committing it leaves such chunks.
    """
    keys, removed = view.keys, 0
    latest = max(0, view.now - round(1000 * limits.ETCD_ORPHAN_SECONDS))
    start, _ = keys.chunk_range
    end = keys.chunk(latest.to_bytes(_TIME_BYTES), 0)
    async for page in view.pages(start, end, keys_only=True):
        identities = sorted({keys.chunk_id(kv.key) for kv in page})
        owners = await view.gets([keys.chunk(identity, 0) for identity in identities])
        rows = await view.gets([owner[0].value if owner else keys.chunk(b"", 0) for owner in owners])
        for identity, owner, row in zip(identities, owners, rows, strict=True):
            if row and identity in row[0].value:
                continue
            compare = [transactions.is_unchanged(owner[0].value, row[0].mod_revision if row else 0)] if owner else []
            request = transactions.transaction(compare, [transactions.delete(*keys.all_chunks(identity))])
            removed += (await view.cluster.ask("Txn", request)).succeeded
    return removed
