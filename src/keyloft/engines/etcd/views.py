"""Reads from one revision of etcd, together with the version counter at that revision."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.engines.etcd import large_values, transactions
from keyloft.engines.etcd.cluster import EtcdCluster
from keyloft.engines.etcd.layout import Chunks, KeyLayout, StoreState, unpack_state
from keyloft.engines.etcd.messages import RangeRequest
from keyloft.errors import DatabaseError, Undecodable


class RevisionView(Struct, frozen=True):
    """A store at one revision, which can be read until etcd compacts it."""

    cluster: EtcdCluster
    keys: KeyLayout
    counter: StoreState
    counter_revision: int
    """The revision that wrote the counter, which a commit compares."""
    revision: int
    now: int
    """The time by which reads decide what has expired: never before the last commit, even if the clock is."""
    arrived: float
    """When the caller's patience began."""

    async def range(self, start: bytes, end: bytes, **options: Any) -> Any:
        """Read a range of keys.

        Raises:
            Failure: The revision is compacted.
        """
        request = RangeRequest(key=start, range_end=end, revision=self.revision, **options)
        return await self.cluster.ask("Range", request, self.arrived)

    async def pages(self, start: bytes, end: bytes, limit: int | None = None, **options: Any) -> AsyncIterator[Any]:
        """All keys of a range with their values, or the first ones, page by page."""
        left = limit
        while start < end and left != 0:
            rows = limits.ETCD_PAGE_ROWS if left is None else min(left, limits.ETCD_PAGE_ROWS)
            reply = await self.range(start, end, limit=rows, **options)
            if reply.kvs:
                yield reply.kvs
                start = reply.kvs[-1].key + b"\x00"
            if not reply.more:
                return
            left = None if left is None else left - len(reply.kvs)

    async def gets(self, keys: Sequence[bytes]) -> list[Any]:
        """The stored pair of each key: a list of one or none."""
        found: list[Any] = []
        for first in range(0, len(keys), limits.ETCD_KEYS_PER_READ):
            some = keys[first : first + limits.ETCD_KEYS_PER_READ]
            request = transactions.lookups(some, self.revision)
            found += transactions.looked_up(await self.cluster.ask("Txn", request, self.arrived))
        return found

    async def values(self, chunks: Sequence[Chunks]) -> list[bytes | None]:
        """Values that are stored in chunks; None for one that is not whole."""
        return await large_values.load(self, chunks) if chunks else []

    def damaged(self) -> Undecodable:
        return Undecodable(f"{self.cluster.name}: chunks of a large value are missing: run `keyloft check`")


class RevisionViews:
    """Makes views of a store, and knows its current generation."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self.cluster = cluster
        self.keys = KeyLayout(cluster.address.prefix, 0)
        self.writer = secrets.token_hex(8)
        """The name of this engine as a writer."""

    async def fetch(
        self,
        operations: Callable[[KeyLayout], Sequence[Any]] = lambda keys: (),
        arrived: float | None = None,
        *,
        serializable: bool = False,
    ) -> tuple[RevisionView, list[Any]]:
        """The newest view, and the replies to some reads from it; in one trip, unless the generation has changed.

        Args:
            operations: The reads.
            arrived: When the caller's patience began, by the event loop's time; now if left out.
            serializable: Whether the member that is asked answers from what it has, without asking others. It has what
                this engine has committed through it, but perhaps not yet what others have. The reads must be so, too.

        Raises:
            DatabaseError: No member answered in time, or the prefix holds no store.
        """
        began = asyncio.get_running_loop().time() if arrived is None else arrived
        while True:
            keys = self.keys
            request = transactions.transaction(
                (), [transactions.read(keys.counter, serializable=serializable), *operations(keys)]
            )
            view, found = self.of(keys, await self.cluster.ask("Txn", request, began), began)
            if view is not None:
                return view, found

    async def look_up(
        self, wanted: Callable[[KeyLayout], Sequence[bytes]], arrived: float
    ) -> tuple[RevisionView, list[Any]]:
        """The newest view, and the stored pair of each key in it: a list of one or none. As `fetch`, but faster.

        Raises:
            DatabaseError: No member answered in time, or the prefix holds no store.
        """
        while True:
            keys = self.keys
            request = transactions.lookups([keys.counter, *wanted(keys)])
            response = await self.cluster.ask("Txn", request, arrived)
            [counter, *found] = transactions.looked_up(response)
            view = self._view(keys, counter, response.header.revision, arrived)
            if view is not None:
                return view, found

    def of(self, keys: KeyLayout, response: Any, arrived: float) -> tuple[RevisionView | None, list[Any]]:
        """The view that the reply to a transaction shows, which has read the counter first, and the other replies.

        The view is None if the store has another generation than these keys.
        """
        [counter, *found] = transactions.replies(response)
        view = self._view(keys, counter.kvs, response.header.revision, arrived)
        return view, [] if view is None else found

    def _view(self, keys: KeyLayout, found: Sequence[Any], revision: int, arrived: float) -> RevisionView | None:
        """The view at a revision, with the counter that was found there; None if the generation has changed."""
        if not found:
            raise DatabaseError(
                f"{self.cluster.name}: the key {keys.counter.decode()} is gone, so the last version is not known; "
                "restore a backup"
            )
        [stored] = found
        counter = unpack_state(self.cluster.name, stored.value)
        if counter.generation != keys.generation:
            self.keys = KeyLayout(self.cluster.address.prefix, counter.generation)
            return None
        now = max(self.cluster.clock.now(), counter.at)
        return RevisionView(self.cluster, keys, counter, stored.mod_revision, revision, now, arrived)
