"""Keeps the temporary files of tests in memory where there is room, unless KEYLOFT_TEST_FOLDER names a folder for them.

On a disk, tests of files take half as much of a processor again, and wait for the disk besides.
TMPDIR does not decide: it is set on many machines, by people who did not think of these tests. CI tests on a disk.

The files of database servers are in memory in any case: to make and drop a PostgreSQL database takes 150 ms of a
processor on a disk, and 20 in memory. Tests kill these servers, but cut no server's power.
PYTEST_DONT_REWRITE: it is loaded before the tests are.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 4 << 30
"""Far more than a run needs at a time: a PostgreSQL server for each worker, and the files of one test."""


def _is_usable(folder: Path) -> bool:
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    found = os.statvfs(folder)
    # Programs that tests make must run from there.
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= _ROOM_BYTES


MEMORY: Final = _MEMORY if _is_usable(_MEMORY) else None
"""A folder in memory, if there is room."""
if _folder := os.environ.get("KEYLOFT_TEST_FOLDER") or MEMORY:
    os.environ["TMPDIR"] = str(_folder)
    tempfile.tempdir = None


@pytest.fixture
def server_folder() -> Iterator[Path]:
    """A folder for the files of database servers."""
    with tempfile.TemporaryDirectory(prefix="keyloft-server-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
