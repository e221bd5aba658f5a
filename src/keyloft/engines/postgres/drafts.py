"""Settles a group before its version and its time are known, and completes the result once they are.

A draft counts versions from DRAFTED, and time from the moment at which its rows were read. An expiry that counts from
the commit is marked by RELATIVE until the commit's time is known.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from keyloft.core.engine import Verdict
from keyloft.core.records import (
    Address,
    Batch,
    Committed,
    Conflict,
    FailedCheck,
    LoggedChange,
    Record,
    Space,
    appended_key,
)
from keyloft.engines import change_log
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.commit.settle import PutRow, RemoveRow, SetExpiry, Settled, settle
from keyloft.engines.postgres.tables import LAYOUTS, RELATIVE, PostgresLayout

DRAFTED: Final = 2**60
"""The version before a draft's first. No commit gets so far, so no check passes by mistake on a version of a draft."""

Arrays: TypeAlias = dict[str, list[Any]]
"""For each kind of rows of a space, an array for each of its arguments."""


class Draft(Struct, frozen=True):
    """A settled group that is not committed yet."""

    settled: Settled
    read_at: int
    current: Mapping[Address, Record]
    """The rows that were read."""
    decided: Mapping[Address, bool]
    """The keys that decided something, and whether their values did."""
    stamps: Mapping[Address, str | None]
    """Those of rows that have other stamps than the time of their last change; None for one that was not read."""
    has_text: ClassVar = False
    """Arrays of rows are lists, except arrays of integers."""

    @property
    def versions(self) -> int:
        """How many versions the group takes."""
        return self.settled.version - DRAFTED

    @property
    def valid(self) -> tuple[int, int]:
        """From when on, and before when, the group can be committed as it was settled."""
        return self.settled.valid_from, self.settled.valid_until

    def parts(self) -> list[bytes]:
        """The changes of the group, as the change log is to hold them."""
        return change_log.pack(self.settled.changes, DRAFTED, self.settled.appended)

    def completed(self, base: int, now: int, *, with_changes: bool) -> Outcome:
        """The outcome of the group, which was committed after version `base`."""
        shift = base - DRAFTED
        verdicts: list[Verdict] = []
        for verdict in self.settled.verdicts:
            if type(verdict) is Committed:
                verdict = Committed(verdict.version + shift, verdict.found, now, verdict.values)
            elif type(verdict) is Conflict:
                verdict = Conflict(tuple([self._failed(each, shift, now) for each in verdict.failed]))
            verdicts.append(verdict)
        if not with_changes:
            return Outcome(verdicts, base, base + self.versions)
        due = [_moment(due, now) for write in self.settled.writes.values() if (due := _expiry(write)) is not None]
        changes = [self._change(change, shift, now) for change in self.settled.changes]
        return Outcome(verdicts, base, base + self.versions, changes, min(due, default=None))

    def _failed(self, failed: FailedCheck, shift: int, now: int) -> FailedCheck:
        """What a Conflict shows; an earlier batch of the group may have written it."""
        check, record = failed.check, failed.current
        if record is None:
            return failed
        if record.expires_at is not None:
            record = replace(record, expires_at=_moment(record.expires_at, now))
        if record.version > DRAFTED:
            created_at = now if record.created_at == self.read_at else record.created_at
            record = replace(record, version=record.version + shift, created_at=created_at, updated_at=now)
        return FailedCheck(check, record)

    def _change(self, change: LoggedChange, shift: int, now: int) -> LoggedChange:
        version, key = change.version + shift, change.key
        if around := self.settled.appended.get((change.space, key)):
            key = appended_key(change.space, around[0], version, around[1])
        return LoggedChange(version, change.space, key, change.kind, now)

    def written(self, base: int, now: int) -> Iterator[tuple[Address, Record | None]]:
        """The rows that the group has put, as they are stored since; None for those that it has touched or removed."""
        shift = base - DRAFTED
        for address, write in self.settled.writes.items():
            if type(write) is PutRow:
                record = write.record
                due = None if record.expires_at is None else _moment(record.expires_at, now)
                version = record.version + shift
                yield address, Record(record.key, record.value, record.encoding, version, due, record.created_at, now)
            else:
                yield address, None

    def arrays(self) -> dict[Space, Arrays]:
        """The rows that the group has read, and those that it writes, by space."""
        spaces: dict[Space, _Rows] = {}
        current, stamps, appended = self.current, self.stamps, self.settled.appended
        updated: set[Address] = set()
        for address, write in self.settled.writes.items():
            space, key = address
            rows = spaces.get(space) or spaces.setdefault(space, _Rows())
            if type(write) is PutRow:
                if address in appended:
                    rows.insert.append((write.record, appended[address]))
                elif write.is_new_entry:
                    rows.remove.append(key)
                    rows.insert.append((write.record, None))
                elif (record := current.get(address)) is not None:
                    rows.update.append(write.record)
                    stamp = stamps.get(address, record.updated_at)
                    rows.updated.append((record.version, record.expires_at, stamp))
                    updated.add(address)
                elif address in self.decided:
                    rows.insert.append((write.record, None))
                else:
                    rows.put.append(write.record)
            elif type(write) is SetExpiry:
                rows.touch.append((key, write.expires_at))
            else:
                rows.remove.append(key)
        for address in self.decided:
            if address not in updated:
                space, key = address
                rows = spaces.get(space) or spaces.setdefault(space, _Rows())
                if (record := current.get(address)) is None:
                    rows.read.append((key, None, None, None))
                else:
                    stamp = stamps.get(address, record.updated_at)
                    rows.read.append((key, record.version, record.expires_at, stamp))
        return {space: rows.bind(space) for space, rows in spaces.items()}


class _Rows:
    """What a group does in one space."""

    def __init__(self) -> None:
        self.read: list[tuple[Any, ...]] = []
        self.update: list[Record] = []
        self.updated: list[tuple[Any, ...]] = []
        """What was read of the rows in `update`."""
        self.put: list[Record] = []
        self.insert: list[tuple[Record, tuple[bytes, bytes] | None]] = []
        self.touch: list[tuple[Any, int | None]] = []
        self.remove: list[Any] = []

    def bind(self, space: Space) -> Arrays:
        """An array for each argument of the function."""
        layout, bound = LAYOUTS[space], Arrays()
        stamped = layout.stamp is not None
        if self.read:
            keys, versions, dues, stamps = zip(*self.read, strict=True)
            bound["read"] = [*layout.bind_keys(keys), *_seen(layout, versions, dues, stamps)]
        if self.update:
            versions, dues, stamps = zip(*self.updated, strict=True)
            puts = _puts(layout, self.update)
            bound["update"] = [*puts, *_seen(layout, versions, dues, stamps)]
        if self.put:
            bound["put"] = _puts(layout, self.put)
        if self.insert:
            columns = bound["insert"] = _puts(layout, [record for record, _ in self.insert])
            if not stamped:
                # The key of an Append is made of what stands before and after its version.
                columns[0] = [around[0] if around else record.key for record, around in self.insert]
                columns.append(_sparse([around[1] if around else None for _, around in self.insert]))
        if self.touch:
            keys, dues = zip(*self.touch, strict=True)
            bound["touch"] = [*layout.bind_keys(keys), integers(dues)]
        if self.remove:
            bound["remove"] = list(layout.bind_keys(self.remove))
        return bound


def _seen(layout: PostgresLayout, versions: Sequence[Any], dues: Sequence[Any], stamps: Sequence[Any]) -> list[Any]:
    return [integers(versions), integers(dues), integers(stamps) if layout.stamp is None else _sparse(stamps)]


def _puts(layout: PostgresLayout, records: list[Record]) -> list[Any]:
    *values, versions, dues = layout.bind_puts(records)
    columns: list[Any] = list(values)
    if not layout.stamp:
        columns[-1] = integers(columns[-1])  # the encodings
    return [*columns, integers([version - DRAFTED for version in versions]), integers(dues)]


def integers(column: Sequence[int | None]) -> str | None:
    """An array of integers as text, which the server casts: for an int the driver takes 0.6 µs.

    None for an array of nothing but None: `unnest` fills it up.
    """
    if None not in column:
        return f"{{{','.join(map(str, column))}}}"
    if _sparse(column) is None:
        return None
    return f"{{{','.join(['NULL' if each is None else str(each) for each in column])}}}"


def _sparse(column: Sequence[Any]) -> Sequence[Any] | None:
    """None for an array of nothing but None."""
    return None if column.count(None) == len(column) else column


def _expiry(write: PutRow | SetExpiry | RemoveRow) -> int | None:
    if type(write) is PutRow:
        return write.record.expires_at
    return write.expires_at if type(write) is SetExpiry else None


def _moment(due: int, now: int) -> int:
    return now + due - RELATIVE if due >= RELATIVE else due


def settled_draft(
    group: Sequence[Batch],
    current: Mapping[Address, Record],
    decided: Mapping[Address, bool],
    stamps: Mapping[Address, str | None],
    now: int,
) -> Draft:
    """Settle a group from what was read at a moment."""
    settled = settle(group, current, DRAFTED, now, relative_from=RELATIVE)
    return Draft(settled, now, current, decided, stamps)


def purging_draft(batch: Batch, expected: Mapping[Address, Record], now: int) -> Draft:
    """Settle a batch of Purges from the rows that it expects, for a moment at which all of them have expired."""
    return settled_draft([batch], expected, dict.fromkeys(expected, False), dict.fromkeys(expected), now)
