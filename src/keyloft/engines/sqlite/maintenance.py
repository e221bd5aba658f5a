"""Reads, loads, checks, backs up and compacts an SQLite file as a whole, on a thread of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import apsw
from msgspec.structs import replace

from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.core.files import create_private
from keyloft.core.maintenance import Existing, Facts, Loaded, Progress, Range, Size, Snapshot, movable_time
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import REVISION, Row, lost_counter
from keyloft.core.values import LOST
from keyloft.engines import loading
from keyloft.engines.sqlite.file import LIBRARY_VERSION, SqliteFile, busy_handler
from keyloft.engines.sqlite.reads import number, point
from keyloft.engines.sqlite.tables import CREATE, LAYOUTS, READ_VERSION, WRITE_VERSION, Layout, milliseconds
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.sqlite.writes import put
from keyloft.errors import Busy, DatabaseError

T = TypeVar("T")
R = TypeVar("R", Record, Size)

_CREATED: Final = [statement.split()[2] for statement in CREATE if statement.startswith("CREATE")]
"""The names of Keyloft's tables and indexes."""


class SqliteMaintenance:
    """An SQLite file as a whole."""

    @classmethod
    async def open(cls, path: str, *, make: bool, read_only: bool = False) -> "SqliteMaintenance":
        """Open a file.

        Args:
            path: The file.
            make: Make it if it is not there; otherwise nothing is written before the first change.
            read_only: Refuse every change.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        maintenance = cls(SqliteFile(path, read_only=read_only))
        try:
            await maintenance.do(maintenance.writer if make else maintenance.file.check_schema)
        except BaseException:
            await maintenance.aclose()
            raise
        return maintenance

    def __init__(self, file: SqliteFile) -> None:
        self.file = file
        self._worker = Worker(f"keyloft maintenance of {file.path}")
        self._writer: apsw.Connection | None = None

    async def facts(self) -> Facts:
        return await self.do(self._facts)

    def _facts(self) -> Facts:
        wal = Path(f"{self.file.path}-wal")
        wal_bytes = wal.stat().st_size if wal.exists() else 0
        return Facts(f"SQLite {LIBRARY_VERSION}", REVISION, Path(self.file.path).stat().st_size, wal_bytes)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator["SqliteSnapshot"]:
        async with self._reader(cache_mib=2) as reader:
            yield await self.do(partial(SqliteSnapshot, self, reader))

    async def load(self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing) -> Loaded:
        return await self._write(lambda transaction: loading.load(transaction, rows, version, existing))

    async def become(self, source: Snapshot, progress: Progress, *, expected_version: int | None = None) -> int:
        return await self._write(
            lambda transaction: loading.replace_all(transaction, source, progress, expected_version)
        )

    async def damage(self) -> list[str]:
        def check() -> list[str]:
            stored = {name for (name,) in reader.execute("SELECT name FROM sqlite_schema").fetchall()}
            missing = [f"{name} is missing" for name in _CREATED if name not in stored]
            found = [line for (text,) in reader.execute("PRAGMA integrity_check(100)") for line in text.splitlines()]
            if missing or found != ["ok"]:
                return missing + [line for line in found if line != "ok" and not line.startswith("***")]
            return [line for layout in LAYOUTS.values() for line in _wrong_values(reader, layout)]

        async with self._reader(cache_mib=limits.SQLITE_CACHE_MIB) as reader:
            return await self.do(check, reader)

    async def compact(self) -> None:
        writer = await self.do(self.writer)

        def work() -> None:
            writer.execute("VACUUM").fetchall()
            [[is_busy, *_]] = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if is_busy:
                raise Busy(
                    f"{self.file.path} is compact, but other processes still read its old state, so its space is not "
                    "yet given back: try again when they are done"
                )

        await self.do(work, writer)

    async def backup(self, target: str, progress: Progress) -> None:
        """Copy the file page by page, with the tables of other programs."""
        async with self._reader(cache_mib=2) as reader:
            copy = SqliteMaintenance(SqliteFile(target))
            try:
                # In a transaction, or each commit of another process would restart the copy.
                await self.do(partial(_begin_reading, reader))
                await copy.take_pages(reader, progress)
                await copy.make_plain()
            finally:
                await copy.aclose()

    async def take_pages(self, source: apsw.Connection, progress: Progress) -> None:
        """Become a copy of another file, whose connection no one else uses meanwhile."""
        create_private(self.file.path)
        self._writer = await self.do(partial(apsw.Connection, self.file.path))
        copying = await self.do(partial(self._writer.backup, "main", source, "main"))
        try:
            while not copying.done:
                await self.do(partial(copying.step, limits.BACKUP_PAGES), self._writer)
                progress(copying.page_count - copying.remaining, copying.page_count)
        except BaseException:
            # `finish` raises the error again, with less of its reason.
            with contextlib.suppress(DatabaseError):
                await self.do(copying.finish)
            raise
        await self.do(copying.finish, self._writer)

    async def make_plain(self) -> None:
        """Leave one file without a write-ahead log, which can be read where nothing can be written."""
        await self.do(lambda: self.writer().execute("PRAGMA journal_mode = DELETE").fetchall())

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._worker.call(partial(self.file.close, self._writer))
        self._worker.stop()

    async def do(self, job: Callable[[], T], connection: apsw.Connection | None = None) -> T:
        """Do a job on the thread; cancelling the caller interrupts what the connection does."""
        doing = asyncio.ensure_future(self._worker.call(partial(self.file.translated, job, connection)))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            if connection is not None:
                connection.interrupt()
            with contextlib.suppress(DatabaseError):
                await doing
            raise

    def writer(self) -> apsw.Connection:
        """The connection that writes; on the thread."""
        if self._writer is None:
            self._writer = writer = self.file.open_writer()
            writer.set_busy_handler(busy_handler(lambda: writer.is_interrupted))
            writer.execute(f"PRAGMA wal_autocheckpoint = {limits.MAINTENANCE_CHECKPOINT_PAGES}").fetchall()
        return self._writer

    @asynccontextmanager
    async def _reader(self, cache_mib: int) -> AsyncIterator[apsw.Connection]:
        reader = await self.do(partial(self.file.open_reader, cache_mib=cache_mib))
        try:
            yield reader
        finally:
            await self.do(partial(self.file.close, reader))

    async def _write(self, work: Callable[["_SqliteLoad"], Awaitable[tuple[T, int | None]]]) -> T:
        """Do something in one transaction, and set the version counter that it returns."""
        writer = await self.do(self.writer)
        try:
            version = await self.do(partial(_begin_writing, writer, self.file), writer)
            result, new_version = await work(_SqliteLoad(self, writer, version))
            await self.do(partial(_commit, writer, new_version))
        except BaseException:
            await self.do(partial(_roll_back, writer))
            raise
        return result


class _SqliteLoad:
    """A transaction that loads rows."""

    def __init__(self, maintenance: SqliteMaintenance, writer: apsw.Connection, version: int) -> None:
        self._maintenance = maintenance
        self._writer = writer
        self.version = version
        self.now = SystemClock().now()

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        return await self._maintenance.do(partial(_stored, self._writer, space, rows), self._writer)

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        await self._maintenance.do(partial(_put, self._writer, space, rows), self._writer)

    async def clear(self) -> None:
        for layout in LAYOUTS.values():
            await self._maintenance.do(partial(_clear, self._writer, layout), self._writer)


class SqliteSnapshot:
    """A file at one moment: a read transaction that stays open. Made on the thread."""

    def __init__(self, maintenance: SqliteMaintenance, connection: apsw.Connection) -> None:
        self._maintenance = maintenance
        self._connection = connection
        _begin_reading(connection)
        self.version = _read_version(connection, maintenance.file)
        self.now = SystemClock().now()

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        layout = LAYOUTS[part.space]
        columns = (*layout.key, layout.value, layout.encoding, "version", "expires_at", "created_at", "updated_at")
        return self._pages(part, after, columns, _plugin_record if part.space is Space.PLUGINS else Record)

    async def count(self, part: Range) -> int:
        count = partial(number, self._connection.cursor(), *_select(part, None, ("count(*)",), ordered=False))
        return await self._maintenance.do(count, self._connection)

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        layout = LAYOUTS[part.space]
        columns = (*layout.key, layout.length, "expires_at")
        return self._pages(part, None, columns, _plugin_size if part.space is Space.PLUGINS else Size)

    async def _pages(
        self, part: Range, after: Key | None, columns: Sequence[str], made: Callable[..., R]
    ) -> AsyncIterator[Sequence[R]]:
        while rows := await self._maintenance.do(partial(self._page, part, after, columns), self._connection):
            some = [made(*row) for row in rows]
            before, after = after, some[-1].key
            # With a damaged index this could go on for ever.
            if before is not None and type(before) is type(after) and before >= after:
                raise DatabaseError(
                    f"{self._maintenance.file.path} is damaged: {LAYOUTS[part.space].table} is not in the order of its "
                    "keys; restore it from a backup"
                )
            yield some

    def _page(self, part: Range, after: Key | None, columns: Sequence[str]) -> list[Row]:
        """About a megabyte of rows, one at least."""
        found: list[Row] = []
        size = 0
        cursor = self._connection.cursor()
        for row in cursor.execute(*_select(part, after, columns)):
            found.append(row)
            for cell in row:
                if type(cell) is bytes:
                    size += len(cell)
            if size > limits.SCAN_BYTES or len(found) == limits.MAINTENANCE_ROWS:
                break
        cursor.close()
        return found


def _plugin_record(plugin: str, key: str, value: bytes, encoding: int, version: int, *times: object) -> Record:
    expires_at, created_at, updated_at = [movable_time(milliseconds(time)) for time in times]
    return Record((plugin, key), value, encoding, version, expires_at, created_at or 0, updated_at or 0)


def _plugin_size(plugin: str, key: str, size: int, expires_at: object) -> Size:
    return Size((plugin, key), size, movable_time(milliseconds(expires_at)))


def _select(part: Range, after: Key | None, columns: Sequence[str], *, ordered: bool = True) -> tuple[str, Row]:
    """The statement that reads a range, or what is left of it after a key."""
    layout = LAYOUTS[part.space]
    where, bindings = loading.range_condition(part, after, layout.key, "?")
    order = f" ORDER BY {', '.join(layout.key)}" if ordered else ""
    return f"SELECT {', '.join(columns)} FROM {layout.table}{where}{order}", tuple(bindings)


def _begin_reading(reader: apsw.Connection) -> None:
    """Fix the moment that a connection shows: a transaction shows what was stored at its first read."""
    reader.execute("BEGIN").fetchall()
    reader.execute(READ_VERSION).fetchall()


def _begin_writing(writer: apsw.Connection, file: SqliteFile) -> int:
    writer.execute("BEGIN IMMEDIATE").fetchall()
    return _read_version(writer, file)


def _commit(writer: apsw.Connection, version: int | None) -> None:
    if version is not None:
        writer.execute(WRITE_VERSION, (version,)).fetchall()
    writer.execute("COMMIT").fetchall()


def _clear(writer: apsw.Connection, layout: Layout) -> None:
    writer.execute(f"DELETE FROM {layout.table}").fetchall()
    if layout.large is not None:
        writer.execute(f"DELETE FROM {layout.large.table}").fetchall()


def _roll_back(writer: apsw.Connection) -> None:
    if writer.in_transaction:
        writer.execute("ROLLBACK").fetchall()


def _read_version(connection: apsw.Connection, file: SqliteFile) -> int:
    rows: list[Row] = connection.execute(READ_VERSION).fetchall()
    if not rows:
        raise lost_counter(file.path)
    version: int = rows[0][0]
    return version


def _wrong_values(reader: apsw.Connection, layout: Layout) -> list[str]:
    """What is wrong between a table and its large value table."""
    if layout.large is None:
        return []
    table = layout.table
    wrong = {
        "have lost their value": f"{layout.encoding} = {LOST}",
        "have two values": "value IS NOT NULL AND large IS NOT NULL",
    }
    found = {what: reader.execute(f"SELECT count(*) FROM {table} WHERE {where}").get for what, where in wrong.items()}
    return [f"{count} rows of {table} {what}" for what, count in found.items() if count]


def _stored(connection: apsw.Connection, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
    keys = [row.key for row in rows]
    # Most rows are loaded where nothing is stored: one statement finds that out, instead of one per row.
    statement, bindings = _select(Range(space, min(keys), max(keys)), None, ("1",), ordered=False)
    if not connection.execute(f"SELECT EXISTS ({statement})", bindings).get:
        # The range leaves out its end, the largest key, which need not be the last: an edited export has any order.
        keys = [max(keys)]
    found: dict[Key, Record] = {}
    cursor = connection.cursor()
    for key in keys:
        if (record := point(cursor, space, key)) is not None:
            is_plugin = space is Space.PLUGINS
            found[key] = replace(record, expires_at=movable_time(record.expires_at)) if is_plugin else record
    return found


def _put(writer: apsw.Connection, space: Space, rows: Sequence[Record]) -> None:
    layout, cursor = LAYOUTS[space], writer.cursor()
    if layout.large is None or not any(map(layout.large.holds, rows)):
        before = writer.total_changes()
        cursor.executemany(layout.put, [layout.bind_put(row, True) for row in rows]).fetchall()
        if writer.total_changes() - before == len(rows):
            return
    # Some values are large, or replace a large one.
    for row in rows:
        put(cursor, layout, row, is_new_entry=True)
