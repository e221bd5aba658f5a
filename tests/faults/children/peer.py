"""Shares files with another process: carries out one command per line, and answers with a line of JSON.

python -m tests.faults.children.peer NAME

race FILE COUNT         open FILE and write it at full speed; answers with the versionstamps of all writes, by kind
open FILE               open FILE for what follows
set KEY NUMBER          KEY is a JSON list; answers with the versionstamp
delete KEY
close
"""

import asyncio
import json
import sys
from typing import Any

import keyloft

Stamps = list[tuple[int, int]]


async def increment(kv: keyloft.Store, count: int) -> Stamps:
    """Check-and-set increments of one key: the numbers that were written, with their versionstamps."""
    written: Stamps = []
    while len(written) < count:
        entry = await kv.get(("race", "checked"))
        number = (entry.value if entry.exists else 0) + 1
        done = await kv.atomic().check(entry).set(entry.key, number).commit()
        if done.versionstamp is not None:
            written.append((number, done.versionstamp))
    return written


async def add(kv: keyloft.Store, count: int) -> Stamps:
    written = []
    for number in range(count):
        done = await kv.atomic().sum(("race", "sum"), 1).commit()
        assert done.versionstamp is not None
        written.append((number, done.versionstamp))
    return written


async def store_own(kv: keyloft.Store, name: str, count: int) -> Stamps:
    return [(number, await kv.set(("own", name, number), number)) for number in range(count)]


async def race(name: str, path: str, count: int) -> dict[str, Stamps]:
    async with keyloft.open(path) as kv:
        checked, summed, own = await asyncio.gather(increment(kv, count), add(kv, count), store_own(kv, name, count))
    return {"checked": checked, "sum": summed, "own": own}


async def main(name: str) -> None:
    kv: keyloft.Store | None = None
    loop = asyncio.get_running_loop()
    say({"ready": name})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, *words = line.rstrip("\n").split(" ", 2)
        answer: Any = None
        match verb:
            case "race":
                answer = await race(name, words[0], int(words[1]))
            case "open":
                kv = await keyloft.open(words[0])
            case "set" if kv is not None:
                answer = await kv.set(json.loads(words[0]), int(words[1]))
            case "delete" if kv is not None:
                answer = await kv.delete(json.loads(words[0]))
            case "close" if kv is not None:
                await kv.aclose()
        say({"done": verb, "answer": answer})


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
