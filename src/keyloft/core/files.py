"""Makes files that their owner alone can read and write."""

import contextlib
import os
from typing import Final

OWNER_ONLY: Final = 0o600


def create_private(path: str | os.PathLike[str]) -> None:
    """Make an empty file with mode 0600, whatever the umask, unless there is one; SQLite gives -wal and -shm its mode.

    An error is left to the caller, who opens the file next and meets it again.
    """
    with contextlib.suppress(OSError):
        # The real path, because O_EXCL refuses a symbolic link, which SQLite follows.
        file = os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(file, OWNER_ONLY)  # the umask may have taken bits away
        finally:
            os.close(file)
