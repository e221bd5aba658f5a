"""How long fdatasync takes on this disk: every durable write waits for it."""

import os
import random
import statistics
import tempfile
import time
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from bench.harness.contest import same
from bench.harness.figures import Figure, Row
from bench.harness.race import Arm, Timed

NAME = "fdatasync after overwriting 8 KiB"
_SYNCS = 100
_PAGE_BYTES = 8192

Pages: TypeAlias = list[bytes]


def syncing(folder: Path, rounds: int) -> Row:
    """Syncs alone."""
    with tempfile.TemporaryDirectory(dir=folder) as own, _set_up(Path(own)) as file:
        took = [_run(file, _plan(None, _SYNCS)).seconds for _ in range(rounds)]
    return Row("fsync", figures=(Figure(NAME, "ms", tuple(statistics.median(seconds) * 1000 for seconds in took)),))


def syncing_among() -> Arm[FileIO, Pages, None]:
    """Syncs as an arm of a race."""
    return Arm(NAME, _SYNCS, _set_up, _plan, _run, _check, FileIO.close)


def _set_up(folder: Path) -> FileIO:
    file = FileIO(folder / "synced", "x+")
    file.write(bytes(_SYNCS * _PAGE_BYTES))
    os.fsync(file.fileno())
    return file


def _plan(_: random.Random | None, operations: int) -> Pages:
    return [os.urandom(_PAGE_BYTES) for _ in range(operations)]


def _run(file: FileIO, pages: Pages) -> Timed[Any]:
    seconds = []
    for number, page in enumerate(pages):
        os.pwrite(file.fileno(), page, number * _PAGE_BYTES)
        began = time.perf_counter()
        os.fdatasync(file.fileno())
        seconds.append(time.perf_counter() - began)
    return Timed([None] * len(pages), seconds, sum(seconds))


def _check(file: FileIO, pages: Pages, _: Timed[None]) -> None:
    same(os.pread(file.fileno(), len(pages) * _PAGE_BYTES, 0), b"".join(pages))
