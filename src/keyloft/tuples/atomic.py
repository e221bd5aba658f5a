"""Atomic writes: all of them are committed if all checks hold, none of them otherwise."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, overload

from msgspec import Struct

from keyloft import limits
from keyloft.core import keys
from keyloft.core.closing import NoCopies
from keyloft.core.engine import Engine, Verdict
from keyloft.core.keys import KeyLike, TupleKey
from keyloft.core.own_commits import note_commit
from keyloft.core.records import (
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    CounterOperation,
    Delete,
    Max,
    Min,
    Mutation,
    Set,
    Space,
    Sum,
    Touch,
)
from keyloft.errors import CounterOutOfRange, InvalidArgument, InvalidValueType, KeyloftError, KeyTooLarge, NotACounter
from keyloft.tuples import typed
from keyloft.tuples.entries import Entry, entry_of
from keyloft.tuples.expiries import UNSET, expiry, new_expiry
from keyloft.tuples.named import InnerEngine, key_maker, origin

_MISSING: Any = object()
_TUPLES = Space.TUPLES  # a shorter way: on Python 3.11, looking up a member of an enum is slow


class CommitResult(Struct, frozen=True):
    """The result of an atomic: its versionstamp if it was committed, else the entries at the failed checks."""

    versionstamp: int | None
    conflicts: tuple[Entry, ...] = ()
    values: tuple[int | None, ...] = ()
    """For each write, in order, the new number of a sum, min or max; None for others. Empty if nothing was written."""
    appended: tuple[TupleKey, ...] = ()
    """The keys that `append` has made, in order; each has the versionstamp in it."""

    @property
    def ok(self) -> bool:
        return self.versionstamp is not None

    def __bool__(self) -> bool:
        return self.ok


class Atomic(NoCopies):
    """Collects checks and writes; `commit` writes all of it or nothing.

    Example:
        entry = await kv.get(("stock", "apples"))
        done = await kv.atomic().check(entry).set(entry.key, entry.value - 1).sum(("sold",), 1).commit()
        if not done.ok:
            print("changed meanwhile:", done.conflicts)
    """

    def __init__(self, engine: Engine, max_value_bytes: int) -> None:
        self._engine = engine
        self._max_value_bytes = max_value_bytes
        self._origin = engine.origin if isinstance(engine, InnerEngine) else b""
        self._checks: list[Check] = []
        self._checked: Any = _MISSING
        """The key of the last check, which most sets repeat: it need not be encoded again."""
        self._mutations: list[Mutation] = []
        self._appends: dict[bytes, int] = {}
        """How many values are appended to each prefix."""
        self._appended: list[tuple[TupleKey, TupleKey]] = []
        """For each appended value, the parts of its key before and after the versionstamp."""

    @overload
    def check(self, entry: Entry, /) -> "Atomic": ...
    @overload
    def check(self, key: KeyLike, /, versionstamp: int | None) -> "Atomic": ...
    def check(self, at: Entry | KeyLike, /, versionstamp: int | None = _MISSING) -> "Atomic":
        """Commit only if the key's versionstamp is still this one; None: only if nothing is stored there.

        The entry must have been read from the store of this atomic: in a scoped store, keys leave out the prefix.
        """
        key: KeyLike
        if isinstance(at, Entry) and versionstamp is _MISSING:
            key, versionstamp = at.key, at.versionstamp
            if self._origin or type(key) is not tuple:
                self._check_origin(at.key)
        elif not isinstance(at, Entry) and versionstamp is not _MISSING:
            key = at
        else:
            raise InvalidArgument("check: pass an entry alone, or a key and a versionstamp (None: nothing is stored)")
        if versionstamp is not None and type(versionstamp) is not int:
            raise InvalidArgument(f"versionstamp: expected an int or None, got {type(versionstamp).__name__}")
        self._checks.append(Check(_TUPLES, keys.encode(key), versionstamp))
        self._checked = key if type(key) is tuple else _MISSING  # a list may change
        return self

    def _check_origin(self, key: TupleKey) -> None:
        """Refuse an entry of another store: its key would name another entry here."""
        if origin(key) != self._origin:
            raise InvalidArgument(
                "check: this entry was read from another store, where the same key names another entry: call atomic() "
                "of that store, or pass the key that the entry has in this store, and its versionstamp"
            )

    def set(
        self,
        key: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "Atomic":
        """Store a value; without `expire_in` or `expire_at` it never expires."""
        data, encoding = typed.encode(value, type, self._max_value_bytes)
        encoded = self._checks[-1].key if key is self._checked else keys.encode(key)
        return self._add(Set(_TUPLES, encoded, data, encoding, *expiry(expire_in, expire_at)))

    def append(
        self,
        prefix: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "Atomic":
        """Store a value under a new key, `(*prefix, versionstamp)`: entries of all writers sort as they were committed.

        Further values that the same atomic appends to a prefix have the keys `(*prefix, versionstamp, 1)`, then 2, and
        so on. `appended` of the result has the keys.

        Example:
            done = await kv.atomic().append(("log",), {"event": "login"}).commit()
            [key] = done.appended                     # ("log", done.versionstamp)
        """
        before = keys.encode_prefix(prefix)
        number = self._appends.get(before, 0)
        after = (number,) if number else ()
        suffix = keys.encode_prefix(after)
        size = len(before) + keys.VERSION_BYTES + len(suffix)
        if size > limits.KEY_BYTES:
            raise KeyTooLarge(
                f"prefix: {size:,} bytes encoded with a versionstamp, and the limit is {limits.KEY_BYTES:,}; shorten it"
            )
        data, encoding = typed.encode(value, type, self._max_value_bytes)
        relative, moment = expiry(expire_in, expire_at)
        self._appends[before] = number + 1
        self._appended.append((tuple(prefix), after))
        return self._add(Append(_TUPLES, before, data, encoding, relative, suffix, moment))

    def delete(self, key: KeyLike) -> "Atomic":
        """Remove an entry, if there is one."""
        return self._add(Delete(_TUPLES, keys.encode(key)))

    def touch(
        self, key: KeyLike, *, expire_in: float | timedelta | None = UNSET, expire_at: datetime | None = None
    ) -> "Atomic":
        """Give an entry another expiry, or with `expire_in=None` no expiry; nothing happens where there is none."""
        return self._add(Touch(_TUPLES, keys.encode(key), *new_expiry(expire_in, expire_at)))

    def sum(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "Atomic":
        """Add to a U64 counter, or subtract: the result wraps around at 0 and 2**64.

        An absent counter begins at 0 and expires as asked; one that exists keeps the expiry it has.
        """
        number = check_number("operand of sum", operand, -limits.U64_MAX)
        return self._add(Sum(_TUPLES, keys.encode(key), number, *expiry(expire_in, expire_at)))

    def min(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "Atomic":
        """Lower a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        number = check_number("operand of min", operand)
        return self._add(Min(_TUPLES, keys.encode(key), number, *expiry(expire_in, expire_at)))

    def max(
        self,
        key: KeyLike,
        operand: int,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> "Atomic":
        """Raise a U64 counter to the operand; an absent one becomes the operand. Expiry as with `sum`."""
        number = check_number("operand of max", operand)
        return self._add(Max(_TUPLES, keys.encode(key), number, *expiry(expire_in, expire_at)))

    async def commit(self) -> CommitResult:
        """Write all of it, or nothing: then `ok` is False, and `conflicts` are the entries at the failed checks.

        A second call commits the same checks and writes again.

        Raises:
            NotACounter: A sum, min or max met a value that is not a U64; nothing was written.
        """
        return self._result(await commit(self._engine, self._batch()))

    def _batch(self) -> Batch:
        return Batch(tuple(self._mutations), tuple(self._checks))

    def _decided(self, verdict: Verdict) -> CommitResult:
        """What `commit` returns or raises, of the verdict on its batch."""
        if isinstance(verdict, KeyloftError):
            raise _with_key(verdict)
        if isinstance(verdict, Committed):
            note_commit(verdict.version)
        return self._result(verdict)

    def _result(self, outcome: Committed | Conflict) -> CommitResult:
        if isinstance(outcome, Committed):
            new: Sequence[int | None] = outcome.values or (None,) * len(self._mutations)
            if len(new) < len(self._mutations):
                numbers = iter(outcome.values)
                new = [next(numbers) if isinstance(each, CounterOperation) else None for each in self._mutations]
            if not self._appended:
                return CommitResult(outcome.version, (), tuple(new))
            appended = [(*before, outcome.version, *after) for before, after in self._appended]
            return CommitResult(outcome.version, (), tuple(new), tuple(appended))
        make_key = key_maker(self._engine)
        conflicts = [entry_of(make_key(keys.decode(failed.check.key)), failed.current) for failed in outcome.failed]
        return CommitResult(None, tuple(conflicts))

    def _add(self, mutation: Mutation) -> "Atomic":
        self._mutations.append(mutation)
        return self


async def commit(engine: Engine, batch: Batch) -> Committed | Conflict:
    """Commit a batch; errors name keys as callers write them."""
    try:
        done = await engine.commit(batch)
    except (NotACounter, CounterOutOfRange) as error:
        raise _with_key(error) from None
    if isinstance(done, Committed):
        note_commit(done.version)
    return done


def _with_key(error: KeyloftError) -> KeyloftError:
    """The same error, which names its key as callers write it."""
    return error.at(keys.decode(error.key)) if isinstance(error, (NotACounter, CounterOutOfRange)) else error


def check_number(name: str, number: int, lowest: int = 0) -> int:
    """A number that a caller gave for a counter, checked.

    Raises:
        InvalidValueType: It is not an int.
        InvalidArgument: It is out of range.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidValueType(f"{name}: expected an int, got {type(number).__name__}")
    if not lowest <= number <= limits.U64_MAX:
        raise InvalidArgument(f"{name}: expected an int from {lowest} to {limits.U64_MAX}")
    return int(number)
