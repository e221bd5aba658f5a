"""Tells whether two databases hold the same, by counts and hashes of their rows."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from keyloft.admin.export_format import shown_key
from keyloft.admin.selection import Selection, count, rows_of
from keyloft.core.maintenance import EVERYTHING, Progress, Range, Snapshot, content
from keyloft.core.records import Record, Space

_to_bytes: Final = msgspec.msgpack.Encoder().encode
_ENTRIES_BETWEEN_LOOKS: Final = 1000


class Digest(Struct, frozen=True):
    """What tells all rows of a database from others: how many they are, and a hash of keys, values, versions, times."""

    rows: int
    hash: str


async def digest(snapshot: Snapshot, progress: Progress) -> Digest:
    """The digest of a database."""
    rows, hashed = 0, hashlib.blake2b(digest_size=32)
    for part in EVERYTHING:
        hashed.update(part.space.encode())
        async for some in snapshot.rows(part):
            # One by one: how rows come in pages is nobody's business.
            for row in some:
                hashed.update(_to_bytes(row))
            rows += len(some)
            progress(rows, rows)
    return Digest(rows, hashed.hexdigest())


class Compared(Struct):
    """How what was moved compares with what it was moved to."""

    entries: int = 0
    missing: int = 0
    different: int = 0
    other_versions: int = 0
    """Equal, but for the version: they were there before, or replaced what was."""
    first: str | None = None
    """Where the first one is that is missing or different."""
    source_hash: str = ""
    target_hash: str = ""


async def compare(source: Snapshot, target: Snapshot, selection: Selection, progress: Progress) -> Compared:
    """Walk through both, key by key; what else the target holds does not matter."""
    told = Compared()
    hashes = hashlib.sha256(), hashlib.sha256()
    total = await count(source, selection)
    for part in selection.parts:
        wanted = _rows(rows_of(source, Selection((part,))))
        stored = _rows(_parts(target, part))
        there = await anext(stored, None)
        async for row in wanted:
            while there is not None and there.key < row.key:
                there = await anext(stored, None)
            if (there is None or there.key != row.key) and not row.is_alive(target.now):
                continue  # it has expired on the way, and was swept
            told.entries += 1
            if not told.entries % _ENTRIES_BETWEEN_LOOKS:
                progress(told.entries, total)
            hashes[0].update(_bytes(part.space, row))
            if there is None or there.key != row.key:
                told.missing += 1
            else:
                hashes[1].update(_bytes(part.space, there))
                if content(row) == content(there):
                    told.other_versions += row.version != there.version
                    continue
                told.different += 1
            told.first = told.first or shown_key(part.space, row.key)
    told.source_hash, told.target_hash = [digest.hexdigest() for digest in hashes]
    return told


async def _parts(snapshot: Snapshot, part: Range) -> AsyncIterator[tuple[Space, Sequence[Record]]]:
    async for rows in snapshot.rows(part):
        yield part.space, rows


async def _rows(pages: AsyncIterator[tuple[Space, Sequence[Record]]]) -> AsyncIterator[Record]:
    async for _, rows in pages:
        for row in rows:
            yield row


def _bytes(space: Space, row: Record) -> bytes:
    """What a row holds, as bytes that no other row has."""
    key = row.key if isinstance(row.key, bytes) else "\x00".join(row.key).encode()
    head = f"{space} {len(key)} {len(row.value)} {row.encoding} {row.expires_at}\n"
    return head.encode() + key + row.value
