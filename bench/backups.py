"""Backs a database up again and again, as a child: `python -m bench.backups FILE TO`."""

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw

from bench.nats_child import run

_PAGES = 256
"""Copied at a time: some 1 MiB."""


@asynccontextmanager
async def copying(path: str, to: str) -> AsyncIterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=_copy, args=(path, Path(to), over))
    thread.start()
    yield
    over.set()
    thread.join()


def _copy(path: str, to: Path, over: threading.Event) -> None:
    source = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    while not over.is_set():
        # One read transaction for the whole copy: without it, each write of others would begin it anew.
        source.execute("BEGIN").fetchall()
        source.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        target = apsw.Connection(str(to))
        with target.backup("main", source, "main") as backup:
            while not backup.done and not over.is_set():
                backup.step(_PAGES)
        target.close()
        source.execute("COMMIT").fetchall()
        to.unlink()
    source.close()


if __name__ == "__main__":
    run(copying(sys.argv[1], sys.argv[2]))
