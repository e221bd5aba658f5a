"""Opens SQLite files: sets permissions and pragmas, makes or checks the schema, and refuses unusable files."""

import ctypes
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw
from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.core.adoption import Adoption, examine_sqlite, examined
from keyloft.core.files import create_private
from keyloft.core.records import Space
from keyloft.engines.inspection import Inspection
from keyloft.engines.sqlite import errors, tables
from keyloft.engines.sqlite.inherited import check_may_open, close_locked, identity, lock_of, will_be_inherited
from keyloft.engines.tables import create_beside
from keyloft.errors import CannotOpen, DatabaseError, NotADatabase, ReadOnly

logger = logging.getLogger(__name__)

LIBRARY_VERSION: Final[str] = apsw.sqlite_lib_version()
"""The version of the SQLite that is part of apsw; Python's `sqlite3` has another one."""

_PLUGINS: Final = tables.LAYOUTS[Space.PLUGINS]


class SqliteFile(Struct, frozen=True):
    """A path, and how connections to it are opened."""

    path: str
    """`:memory:` is a private database in memory."""
    durability: str = "full"
    """"full" or "relaxed"."""
    sync: str = "auto"
    """"auto": the event loop may wait for the commit of a lone caller; "thread": it never waits for the disk."""
    vfs: str | None = None
    """The name of an SQLite VFS, for tests."""
    cache_mib: int = limits.SQLITE_CACHE_MIB
    """How much of the file a connection keeps in memory to read from."""
    read_only: bool = False
    """Make nothing, write nothing, and refuse every commit."""
    immutable: bool = False
    """Read-only, and no process writes the file while it is open: then SQLite needs no lock and no file beside it."""

    @property
    def in_memory(self) -> bool:
        return self.path == ":memory:"

    def open_writer(self, *, mutex: bool = True) -> apsw.Connection:
        """The connection that writes; makes a new file and its schema, or checks the schema of an old one.

        Without SQLite's mutex, a thread may use it only while it holds `lock_of(connection)`. SQLite takes the mutex a
        dozen times for each row that is read: without it, a list takes a quarter less of SQLite's time (ADR 2).
        """
        if self.read_only:
            raise errors.opened_read_only(self.path)
        if not self.in_memory and self.vfs is None:
            create_private(self.path)
        self._check_has_one_name()
        connection = self._connect(mutex=mutex)
        try:
            with lock_of(connection), self.explained(connection):
                connection.set_busy_handler(busy_handler())
                if connection.readonly("main"):
                    raise ReadOnly(
                        f"{self.path} can't be written: the file is read-only for this user; to read it, open "
                        f"sqlite:///{self.path}?mode=ro"
                    )
                revision = self._revision(connection)
                if revision is not None:
                    self._check_revision(revision)
                self._set_pragmas(connection)
                if revision is None:
                    self._create_schema(connection)
                connection.set_busy_handler(None)  # the event loop never waits for a lock; `SqliteWriter.commit` does
        except BaseException:
            close_locked(connection)
            raise
        return connection

    def open_reader(self, *, cache_mib: int | None = None, mutex: bool = True) -> apsw.Connection:
        """A connection that only reads; `mutex` as for `open_writer`."""
        flags = apsw.SQLITE_OPEN_READONLY if self.read_only else apsw.SQLITE_OPEN_READWRITE
        connection = self._connect(flags, mutex=mutex)
        try:
            with lock_of(connection), self.explained():
                connection.set_busy_timeout(int(limits.BUSY_SECONDS * 1000))
                connection.pragma("query_only", True)
                connection.pragma("cache_size", -1024 * (cache_mib or self.cache_mib))
        except BaseException:
            close_locked(connection)
            raise
        return connection

    def opener(self) -> Callable[[int], apsw.Connection]:
        """Opens further readers of the file that the path names now, given the size of their cache in MiB.

        It raises DatabaseError if the path names another file by then, or none. SQLite would apply the write-ahead log
        of the first file to the other one.
        """
        opened = identity(self.path)

        def open_reader(cache_mib: int) -> apsw.Connection:
            if identity(self.path) != opened:
                raise self._moved("nothing was read")
            return self.open_reader(cache_mib=cache_mib)

        return open_reader

    def _connect(
        self, flags: int = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, *, mutex: bool
    ) -> apsw.Connection:
        check_may_open(self.path)
        if not mutex:
            flags |= apsw.SQLITE_OPEN_NOMUTEX
        name = self.path
        if self.immutable:
            self._check_has_no_log()
            name, flags = f"file://{quote(self.path)}?mode=ro&immutable=1", flags | apsw.SQLITE_OPEN_URI
        with self.explained():
            connection = will_be_inherited(apsw.Connection(name, flags=flags, vfs=self.vfs), self.path)
        # Otherwise SQLite compiles a statement again each time that a number is bound to its LIMIT, because it
        # might find a better plan: that takes a third of the time of a short list (ADR 2).
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return connection

    def _check_has_no_log(self) -> None:
        """Refuse a file with a write-ahead log or a journal, which SQLite would not read."""
        for ending in ("-wal", "-journal"):
            log = Path(f"{Path(self.path).resolve()}{ending}")  # SQLite follows links, too
            if log.exists() and log.stat().st_size:
                raise CannotOpen(
                    f"{self.path} can't be opened with immutable=1: {log.name} belongs to its state, because a process "
                    "writes it or was killed; open and close it once where it can be written"
                )

    def _check_has_one_name(self) -> None:
        """Refuse a file with hard links: under each name, SQLite would use another write-ahead log."""
        if self.in_memory or self.immutable:
            return
        try:
            found = Path(self.path).stat()
        except OSError:  # SQLite's error says more
            return
        if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
            raise CannotOpen(
                f"{self.path} has {found.st_nlink} names (hard links). SQLite keeps the newest writes in a file "
                "named like the database, so what is written under one name would be missing or lost under another: "
                "remove the other names, which `find … -samefile` shows, or open a copy"
            )

    def check_schema(self) -> None:
        """Check that the file is Keyloft's, without writing anything.

        Raises:
            DatabaseError: The file does not exist, is not Keyloft's, or has the schema of another version.
        """
        if not os.access(self.path, os.F_OK):
            raise CannotOpen(f"there is no file {self.path}, or its folder may not be entered")
        self._check_has_one_name()
        with self.explained(), closing(self.open_reader()) as connection:
            revision = self._revision(connection)
        if revision is None:
            raise NotADatabase(f"{self.path} is no database of Keyloft; it was left as it is")
        self._check_revision(revision)

    def inspect(self) -> Inspection:
        """Read the state of the file, without changing it or making a file beside it."""
        # To read a file in WAL mode, SQLite makes the files -wal and -shm if there are none; `immutable` prevents that.
        is_in_use = all([Path(f"{self.path}-{part}").exists() for part in ("wal", "shm")])
        uri = f"file:{quote(self.path)}?{'mode=ro' if is_in_use else 'mode=ro&immutable=1'}"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with self.explained(), closing(apsw.Connection(uri, flags=flags, vfs=self.vfs)) as connection:
            connection.set_busy_timeout(int(limits.INSPECTION_SECONDS * 1000))
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            revision, store = self._revision(connection), None
            if revision == schema.REVISION:
                for layout in tables.LAYOUTS.values():
                    connection.execute(f"SELECT {layout.row} FROM {layout.table} LIMIT 1").fetchall()
                connection.execute(tables.READ_VERSION).fetchall()
                store = connection.execute(schema.READ_STORE_ID).get
            adoption = self._adoption(connection) if revision is None else None
        return Inspection(
            software=f"SQLite {LIBRARY_VERSION}",
            revision=revision,
            wanted=schema.REVISION,
            store=store,
            adoption=adoption,
        )

    def close(self, connection: apsw.Connection) -> None:
        """Close a connection; when the last one is closed, SQLite checkpoints the write-ahead log."""
        try:
            connection.close()
        except apsw.Error as error:
            # Nothing is lost: the write-ahead log stays beside the file, and the next opening reads it.
            logger.warning("closing failed: %s", self.explain(error))

    @contextmanager
    def explained(self, connection: apsw.Connection | None = None) -> Iterator[None]:
        """Raise an error of SQLite as one that names the file and the reason."""
        try:
            yield
        except errors.OF_SQLITE as error:
            raise self.explain(error, connection) from error

    def explain(
        self, error: apsw.Error | UnicodeDecodeError, connection: apsw.Connection | None = None
    ) -> DatabaseError:
        """The error for the caller: what is wrong with this file, and what to do."""
        return errors.explain(error, self.path, connection, read_only=self.read_only)

    def place_check(self, connection: apsw.Connection, result: str = "nothing was written") -> Callable[[], None]:
        """A check that the path still names the file; in WAL mode SQLite does not check that.

        It raises DatabaseError if the file was moved, removed or replaced, which says what the result of that is.
        """
        # Made once, because that takes longer than the check itself.
        moved = ctypes.c_int(0)
        address, control = ctypes.addressof(moved), connection.file_control

        def check() -> None:
            if control("main", apsw.SQLITE_FCNTL_HAS_MOVED, address) and moved.value:
                raise self._moved(result)

        return (lambda: None) if self.in_memory else check

    def _moved(self, result: str) -> DatabaseError:
        return DatabaseError(f"{self.path} was moved, removed or replaced while it was open; {result}: open it again")

    def _set_pragmas(self, connection: apsw.Connection) -> None:
        deadline = time.monotonic() + limits.BUSY_SECONDS
        while True:
            try:
                mode = connection.pragma("journal_mode", "WAL")
                break
            except apsw.BusyError:
                # Another process is switching the same new file to WAL, and SQLite calls no busy handler here.
                if time.monotonic() > deadline:
                    raise
                time.sleep(limits.SQLITE_LOCK_PAUSES[-1])
        if mode != "wal" and not self.in_memory:
            raise CannotOpen(
                f"{self.path} can't be opened: its file system has no shared memory, which SQLite's write-ahead log "
                "needs; use a local disk"
            )
        connection.pragma("synchronous", "FULL" if self.durability == "full" else "NORMAL")
        connection.pragma("fullfsync", True)
        connection.pragma("wal_autocheckpoint", 0)
        # A write-ahead log that grew while a reader needed it is truncated when it restarts.
        connection.pragma("journal_size_limit", limits.WAL_BYTES_KEPT)
        connection.pragma("cache_size", -1024 * self.cache_mib)

    def _create_schema(self, connection: apsw.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have been faster.
            if self._revision(connection) is None:
                adoption = self._adoption(connection)
                if adoption is not None:
                    adoption.check(self.path)
                    logger.info("%s: adopting its table %s", self.path, schema.PLUGIN_TABLE)
                connection.execute("; ".join(create_beside(tables.CREATE, _PLUGINS.create, adoption))).fetchall()
            connection.execute("COMMIT")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if isinstance(error, apsw.SQLError):  # the name of a table is taken; no later attempt would succeed
                raise CannotOpen(
                    f"{self.path} can't be made a database of Keyloft: {error}; rename what has this name, or name "
                    "another file. Nothing was changed"
                ) from error
            raise

    @staticmethod
    def _adoption(connection: apsw.Connection) -> Adoption | None:
        """What to do with a plugins' table that another program made."""
        return examined(examine_sqlite(_PLUGINS.create), lambda query: connection.execute(query).fetchall())

    def _revision(self, connection: apsw.Connection) -> str | None:
        """The revision of the schema; None in a database that is not Keyloft's yet."""
        table = schema.REVISION_TABLE
        if not connection.execute("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1", (table,)).get:
            return None
        rows = connection.execute(f"SELECT version_num FROM {table}").fetchall()
        return str(rows[0][0]) if rows else None

    def _check_revision(self, revision: str) -> None:
        schema.check_revision(revision, self.path, self.path)


def busy_handler(is_cancelled: Callable[[], bool] = lambda: False) -> Callable[[int], bool]:
    """A handler that waits for another process's lock. SQLite's own sleeps 100 ms at a time, and misses short gaps."""
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
