"""Knows which rows and tables are locked: batches that need them wait, in their order, and all others go on."""

import asyncio
from collections.abc import Iterable, Sequence

from keyloft import limits
from keyloft.core.records import Address, Batch, Space


class LockedRows:
    """The keys and spaces whose rows and tables other clients have locked, and when to try them again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._locked: set[Address] = set()
        self.spaces: frozenset[Space] = frozenset()
        """The spaces whose tables are locked."""
        self._retry_at = 0.0
        self._pause = limits.POSTGRES_LOCKED_PAUSES[0]

    @property
    def is_due(self) -> bool:
        """Whether it is time to try the waiting batches again."""
        return self._loop.time() >= self._retry_at

    def hold(self, locked: Iterable[Address] = (), spaces: Iterable[Space] = ()) -> None:
        """Note that these rows, or the tables of these spaces, are locked."""
        longest = limits.POSTGRES_LOCKED_PAUSES[1]
        self._locked.update(locked)
        self.spaces |= frozenset(spaces)
        self._retry_at = self._loop.time() + self._pause
        self._pause = min(2 * self._pause, longest)

    def release(self) -> None:
        """Forget the locks, because the waiting batches are about to be tried."""
        self._locked.clear()
        self.spaces = frozenset()

    def forget(self) -> None:
        """Forget the locks and the pause, because no batch waits any more."""
        self.release()
        self._pause = limits.POSTGRES_LOCKED_PAUSES[0]

    def waits(self, group: Sequence[Batch]) -> list[bool]:
        """For each batch, whether it meets a lock, or shares a key with an earlier batch that waits for one."""
        if not self._locked and not self.spaces:
            return [False] * len(group)
        reached = set(self._locked)
        waits: list[bool] = []
        for batch in group:
            addresses = addresses_of(batch)
            waits.append(not reached.isdisjoint(addresses) or not self.spaces.isdisjoint(spaces_of(batch)))
            if waits[-1]:
                reached |= addresses
        return waits


def addresses_of(batch: Batch) -> set[Address]:
    """All keys of a batch, those of its checks included."""
    return {(each.space, each.key) for each in (*batch.mutations, *batch.checks)}


def spaces_of(batch: Batch) -> set[Space]:
    """The spaces of all keys of a batch, those of its checks included."""
    return {each.space for each in (*batch.mutations, *batch.checks)}
