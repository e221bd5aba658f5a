"""Writes a store under a limit on the size of files (RLIMIT_FSIZE), lifts the limit, and goes on.

    python -m tests.faults.children.limited FILE BYTES

Answers with one line of JSON: what was acknowledged, how writing failed, and what could be read and written then.
"""

import asyncio
import json
import resource
import sys
from typing import Any

import keyloft


def limit_files_to(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def described(error: keyloft.KeyloftError) -> list[str]:
    return [type(error).__name__, str(error)]


async def fill(path: str, limit: int) -> dict[str, Any]:
    limit_files_to(limit)
    try:
        kv = await keyloft.open(path)
    except keyloft.KeyloftError as error:
        limit_files_to(resource.RLIM_INFINITY)
        async with keyloft.open(path) as kv:
            return {"opening": described(error), "written_then": await kv.set(("later",), 1)}
    acknowledged = 0
    failures: list[list[str]] = []
    while len(failures) < 2:
        try:
            await kv.set_many([(("filling", acknowledged, part), bytes(3000)) for part in range(4)])
        except keyloft.KeyloftError as error:
            failures.append(described(error))
        else:
            acknowledged += 1
    readable = await kv.count(("filling",))
    limit_files_to(resource.RLIM_INFINITY)
    await kv.set(("later",), 1)
    await kv.aclose()
    return {"acknowledged": acknowledged, "failures": failures, "readable": readable}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(fill(sys.argv[1], int(sys.argv[2])))) + "\n")
