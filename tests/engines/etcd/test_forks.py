"""A program with a store on etcd may start others."""

import os
import subprocess
import sys

from tests.support.examples import rounds

# With a user and a group subprocess forks; without them it uses vfork, which libraries don't notice.
_PROGRAM = """
import asyncio, os, subprocess, sys
import keyloft

def start():
    return subprocess.run(["/bin/true"], user=os.getuid(), group=os.getgid(), check=False).returncode

async def main():
    async def write():
        while True:
            await kv.set(("k",), "v")

    async with keyloft.open(sys.argv[1]) as kv:
        writers = [asyncio.create_task(write()) for _ in range(8)]
        codes = [await asyncio.to_thread(start) for _ in range(int(sys.argv[2]))]
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    print(*codes)

asyncio.run(main())
"""


def test_programs_that_are_started_by_a_fork_beside_a_busy_store_live(etcd_url: str) -> None:
    """In a process of its own: what gRPC does at a fork is decided when it is first imported."""
    forks = len(rounds(40))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", _PROGRAM, etcd_url, str(forks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * forks), done.stderr[-2000:]
