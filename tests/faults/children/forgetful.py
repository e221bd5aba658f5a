"""Writes a store and ends without closing it.

    python -m tests.faults.children.forgetful FILE HOW

HOW is «quiet» (nothing under way), «writing» (writes under way), «reading» (a long read under way) or «watching».
Answers with a line for each acknowledged write: its number.
"""

import asyncio
import os
import sys
from typing import Any

import keyloft


async def write(kv: keyloft.Store, number: int) -> None:
    await kv.set(("k", number), number)
    os.write(1, b"%d\n" % number)


async def main(path: str, how: str) -> None:
    kv = await keyloft.open(path)
    await asyncio.gather(*[write(kv, number) for number in range(100)])
    under_way: list[asyncio.Future[Any]] = []
    match how:
        case "writing":
            under_way = [asyncio.create_task(write(kv, number)) for number in range(100, 2000)]
        case "reading":
            under_way = [asyncio.create_task(kv.count(()))]
        case "watching":
            under_way = [asyncio.ensure_future(anext(kv.watch(prefix=("elsewhere",))))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in under_way:
        assert not task.done()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
