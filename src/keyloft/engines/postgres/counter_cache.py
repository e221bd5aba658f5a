"""Caches the counters that this process has written last: a group that adds to them need not read them.

If another process has changed one meanwhile, the function that commits notices: it compares what the group was settled
from with what is stored. Then the group is read and settled again, and some of the next groups are read, too.
"""

from collections.abc import Iterable

from keyloft import limits
from keyloft.core.records import Address, Record
from keyloft.engines.postgres.drafts import Draft
from keyloft.engines.postgres.tables import LAYOUTS


class CounterCache:
    """The newest counters, two generations of them: the older one is forgotten when the newer one is full."""

    def __init__(self) -> None:
        self._newer: dict[Address, Record] = {}
        self._older: dict[Address, Record] = {}
        self._groups_to_read = 0
        """How many of the next groups are to be read, even if their counters are cached."""
        self._next_groups_to_read = 1

    def __len__(self) -> int:
        return len(self._newer.keys() | self._older.keys())

    def find(self, addresses: Iterable[Address]) -> dict[Address, Record] | None:
        """The counters from which a group of these keys can be settled; None if they are to be read."""
        if self._groups_to_read:
            self._groups_to_read -= 1
            return None
        newer, older = self._newer, self._older
        found: dict[Address, Record] = {}
        for address in addresses:
            if (record := newer.get(address) or older.get(address)) is None:
                return None
            found[address] = record
        return found or None

    def note(self, draft: Draft, base: int, now: int) -> None:
        """Keep the counters of a group that was committed after version `base`, at this time."""
        newer, older, decided = self._newer, self._older, draft.decided
        if not decided and not newer and not older:
            return
        for address, record in draft.written(base, now):
            if record is not None and decided.get(address) and _may_be_cached(address, record):
                newer[address] = record
            else:
                newer.pop(address, None)
                older.pop(address, None)
        if len(newer) > limits.POSTGRES_CACHED_COUNTERS // 2:
            self._newer, self._older = {}, newer

    def clear(self) -> None:
        """Forget all counters, because a long batch may have written any of them."""
        self._newer, self._older = {}, {}

    def confirm(self) -> None:
        """Note that a group that was settled from the cache was committed."""
        self._next_groups_to_read = 1

    def refute(self, addresses: Iterable[Address]) -> None:
        """Note that one of these counters was out of date: other processes write it, too."""
        for address in addresses:
            self._newer.pop(address, None)
            self._older.pop(address, None)
        self._groups_to_read = self._next_groups_to_read
        self._next_groups_to_read = min(2 * self._next_groups_to_read, limits.POSTGRES_GROUPS_READ)


def _may_be_cached(address: Address, record: Record) -> bool:
    """Whether a counter may be settled from memory: its number is short, and no people write to its table.

    Where people write, only a row's stamp says exactly when it was written, and the stamp would have to be read.
    """
    return LAYOUTS[address[0]].stamp is None and len(record.value) <= limits.POSTGRES_HEAD_BYTES
