"""Paths of files, and files that only their owner can read and write."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from keyloft.errors import CannotOpen

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


def absolute_path(path: str) -> str:
    """The absolute path of a database file; `~` and `~user` stand for home directories.

    Raises:
        CannotOpen: There is no such user, or the path is not UTF-8.
    """
    try:
        found = str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise CannotOpen(f"{path} can't be opened: there is no such user on this machine") from None
    try:
        found.encode()
    except UnicodeEncodeError:
        raise CannotOpen(
            f"{found!a} can't be opened: SQLite takes only paths in UTF-8; rename the file or folder"
        ) from None
    return found
