"""Caches the rows that were written last: a group that sets them need not be read before it is written.

As long as the version counter is as the last own commit has left it, no one else has written. The next commit compares
that. While several processes write, each commit leaves a note of the rows that it wrote, and of the revision of the
counter that it replaced: so the others learn, without a gap, what has become of the rows in their caches.

Keys that are not in the cache are guessed to be absent, and each is compared, too. If a comparison fails, nothing is
written. Such a transaction costs as much as a commit, so wrong guesses make later ones rarer.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import Address
from keyloft.engines.etcd import transactions
from keyloft.engines.etcd.layout import (
    KeyLayout,
    StoredRow,
    StoreState,
    pack_written,
    row_without_value,
    unpack_written,
)
from keyloft.engines.etcd.views import RevisionView


def note(view: RevisionView, version: int, written: Mapping[Address, StoredRow | None], *, is_first: bool) -> list[Any]:
    """What a commit leaves for other processes that write, so that they need not read the rows that it wrote.

    Args:
        view: What it replaces.
        version: That of the commit.
        written: The rows; a process that finds no note of a commit forgets its own rows, so many may be left out.
        is_first: Whether another process made the commit before: old notes are then removed, and now and then.
    """
    if len(written) > limits.ETCD_NOTED_ROWS:
        return []
    packed = pack_written(view.counter_revision, written)
    if len(packed) > limits.ETCD_NOTE_BYTES:
        return []
    operations = [transactions.put(view.keys.written(version), packed)]
    if is_first or version // limits.ETCD_NOTED_VERSIONS > view.counter.version // limits.ETCD_NOTED_VERSIONS:
        old = view.keys.written(max(0, version - limits.ETCD_NOTED_VERSIONS))
        operations.append(transactions.delete(view.keys.written_range[0], old))
    return operations


class RowCache:
    """The store as it was last known, and rows in it without their values.

    There are two generations of them: the older one is forgotten when the newer one is full.
    """

    def __init__(self) -> None:
        self._view: RevisionView | None = None
        self._newer: dict[Address, StoredRow | bytes] = {}
        """Own rows, and those of others as their notes have them."""
        self._older: dict[Address, StoredRow | bytes] = {}
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
        found, absent = self.known(addresses)
        if absent and (self._groups_to_read or len(absent) > limits.ETCD_GUESSED_KEYS):
            self._groups_to_read = max(0, self._groups_to_read - 1)
            return None
        return replace(self._view, arrived=arrived), found, absent

    def known(self, addresses: Iterable[Address]) -> tuple[dict[Address, StoredRow], list[Address]]:
        """The rows in the cache at some keys, and the keys that have none there."""
        newer, older = self._newer, self._older
        found: dict[Address, StoredRow] = {}
        others: list[Address] = []
        for address in addresses:
            if (row := newer.get(address) or older.get(address)) is None:
                others.append(address)
            else:
                found[address] = row if isinstance(row, StoredRow) else row_without_value(address[1], row)
        return found, others

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
        self._put(written)

    def _put(self, written: Mapping[Address, StoredRow | bytes | None]) -> None:
        newer, older = self._newer, self._older
        for address, row in written.items():
            if row is None:
                newer.pop(address, None)
                older.pop(address, None)
            else:
                newer[address] = row
        if len(newer) > limits.ETCD_REMEMBERED_ROWS // 2:
            self._newer, self._older = {}, newer

    # Commits of others

    def shows(self, view: RevisionView) -> bool:
        """Whether the rows in the cache are as a view shows them."""
        return self._view is not None and self._view.counter_revision == view.counter_revision

    def news(self, keys: KeyLayout, *, serializable: bool = False) -> list[Any]:
        """The read that tells what was written since the cache was last up to date; none if it is empty."""
        if self._view is None:
            return []
        start, end = keys.written(self._view.counter.version + 1), keys.written_range[1]
        return [transactions.read(start, end, limit=limits.ETCD_NOTES_READ, serializable=serializable)]

    def catch_up(self, view: RevisionView, replies: Sequence[Any]) -> bool:
        """Take over what others have written until a view was read, together with `news`.

        Returns:
            Whether the rows in the cache are as the view shows them; if not, it is empty now.
        """
        known = self._view
        if known is not None and known.keys.generation == view.keys.generation:
            revision = known.counter_revision
            for note in [note for reply in replies for note in reply.kvs]:
                replaced, written = unpack_written(note.value)
                if replaced != revision:
                    break
                self._put(written)
                revision = note.mod_revision
            if revision == view.counter_revision:
                self._view = view
                return True
        self.clear()
        return False

    def clear(self) -> None:
        self._view, self._newer, self._older = None, {}, {}

    def confirm(self) -> None:
        """A group was committed by a guess."""
        self._next_groups_to_read = 1

    def refute(self) -> None:
        """A key was there, or another process has committed."""
        self._groups_to_read = self._next_groups_to_read
        self._next_groups_to_read = min(2 * self._next_groups_to_read, limits.ETCD_GROUPS_READ)
