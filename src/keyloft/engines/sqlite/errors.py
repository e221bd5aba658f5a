"""Translates SQLite's errors: a full disk, and a file that is locked, damaged, missing or read-only."""

import contextlib
import ctypes
import os
import stat
from pathlib import Path
from typing import Final

import apsw

from keyloft.core.files import OUT_OF_SPACE
from keyloft.errors import Busy, CannotOpen, CommitUnknown, DatabaseError, DiskFull, NotADatabase, ReadOnly

FAILS_WHOLE_GROUP: Final = (
    apsw.IOError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.ReadOnlyError,
    apsw.NotADBError,
    apsw.CantOpenError,
)
"""Failures of the disk, the file or a lock: if the batches of the group were tried one by one, each would fail, too. A
damaged page and a full disk are not among them: only batches that use the page fail, and a smaller batch may fit."""

OF_SQLITE: Final = (apsw.Error, UnicodeDecodeError)
"""What a statement may raise: the second, if a text is not UTF-8, because it is damaged or was written by hand."""


def explain(
    error: apsw.Error | UnicodeDecodeError,
    path: str,
    connection: apsw.Connection | None = None,
    *,
    read_only: bool = False,
) -> DatabaseError:
    """The error for the caller: what is wrong with which file, and what to do."""
    cause = _system_error(connection)
    if isinstance(error, apsw.FullError) or (isinstance(error, apsw.IOError) and cause in OUT_OF_SPACE):
        return DiskFull(f"no space is left for {path}; nothing was written, and it works again once there is space")
    match error:
        case UnicodeDecodeError():
            return DatabaseError(
                f"{path} holds a text that is not UTF-8: it is damaged, or was written by hand; "
                "restore it from a backup, or correct that row"
            )
        case apsw.ReadOnlyError() if not read_only:
            return ReadOnly(f"{path} can't be written: the file or its folder is read-only for this user")
        case apsw.NotADBError():
            return NotADatabase(f"{path} is not an SQLite database; it was left as it is")
        case apsw.CorruptError():
            return DatabaseError(f"{path} is damaged ({error}); restore it from a backup")
        case apsw.BusyError() | apsw.LockedError():
            return Busy(f"{path} was locked by other processes for too long; nothing was written: retry")
        case apsw.CantOpenError() | apsw.ReadOnlyError():
            return CannotOpen(f"{path} can't be opened: {_why_it_can_not_be_opened(Path(path), read_only)}")
        case apsw.PermissionsError() | apsw.AuthError():
            return CannotOpen(f"{path} can't be opened: this user may not access it")
    reason = f"{error} ({os.strerror(cause)})" if cause else str(error)
    return DatabaseError(f"{path}: {type(error).__name__}: {reason}")


def is_unknown_commit(error: apsw.Error) -> bool:
    """Whether a COMMIT that failed with this error may be found after a crash nevertheless.

    If the disk refused a write, it is not: what ends a commit, its last page, is not in the write-ahead log.
    """
    # An exception that a VFS in Python raised, in tests, has no such attribute.
    result = getattr(error, "extendedresult", apsw.SQLITE_IOERR)
    return isinstance(error, apsw.IOError) and result != apsw.SQLITE_IOERR_WRITE


def unknown_commit(error: apsw.Error, path: str) -> CommitUnknown:
    """The error of a COMMIT that the disk failed to sync.

    SQLite forgets it, but has perhaps written all of it to the write-ahead log. If no later commit overwrites that, the
    recovery after a crash takes it for committed.
    """
    return CommitUnknown(
        f"{path}: the disk failed to write a commit ({error}): it can't be read now, but may be there if this process "
        "is killed, or the power fails, before the next write succeeds"
    )


def opened_read_only(path: str) -> ReadOnly:
    """The error of every write to a file that was opened for reading."""
    return ReadOnly(f"{path} was opened with ?mode=ro, which allows no writes; open it without options to write")


def _system_error(connection: apsw.Connection | None) -> int:
    """The errno of the operating system's last error on the file, or 0."""
    if connection is None:
        return 0
    with contextlib.suppress(apsw.ConnectionClosedError):
        if connection.system_errno:
            return connection.system_errno
        # SQLite's backup API sets no errno on its connection, but the file has it.
        last = ctypes.c_int(0)
        connection.file_control("main", apsw.SQLITE_FCNTL_LAST_ERRNO, ctypes.addressof(last))
        return last.value
    return 0


def _why_it_can_not_be_opened(path: Path, read_only: bool) -> str:
    try:
        # From Python 3.14 on, `path.is_dir()` and the like no longer raise what prevents them: `stat()` does.
        if stat.S_ISDIR(path.stat().st_mode):
            return f"it is a folder; name a file in it, as in {path / 'app.db'}"
    except FileNotFoundError:
        if not path.parent.is_dir():
            return f"the folder {path.parent} does not exist; make it first"
        if read_only:
            return "there is no such file, and ?mode=ro makes none"
    except NotADirectoryError:
        return f"{path.parent} is no folder"
    except PermissionError:
        return f"this user may not enter the folder {path.parent}"
    except OSError as error:
        return str(error.strerror)
    if os.access(path.parent, os.W_OK):
        return f"this user may not {'read' if read_only else 'read and write'} it"
    if read_only and not os.access(path, os.R_OK):
        return "this user may not read it"
    if read_only:
        return (
            f"it is written with a write-ahead log, so SQLite needs the file {path.name}-shm to read it, and this user "
            "may not write to the folder: read a copy that `keyloft backup` made, let this user write to the folder, "
            "or add &immutable=1 to the URL if no process writes the file"
        )
    return f"this user may not write to the folder {path.parent}"
