"""Opens SQLite files: who may read a new one, pragmas, the schema, and whether the file can be used at all."""

import ctypes
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import apsw

from keyloft import limits
from keyloft.core import schema
from keyloft.core.files import create_private
from keyloft.engines.inspection import Inspection
from keyloft.engines.sqlite import errors, tables
from keyloft.errors import CannotOpen, DatabaseError, NotADatabase, ReadOnly

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIBRARY_VERSION: Final[str] = apsw.sqlite_lib_version()
"""The version of the SQLite that is part of apsw; Python's `sqlite3` has another one."""

_SYNCHRONOUS: Final = {"full": "FULL", "relaxed": "NORMAL"}


class SqliteFile:
    """A path, and how connections to it are opened."""

    def __init__(
        self,
        path: str,
        durability: str = "full",
        *,
        vfs: str | None = None,
        cache_mib: int = limits.SQLITE_CACHE_MIB,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self.in_memory = path == ":memory:"
        self.read_only = read_only
        self.syncs = durability == "full"
        """Whether a commit waits for the disk."""
        self._synchronous = _SYNCHRONOUS[durability]
        self._vfs = vfs
        self._cache_mib = cache_mib

    def open_writer(self) -> apsw.Connection:
        """The connection that writes; makes a new file and its schema, or checks the schema of an old one."""
        if self.read_only:
            raise errors.opened_read_only(self.path)
        if not self.in_memory and self._vfs is None:
            create_private(self.path)
        return self.translated(self._open_writer)

    def open_reader(self, *, cache_mib: int | None = None) -> apsw.Connection:
        """A connection that only reads."""
        return self.translated(lambda: self._open_reader(self._cache_mib if cache_mib is None else cache_mib))

    def check_schema(self) -> None:
        """Check that the file is Keyloft's, without writing anything.

        Raises:
            DatabaseError: It is not there, not Keyloft's, or of another version.
        """
        if not Path(self.path).exists():
            raise CannotOpen(f"there is no file {self.path}")
        connection = self.open_reader()
        try:
            revision = self.translated(lambda: self._revision(connection))
            if revision is None:
                raise NotADatabase(f"{self.path} is no database of Keyloft; it was left as it is")
            self._check_revision(revision)
        finally:
            connection.close()

    def inspect(self) -> Inspection:
        """Read the state of the file, without changing it or making a file beside it."""
        return self.translated(self._inspect)

    def close(self, connection: apsw.Connection) -> None:
        """Close a connection; SQLite checkpoints the write-ahead log with the last one."""
        try:
            connection.close()
        except apsw.Error as error:
            # Nothing is lost: the write-ahead log stays beside the file, and the next opening reads it.
            logger.warning("closing failed: %s", self.explain(error))

    def translated(self, work: Callable[[], T], connection: apsw.Connection | None = None) -> T:
        """Call `work`; an error of SQLite is raised as one that names the file and the reason."""
        try:
            return work()
        except apsw.Error as error:
            raise self.explain(error, connection) from error
        except UnicodeDecodeError as error:
            raise DatabaseError(
                f"{self.path} holds a text that is not UTF-8: it is damaged, or was written by hand"
            ) from error

    def explain(self, error: apsw.Error, connection: apsw.Connection | None = None) -> DatabaseError:
        """The error for the caller: what is wrong with this file, and what to do."""
        return errors.explain(error, self.path, connection, read_only=self.read_only)

    def check_in_place(self, connection: apsw.Connection) -> None:
        """Refuse to write to a file that its path no longer names; in WAL mode SQLite does not check that.

        Raises:
            DatabaseError: The file was moved, removed or replaced.
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
        connection = apsw.Connection(self.path, vfs=self._vfs)
        try:
            connection.set_busy_handler(busy_handler())
            if connection.readonly("main"):
                raise ReadOnly(f"{self.path} can't be written: the file is read-only for this user")
            revision = self._revision(connection)
            if revision is not None:
                self._check_revision(revision)
            self._set_pragmas(connection)
            self._create_schema(connection)
            connection.set_busy_handler(None)  # the event loop never waits for a lock; who may wait sets it again
        except apsw.Error as error:
            explained = self.explain(error, connection)
            connection.close()
            raise explained from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_reader(self, cache_mib: int) -> apsw.Connection:
        flags = apsw.SQLITE_OPEN_READONLY if self.read_only else apsw.SQLITE_OPEN_READWRITE
        connection = apsw.Connection(self.path, flags=flags, vfs=self._vfs)
        connection.set_busy_timeout(int(limits.BUSY_SECONDS * 1000))
        connection.execute("PRAGMA query_only = 1").fetchall()
        connection.execute(f"PRAGMA cache_size = -{cache_mib * 1024}").fetchall()
        return connection

    def _inspect(self) -> Inspection:
        # To read a file in WAL mode, SQLite makes a -wal and a -shm if there are none: `immutable` prevents that.
        is_in_use = all([Path(f"{self.path}-{part}").exists() for part in ("wal", "shm")])
        options = "mode=ro" if is_in_use else "mode=ro&immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(f"file:{quote(self.path)}?{options}", flags=flags, vfs=self._vfs)
        try:
            connection.set_busy_timeout(int(limits.INSPECTION_SECONDS * 1000))
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            revision = self._revision(connection)
            if revision == schema.REVISION:
                for layout in tables.LAYOUTS.values():
                    connection.execute(f"SELECT {layout.value} FROM {layout.table} LIMIT 1").fetchall()
                connection.execute(tables.READ_VERSION).fetchall()
            return Inspection(software=f"SQLite {LIBRARY_VERSION}", revision=revision, wanted=schema.REVISION)
        finally:
            connection.close()

    def _set_pragmas(self, connection: apsw.Connection) -> None:
        deadline = time.monotonic() + limits.BUSY_SECONDS
        while True:
            try:
                [[mode]] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
                break
            except apsw.BusyError:
                # SQLite calls no busy handler here; another process is switching the same new file to WAL.
                if time.monotonic() > deadline:
                    raise
                time.sleep(limits.SQLITE_LOCK_PAUSES[-1])
        if mode != "wal" and not self.in_memory:
            raise CannotOpen(
                f"{self.path} can't be opened: its file system has no shared memory, which SQLite's write-ahead log "
                "needs; use a local disk"
            )
        for pragma in (
            f"synchronous = {self._synchronous}",
            "fullfsync = 1",
            "wal_autocheckpoint = 0",
            f"cache_size = -{self._cache_mib * 1024}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    def _create_schema(self, connection: apsw.Connection) -> None:
        if self._revision(connection) is not None:
            return
        connection.execute("BEGIN IMMEDIATE").fetchall()
        try:
            # Another process may have been faster.
            if self._revision(connection) is None:
                for statement in tables.CREATE:
                    connection.execute(statement).fetchall()
            connection.execute("COMMIT").fetchall()
        except apsw.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK").fetchall()
            raise

    def _revision(self, connection: apsw.Connection) -> str | None:
        """The revision of the schema; None in a database that is not Keyloft's yet."""
        found = connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1", (schema.REVISION_TABLE,)
        ).fetchall()
        if not found:
            return None
        rows = connection.execute(f"SELECT version_num FROM {schema.REVISION_TABLE}").fetchall()
        return str(rows[0][0]) if rows else None

    def _check_revision(self, revision: str) -> None:
        schema.check_revision(revision, self.path, self.path)


def busy_handler(is_cancelled: Callable[[], bool] = lambda: False) -> Callable[[int], bool]:
    """Waits for a lock of another process. SQLite's own handler sleeps 100 ms at a time, and misses short gaps."""
    began = 0.0

    def wait(calls: int) -> bool:
        nonlocal began
        if calls == 0:
            began = time.monotonic()
        elif is_cancelled() or time.monotonic() - began > limits.BUSY_SECONDS:
            return False
        time.sleep(limits.SQLITE_LOCK_PAUSES[min(calls, len(limits.SQLITE_LOCK_PAUSES) - 1)])
        return True

    return wait
