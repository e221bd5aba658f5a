"""Keyloft's plugin service as a child process: `python -m bench.arms.nats.keyloft_service ADDRESS FILE [KEYS]`.

With KEYS it fills the file first. It imports nothing that `keyloft serve` would not import: its memory is measured.
"""

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bench.harness.child_main import run
from bench.harness.data import Pair, stored_pairs
from keyloft.core.records import Batch, Set, Space
from keyloft.core.values import Encoding
from keyloft.nats.connection import connect
from keyloft.plugins.service import DatabaseService
from keyloft.plugins.store import BotDatabase

_CHUNK = 2000


@asynccontextmanager
async def serving(address: str, path: Path, stored: int) -> AsyncIterator[None]:
    db = BotDatabase(path)
    await fill(db, stored_pairs(stored))
    client = await connect(address, name="keyloft", skip_subject_validation=True)  # as keyloft serve does
    service = DatabaseService(client, db)
    await service.start()
    yield
    await service.stop()
    await client.close()
    await db.close()


async def filled(path: Path, stored: int) -> None:
    """Make a file with this many keys and close it, so that they are in the file, not in its write-ahead log."""
    db = BotDatabase(path)
    await fill(db, stored_pairs(stored))
    await db.close()


async def fill(db: BotDatabase, pairs: Iterable[Pair], expire_in: int | None = None) -> None:
    """Store pairs in large batches, with an optional expiry in milliseconds."""
    engine = await db.engine()
    mutations = [Set(Space.PLUGINS, key, msgspec.json.encode(value), Encoding.JSON, expire_in) for key, value in pairs]
    for first in range(0, len(mutations), _CHUNK):
        await engine.commit(Batch(tuple(mutations[first : first + _CHUNK])))


if __name__ == "__main__":
    run(serving(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
