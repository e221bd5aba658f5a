"""Compares databases, by counts and hashes of their rows."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from keyloft import limits
from keyloft.admin.export_format import row_name
from keyloft.admin.selection import Selection, count, rows_of
from keyloft.core.maintenance import EVERYTHING, Progress, Range, Snapshot, content
from keyloft.core.records import Record, Space

_to_bytes: Final = msgspec.msgpack.Encoder().encode


class Digest(Struct, frozen=True):
    """The number of rows of a database, and a hash of their keys, values, versions and times."""

    rows: int
    hash: str


async def digest(snapshot: Snapshot, progress: Progress) -> Digest:
    """The digest of a database."""
    rows, hashed = 0, hashlib.blake2b(digest_size=32)
    for part in EVERYTHING:
        hashed.update(part.space.encode())
        async for some in snapshot.rows(part):
            # Row by row: the hash must not depend on where a page ends.
            for row in some:
                hashed.update(_to_bytes(row))
            rows += len(some)
            progress(rows, rows)
    return Digest(rows, hashed.hexdigest())


class Comparison(Struct):
    """How what was copied compares with its source."""

    compared: int = 0
    missing: int = 0
    different: int = 0
    other_versions: int = 0
    """Equal but for the version: they were stored before, or replaced another entry."""
    first_difference: str | None = None
    """The first row that is missing or different."""
    source_sha256: str = ""
    target_sha256: str = ""


async def compare(source: Snapshot, target: Snapshot, selection: Selection, progress: Progress) -> Comparison:
    """Read both, key by key. What else the target holds does not matter."""
    found = Comparison()
    hashes = hashlib.sha256(), hashlib.sha256()
    total = await count(source, selection)
    for part in selection.parts:
        wanted = _rows(rows_of(source, Selection((part,))))
        stored = _rows(_pages(target, part))
        current = await anext(stored, None)
        async for row in wanted:
            while current is not None and current.key < row.key:
                current = await anext(stored, None)
            if (current is None or current.key != row.key) and not row.is_alive(target.now):
                continue  # it expired on the way, and was swept
            found.compared += 1
            if not found.compared % limits.ROWS_BETWEEN_PROGRESS:
                progress(found.compared, total)
            hashes[0].update(_bytes(part.space, row))
            if current is None or current.key != row.key:
                found.missing += 1
            else:
                hashes[1].update(_bytes(part.space, current))
                if content(row) == content(current):
                    found.other_versions += row.version != current.version
                    continue
                found.different += 1
            found.first_difference = found.first_difference or row_name(part.space, row.key)
    found.source_sha256, found.target_sha256 = [digest.hexdigest() for digest in hashes]
    return found


async def _pages(snapshot: Snapshot, part: Range) -> AsyncIterator[tuple[Space, Sequence[Record]]]:
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
