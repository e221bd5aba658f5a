"""Atomic writes for threads and scripts: every method of `Atomic`, run to its end.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, overload

from keyloft.core.driving import Driven
from keyloft.core.engine import Verdict
from keyloft.core.keys import KeyLike
from keyloft.core.records import Batch
from keyloft.tuples.atomic import _MISSING, Atomic, CommitResult
from keyloft.tuples.entries import Entry
from keyloft.tuples.expiries import UNSET


class SyncAtomic(Driven[Atomic]):
    """Collects checks and writes; `commit` writes all of it or nothing.

    Example:
        entry = kv.get(("stock", "apples"))
        done = kv.atomic().check(entry).set(entry.key, entry.value - 1).sum(("sold",), 1).commit()
        if not done.ok:
            print("changed meanwhile:", done.conflicts)
    """

    decide: Callable[[Batch], Verdict] | None = None
    """What `commit` commits with, if the engine can do so without a coroutine."""

    @overload
    def check(self, entry: Entry, /) -> "SyncAtomic": ...
    @overload
    def check(self, key: KeyLike, /, versionstamp: int | None) -> "SyncAtomic": ...
    def check(self, at: Entry | KeyLike, /, versionstamp: int | None = _MISSING) -> "SyncAtomic":
        """Commit only if the key's versionstamp is still this one; None: only if nothing is stored there.

        The entry must have been read from the store of this atomic: in a scoped store, keys leave out the prefix.
        """
        self._untyped.check(at, versionstamp)
        return self

    def set(
        self,
        key: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "SyncAtomic":
        """Store a value; without `expire_in` or `expire_at` it never expires."""
        self._inner.set(key, value, type=type, expire_in=expire_in, expire_at=expire_at)
        return self

    def append(
        self,
        prefix: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "SyncAtomic":
        """Store a value under a new key, `(*prefix, versionstamp)`: entries of all writers sort as they were committed.

        Further values that the same atomic appends to a prefix have the keys `(*prefix, versionstamp, 1)`, then 2, and
        so on. `appended` of the result has the keys.

        Example:
            done = kv.atomic().append(("log",), {"event": "login"}).commit()
            [key] = done.appended                     # ("log", done.versionstamp)
        """
        self._inner.append(prefix, value, type=type, expire_in=expire_in, expire_at=expire_at)
        return self

    def delete(self, key: KeyLike) -> "SyncAtomic":
        """Remove an entry, if there is one."""
        self._inner.delete(key)
        return self

    def touch(
        self, key: KeyLike, *, expire_in: float | timedelta | None = UNSET, expire_at: datetime | None = None
    ) -> "SyncAtomic":
        """Give an entry another expiry, or with `expire_in=None` no expiry; nothing happens where there is none."""
        self._inner.touch(key, expire_in=expire_in, expire_at=expire_at)
        return self

    def sum(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "SyncAtomic":
        """Add to a U64 counter, or subtract: the result wraps around at 0 and 2**64.

        An absent counter begins at 0 and expires as asked; one that exists keeps the expiry it has.
        """
        self._inner.sum(key, operand, expire_in=expire_in, expire_at=expire_at)
        return self

    def min(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "SyncAtomic":
        """Lower a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        self._inner.min(key, operand, expire_in=expire_in, expire_at=expire_at)
        return self

    def max(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "SyncAtomic":
        """Raise a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        self._inner.max(key, operand, expire_in=expire_in, expire_at=expire_at)
        return self

    def commit(self) -> CommitResult:
        """Write all of it, or nothing: then `ok` is False, and `conflicts` are the entries at the failed checks.

        A second call commits the same checks and writes again.

        Raises:
            NotACounter: A sum, min or max met a value that is not a U64; nothing was written.
        """
        if self.decide is not None:
            return self._inner._decided(self.decide(self._inner._batch()))
        return self._run(self._inner.commit())
