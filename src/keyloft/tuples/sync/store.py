"""The tuple store for threads and scripts: every method of `Store` and `Atomic`, run to its end.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import overload

from keyloft.core.closing import SyncClosing
from keyloft.core.drivers import LoopThread
from keyloft.core.driving import Driven
from keyloft.core.keys import KeyLike, TupleKey
from keyloft.tuples.atomic import _MISSING, Atomic, CommitResult
from keyloft.tuples.entries import Entry
from keyloft.tuples.store import Entries, K, Store
from keyloft.tuples.sync.closing import close_store
from keyloft.tuples.sync.lists import SyncListing, SyncWatching
from keyloft.tuples.sync.loop_side import LoopSide


class SyncAtomic(Driven[Atomic]):
    """Collects checks and writes; `commit` writes all of it or nothing.

    Example:
        entry = kv.get(("stock", "apples"))
        done = kv.atomic().check(entry).set(entry.key, entry.value - 1).sum(("sold",), 1).commit()
        if not done.ok:
            print("changed meanwhile:", done.conflicts)
    """

    @overload
    def check(self, entry: Entry, /) -> "SyncAtomic": ...
    @overload
    def check(self, key: KeyLike, /, versionstamp: int | None) -> "SyncAtomic": ...
    def check(self, at: Entry | KeyLike, /, versionstamp: int | None = _MISSING) -> "SyncAtomic":
        """Commit only if the key's versionstamp is still this one; None: only if nothing is stored there."""
        self._untyped.check(at, versionstamp)
        return self

    def set(self, key: KeyLike, value: object, *, expire_in: float | timedelta | None = None) -> "SyncAtomic":
        """Store a value; without `expire_in` it never expires."""
        self._inner.set(key, value, expire_in=expire_in)
        return self

    def delete(self, key: KeyLike) -> "SyncAtomic":
        """Remove an entry, if there is one."""
        self._inner.delete(key)
        return self

    def touch(self, key: KeyLike, *, expire_in: float | timedelta | None) -> "SyncAtomic":
        """Give an entry another expiry, or with None no expiry; nothing happens where there is none."""
        self._inner.touch(key, expire_in=expire_in)
        return self

    def sum(self, key: KeyLike, operand: int, *, expire_in: float | timedelta | None = None) -> "SyncAtomic":
        """Add to a U64 counter, or subtract: the result wraps around at 0 and 2**64.

        An absent counter begins at 0 and expires after `expire_in`; one that exists keeps the expiry it has.
        """
        self._inner.sum(key, operand, expire_in=expire_in)
        return self

    def min(self, key: KeyLike, operand: int, *, expire_in: float | timedelta | None = None) -> "SyncAtomic":
        """Lower a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        self._inner.min(key, operand, expire_in=expire_in)
        return self

    def max(self, key: KeyLike, operand: int, *, expire_in: float | timedelta | None = None) -> "SyncAtomic":
        """Raise a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        self._inner.max(key, operand, expire_in=expire_in)
        return self

    def commit(self) -> CommitResult:
        """Write all of it, or nothing: then `ok` is False, and `conflicts` are the entries at the failed checks.

        A second call commits the same checks and writes again.

        Raises:
            NotACounter: A sum, min or max met a value that is not a U64; nothing was written.
        """
        return self._run(self._inner.commit())


class SyncStore(SyncClosing, Driven[Store]):
    """An open store for any thread. Get one from `keyloft.open_sync`; close it with `close`, or use `with`."""

    loop_side: LoopSide | None = None
    """What `on_a_loop` opens, if the store itself has no event loop."""

    def close(self) -> None:
        """Finish the writes under way, end the watches and close the database. A second call does nothing."""
        close_store(self._inner, self._driver, self.loop_side)

    def on_a_loop(self) -> "tuple[Store, LoopThread]":
        """The same database in an event loop, and what runs it: for locks and others with work in the background."""
        if self.loop_side is not None:
            return self.loop_side.opened()
        assert isinstance(self._driver, LoopThread)
        return self._inner, self._driver

    def get(self, key: KeyLike) -> Entry:
        """The entry at a key; `exists` is False where there is none."""
        return self._run(self._inner.get(key))

    def get_many(self, keys: Iterable[KeyLike]) -> Entries:
        """The entries at several keys, in their order, all as of one moment."""
        return self._run(self._inner.get_many(keys))

    def set(self, key: KeyLike, value: object, *, expire_in: float | timedelta | None = None) -> int:
        """Store a value and return its versionstamp; without `expire_in` it never expires."""
        return self._run(self._inner.set(key, value, expire_in=expire_in))

    def set_many(
        self,
        entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
        *,
        expire_in: float | timedelta | None = None,
    ) -> int:
        """Store several values, all or none, under one versionstamp, which is returned."""
        return self._run(self._inner.set_many(entries, expire_in=expire_in))

    def delete(self, key: KeyLike) -> bool:
        """Remove an entry; returns whether there was one."""
        return self._run(self._inner.delete(key))

    def delete_many(self, keys: Iterable[KeyLike]) -> int:
        """Remove several entries, all or none; returns how many there were."""
        return self._run(self._inner.delete_many(keys))

    def touch(self, key: KeyLike, *, expire_in: float | timedelta | None) -> bool:
        """Give an entry another expiry, or with None no expiry; its value and versionstamp stay.

        Returns whether there was an entry.
        """
        return self._run(self._inner.touch(key, expire_in=expire_in))

    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> "SyncListing[Entry]":
        """The entries below a prefix, or from `start` up to but not including `end`, or both, in the order of keys.

        Iterate it, or call `all` for a list: a long one is read page by page, each page consistent in itself.

        Example:
            users = kv.list(prefix=("users",), limit=10).all()
            more = kv.list(prefix=("users",), limit=10, cursor=users.cursor).all()
            for entry in kv.list(prefix=("users",)):
                print(entry.key, entry.value)
        """
        return SyncListing(
            self._inner.list(prefix, start=start, end=end, limit=limit, reverse=reverse, cursor=cursor), self._driver
        )

    def keys(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> "SyncListing[TupleKey]":
        """Like `list`, but the keys alone; no value is read."""
        return SyncListing(
            self._inner.keys(prefix, start=start, end=end, limit=limit, reverse=reverse, cursor=cursor), self._driver
        )

    def count(self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None) -> int:
        """How many entries there are in a range, as of one moment."""
        return self._run(self._inner.count(prefix, start=start, end=end))

    def delete_range(
        self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None
    ) -> int:
        """Remove all entries of a range; returns how many there were.

        Entries go in slices of up to a thousand, so that other writers are not held up. Each slice is removed as a
        whole; an entry that is written into the range meanwhile may stay.
        """
        return self._run(self._inner.delete_range(prefix, start=start, end=end))

    def atomic(self) -> SyncAtomic:
        """Begin a set of writes that are made together, if their checks hold."""
        return SyncAtomic(self._inner.atomic(), self._driver)

    def watch(self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None) -> "SyncWatching":
        """Changes as they are committed, by this process or by another: writes, deletions and expiries.

        On keys: first their current entries, then all of them again, in the order given, whenever one changed. On a
        prefix: the entries that changed since the watch was made. An entry that was deleted or has expired has `exists`
        False; one that was touched has its old versionstamp. A slow reader misses intermediate states, never the last
        one. To know all entries below a prefix at any time: watch, then list, then apply what the watch reports. The
        iteration ends when the store closes.

        Args:
            watched: Keys.
            prefix: Instead of keys, all that is stored below it.
            since: A versionstamp: report what changed after it, instead of from now on. Keys are then reported only
                once one of them has changed.

        Raises:
            HistoryGone: By the iteration: the change log does not reach back to `since`, or the reader of a prefix was
                so slow that it does not reach back to what it has seen. List, then watch again.

        Example:
            for [config, flags] in kv.watch(("config",), ("flags",)):
                ...
        """
        return SyncWatching(self._driver.call(self._inner.watch, *watched, prefix=prefix, since=since), self._driver)

    def sweep(self) -> int:
        """Remove what has expired from the database; returns how many entries. Readers never see them either way."""
        return self._run(self._inner.sweep())
