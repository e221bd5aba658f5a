"""Prints its memory before and after it reads a store: `python -m bench.probes.memory_reader FILE KEYS [SAMPLE]`.

Without SAMPLE it reads every key by get and by list; with it, that many keys by get. It imports nothing that a user of
the embedded store would not import.
"""

import asyncio
import sys
from pathlib import Path

import keyloft
from bench.harness.data import key_of, value_of


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


async def read_some(path: str, stored: int, sample: int) -> None:
    async with keyloft.open(path, sweep_every=None) as kv:
        for index in range(0, stored, max(1, stored // sample)):
            entry = await kv.get(key_of(index))
            assert entry.value["id"] == index
        print(resident_megabytes())


if __name__ == "__main__":
    print(resident_megabytes())
    if len(sys.argv) > 3:
        asyncio.run(read_some(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(read_all(sys.argv[1], int(sys.argv[2])))
