"""Short calls of an engine, for tests that make many of them."""

import asyncio

import pytest

from keyloft.core.engine import Engine, LogWatch, Watch
from keyloft.core.records import (
    Batch,
    Change,
    Changes,
    Committed,
    Get,
    Key,
    LoggedChange,
    LogPosition,
    Mutation,
    Record,
    Scan,
    Set,
    Space,
)
from keyloft.core.values import Encoding, unpack_counter

A = Space.TUPLES
B = Space.SEMANTIC
P = Space.PLUGINS
START, END = b"\x00", b"\xff"
LONGEST_SECONDS = 30
IN_LARGE_BATCHES = 2500


def put(key: bytes, value: bytes = b'"v"', expire_in: int | None = None, space: Space = A) -> Set:
    return Set(space, key, value, Encoding.JSON, expire_in)


async def write(engine: Engine, *mutations: Mutation) -> Committed:
    return await commit(engine, Batch(mutations))


async def commit(engine: Engine, batch: Batch) -> Committed:
    done = await engine.commit(batch)
    assert isinstance(done, Committed)
    return done


async def get(engine: Engine, key: Key, space: Space = A) -> Record | None:
    [record] = await engine.read(Get(space, key))
    return record


async def stored(engine: Engine, key: bytes) -> Record:
    record = await get(engine, key)
    assert record is not None
    return record


async def scan(
    engine: Engine, start: bytes = START, end: bytes = END, limit: int = 100, **options: bool
) -> list[bytes]:
    [records] = await engine.read(Scan(A, start, end, limit, **options))
    return [record.key for record in records]


async def logged_after(engine: Engine, version: int) -> list[LoggedChange]:
    """The changes of later versions."""
    changes: list[LoggedChange] = []
    position, is_last = LogPosition(version), False
    while not is_last:
        [piece] = await engine.read(Changes(position))
        changes += piece.changes
        position, is_last = piece.end, piece.is_last
    return changes


async def counter(engine: Engine, key: bytes) -> int:
    return unpack_counter((await stored(engine, key)).value)


async def taken(log: LogWatch, woken: asyncio.Event, number: int) -> list[LoggedChange]:
    """So many changes, once they are there."""
    changes: list[LoggedChange] = []
    async with asyncio.timeout(LONGEST_SECONDS):
        while len(changes) < number:
            if not log.is_woken:
                await woken.wait()
            woken.clear()
            changes += await log.take()
    return changes


def read_the_log_in_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOG_SLICE_BYTES", "LOG_SLICE_ROWS", "MEMORY_SLICE_CHANGES"):
        monkeypatch.setattr(f"keyloft.limits.{name}", 10)


async def next_of(watch: Watch) -> list[Change]:
    async with asyncio.timeout(60):  # wait_for of Python 3.11 loses a result that arrives with a cancellation
        return await watch.__anext__()


async def collect(watch: Watch) -> list[list[Change]]:
    return [changes async for changes in watch]


def values_of(changes: list[Change]) -> dict[bytes, bytes | None]:
    return {change.key: None if change.record is None else change.record.value for change in changes}


async def write_large_batches(engine: Engine) -> dict[Key, int]:
    """Commit several batches at once, one of them a long one; returns the versions of their keys."""
    batches = [[put(b"%d-%04d" % (batch, number)) for number in range(250)] for batch in range(5)]
    batches.append([put(b"long-%04d" % number) for number in range(1250)])
    done = await asyncio.gather(*[write(engine, *batch) for batch in batches])
    return {put_.key: each.version for batch, each in zip(batches, done, strict=True) for put_ in batch}
