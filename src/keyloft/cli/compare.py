"""Tells whether two databases hold the same, by counts and hashes of all their rows."""

import hashlib
from typing import Final

import msgspec
from msgspec import Struct

from keyloft.upkeep import EVERYTHING, Progress, Snapshot

_to_bytes: Final = msgspec.msgpack.Encoder().encode


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
