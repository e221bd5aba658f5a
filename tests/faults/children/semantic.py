"""Writes to the semantic store at full speed and reports what was acknowledged, until it is killed.

    python -m tests.faults.children.semantic DATABASE WRITERS

Says a line for each acknowledged write: what, which key, and what its audit record must show: the version that a put or
restore made, the version that a delete removed, the correlation id of a conflict.
"""

import asyncio
import itertools
import logging
import os
import sys

import keyloft
from keyloft.clock import SystemClock
from keyloft.semantic import Envelope, Intent, NothingToRestore, Semantics, SemanticStore, VersionConflict

CONFIG = Semantics("config")
BRIEF = Semantics("lock", ttl_seconds=1)


class HurriedClock(SystemClock):
    """Lets entries expire within the short life of this process: a second takes 20 milliseconds."""

    __slots__ = ()

    def now(self) -> int:
        return 50 * super().now()


def say(*lines: str) -> None:
    # One system call, past all buffers: what was written before a SIGKILL has arrived.
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


def acknowledged(what: str, entry: Envelope | None) -> list[str]:
    return [] if entry is None else [f"{what} {entry.key} {entry.version}"]


async def make(store: SemanticStore, writer: int, number: int) -> list[str]:
    key, pair = [f"tenant/acme/project/web/{name}/{writer}" for name in ("single", "pair")]
    who = f"writer-{writer}:step-{number}"
    match number % 8:
        case 0 | 1 | 2:
            meaning = BRIEF if number % 8 == 2 else CONFIG
            entry = await store.put(key, number, expected_version="*", writer=who, semantics=meaning)
            return acknowledged("put", entry)
        case 3:
            await store.put(key, number, expected_version=1, writer=who, semantics=CONFIG)
        case 4 | 6:
            return acknowledged(
                "delete", await store.delete(key, expected_version="*", writer=who, request_id=f"d{number}")
            )
        case 5:
            return acknowledged("restore", await store.restore(key, writer=who))
    put, delete = (
        Intent.put(key, number, expected_version="*", writer=who, semantics=CONFIG),
        Intent.delete(pair, expected_version="*", writer=who),
    )
    deletes = number % 16 == 7
    one, other = await store.batch(
        [put, delete if deletes else Intent.put(pair, number, expected_version="*", writer=who, semantics=BRIEF)]
    )
    return acknowledged("put", one) + acknowledged("delete" if deletes else "put", other)


async def go_on(store: SemanticStore, writer: int) -> None:
    for number in itertools.count():
        try:
            say(*await make(store, writer, number))
        except VersionConflict as error:
            say(*[f"conflict {failed.key} {error.correlation_id}" for failed in error.conflicts])
        except NothingToRestore:
            continue


async def sweep(store: SemanticStore) -> None:
    while True:
        await store.sweep()
        await asyncio.sleep(0.01)


async def main(database: str, writers: int) -> None:
    logging.disable()
    kv = await keyloft.open(database, clock=HurriedClock())
    store = SemanticStore(kv, sweep_every=None)
    await asyncio.gather(sweep(store), *[go_on(store, writer) for writer in range(writers)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
