"""The audit trail: who did what to which entry, when and why, with keyed hashes instead of values.

A record is a row of its project's audit log, written by the commit that it describes. Its key ends with that commit's
version, so the log is in the order of what happened.

The trail of one key is read by an index. The entry's own row lists the records of its latest changes; every 16th put,
and each delete or expiry, moves that list into an index row. So most puts write only one row for the trail. A conflict
changes no entry, so a separate row points to its record.
"""

import asyncio
import hmac
import os
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from keyloft import limits
from keyloft.core.lazy import ClosableSource, SourceList
from keyloft.core.paging import Pages
from keyloft.core.records import Append, Get, Page, Record, Scan
from keyloft.core.values import Encoding
from keyloft.semantic.envelope import datetime_of, read_entry, row_reader, to_json
from keyloft.semantic.keys import SPACE, EntryKey, Project
from keyloft.semantic.rules import directive_of, wrong

AuditAction: TypeAlias = Literal["put", "delete", "expire", "conflict", "restore"]

_VERSION_BYTES: Final = 8
POSITION_BYTES: Final = _VERSION_BYTES + 2
_HIGHEST: Final = b"\xff" * POSITION_BYTES
"""A position above that of every record."""


class AuditRecord(Struct, frozen=True, kw_only=True, rename="camel"):
    """What happened to an entry. The hashes are HMACs of its value before and after: equal for equal values."""

    action: AuditAction
    key: str
    writer: str
    directive: str
    purpose: str | None
    request_id: str | None
    spec_ref: str | None
    version_before: int | None
    version_after: int | None
    before_hash: str | None
    after_hash: str | None
    at: datetime
    """By the database's clock."""
    sequence: int
    """The version of the commit that wrote this record; no two commits share one."""
    expected_version: int | str | None = None
    """For a conflict: the version that the caller expected."""
    reason: str | None = None
    """For a conflict: version, request_id or fence. For an expiry: who last wrote the entry."""
    correlation_id: str | None = None


class StoredAuditRecord(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An audit record as its row's value holds it; version and time are the row's."""

    action: AuditAction = msgspec.field(name="a")
    path: str = msgspec.field(name="k")
    writer: str = msgspec.field(name="w")
    purpose: str | None = msgspec.field(name="p", default=None)
    request_id: str | None = msgspec.field(name="r", default=None)
    spec_ref: str | None = msgspec.field(name="c", default=None)
    version_before: int | None = msgspec.field(name="b", default=None)
    before_hash: str | None = msgspec.field(name="x", default=None)
    after_hash: str | None = msgspec.field(name="y", default=None)
    expected_version: int | str | None = msgspec.field(name="e", default=None)
    reason: str | None = msgspec.field(name="n", default=None)
    correlation_id: str | None = msgspec.field(name="i", default=None)


read_audit_record = row_reader(StoredAuditRecord, "the audit record {!r} is damaged")
"""The audit record that a row of the log holds."""


class Hasher:
    """Makes the keyed hashes of values."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")

    def of(self, key: EntryKey, value: bytes) -> str:
        made = self._keyed.copy()
        # The hash includes the entry's key, so that equal values of two entries have different hashes.
        made.update(b"%b\x00%b" % (key.entry, value))
        return made.hexdigest()


def configured_hasher(key: bytes | str | None) -> Hasher | None:
    """The hasher of the given audit key, or of the environment's KEYLOFT_AUDIT_KEY; None if there is neither.

    Raises:
        InvalidArgument: The given key is empty, or neither bytes nor a str.
    """
    if key is None:
        key = os.environ.get("KEYLOFT_AUDIT_KEY") or None
    elif not isinstance(key, (str, bytes)):
        raise wrong("audit_key", "bytes or a str", key)
    elif not key:
        raise wrong("audit_key", "a secret that is not empty", key, str, bytes)
    return None if key is None else Hasher(key.encode() if isinstance(key, str) else key)


def position(version: int, number: int) -> bytes:
    """The position of a record, with which its row's key ends: the version of its commit, and its number in it."""
    return version.to_bytes(_VERSION_BYTES) + number.to_bytes(2)


def positions(joined: bytes) -> list[bytes]:
    """The record positions that an entry's row, or an index row, lists."""
    return [joined[at : at + POSITION_BYTES] for at in range(0, len(joined), POSITION_BYTES)]


def rows_for(
    key: EntryKey, record: StoredAuditRecord, number: int, *, expire_in: int, index: bytes | None = None
) -> list[Append]:
    """The rows of an audit record: its own, and one that lists it, where one is written.

    Args:
        key: The key that the record is about.
        record: What happened.
        number: The number of this record within its commit.
        expire_in: After how many milliseconds the rows expire.
        index: The positions of earlier records that an index row lists from now on; None writes no index row.
    """
    suffix = number.to_bytes(2)
    rows = [Append(SPACE, key.audit_log, to_json(record), Encoding.JSON, expire_in, suffix)]
    if record.action == "conflict":
        rows.append(Append(SPACE, key.conflicts, b"", Encoding.BYTES, expire_in, suffix))
    elif index is not None:
        rows.append(Append(SPACE, key.audit_index, index, Encoding.BYTES, expire_in, suffix))
    return rows


class AuditTrail(SourceList[AuditRecord]):
    """Audit records in the order of what happened: iterate them with `async for`, or `await` them all."""

    what = "audit records"

    def __init__(
        self,
        source: ClosableSource,
        project: Project,
        key: EntryKey | None,
        *,
        after: int | None,
        limit: int,
        reverse: bool,
    ) -> None:
        super().__init__(source)
        self._project = project.prefix
        self._log = project.audit_log
        self._key = key
        self._start = b"" if after is None else position(after + 1, 0)
        self._limit = limit
        self._reverse = reverse

    async def __aiter__(self) -> AsyncIterator[AuditRecord]:
        async for _, record in self.located():
            yield record

    async def located(self, beyond: bytes | None = None) -> AsyncIterator[tuple[bytes, AuditRecord]]:
        """The records, each with its position; `beyond` is the position of the last one of an earlier list."""
        low, high = self._start, _HIGHEST
        if beyond is not None:
            low, high = (low, beyond) if self._reverse else (max(low, beyond + b"\x00"), high)
        pages = self._of_project(low, high) if self._key is None else self._of_key(self._key, low, high)
        async for page in pages:
            for record in page:
                yield record.key[-POSITION_BYTES:], self._shown(record)

    def _of_project(self, low: bytes, high: bytes) -> AsyncIterator[Page]:
        scan = Scan(SPACE, self._log + low, self._log + high, self._limit, self._reverse, times=True)
        return Pages(self._engine, scan)

    async def _of_key(self, key: EntryKey, low: bytes, high: bytes) -> AsyncIterator[list[Record]]:
        """Pages of two reads each: where the records are, then the records."""
        left, more = self._limit, True
        size = min(left, limits.FIRST_PAGE_ROWS if left > limits.SCAN_ROWS else limits.SCAN_ROWS)
        while more and left:
            found, more = await self._find(key, low, high, min(left, size))
            records = await self._engine.read(*[Get(SPACE, self._log + each) for each in found])
            page = [record for record in records if record is not None]  # older records have expired
            yield page
            left -= len(page)
            if more:
                low, high = (low, found[-1]) if self._reverse else (found[-1] + b"\x00", high)
                size = limits.SCAN_ROWS
                await asyncio.sleep(0)  # a read may complete without waiting, and other tasks must run, too

    async def _find(self, key: EntryKey, low: bytes, high: bytes, count: int) -> tuple[list[bytes], bool]:
        """The positions of up to this many records between two positions, and whether there are more."""
        index, conflicts = key.audit_index, key.conflicts
        entry, changed, refused, [*across] = await self._engine.read(
            Get(SPACE, key.entry, include_expired=True),
            Scan(SPACE, index + low, index + high, count, self._reverse, times=True),
            Scan(SPACE, conflicts + low, conflicts + high, count, self._reverse, keys_only=True, times=True),
            # An index row lists records before its own position: the next one after `high` may list some below it.
            Scan(SPACE, index + high, index + _HIGHEST, 1, times=True),
        )
        found = {pointer[-POSITION_BYTES:] for pointer in refused.keys}
        for row in (*changed, *across):
            found.update(_listed(row))
        if entry is not None:
            stored = read_entry(entry)
            found.update(positions(stored.unindexed), [position(entry.version, stored.number)])
        # If a scan reached its limit, there may be further rows after its last one: only records up to there are next.
        known = [refused.keys[-1][-POSITION_BYTES:]] if len(refused) == count else []
        if len(changed) == count:
            known.append((min if self._reverse else max)(_listed(changed[-1])))
        if self._reverse:
            low = max([low, *known])
        else:
            high = min([high, *[each + b"\x00" for each in known]])
        page = sorted([each for each in found if low <= each < high], reverse=self._reverse)
        return page[:count], bool(known) or len(page) > count

    def _shown(self, record: Record) -> AuditRecord:
        stored = read_audit_record(record)
        fields = msgspec.structs.asdict(stored)
        return AuditRecord(
            key=self._project + fields.pop("path"),
            directive=directive_of(stored.writer),
            version_after=record.version if stored.action in ("put", "restore") else None,
            at=datetime_of(record.updated_at),
            sequence=record.version,
            **fields,
        )


def _listed(row: Record) -> list[bytes]:
    """The positions that an index row stands for: those that it lists, and its own."""
    return [*positions(row.value), row.key[-POSITION_BYTES:]]
