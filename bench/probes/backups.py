"""Backs a database up again and again, as a child process: `python -m bench.probes.backups FILE TO`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench.harness.child_main import run
from keyloft.engines import open_maintenance


@asynccontextmanager
async def copying(path: str, to: str) -> AsyncIterator[None]:
    backups = asyncio.create_task(_back_up(path, to))
    yield
    backups.cancel()
    with suppress(asyncio.CancelledError):
        await backups
    _remove(to)


async def _back_up(path: str, to: str) -> None:
    maintenance = await open_maintenance(path)
    try:
        while True:
            await maintenance.backup(to, lambda done, total: None)
            _remove(to)
    finally:
        await maintenance.aclose()


def _remove(file: str) -> None:
    Path(file).unlink(missing_ok=True)


if __name__ == "__main__":
    run(copying(sys.argv[1], sys.argv[2]))
