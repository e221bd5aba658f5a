"""Decides a group of batches in memory, in order: group commit as a pure function.

A group holds the batches of many callers for one database transaction. The engine loads the records that decide
something (`deciding`), `settle` returns a verdict per batch, the rows to write and the changes to log, and the engine
writes each changed key once. A batch that fails leaves no trace, so it can't harm the others of its group.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import (
    Add,
    Address,
    Append,
    Batch,
    ChangeKind,
    Check,
    Committed,
    Conflict,
    CounterOperation,
    FailedCheck,
    Head,
    LoggedChange,
    Max,
    Min,
    Mutation,
    Purge,
    Record,
    Set,
    Sum,
    Touch,
)
from keyloft.core.schema import LAST_MOMENT
from keyloft.core.values import COUNTER, JSON, decode_json, encode_json, pack_counter, unpack_counter
from keyloft.errors import CounterOutOfRange, InvalidArgument, KeyloftError, NotACounter, Undecodable


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
_COUNTERS: Final = (Sum, Add, Min, Max)
_Pending: TypeAlias = tuple[Record | None, Write, ChangeKind]
"""What a key holds after the batches so far, the write that stores it, and what the last of them did to the key."""
_PUT, _DELETE, _TOUCH, _EXPIRED = ChangeKind
# Shared: a tuple for each key of a long batch would burden the garbage collector.
_DELETED: Final[_Pending] = None, _REMOVE, _DELETE
_PURGED: Final[_Pending] = None, _REMOVE, _EXPIRED


class Settled(Struct, frozen=True):
    """The result for a group."""

    verdicts: list[Verdict]
    writes: dict[Address, Write]
    """One write per changed key."""
    version: int
    """The last version given; that of the last commit before the group if nothing was committed."""
    changes: list[LoggedChange]
    """The changes to log, in the order of their versions."""
    appended: dict[Address, tuple[bytes, bytes]]
    """For each key that an Append made, what stands before and after the version."""
    next_expiry: int | None = None
    """The earliest expiry that the group gives to an entry, also if a later batch of the group changes it again."""
    valid_from: int = 0
    valid_until: int = LAST_MOMENT + 1
    """Of a group that was settled before the time of its commit was known: the decisions hold for a time from
    `valid_from` on and before `valid_until`. At any other time, an expiry that lay ahead has passed, or the other way
    round."""


def deciding(group: Iterable[Batch]) -> dict[Address, bool]:
    """The keys whose stored records `settle` needs, and whether it needs their values, too.

    A plain Set or an Append succeeds whatever is stored, so most writes load nothing.
    """
    addresses: dict[Address, bool] = {}
    for batch in group:
        for check in batch.checks:
            addresses.setdefault((check.space, check.key), False)
        for mutation in batch.mutations:
            kind = type(mutation)
            if kind is Append or (type(mutation) is Set and not (mutation.if_absent or mutation.keep_expiry)):
                continue  # most of them
            if kind in _COUNTERS:
                addresses[mutation.space, mutation.key] = True
            else:
                addresses.setdefault((mutation.space, mutation.key), False)
    return addresses


def settle(
    group: Sequence[Batch],
    current: Mapping[Address, Record],
    version: int,
    now: int,
    *,
    relative_from: int | None = None,
) -> Settled:
    """Decide a group as if its batches were committed one by one.

    Args:
        current: The stored records of all `deciding` keys, expired ones included; a key without a row is left out. A
            Head stands for a record whose value was not loaded; `unread` returns those that a Conflict shows.
        version: The version of the last commit before this group.
        now: The time of this group, in milliseconds.
        relative_from: If the time of the commit is not known yet, an expiry that counts from the commit becomes this
            number plus its milliseconds.
    """
    verdicts: list[Verdict] = []
    changes: list[LoggedChange] = []
    state = _State(current, now, relative_from)
    pending = state.pending
    for batch in group:
        try:
            if len(batch.mutations) == 1 and type(only := batch.mutations[0]) is Set and not batch.checks:
                address = (only.space, only.key)
                if address not in pending and not only.if_absent and address not in current:
                    # Most batches are one plain Set, which succeeds whatever is stored: nothing was loaded for it.
                    forever = only.expire_in is None and only.expire_at is None
                    expires_at = None if forever else state.expiry(only)
                    version += 1
                    record = Record(only.key, only.value, only.encoding, version, expires_at, now, now)
                    kind = _PUT if forever else state.logged_as(_PUT, expires_at)
                    pending[address] = record, PutRow(record, False), kind
                    changes.append(LoggedChange(version, only.space, only.key, kind, now))
                    verdicts.append(Committed(version, (), now))
                    continue
            if batch.checks and (failed := [failure for check in batch.checks if (failure := state.failure(check))]):
                verdicts.append(Conflict(tuple(failed)))
                continue
            found, values = state.apply(batch.mutations, version + 1, changes)
        except KeyloftError as error:
            verdicts.append(error)
            continue
        version += 1
        verdicts.append(Committed(version, found, now, values))
    writes = {address: write for address, (_, write, _) in pending.items()}
    return Settled(
        verdicts, writes, version, changes, state.appended, state.next_expiry, state.valid_from, state.valid_until
    )


def unread(settled: Settled) -> set[Address]:
    """The keys of Heads that a Conflict shows: the engine reads their values, and passes them to `with_values`."""
    return {
        (failure.check.space, failure.check.key)
        for verdict in settled.verdicts
        if type(verdict) is Conflict
        for failure in verdict.failed
        if isinstance(failure.current, Head)
    }


def with_values(settled: Settled, stored: Mapping[Address, Record]) -> Settled:
    """The same with values in all conflicts. `stored` holds the records of `unread` as they were before the group."""

    def filled(failure: FailedCheck) -> FailedCheck:
        head = failure.current
        if not isinstance(head, Head):
            return failure
        record = stored[failure.check.space, failure.check.key]
        return FailedCheck(failure.check, replace(record, version=head.version, expires_at=head.expires_at))

    verdicts = [
        Conflict(tuple([filled(failure) for failure in verdict.failed])) if type(verdict) is Conflict else verdict
        for verdict in settled.verdicts
    ]
    return replace(settled, verdicts=verdicts)


class _State:
    """The records and writes of a group so far."""

    def __init__(self, current: Mapping[Address, Record], now: int, relative_from: int | None) -> None:
        self._current = current
        self._now = now
        self._relative_from = relative_from
        self.pending: dict[Address, _Pending] = {}
        self.appended: dict[Address, tuple[bytes, bytes]] = {}
        self.next_expiry: int | None = None
        self.valid_from, self.valid_until = 0, LAST_MOMENT + 1

    def failure(self, check: Check) -> FailedCheck | None:
        address = (check.space, check.key)
        pending = self.pending.get(address)
        record = self._current.get(address) if pending is None else pending[0]
        if not check.include_expired:
            record = self._alive(record)
        version = None if record is None else record.version
        return None if version == check.version else FailedCheck(check, record)

    def apply(
        self, mutations: Sequence[Mutation], version: int, changes: list[LoggedChange]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Apply all mutations and add to the changes, or raise and apply none."""
        found: list[bool] = []
        values: list[int] = []
        if len(mutations) == 1 and type(only := mutations[0]) is not Append:
            address = (only.space, only.key)
            if (done := self._done(only, self.pending.get(address), version, found, values)) is not None:
                self.pending[address] = done
                changes.append(LoggedChange(version, only.space, only.key, done[2], self._now))
            return tuple(found), tuple(values)
        draft: dict[Address, _Pending] = {}
        appended: dict[Address, tuple[bytes, bytes]] = {}
        for mutation in mutations:
            if type(mutation) is Append:
                around = mutation.key, mutation.suffix
                mutation = mutation.at(version)
                appended[mutation.space, mutation.key] = around
            address = (mutation.space, mutation.key)
            before = draft.get(address) or self.pending.get(address)
            if (done := self._done(mutation, before, version, found, values)) is not None:
                if done[2] is _TOUCH and address in draft:
                    done = (done[0], done[1], draft[address][2])  # the batch has put the entry, which says more
                draft[address] = done
        self.pending.update(draft)
        self.appended.update(appended)
        for (space, key), (_, _, kind) in draft.items():
            changes.append(LoggedChange(version, space, key, kind, self._now))
        return tuple(found), tuple(values)

    def _done(
        self, mutation: Mutation, before: _Pending | None, version: int, found: list[bool], values: list[int]
    ) -> _Pending | None:
        """What a mutation makes of its key, None if it changes nothing; adds to `found` and `values`.

        Args:
            mutation: Anything but an Append.
            before: What earlier batches and mutations made of the key, None if they left it alone.
            version: Of the batch.
            found: For each mutation that asks, whether there was an entry.
            values: The new numbers of counters.
        """
        stored, write = (self._current.get((mutation.space, mutation.key)), None) if before is None else before[:2]
        record = stored if stored is not None and stored.is_alive(self._now) else None
        # By type, not by `match`, which takes time for each class that does not match.
        if type(mutation) is Set:
            if mutation.if_absent:
                found.append(record is not None)
                if record is not None:
                    return None
            return self._set(mutation, record, write, version)
        if type(mutation) is Purge:
            is_due = stored is not None and record is None and stored.version == mutation.version
            found.append(is_due)
            return _PURGED if is_due else None
        if isinstance(mutation, CounterOperation):
            number, done = self._count(mutation, record, write, version)
            values.append(number)
            return done
        found.append(record is not None)
        if record is None:
            return None
        return self._touch(mutation, record, write) if type(mutation) is Touch else _DELETED

    def _alive(self, record: Record | None) -> Record | None:
        return record if record is not None and record.is_alive(self._now) else None

    def expiry(self, mutation: Set | Touch | CounterOperation) -> int | None:
        """When the entry expires that a mutation writes.

        Raises:
            InvalidArgument: No database can hold that time.
        """
        expire_in = mutation.expire_in
        moment = mutation.expire_at if expire_in is None else self._now + expire_in
        if moment is None:
            return None
        if type(moment) is not int or not 0 <= moment <= LAST_MOMENT:
            field = "expire_at" if expire_in is None else "expire_in"
            raise InvalidArgument(f"{field}: expected whole milliseconds, up to a moment from 1970 to 9999")
        if self._relative_from is not None:
            if expire_in is not None and expire_in > 0:
                # An entry that expires at once has expired for the next batch of the group, too.
                moment = self._relative_from + expire_in
            elif moment <= self._now:
                self.valid_from = max(self.valid_from, moment)
            else:
                self.valid_until = min(self.valid_until, moment)
        if self.next_expiry is None or moment < self.next_expiry:
            self.next_expiry = moment
        return moment

    def logged_as(self, kind: ChangeKind, expires_at: int | None) -> ChangeKind:
        """What the log says of a put or a touch: `expired`, if its expiry has passed, so that no reader finds it."""
        return kind if expires_at is None or expires_at > self._now else _EXPIRED

    def _set(self, mutation: Set, record: Record | None, write: Write | None, version: int) -> _Pending:
        expires_at = record.expires_at if record is not None and mutation.keep_expiry else self.expiry(mutation)
        created_at = self._now if record is None else record.created_at
        new = Record(mutation.key, mutation.value, mutation.encoding, version, expires_at, created_at, self._now)
        put = PutRow(new, write is not None and makes_new_entry(write, record))
        return new, put, self.logged_as(_PUT, expires_at)

    def _touch(self, mutation: Touch, record: Record, write: Write | None) -> _Pending:
        expires_at = self.expiry(mutation)
        new, kind = replace(record, expires_at=expires_at), self.logged_as(_TOUCH, expires_at)
        if type(write) is PutRow:
            return new, PutRow(new, write.is_new_entry), kind
        return new, SetExpiry(expires_at), kind

    def _count(
        self, mutation: CounterOperation, record: Record | None, write: Write | None, version: int
    ) -> tuple[int, _Pending]:
        """The new number, and what stores it."""
        if record is None:
            number, expires_at, created_at = mutation.operand, self.expiry(mutation), self._now
            encoding: int = JSON if type(mutation) is Add else COUNTER
        else:
            expires_at, created_at, encoding = record.expires_at, record.created_at, record.encoding
            if type(mutation) is Add:
                number = _integer(record) + mutation.operand
                if encoding == COUNTER and not 0 <= number <= limits.U64_MAX:
                    raise CounterOutOfRange(mutation.key)
            elif encoding != COUNTER:
                raise NotACounter(mutation.key)
            else:
                number = _COUNT[type(mutation)](unpack_counter(record.value), mutation.operand)
        if encoding == JSON:
            # The common case, without the checks of `encode_json`.
            value = b"%d" % number if number.bit_length() <= 64 else encode_json(number, limits.VALUE_BYTES)
        else:
            number %= limits.U64_MAX + 1
            value = pack_counter(number)
        new = Record(mutation.key, value, encoding, version, expires_at, created_at, self._now)
        put = PutRow(new, write is not None and makes_new_entry(write, record))
        return number, (new, put, self.logged_as(_PUT, expires_at))


def _integer(record: Record) -> int:
    """The number that a record holds, as a JSON integer or as a U64.

    Raises:
        NotACounter: The record holds something else.
    """
    if record.encoding == COUNTER:
        return unpack_counter(record.value)
    number: Any = None
    if record.encoding == JSON and len(record.value) <= limits.COUNTER_DIGITS:
        with contextlib.suppress(Undecodable):
            number = decode_json(record.value)
    if type(number) is not int:
        raise NotACounter(record.key, takes_json=True)
    return number


def makes_new_entry(write: Write, record: Record | None) -> bool:
    """Whether the `created_at` of the row that the database still holds no longer counts.

    Args:
        write: What this group has done to the key so far.
        record: The live entry after that write; None if the write removed the entry, or let it expire.
    """
    return record is None or removes_row(write)


def removes_row(write: Write | None) -> bool:
    """Whether this group removes the row that the database still holds."""
    return type(write) is RemoveRow or (type(write) is PutRow and write.is_new_entry)
