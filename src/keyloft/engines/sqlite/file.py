"""Opens SQLite files: pragmas, the schema of a fresh one, and what SQLite's errors mean to a user."""

import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import apsw

from keyloft import limits
from keyloft.core import schema
from keyloft.engines.inspection import Inspection
from keyloft.engines.sqlite import tables
from keyloft.errors import (
    Busy,
    CannotOpen,
    DatabaseError,
    DiskFull,
    KeyloftError,
    NotADatabase,
    ReadOnly,
    SchemaTooNew,
    SchemaTooOld,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIBRARY_VERSION: Final[str] = apsw.sqlite_lib_version()
"""Of the SQLite that comes with apsw; Python's own is another one."""

_GLANCE_SECONDS: Final = 2.0
_SYNCHRONOUS: Final = {"full": "FULL", "relaxed": "NORMAL"}
_OUT_OF_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SqliteFile:
    """A path, and how connections to it are made."""

    def __init__(
        self, path: str, durability: str, vfs: str | None = None, cache_mib: int = limits.SQLITE_CACHE_MIB
    ) -> None:
        self.path = path
        self._cache_mib = cache_mib
        self.in_memory = path == ":memory:"
        self._durability = durability
        self.syncs = durability == "full"
        """Whether a commit waits for the disk."""
        self._vfs = vfs

    def open_writer(self) -> apsw.Connection:
        """The connection that writes; makes or checks the schema first."""
        return self.translated(self._open_writer)

    def open_reader(self, *, cache_mib: int | None = None) -> apsw.Connection:
        """A connection that only reads."""
        return self.translated(lambda: self._open_reader(self._cache_mib if cache_mib is None else cache_mib))

    def check_schema(self) -> None:
        """See whether the file is ours, without writing anything.

        Raises:
            DatabaseError: It is not, or of another version.
        """
        if not Path(self.path).exists():
            raise CannotOpen(f"there is no file {self.path}")
        connection = self.open_reader()
        try:
            stamp = self.translated(lambda: self._stamp(connection))
            if stamp is None:
                raise NotADatabase(f"{self.path} is no database of Keyloft; it was left as it is")
            self._check_stamp(stamp)
        finally:
            connection.close()

    def look(self) -> Inspection:
        """What the file shows to somebody who changes neither it nor what is beside it."""
        return self.translated(self._look)

    def close(self, connection: apsw.Connection) -> None:
        """Let go of a connection; the last one takes the log into the file."""
        try:
            connection.close()
        except apsw.Error as error:
            # The log stays beside the file, and the next opening takes it in: nothing is lost.
            logger.warning("closing failed: %s", self.explain(error))

    def translated(self, work: Callable[[], T], connection: apsw.Connection | None = None) -> T:
        """Do something with a connection; let its errors name the file and the reason."""
        try:
            return work()
        except apsw.Error as error:
            raise self.explain(error, connection) from error
        except UnicodeDecodeError as error:
            raise DatabaseError(
                f"{self.path} holds a text that is not UTF-8: it is damaged, or somebody wrote it by hand"
            ) from error

    def explain(self, error: apsw.Error, connection: apsw.Connection | None = None) -> DatabaseError:
        """The error that tells a user what is wrong with which file."""
        where = self.path
        cause = 0
        with contextlib.suppress(apsw.ConnectionClosedError):
            cause = 0 if connection is None else connection.system_errno or _last_errno(connection)
        match error:
            case apsw.FullError():
                return DiskFull(_FULL.format(where))
            case apsw.IOError() if cause in _OUT_OF_SPACE:
                return DiskFull(_FULL.format(where))
            case apsw.ReadOnlyError():
                return ReadOnly(f"{where} can't be written: the file or its folder is read-only for this user")
            case apsw.NotADBError():
                return NotADatabase(f"{where} is not an SQLite database; it was left as it is")
            case apsw.CorruptError():
                return DatabaseError(f"{where} is damaged ({error}); restore it from a backup")
            case apsw.BusyError() | apsw.LockedError():
                return Busy(
                    f"{where} was locked by others for over {limits.BUSY_SECONDS:g} s; nothing was written: retry"
                )
            case apsw.CantOpenError():
                return CannotOpen(f"{where} can't be opened: {self._why_not()}")
            case apsw.PermissionsError() | apsw.AuthError():
                return CannotOpen(f"{where} can't be opened: this user may not access it")
        reason = f"{error} ({os.strerror(cause)})" if cause else str(error)
        return DatabaseError(f"{where}: {type(error).__name__}: {reason}")

    def check_in_place(self, connection: apsw.Connection) -> None:
        """Refuse to write a file that nobody would find again; in WAL mode SQLite itself does not look (1.5 µs).

        Raises:
            DatabaseError: The path no longer leads to the file that is open.
        """
        if self.in_memory:
            return
        moved = ctypes.c_int(0)
        known = connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
        if known and moved.value:
            raise DatabaseError(
                f"{self.path} was moved, removed or replaced while it was open; nothing was written: open it again"
            )

    def _open_writer(self) -> apsw.Connection:
        connection = self._connect()
        try:
            connection.set_busy_handler(wait_patiently())
            if connection.readonly("main"):
                raise ReadOnly(f"{self.path} can't be written: the file is read-only for this user")
            stamp = self._stamp(connection)
            if stamp is not None:
                self._check_stamp(stamp)
            self._set_up(connection)
            self._create_schema(connection)
        except apsw.Error as error:
            explained = self.explain(error, connection)
            connection.close()
            raise explained from error
        except KeyloftError:
            connection.close()
            raise
        return connection

    def _open_reader(self, cache_mib: int) -> apsw.Connection:
        connection = self._connect()
        connection.set_busy_timeout(int(limits.BUSY_SECONDS * 1000))
        connection.execute("PRAGMA query_only = 1").fetchall()
        connection.execute(f"PRAGMA cache_size = -{cache_mib * 1024}").fetchall()
        return connection

    def _look(self) -> Inspection:
        # Who reads a file in WAL mode makes a log and an index if there are none: then it is read as if on a CD.
        is_in_use = all([Path(f"{self.path}-{part}").exists() for part in ("wal", "shm")])
        options = "mode=ro" if is_in_use else "mode=ro&immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(f"file:{quote(self.path)}?{options}", flags=flags, vfs=self._vfs)
        try:
            connection.set_busy_timeout(int(_GLANCE_SECONDS * 1000))
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            revision = self._stamp(connection)
            if revision == schema.REVISION:
                for layout in tables.LAYOUTS.values():
                    connection.execute(f"SELECT {layout.value} FROM {layout.table} LIMIT 1").fetchall()
                connection.execute(tables.READ_CLOCK).fetchall()
            return Inspection(software=f"SQLite {LIBRARY_VERSION}", revision=revision, wanted=schema.REVISION)
        finally:
            connection.close()

    def _connect(self) -> apsw.Connection:
        return apsw.Connection(self.path, vfs=self._vfs)

    def _set_up(self, connection: apsw.Connection) -> None:
        deadline = time.monotonic() + limits.BUSY_SECONDS
        while True:
            try:
                [[mode]] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
                break
            except apsw.BusyError:
                # SQLite asks no busy handler here: another process is switching the same fresh file to WAL.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
        if mode != "wal" and not self.in_memory:
            raise CannotOpen(
                f"{self.path} can't be opened: its file system has no shared memory for SQLite's log; use a local disk"
            )
        for pragma in (
            f"synchronous = {_SYNCHRONOUS[self._durability]}",
            "fullfsync = 1",
            "wal_autocheckpoint = 0",
            f"cache_size = -{self._cache_mib * 1024}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    def _create_schema(self, connection: apsw.Connection) -> None:
        if self._stamp(connection) is not None:
            return
        connection.execute("BEGIN IMMEDIATE").fetchall()
        try:
            # Another process may have been faster.
            if self._stamp(connection) is None:
                for statement in tables.CREATE:
                    connection.execute(statement).fetchall()
            connection.execute("COMMIT").fetchall()
        except apsw.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK").fetchall()
            raise

    def _stamp(self, connection: apsw.Connection) -> str | None:
        """The revision of the schema; None in a database that is not ours yet."""
        found = connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1", (schema.REVISION_TABLE,)
        ).fetchall()
        if not found:
            return None
        rows = connection.execute(f"SELECT version_num FROM {schema.REVISION_TABLE}").fetchall()
        return str(rows[0][0]) if rows else None

    def _check_stamp(self, stamp: str) -> None:
        if stamp < schema.REVISION:
            raise SchemaTooOld(
                f"{self.path} has schema {stamp}, this version of Keyloft has {schema.REVISION}: run "
                f"`keyloft migrate --database {self.path}`; the file was left as it is"
            )
        if stamp > schema.REVISION:
            raise SchemaTooNew(
                f"{self.path} has schema {stamp}, which this version of Keyloft does not know (it has "
                f"{schema.REVISION}): upgrade keyloft; the file was left as it is"
            )

    def _why_not(self) -> str:
        path = Path(self.path)
        try:
            if path.is_dir():
                return "it is a folder"
            if path.parent.is_file():
                return f"{path.parent} is no folder"
            if not path.parent.is_dir():
                return f"the folder {path.parent} does not exist"
        except PermissionError:
            return f"this user may not enter the folder {path.parent}"
        except OSError as error:
            return str(error.strerror)
        if not os.access(path.parent, os.W_OK):
            return f"this user may not write to the folder {path.parent}"
        return "this user may not read and write it"


def _last_errno(connection: apsw.Connection) -> int:
    """What the system last said about the file: SQLite's backups tell their connection nothing."""
    errno_of_file = ctypes.c_int(0)
    connection.file_control("main", apsw.SQLITE_FCNTL_LAST_ERRNO, ctypes.addressof(errno_of_file))
    return errno_of_file.value


_FULL = "no space is left for {}; nothing of this write was kept, and writes work again once there is space"


def wait_patiently(is_given_up: Callable[[], bool] = lambda: False) -> Callable[[int], bool]:
    """A busy handler for many writers: SQLite's own sleeps up to 100 ms at a time, and so starves the patient."""
    began = 0.0

    def wait(calls: int) -> bool:
        nonlocal began
        if calls == 0:
            began = time.monotonic()
        elif is_given_up() or time.monotonic() - began > limits.BUSY_SECONDS:
            return False
        time.sleep(0.0005 if calls < 20 else 0.002)
        return True

    return wait
