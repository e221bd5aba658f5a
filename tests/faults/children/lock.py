"""Workers that contend for one lock until they are killed, or one holder that is late.

    python -m tests.faults.children.lock DATABASE NAME WORKERS
    python -m tests.faults.children.lock DATABASE NAME late
    python -m tests.faults.children.lock DATABASE NAME hold

DATABASE may be nats://…, where a service has the store.

Says «held FENCE» for each hold that wrote something under its lock. The late one says so, waits for a line, writes
under its old fence, and prints the outcome. With «hold» it holds the lock until it loses it, and does the same then.
"""

import asyncio
import logging
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import keyloft
from keyloft import KeyloftError
from keyloft.errors import DatabaseError, Unanswered
from keyloft.semantic import LockLost, SemanticClient, Semantics, SemanticStore, StaleFence
from tests.semantic.over_nats import WholeKeys

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
        except (Unanswered, DatabaseError):
            pass  # a service was killed
        # Other processes poll 40 times a second: a process that takes the lock again at once leaves them no chance.
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def hold(store: SemanticStore, name: str) -> None:
    while True:
        lock = store.lock(LOCK, writer=f"{name}:hold", ttl=TTL_SECONDS)
        try:
            await lock.acquire()
            await step(store, name, lock.fence)
            break
        except (LockLost, StaleFence, Unanswered, DatabaseError):
            continue  # on a busy machine, a second may be over
    say(f"held {lock.fence}")
    await lock.lost.wait()
    say("lost")
    while True:
        try:
            await step(store, name, lock.fence)
            say("written")
        except (Unanswered, DatabaseError):
            continue  # a service was killed
        except KeyloftError as error:
            say(error.code)
        return


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


@asynccontextmanager
async def reached(url: str) -> AsyncIterator[SemanticStore]:
    if url.startswith("nats://"):
        async with await SemanticClient.connect(url, tenant="acme", project="web", timeout=3) as client:
            yield cast(SemanticStore, WholeKeys(client))
    else:
        async with keyloft.open(url) as kv, SemanticStore(kv, audit_key="k") as store:
            yield store


async def main(url: str, name: str, what: str) -> None:
    async with reached(url) as store:
        if what == "late":
            await be_late(store, name)
        elif what == "hold":
            await hold(store, name)
        else:
            await asyncio.gather(*[work(store, f"{name}-{number}") for number in range(int(what))])


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # conflicts are part of contending
    asyncio.run(main(*sys.argv[1:]))
