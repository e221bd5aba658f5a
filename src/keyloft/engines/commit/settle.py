"""Decides a group of batches in memory, in order: the heart of group commit, as a pure function.

A group is many callers' batches on their way to one database transaction. The engine loads the records that decide
something (`deciding`), `settle` works out what becomes of each batch and what is to be written, and the engine writes
each touched key once. A batch that fails leaves no trace, so it can't harm the others of its group.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

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
"""What becomes of a batch; an error is raised to its caller, and to nobody else."""


class Put(Struct, frozen=True, gc=False):
    """Store this record. Unless it begins anew, the `created_at` of a live row in its place is kept."""

    record: Record
    anew: bool


class Retime(Struct, frozen=True, gc=False):
    """Change the expiry of a stored row and nothing else."""

    expires_at: int | None


class Remove(Struct, frozen=True, gc=False):
    """Remove the row, if there is one."""


Write: TypeAlias = Put | Retime | Remove
_REMOVE = Remove()
_Made: TypeAlias = tuple[Record | None, Write]
"""What a key holds after the batches so far, and the write that makes it so."""


class Settled(Struct, frozen=True):
    """What becomes of a group: a verdict per batch, a write per touched key, and the clock after it."""

    verdicts: list[Verdict]
    writes: dict[Address, Write]
    clock: int


def deciding(group: Iterable[Batch]) -> set[Address]:
    """The keys whose stored records `settle` must see. A plain Set decides nothing, so most writes load nothing.

    What is appended is new, whatever is stored.
    """
    addresses = set()
    for batch in group:
        for check in batch.checks:
            addresses.add((check.space, check.key))
        for mutation in batch.mutations:
            if type(mutation) is not Set and type(mutation) is not Append:
                addresses.add((mutation.space, mutation.key))
    return addresses


def settle(group: Sequence[Batch], current: Mapping[Address, Record], clock: int, now: int) -> Settled:
    """Decide a group as if its batches were committed one by one.

    Args:
        current: The stored records of all `deciding` keys, expired ones included; a key without a row is left out.
        clock: The version of the last commit before this group.
        now: The time of this group, in milliseconds.
    """
    verdicts: list[Verdict] = []
    state = _State(current, now)
    for batch in group:
        if failed := [failure for check in batch.checks if (failure := state.fails(check)) is not None]:
            verdicts.append(Conflict(tuple(failed)))
            continue
        try:
            found = state.apply(batch.mutations, clock + 1)
        except KeyloftError as error:
            verdicts.append(error)
            continue
        clock += 1
        verdicts.append(Committed(clock, found, now))
    return Settled(verdicts, state.writes, clock)


class _State:
    """The records and writes of a group so far."""

    def __init__(self, current: Mapping[Address, Record], now: int) -> None:
        self._current = current
        self._now = now
        self._made: dict[Address, _Made] = {}

    @property
    def writes(self) -> dict[Address, Write]:
        return {address: write for address, (_, write) in self._made.items()}

    def fails(self, check: Check) -> FailedCheck | None:
        record, _ = self._made.get(address := (check.space, check.key)) or (self._current.get(address), None)
        if not check.include_expired:
            record = self._alive(record)
        version = None if record is None else record.version
        return None if version == check.version else FailedCheck(check, record)

    def apply(self, mutations: Sequence[Mutation], version: int) -> tuple[bool, ...]:
        """Make all mutations, or raise and make none."""
        draft: dict[Address, _Made] = {}
        found: list[bool] = []
        for mutation in mutations:
            if type(mutation) is Append:
                mutation = mutation.at(version)
            address = (mutation.space, mutation.key)
            stored, write = draft.get(address) or self._made.get(address) or (self._current.get(address), None)
            record = None if stored is None else self._alive(stored)
            match mutation:
                case Set():
                    draft[address] = self._put(mutation, record, write, version)
                case Delete():
                    found.append(record is not None)
                    if record is not None:
                        draft[address] = None, _REMOVE
                case Touch():
                    found.append(record is not None)
                    if record is not None:
                        draft[address] = self._retime(mutation, record, write)
                case Purge():
                    due = stored is not None and record is None and stored.version == mutation.version
                    found.append(due)
                    if due:
                        draft[address] = None, _REMOVE
                case Sum() | Min() | Max():
                    draft[address] = self._count(mutation, record, write, version)
        self._made.update(draft)
        return tuple(found)

    def _alive(self, record: Record | None) -> Record | None:
        return record if record is not None and record.is_alive(self._now) else None

    def _due(self, expire_in: int | None) -> int | None:
        return None if expire_in is None else self._now + expire_in

    def _put(self, mutation: Set, record: Record | None, write: Write | None, version: int) -> tuple[Record, Put]:
        now = self._now
        new = Record(
            mutation.key,
            mutation.value,
            mutation.encoding,
            version,
            self._due(mutation.expire_in),
            now if record is None else record.created_at,
            now,
        )
        return new, Put(new, write is not None and _begins_anew(write))

    def _retime(self, mutation: Touch, record: Record, write: Write | None) -> tuple[Record, Write]:
        expires_at = self._due(mutation.expire_in)
        new = replace(record, expires_at=expires_at)
        return new, Put(new, write.anew) if isinstance(write, Put) else Retime(expires_at)

    def _count(
        self, mutation: Sum | Min | Max, record: Record | None, write: Write | None, version: int
    ) -> tuple[Record, Put]:
        operand = mutation.operand
        if record is None:
            number, expires_at, created_at = operand, self._due(mutation.expire_in), self._now
        else:
            if record.encoding != Encoding.U64:
                raise NotACounter(mutation.key)
            number, expires_at, created_at = unpack_counter(record.value), record.expires_at, record.created_at
            match mutation:
                case Sum():
                    number += operand
                case Min():
                    number = min(number, operand)
                case Max():
                    number = max(number, operand)
        value = pack_counter(number % (limits.U64_MAX + 1))
        new = Record(mutation.key, value, Encoding.U64, version, expires_at, created_at, self._now)
        return new, Put(new, write is not None and _begins_anew(write))


def _begins_anew(write: Write) -> bool:
    """Whether the row in the database is not the one that this group has in mind."""
    return isinstance(write, Remove) or (isinstance(write, Put) and write.anew)
