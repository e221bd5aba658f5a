"""Keeps the temporary files of tests in memory where there is room, unless TMPDIR names a folder for them.

On a disk, making and removing files took longer than many tests: a PostgreSQL database 100 ms instead of 25.
PYTEST_DONT_REWRITE: it is loaded before the tests are.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 4 << 30
"""Far more than a run needs at a time: a PostgreSQL server for each worker, and the files of one test."""


def _is_usable(folder: Path) -> bool:
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    found = os.statvfs(folder)
    # Programs that tests make must run from there.
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= _ROOM_BYTES


if "TMPDIR" not in os.environ and _is_usable(_MEMORY):
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None
