"""Workers that contend for one lock until they are killed, or one holder that is late.

    python -m tests.faults.children.lock DATABASE NAME WORKERS
    python -m tests.faults.children.lock DATABASE NAME late

Says «held FENCE» for each hold that wrote something under its lock. The late one says so, waits for a line, writes
under its old fence, and prints the outcome.
"""

import asyncio
import logging
import os
import random
import sys

import keyloft
from keyloft import KeyloftError
from keyloft.semantic import LockLost, Semantics, SemanticStore, StaleFence

PROJECT = "tenant/acme/project/web"
LOCK = f"{PROJECT}/locks/sync"
STEPS = f"{PROJECT}/steps"
TTL_SECONDS = 1


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


async def step(store: SemanticStore, name: str, fence: int) -> None:
    """One more step, without a version to compare: only the lock keeps two from making the same one."""
    entry = await store.get(STEPS)
    made = 0 if entry is None else entry.value
    await asyncio.sleep(random.random() / 200)
    await store.put(
        STEPS,
        made + 1,
        expected_version="*",
        writer=f"{name}:step",
        semantics=Semantics("checkpoint"),
        spec_ref=f"fence {fence}",
        fence=fence,
    )


async def work(store: SemanticStore, name: str) -> None:
    while True:
        try:
            async with store.lock(LOCK, writer=f"{name}:work", ttl=TTL_SECONDS) as lock:
                await step(store, name, lock.fence)
                say(f"held {lock.fence}")
                await asyncio.sleep(0.03)  # so that a test that reads the line can kill the holder
                await step(store, name, lock.fence)
        except (LockLost, StaleFence):
            continue  # on a busy machine, a second may be over
        # Other processes poll 40 times a second: a process that takes the lock again at once leaves them no chance.
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def be_late(store: SemanticStore, name: str) -> None:
    lock = store.lock(LOCK, writer=f"{name}:late", ttl=TTL_SECONDS)
    await lock.acquire()
    await step(store, name, lock.fence)
    say(f"held {lock.fence}")
    sys.stdin.readline()  # stops everything in this process, as a long pause of a machine does
    try:
        await step(store, name, lock.fence)
        say("written")
    except KeyloftError as error:
        say(error.code)
    await lock.lost.wait()
    say("lost")


async def main(url: str, name: str, what: str) -> None:
    async with keyloft.open(url) as kv, SemanticStore(kv, audit_key="k") as store:
        if what == "late":
            await be_late(store, name)
        else:
            await asyncio.gather(*[work(store, f"{name}-{number}") for number in range(int(what))])


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # conflicts are part of contending
    asyncio.run(main(*sys.argv[1:]))
