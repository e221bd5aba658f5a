"""A program with a store on etcd may start others."""

import asyncio
import os
import subprocess
from collections import Counter

import keyloft
from tests.support.examples import rounds


async def test_programs_that_are_started_by_a_fork_beside_a_busy_store_live(etcd_url: str) -> None:
    async def write() -> None:
        while True:
            await kv.set(("k",), "v")

    def start() -> int:
        # With a user and a group subprocess forks; without them it uses vfork, which libraries don't notice.
        return subprocess.run(["/bin/true"], user=os.getuid(), group=os.getgid(), check=False).returncode

    forks = rounds(40)
    async with keyloft.open(etcd_url) as kv:
        writers = [asyncio.create_task(write()) for _ in range(8)]
        codes = Counter([await asyncio.to_thread(start) for _ in forks])
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    assert codes == {0: len(forks)}
