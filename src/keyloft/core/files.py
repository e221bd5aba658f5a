"""Makes files that only their owner can read and write."""

import contextlib
import errno
import os
from typing import Final

OWNER_ONLY: Final = 0o600
OUT_OF_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the operating system that mean a full disk, a quota, or a limit on the size of files."""


def create_private(path: str | os.PathLike[str]) -> OSError | None:
    """Make an empty file with mode 0600, whatever the umask, unless it exists. SQLite's -wal and -shm get its mode.

    Returns:
        The error if no file was made, also because it exists; a caller that opens it next may ignore this.
    """
    try:
        # The real path, because O_EXCL refuses a symbolic link, which SQLite follows.
        file = os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY)
    except OSError as error:
        return error
    with os.fdopen(file, "wb"), contextlib.suppress(OSError, AttributeError):
        os.fchmod(file, OWNER_ONLY)  # the umask may have taken bits away; not every system and disk has modes
    return None
