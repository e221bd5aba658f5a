"""Reads, loads, checks, backs up and compacts an SQLite file as a whole, on a thread of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw
from msgspec import Struct
from msgspec.structs import astuple, replace

from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.core.files import create_private
from keyloft.core.maintenance import Existing, Facts, Loaded, LogRow, Progress, Range, Snapshot, version_after_jump
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import CHANGES_TABLE, REVISION, STORE_TABLE, Row
from keyloft.core.values import DAMAGED, LOST
from keyloft.engines import change_log, loading
from keyloft.engines.loading import TableSnapshot
from keyloft.engines.sqlite.file import LIBRARY_VERSION, SqliteFile, busy_handler
from keyloft.engines.sqlite.log import last_logged
from keyloft.engines.sqlite.reads import point
from keyloft.engines.sqlite.rows import put
from keyloft.engines.sqlite.tables import CREATE, LAYOUTS, LOG, READ_VERSION, SqliteLayout, checksum, milliseconds
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.tables import Layout, created_names
from keyloft.errors import Busy, DatabaseError

T = TypeVar("T")


class SqliteMaintenance:
    """An SQLite file as a whole."""

    @classmethod
    async def open(cls, file: SqliteFile, *, make: bool) -> "SqliteMaintenance":
        """Open a file; `make` makes it if it is not there, otherwise nothing is written before the first change.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        maintenance = cls(file)
        try:
            await maintenance.do(maintenance.writer if make else file.check_schema)
        except BaseException:
            await maintenance.aclose()
            raise
        return maintenance

    def __init__(self, file: SqliteFile) -> None:
        self.file = file
        self._worker = Worker(f"keyloft maintenance of {file.path}")
        self._writer: apsw.Connection | None = None

    async def facts(self) -> Facts:
        path, wal = Path(self.file.path), Path(f"{self.file.path}-wal")
        sizes = await self.do(lambda: (path.stat().st_size, wal.stat().st_size if wal.exists() else 0))
        return Facts(f"SQLite {LIBRARY_VERSION}", REVISION, *sizes)

    @asynccontextmanager
    async def snapshot(self, *, held: bool = True) -> AsyncIterator["SqliteSnapshot"]:
        async with self._reader(cache_mib=2) as reader:
            if held:
                await self.execute(reader, "BEGIN")
            version, last_commit, _ = await self.do(partial(last_logged, reader.cursor()))
            yield SqliteSnapshot(self, reader, version, max(SystemClock().now(), last_commit))

    async def load(
        self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing, *, is_copy: bool = False
    ) -> Loaded:
        return await self._write(
            lambda transaction: loading.load(transaction, rows, version, existing, is_copy=is_copy)
        )

    async def become(
        self,
        source: Snapshot,
        progress: Progress,
        *,
        expected_version: int | None = None,
        with_history: bool = False,
    ) -> int:
        return await self._write(
            lambda transaction: loading.replace_all(
                transaction, source, progress, expected_version=expected_version, with_history=with_history
            ),
            restarts_history=True,
        )

    async def restart_history(self) -> int:
        async def work(transaction: _SqliteLoad) -> tuple[int, int]:
            version = version_after_jump(transaction.version)
            await loading.restart_history(transaction, version)
            return version, version

        return await self._write(work, restarts_history=True)

    async def damage(self) -> list[str]:
        async with self._reader(cache_mib=limits.SQLITE_CACHE_MIB) as reader:
            stored = {name for (name,) in await self.execute(reader, "SELECT name FROM sqlite_schema")}
            missing = [f"{name} is missing" for name in created_names(CREATE) if name not in stored]
            found = await self.execute(reader, "PRAGMA integrity_check(100)")
            lines = [line for (text,) in found for line in text.splitlines()]
            if missing or lines != ["ok"]:
                return missing + [line for line in lines if line != "ok" and not line.startswith("***")]
            return [line for layout in LAYOUTS.values() for line in await self._wrong_values(reader, layout)]

    async def _wrong_values(self, reader: apsw.Connection, layout: SqliteLayout) -> list[str]:
        """How a table and its large value table contradict each other."""
        if layout.large is None:
            return []
        wrong = {
            "have lost their value": layout.large.is_lost,
            "have two values": "value IS NOT NULL AND large IS NOT NULL",
        }
        found = []
        for what, where in wrong.items():
            [[count]] = await self.execute(reader, f"SELECT count(*) FROM {layout.table} WHERE {where}")
            if count:
                found.append(f"{count} rows of {layout.table} {what}")
        return found

    async def compact(self) -> None:
        writer = await self.do(self.writer)
        await self.execute(writer, "VACUUM")
        [[is_busy, *_]] = await self.execute(writer, "PRAGMA wal_checkpoint(TRUNCATE)")
        if is_busy:
            raise Busy(
                f"{self.file.path} is compact, but other processes still read its old state, so its space is not "
                "yet given back: try again when they are done"
            )

    async def backup(self, target: str, progress: Progress) -> None:
        """Copy the file page by page, with the tables of other programs."""
        async with self._reader(cache_mib=2) as reader:
            copy = SqliteMaintenance(SqliteFile(target))
            try:
                # In a transaction, or each commit of another process would restart the copy; its first read begins it.
                await self.execute(reader, f"BEGIN; {READ_VERSION}")
                await copy.take_pages(reader, progress)
                await copy.make_plain()
            finally:
                await copy.aclose()

    async def take_pages(self, source: apsw.Connection, progress: Progress) -> None:
        """Become a copy of another file; nothing else may use its connection meanwhile."""
        create_private(self.file.path)
        self._writer = await self.do(partial(apsw.Connection, self.file.path))
        copying = await self.do(partial(self._writer.backup, "main", source, "main"))
        try:
            while not copying.done:
                await self.do(partial(copying.step, limits.BACKUP_PAGES), self._writer)
                progress(copying.page_count - copying.remaining, copying.page_count)
        except BaseException:
            # `finish` raises the same error again, with less information.
            with contextlib.suppress(DatabaseError):
                await self.do(copying.finish)
            raise
        await self.do(copying.finish, self._writer)

    async def make_plain(self) -> None:
        """Leave one file without a write-ahead log, which can be read from a folder that can't be written."""
        await self.do(lambda: self.writer().pragma("journal_mode", "DELETE"))

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._worker.call(partial(self.file.close, self._writer))
        self._worker.stop()

    async def do(self, job: Callable[[], T], connection: apsw.Connection | None = None) -> T:
        """Do a job on the thread; cancelling the caller interrupts what the connection does."""

        def explained() -> T:
            with self.file.explained(connection):
                return job()

        doing = asyncio.ensure_future(self._worker.call(explained))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            if connection is not None:
                connection.interrupt()
            with contextlib.suppress(DatabaseError):
                await doing
            raise

    async def execute(self, connection: apsw.Connection, statements: str, bindings: Row = ()) -> list[Row]:
        """Execute SQL on the thread; returns the rows that it selects."""
        return await self.do(lambda: connection.execute(statements, bindings).fetchall(), connection)

    def writer(self) -> apsw.Connection:
        """The connection that writes; on the thread."""
        if self._writer is None:
            self._writer = writer = self.file.open_writer()
            writer.set_busy_handler(busy_handler(lambda: writer.is_interrupted))
            writer.pragma("wal_autocheckpoint", limits.MAINTENANCE_CHECKPOINT_PAGES)
        return self._writer

    @asynccontextmanager
    async def _reader(self, cache_mib: int) -> AsyncIterator[apsw.Connection]:
        reader = await self.do(partial(self.file.open_reader, cache_mib=cache_mib))
        reader.create_scalar_function("milliseconds", lambda *cells: milliseconds(cells[0]), 1)
        try:
            yield reader
        finally:
            await self.do(partial(self.file.close, reader))

    async def _begin(self, connection: apsw.Connection, begin: str) -> tuple[int, int, int]:
        """Begin a transaction; returns what `last_logged` returns in it."""
        await self.execute(connection, begin)
        return await self.do(partial(last_logged, connection.cursor()))

    async def _write(
        self, work: Callable[["_SqliteLoad"], Awaitable[tuple[T, int | None]]], *, restarts_history: bool = False
    ) -> T:
        """Do something in one transaction. A log that is replaced need not continue the time of the last commit."""
        writer = await self.do(self.writer)
        try:
            version, last_commit, log_size = await self._begin(writer, "BEGIN IMMEDIATE")
            now = SystemClock().now()
            if not restarts_history:
                now = change_log.commit_time(now, last_commit, self.file.path)
            result, _ = await work(_SqliteLoad(self, writer, version, now, log_size))
            await self.do(lambda: writer.execute("COMMIT"))  # without `writer`: not to be interrupted
        except BaseException:
            if writer.in_transaction:
                await self.do(lambda: writer.execute("ROLLBACK"))
            raise
        return result


class _SqliteLoad(Struct):
    """A transaction that loads rows. The newest row that it logs is the version counter."""

    maintenance: SqliteMaintenance
    writer: apsw.Connection
    version: int
    now: int
    log_size: int

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        return await self.maintenance.do(partial(_stored, self.writer, space, rows), self.writer)

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        await self.maintenance.do(partial(_put, self.writer, LAYOUTS[space], rows), self.writer)

    async def clear(self) -> None:
        for layout in LAYOUTS.values():
            await self.maintenance.execute(self.writer, f"DELETE FROM {layout.table}")
            if layout.large is not None:
                await self.maintenance.execute(self.writer, f"DELETE FROM {layout.large.table}")

    async def log(self, rows: Sequence[LogRow]) -> None:
        bindings = list(map(astuple, rows))
        await self.maintenance.do(lambda: self.writer.executemany(LOG, bindings).fetchall(), self.writer)

    async def clear_log(self) -> None:
        await self.maintenance.execute(self.writer, f"DELETE FROM {CHANGES_TABLE}")

    async def name_store(self, store_id: str) -> None:
        await self.maintenance.execute(self.writer, f"UPDATE {STORE_TABLE} SET store_id = ?1", (store_id,))


class SqliteSnapshot(TableSnapshot):
    """A file at one moment."""

    def __init__(self, maintenance: SqliteMaintenance, connection: apsw.Connection, version: int, now: int) -> None:
        super().__init__(maintenance.file.path, LAYOUTS, version, now)
        self._maintenance = maintenance
        self._connection = connection

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        """A row that does not match its checksum has the encoding DAMAGED, so that it is not moved as an intact one."""
        layout = LAYOUTS[part.space]
        if layout.large is None:
            return super().rows(part, after)
        columns = ", ".join((layout.row, *loading.TIMES, "checksum"))
        return self._pages(part, after, columns, _checked, with_values=True)

    async def fetch(self, statement: str, bindings: Row) -> list[Row]:
        return await self._maintenance.execute(self._connection, statement, bindings)

    async def page(
        self, layout: Layout, columns: str, part: Range, after: Key | None, *, with_values: bool
    ) -> list[Row]:
        statement, bindings = loading.select(layout, columns, part, after)

        def read() -> list[Row]:
            found, size = list[Row](), 0
            cursor = self._connection.cursor()
            for row in cursor.execute(f"{statement} ORDER BY {', '.join(layout.key)}", bindings):
                found.append(row)
                size += sum([len(cell) for cell in row if type(cell) is bytes])
                if size > limits.SCAN_BYTES or len(found) == limits.MAINTENANCE_ROWS:
                    break
            cursor.close()
            return found

        return await self._maintenance.do(read, self._connection)


def _checked(key: Key, value: Any, encoding: Any, version: int, *others: Any) -> Record:
    *times, stored = others
    row = Record(key, value, encoding, version, *times)
    if stored is None or encoding == LOST:
        return row
    if type(key) is type(value) is bytes and type(encoding) is int and checksum(key, encoding, value) == stored:
        return row
    return replace(row, value=b"", encoding=DAMAGED)


def _stored(connection: apsw.Connection, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
    keys = [row.key for row in rows]
    # Mostly nothing is stored in the range of the rows: one statement finds that out, instead of one per row.
    statement, bindings = loading.select(LAYOUTS[space], "1", Range(space, min(keys), max(keys)))
    if not connection.execute(f"SELECT EXISTS ({statement})", bindings).get:
        # The range excludes its end, the largest key. That need not be the last key: an edited export has any order.
        keys = [max(keys)]
    cursor = connection.cursor()
    return {key: record for key in keys if (record := point(cursor, space, key)) is not None}


def _put(writer: apsw.Connection, layout: SqliteLayout, rows: Sequence[Record]) -> None:
    cursor = writer.cursor()
    if layout.large is None or not any(map(layout.large.holds, rows)):
        before = writer.total_changes()
        cursor.executemany(layout.put, [layout.bind_put(row, True) for row in rows]).fetchall()
        if writer.total_changes() - before == len(rows):
            return
    # Some values are large, or replace a large one.
    for row in rows:
        put(cursor, layout, row, is_new_entry=True)


async def save_as_file(source: Snapshot, target: str, progress: Progress) -> None:
    """Write what a snapshot of another engine holds into a new file, with its history.

    Raises:
        DatabaseError: The file can't be written.
    """
    copy = await SqliteMaintenance.open(SqliteFile(target), make=True)
    try:
        await copy.become(source, progress, with_history=True)
        await copy.make_plain()
    finally:
        await copy.aclose()
