"""Reads a whole store and prints the process's memory before and after: `python -m bench.reader FILE KEYS`.

It imports nothing that a user of the embedded store would not import.
"""

import asyncio
import sys
from pathlib import Path

import keyloft
from bench.data import key_of, value_of


def resident_megabytes() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


async def read_all(path: str, stored: int) -> None:
    async with keyloft.open(path) as kv:
        for index in range(stored):
            entry = await kv.get(key_of(index))
            assert entry.value == value_of(index)
        listed = 0
        async for entry in kv.list(prefix=()):
            assert entry.value == value_of(listed)
            listed += 1
        assert listed == stored
        print(resident_megabytes())


if __name__ == "__main__":
    print(resident_megabytes())
    asyncio.run(read_all(sys.argv[1], int(sys.argv[2])))
