"""Caches the rows that this process has written last: a group that sets them need not be read before it is written.

As long as the version counter is as the last own commit has left it, no one else has written. The next commit compares
that. Keys that are not in the cache are guessed to be absent, and each is compared, too. If a comparison fails, nothing
is written, and the reply brings what would have been read. Such a transaction costs as much as a commit, so wrong
guesses make later ones rarer.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import Address
from keyloft.engines.etcd.layout import StoredRow, StoreState
from keyloft.engines.etcd.views import RevisionView


class RowCache:
    """The store as the last own commit has left it, and rows in it without their values.

    There are two generations of them: the older one is forgotten when the newer one is full.
    """

    def __init__(self) -> None:
        self._view: RevisionView | None = None
        self._newer: dict[Address, StoredRow] = {}
        self._older: dict[Address, StoredRow] = {}
        self._groups_to_read = 0
        """How many groups with keys that are not in the cache are to be read."""
        self._next_groups_to_read = 1

    def find(
        self, addresses: Iterable[Address], arrived: float
    ) -> tuple[RevisionView, dict[Address, StoredRow], list[Address]] | None:
        """The store as it probably is, the rows at some keys, and the keys that are guessed to be absent.

        Returns:
            None if that is to be read.
        """
        if self._view is None:
            return None
        newer, older = self._newer, self._older
        found: dict[Address, StoredRow] = {}
        absent: list[Address] = []
        for address in addresses:
            if (row := newer.get(address) or older.get(address)) is None:
                absent.append(address)
            else:
                found[address] = row
        if absent and (self._groups_to_read or len(absent) > limits.ETCD_GUESSED_KEYS):
            self._groups_to_read = max(0, self._groups_to_read - 1)
            return None
        return replace(self._view, arrived=arrived), found, absent

    def read(self, rows: Mapping[Address, StoredRow]) -> None:
        """A group of sets was read: where its keys were absent, those of the next one may be, too."""
        if not rows:
            self._groups_to_read = 0

    def committed(
        self, before: RevisionView, counter: StoreState, revision: int, written: Mapping[Address, StoredRow | None]
    ) -> None:
        """An own commit has replaced what a view shows by this version counter and these rows, at this revision."""
        if self._view is None or before.counter_revision != self._view.counter_revision:
            self._newer, self._older = {}, {}  # another process has committed in between
        self._view = replace(before, counter=counter, counter_revision=revision, revision=revision)
        newer, older = self._newer, self._older
        for address, row in written.items():
            if row is None:
                newer.pop(address, None)
                older.pop(address, None)
            else:
                newer[address] = row
        if len(newer) > limits.ETCD_REMEMBERED_ROWS // 2:
            self._newer, self._older = {}, newer

    def confirm(self) -> None:
        """A group was committed by a guess."""
        self._next_groups_to_read = 1

    def refute(self) -> None:
        """A key was there, or another process has committed."""
        self._groups_to_read = self._next_groups_to_read
        self._next_groups_to_read = min(2 * self._next_groups_to_read, limits.ETCD_GROUPS_READ)
