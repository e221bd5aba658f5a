"""Keyloft on uvloop: the turns of its event loop are cut differently, the promises are the same."""

import asyncio
from pathlib import Path

import uvloop

import keyloft


def test_reads_see_writes_and_watches_see_both(tmp_path: Path) -> None:
    async def work() -> None:
        async with keyloft.open(tmp_path / "app.db") as kv:
            watch = kv.watch(prefix=("n",))

            async def write_and_read(task: int) -> None:
                for number in range(20):
                    stamp = await kv.set(("n", task), number)
                    entry = await kv.get(("n", task))
                    assert (entry.value, entry.versionstamp) == (number, stamp)

            await asyncio.gather(*[write_and_read(task) for task in range(32)])
            seen = {entry.key: entry.value for entry in await anext(watch)}
            assert seen == {("n", task): 19 for task in range(32)}
            assert await kv.count() == 32

    uvloop.run(work())
