"""Makes moves at full speed and reports each one that was acknowledged, until it is killed.

    python -m tests.faults.children.writer FILE WRITERS [checkpointing]

With «checkpointing» it also checkpoints without a pause, so that a kill is likely to hit a checkpoint.
Says «opening», then «open», then a line for each acknowledged move: kind, writer, number, versionstamp.
"""

import asyncio
import os
import sys

import apsw

import keyloft
from tests.faults.moves import Chain, Move, chains, contents_of, made_in, make


def say(line: str) -> None:
    # One system call per line, past all buffers: what was written before a SIGKILL has arrived.
    os.write(1, line.encode() + b"\n")


async def go_on(kv: keyloft.Store, chain: Chain, last: int) -> None:
    while True:
        last += 1
        versionstamp = await make(kv, Move(chain, last))
        say(f"{chain.kind} {chain.writer} {last} {versionstamp}")


async def checkpoint(path: str) -> None:
    connection = apsw.Connection(path)
    connection.set_busy_timeout(1000)
    while True:
        await asyncio.to_thread(connection.wal_checkpoint, mode=apsw.SQLITE_CHECKPOINT_RESTART)


async def main(path: str, writers: int, *also: str) -> None:
    say("opening")
    kv = await keyloft.open(path)
    contents, _ = await contents_of(kv)
    made = made_in(contents, chains(writers))
    say("open")
    await asyncio.gather(
        *[go_on(kv, chain, last) for chain, last in made.items()],
        *[checkpoint(path) for what in also if what == "checkpointing"],
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
