"""Caches the rows that were written last: a group that sets them need not be read before it is written.

As long as the version counter is as this process's last commit has left it, no other process has written. The next
commit compares that. While several processes write, each commit leaves a note of the rows that it wrote, and of the
revision of the counter that it replaced: so the others learn, without a gap, what has become of the rows in their
caches.

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


def note(view: RevisionView, version: int, written: Mapping[Address, StoredRow | None]) -> list[Any]:
    """What a commit leaves for other processes that write, so that they need not read the rows that it wrote.

    Args:
        view: The state that the commit replaces.
        version: The version of the commit.
        written: The rows. If there are many, no note is left: a process that finds none forgets its own rows.
    """
    if len(written) > limits.ETCD_NOTED_ROWS:
        return []
    packed = pack_written(view.counter_revision, written)
    if len(packed) > limits.ETCD_NOTE_BYTES:
        return []
    operations = [transactions.put(view.keys.written(version), packed)]
    every = limits.ETCD_NOTED_VERSIONS // 10
    if version // every > view.counter.version // every:
        old = view.keys.written(max(0, version - limits.ETCD_NOTED_VERSIONS))
        operations.append(transactions.delete(view.keys.written_range[0], old))
    return operations


class RowCache:
    """The store as it was last known, and rows in it without their values.

    There are two generations of them: the older one is forgotten when the newer one is full.
    """

    def __init__(self) -> None:
        self._view: RevisionView | None = None
        self._newer: dict[Address, StoredRow | bytes | None] = {}
        """The rows of own commits, and of others' commits by their notes; None for keys that are absent."""
        self._older: dict[Address, StoredRow | bytes | None] = {}
        self.forgotten = 0
        """How often rows were forgotten."""
        self._groups_to_read = 0
        """How many groups with keys that are not in the cache are to be read."""
        self._next_groups_to_read = 1

    def find(
        self, addresses: Iterable[Address], arrived: float
    ) -> tuple[RevisionView, dict[Address, StoredRow], list[Address]] | None:
        """The store as it probably is, the rows at some keys, and the keys that are guessed to be absent.

        Returns:
            None if the rows are to be read.
        """
        if self._view is None:
            return None
        found, absent = self.known(addresses)
        if absent and self.reads_first(absent):
            return None
        return replace(self._view, arrived=arrived), found, absent

    def reads_first(self, unknown: Sequence[Address]) -> bool:
        """Whether keys that are not in the cache are to be read instead of guessed."""
        reads = self._groups_to_read > 0 or len(unknown) > limits.ETCD_GUESSED_KEYS
        if reads:
            self._groups_to_read = max(0, self._groups_to_read - 1)
        return reads

    def known(self, addresses: Iterable[Address]) -> tuple[dict[Address, StoredRow], list[Address]]:
        """The rows in the cache at some keys, and the keys of which it knows nothing."""
        newer, older = self._newer, self._older
        found: dict[Address, StoredRow] = {}
        unknown: list[Address] = []
        for address in addresses:
            row = newer.get(address) or older.get(address)
            if row is not None:
                found[address] = row if isinstance(row, StoredRow) else row_without_value(address[1], row)
            elif address not in newer and address not in older:
                unknown.append(address)
        return found, unknown

    def read(self, rows: Mapping[Address, StoredRow]) -> None:
        """Learn from a group of sets that was read: if its keys were absent, those of the next group may be, too."""
        if not rows:
            self._groups_to_read = 0

    def committed(
        self, before: RevisionView, counter: StoreState, revision: int, written: Mapping[Address, StoredRow | None]
    ) -> None:
        """Take over an own commit: at this revision, it replaced a view by this version counter and these rows."""
        if self.counter_revision >= revision:
            return  # the watch was faster
        if self._view is None or before.counter_revision != self._view.counter_revision:
            self._forget()  # another process has committed in between
        self._view = replace(before, counter=counter, counter_revision=revision, revision=revision)
        self._put(written)

    def _put(self, written: Mapping[Address, StoredRow | bytes | None]) -> None:
        newer, older = self._newer, self._older
        for address, row in written.items():
            newer[address] = row
            if row is None:
                older.pop(address, None)
        if len(newer) > limits.ETCD_REMEMBERED_ROWS // 2:
            self._newer, self._older = {}, newer
            self.forgotten += 1

    def _forget(self) -> None:
        self._newer, self._older = {}, {}
        self.forgotten += 1

    @property
    def counter_revision(self) -> int:
        """The revision of the counter at which the rows are as they are in the cache."""
        return 0 if self._view is None else self._view.counter_revision

    def learn(
        self, view: RevisionView, rows: Mapping[Address, StoredRow], asked: Iterable[Address], forgotten: int
    ) -> None:
        """Add rows that were read while others committed.

        Args:
            view: The view from which they were read; it is not older than the cache was when the read began.
            rows: The rows that exist.
            asked: All keys that were read.
            forgotten: The attribute `forgotten` when the read began. If it is unchanged, the cache has all rows that
                were written since.
        """
        if self._view is None or forgotten != self.forgotten or view.keys.generation != self._view.keys.generation:
            return
        # The view may be newer than the cache: commits that the cache takes over next don't change these rows, or are
        # older than the view.
        self._put({address: rows.get(address) for address in self.known(asked)[1]})

    # Commits of others

    def shows(self, view: RevisionView) -> bool:
        """Whether the rows in the cache are as a view shows them."""
        return self._view is not None and self._view.counter_revision == view.counter_revision

    def news(self, keys: KeyLayout, *, serializable: bool = False) -> list[Any]:
        """The read of the notes since the cache was last up to date; none if the cache is empty."""
        if self._view is None:
            return []
        start, end = keys.written(self._view.counter.version + 1), keys.written_range[1]
        return [transactions.read(start, end, limit=limits.ETCD_NOTES_READ, serializable=serializable)]

    def catch_up(self, view: RevisionView, replies: Sequence[Any]) -> bool:
        """Take over what others have written until a view was read, together with `news`.

        Returns:
            Whether the rows in the cache are as the view shows them, or newer; if not, it has none now.
        """
        known = self._view
        if known is not None and known.keys.generation == view.keys.generation:
            revision = known.counter_revision
            if revision >= view.counter_revision:
                return True
            for note in [note for reply in replies for note in reply.kvs if note.mod_revision > revision]:
                replaced, written = unpack_written(note.value)
                if replaced != revision:
                    break
                self._put(written)
                revision = note.mod_revision
            if revision == view.counter_revision:
                self._view = view
                return True
        self._begin(view)
        return False

    def follow(self, revision: int, counter: StoreState, note: bytes | None) -> None:
        """Take over a reported commit: the counter that it has written at this revision, and its note."""
        view = self._view
        if view is None or counter.generation != view.keys.generation or revision <= view.counter_revision:
            return
        newer = replace(view, counter=counter, counter_revision=revision, revision=revision)
        replaced, written = (None, {}) if note is None else unpack_written(note)
        if replaced == view.counter_revision:
            self._view = newer
        else:
            self._begin(newer)
        self._put(written)

    def _begin(self, view: RevisionView) -> None:
        """Forget all rows, because it is not known what was written until a view was read."""
        self._forget()
        self._view = view
        self._groups_to_read = max(1, self._groups_to_read)  # what was in the cache is not absent

    def clear(self) -> None:
        self._forget()
        self._view = None

    def confirm(self) -> None:
        """Note that a guess was right: the group was committed."""
        self._next_groups_to_read = 1

    def refute(self) -> None:
        """Note that a guess was wrong: a key existed, or another process has committed."""
        self._groups_to_read = self._next_groups_to_read
        self._next_groups_to_read = min(2 * self._next_groups_to_read, limits.ETCD_GROUPS_READ)
