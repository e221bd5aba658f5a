"""Closes the connections that a child inherits by a fork, so that it may open the same files itself.

SQLite remembers in memory which locks its process has on each file. A child inherits that memory, but not the locks. A
new connection of the child to the same file would take no locks; another process would find the file unused, and remove
the write-ahead log when it closes; and what the child writes afterwards would be lost.
"""

from pathlib import Path
from weakref import WeakKeyDictionary

import apsw

from keyloft.core.forks import call_in_children, no_fork
from keyloft.errors import CannotOpen

_paths: "WeakKeyDictionary[apsw.Connection, str]" = WeakKeyDictionary()
"""The paths of open connections."""
_unusable: set[tuple[int, int]] = set()
"""Device and inode of the files that were in use by another thread when this process was forked."""


def will_be_inherited(connection: apsw.Connection, path: str) -> apsw.Connection:
    """Have a new connection closed in the children of this process."""
    with no_fork:
        _paths[connection] = path
    return connection


def check_may_open(path: str) -> None:
    """Refuse a file that this process can't lock.

    Raises:
        CannotOpen: A thread of the parent was using it at the moment of the fork.
    """
    if _unusable and identity(path) in _unusable:
        raise CannotOpen(
            f"{path}: another thread of the parent process was using this file when this process was forked, so it "
            "can't be locked here: fork while no other thread uses the store, or start the process with spawn"
        )


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of the file that a path names; None if there is none."""
    try:
        found = Path(path).stat()
    except OSError as error:
        if error.errno is None:
            raise  # a TimeoutError, for example, that a signal's handler has raised
        return None
    return found.st_dev, found.st_ino


def _close_inherited() -> None:
    for connection, path in [*_paths.items()]:
        try:
            # A rollback would change the index of the write-ahead log, which the parent shares and is writing to.
            if connection.txn_state() != apsw.SQLITE_TXN_WRITE:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close(True)
                continue
        except apsw.ConnectionClosedError:
            continue
        except apsw.Error:  # a thread that the child does not have is using it
            pass
        if (file := identity(path)) is not None:
            _unusable.add(file)
    _paths.clear()


call_in_children(_close_inherited)
