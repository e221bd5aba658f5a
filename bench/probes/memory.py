"""Memory of a fresh process that opens a store and reads all of it."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import keyloft
from bench.arms.keyloft_file import fill
from bench.harness.figures import Figure, Row, within


def remembering(folder: Path, stored: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "resident.db"
        asyncio.run(_fill(path, stored))
        reported = [_child(path, stored) for _ in range(rounds)]
    empty = Figure("Python with keyloft imported", "MB", tuple(before for before, _ in reported))
    full = Figure("after reading all by get, and all by list", "MB", tuple(after for _, after in reported))
    return Row(f"resident memory, {stored:,} keys", figures=(empty, full), verdicts=(within(full, 50),))


async def _fill(path: Path, stored: int) -> None:
    async with keyloft.open(path, sweep_every=None) as kv:
        await fill(kv, stored)


def _child(path: Path, stored: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "bench.probes.memory_reader", str(path), str(stored)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = finished.stdout.split()
    return float(before), float(after)
