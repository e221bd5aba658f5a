"""Stores entry after entry: python -m tests.faults.children.appender URL WRITER

Keys are ("log", writer, number). Prints the versionstamp of each once it is acknowledged.
"""

import asyncio
import sys

import keyloft


async def main(url: str, writer: int) -> None:
    async with keyloft.open(url, sweep_every=None) as kv:
        number = 0
        while True:
            number += 1
            stamp = await kv.set(("log", writer, number), number)
            sys.stdout.write(f"{stamp}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
