"""The lock of each connection, and what becomes of connections at a fork: a child closes those that it inherits.

SQLite remembers in memory which locks its process has on each file. A child inherits that memory, but not the locks. A
new connection of the child to the same file would take no locks; another process would find the file unused, and remove
the write-ahead log when it closes; and what the child writes afterwards would be lost. So the child closes the
connection that it inherits, unless another thread of its parent was using it: then the child may not open that file.
"""

import ctypes
from pathlib import Path
from weakref import WeakKeyDictionary

import apsw
from msgspec import Struct

from keyloft.core.forks import call_in_children, no_fork
from keyloft.core.waiting import ThreadLock
from keyloft.errors import CannotOpen


class _OpenConnection(Struct, frozen=True, eq=False):
    path: str
    lock: ThreadLock


_open: "WeakKeyDictionary[apsw.Connection, _OpenConnection]" = WeakKeyDictionary()
_unusable: set[tuple[int, int]] = set()
"""Device and inode of the files that were in use by another thread when this process was forked."""


def will_be_inherited(connection: apsw.Connection, path: str) -> apsw.Connection:
    """Give a new connection its lock, and have it closed in the children of this process."""
    with no_fork:
        _open[connection] = _OpenConnection(path, ThreadLock())
    return connection


def lock_of(connection: apsw.Connection) -> ThreadLock:
    """The lock that a thread holds while it uses a connection that SQLite does not protect by a mutex."""
    return _open[connection].lock


def close_locked(connection: apsw.Connection) -> None:
    """Close a connection with its lock, so that a child does not close it in the middle of that."""
    with lock_of(connection):
        connection.close()


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
    for connection, opened in [*_open.items()]:
        try:
            # A lock that can't be taken is held by a thread that exists only in the parent: it is using the connection.
            # And a rollback would change the index of the write-ahead log, which the parent shares and is writing to.
            if opened.lock.acquire(blocking=False) and connection.txn_state() != apsw.SQLITE_TXN_WRITE:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close(True)
                continue
        except apsw.ConnectionClosedError:
            continue
        except apsw.Error:  # a thread that exists only in the parent holds SQLite's mutex
            pass
        # One more reference, so that the connection is never freed, not even as the child ends: that would close it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        if (file := identity(opened.path)) is not None:
            _unusable.add(file)
    _open.clear()


call_in_children(_close_inherited)
