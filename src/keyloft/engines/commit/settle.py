"""Decides a group of batches in memory, in order: group commit as a pure function.

A group holds the batches of many callers for one database transaction. The engine loads the records that decide
something (`deciding`), `settle` returns a verdict per batch and the rows to write, and the engine writes each touched
key once. A batch that fails leaves no trace, so it can't harm the others of its group.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import (
    Address,
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    Delete,
    FailedCheck,
    Max,
    Min,
    Mutation,
    Purge,
    Record,
    Set,
    Sum,
    Touch,
)
from keyloft.core.values import Encoding, pack_counter, unpack_counter
from keyloft.errors import KeyloftError, NotACounter

Verdict: TypeAlias = Committed | Conflict | KeyloftError
"""What became of a batch; an error is raised to its caller, and to no other."""


class PutRow(Struct, frozen=True, gc=False):
    """Store this record."""

    record: Record
    is_new_entry: bool
    """Use the record's `created_at`. Otherwise a live row under this key keeps its own."""


class SetExpiry(Struct, frozen=True, gc=False):
    """Change the expiry of a stored row and nothing else."""

    expires_at: int | None


class RemoveRow(Struct, frozen=True, gc=False):
    """Remove the row, if there is one."""


Write: TypeAlias = PutRow | SetExpiry | RemoveRow
_REMOVE: Final = RemoveRow()
_COUNT: Final[Mapping[type, Callable[[int, int], int]]] = {Sum: operator.add, Min: min, Max: max}
_Pending: TypeAlias = tuple[Record | None, Write]
"""What a key holds after the batches so far, and the write that stores it."""


class Settled(Struct, frozen=True):
    """The result for a group: a verdict per batch, a write per touched key, and the last version given."""

    verdicts: list[Verdict]
    writes: dict[Address, Write]
    version: int


def deciding(group: Iterable[Batch]) -> set[Address]:
    """The keys whose stored records `settle` needs.

    A Set or an Append succeeds whatever is stored, so most writes load nothing.
    """
    addresses = set()
    for batch in group:
        for check in batch.checks:
            addresses.add((check.space, check.key))
        for mutation in batch.mutations:
            if type(mutation) is not Set and type(mutation) is not Append:
                addresses.add((mutation.space, mutation.key))
    return addresses


def settle(group: Sequence[Batch], current: Mapping[Address, Record], version: int, now: int) -> Settled:
    """Decide a group as if its batches were committed one by one.

    Args:
        current: The stored records of all `deciding` keys, expired ones included; a key without a row is left out.
        version: The version of the last commit before this group.
        now: The time of this group, in milliseconds.
    """
    verdicts: list[Verdict] = []
    state = _State(current, now)
    for batch in group:
        if failed := [failure for check in batch.checks if (failure := state.failure(check)) is not None]:
            verdicts.append(Conflict(tuple(failed)))
            continue
        try:
            found = state.apply(batch.mutations, version + 1)
        except KeyloftError as error:
            verdicts.append(error)
            continue
        version += 1
        verdicts.append(Committed(version, found, now))
    return Settled(verdicts, {address: write for address, (_, write) in state.pending.items()}, version)


class _State:
    """The records and writes of a group so far."""

    def __init__(self, current: Mapping[Address, Record], now: int) -> None:
        self._current = current
        self._now = now
        self.pending: dict[Address, _Pending] = {}

    def failure(self, check: Check) -> FailedCheck | None:
        address = (check.space, check.key)
        record, _ = self.pending.get(address) or (self._current.get(address), None)
        if not check.include_expired:
            record = self._alive(record)
        version = None if record is None else record.version
        return None if version == check.version else FailedCheck(check, record)

    def apply(self, mutations: Sequence[Mutation], version: int) -> tuple[bool, ...]:
        """Apply all mutations, or raise and apply none."""
        draft: dict[Address, _Pending] = {}
        found: list[bool] = []
        for mutation in mutations:
            if type(mutation) is Append:
                mutation = mutation.at(version)
            address = (mutation.space, mutation.key)
            stored, write = draft.get(address) or self.pending.get(address) or (self._current.get(address), None)
            record = None if stored is None else self._alive(stored)
            match mutation:
                case Set():
                    draft[address] = self._set(mutation, record, write, version)
                case Delete():
                    found.append(record is not None)
                    if record is not None:
                        draft[address] = None, _REMOVE
                case Touch():
                    found.append(record is not None)
                    if record is not None:
                        draft[address] = self._touch(mutation, record, write)
                case Purge():
                    is_due = stored is not None and record is None and stored.version == mutation.version
                    found.append(is_due)
                    if is_due:
                        draft[address] = None, _REMOVE
                case Sum() | Min() | Max():
                    draft[address] = self._count(mutation, record, write, version)
        self.pending.update(draft)
        return tuple(found)

    def _alive(self, record: Record | None) -> Record | None:
        return record if record is not None and record.is_alive(self._now) else None

    def _expiry(self, expire_in: int | None) -> int | None:
        return None if expire_in is None else self._now + expire_in

    def _set(self, mutation: Set, record: Record | None, write: Write | None, version: int) -> _Pending:
        expires_at = self._expiry(mutation.expire_in)
        created_at = self._now if record is None else record.created_at
        new = Record(mutation.key, mutation.value, mutation.encoding, version, expires_at, created_at, self._now)
        return new, PutRow(new, removes_row(write))

    def _touch(self, mutation: Touch, record: Record, write: Write | None) -> _Pending:
        expires_at = self._expiry(mutation.expire_in)
        new = replace(record, expires_at=expires_at)
        return new, PutRow(new, write.is_new_entry) if isinstance(write, PutRow) else SetExpiry(expires_at)

    def _count(self, mutation: Sum | Min | Max, record: Record | None, write: Write | None, version: int) -> _Pending:
        if record is None:
            number, expires_at, created_at = mutation.operand, self._expiry(mutation.expire_in), self._now
        else:
            if record.encoding != Encoding.U64:
                raise NotACounter(mutation.key)
            number = _COUNT[type(mutation)](unpack_counter(record.value), mutation.operand)
            expires_at, created_at = record.expires_at, record.created_at
        value = pack_counter(number % (limits.U64_MAX + 1))
        new = Record(mutation.key, value, Encoding.U64, version, expires_at, created_at, self._now)
        return new, PutRow(new, removes_row(write))


def removes_row(write: Write | None) -> bool:
    """Whether this group removes the row that the database still holds, so that its `created_at` no longer counts."""
    return isinstance(write, RemoveRow) or (isinstance(write, PutRow) and write.is_new_entry)
