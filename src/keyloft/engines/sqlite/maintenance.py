"""Looks through, fills, checks and compacts an SQLite file as a whole, on a thread of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import apsw
from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.clock import SystemClock
from keyloft.core.maintenance import (
    EVERYTHING,
    Existing,
    Facts,
    Loaded,
    Progress,
    Range,
    Size,
    Snapshot,
    check_unchanged,
    merge,
    movable_time,
    version_after_load,
)
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import REVISION, Row
from keyloft.core.values import JSON, LOST
from keyloft.engines.sqlite.file import SqliteFile, wait_patiently
from keyloft.engines.sqlite.reads import point
from keyloft.engines.sqlite.tables import (
    CREATE,
    LAYOUTS,
    READ_CLOCK,
    WRITE_CLOCK,
    Layout,
    milliseconds,
)
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.sqlite.writes import put
from keyloft.errors import Busy, DatabaseError

T = TypeVar("T")
R = TypeVar("R", Record, Size)

_PAGES_AT_ONCE: Final = 1000
_LOG_PAGES: Final = 8000
_MADE: Final = [statement.split()[2] for statement in CREATE if statement.startswith("CREATE")]
"""The names of our tables and indexes."""


class _Table(Struct, frozen=True):
    """How the rows of a space are read, with their times."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    """What `record` takes."""
    record: Callable[..., Record]
    size: Callable[..., Size]

    def select(self, part: Range, after: Key | None, columns: Sequence[str]) -> tuple[str, Row]:
        """The statement that reads a range, or what is left of it after a key."""
        key = f"({', '.join(self.key)})" if len(self.key) > 1 else self.key[0]
        place = f"({', '.join('?' * len(self.key))})" if len(self.key) > 1 else "?"
        conditions: list[str] = []
        bindings: list[object] = []
        start = part.start if after is None else after
        if start is not None:
            conditions.append(f"{key} {'>=' if after is None else '>'} {place}")
            bindings += LAYOUTS[part.space].bind_key(start)
        if part.end is not None:
            conditions.append(f"{key} < {place}")
            bindings += LAYOUTS[part.space].bind_key(part.end)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        order = ", ".join(self.key)
        return f"SELECT {', '.join(columns)} FROM {self.name}{where} ORDER BY {order}", tuple(bindings)


def _plugin_row(
    plugin: str, key: str, value: bytes, version: int, due: object, made: object, changed: object
) -> Record:
    return Record((plugin, key), value, JSON, version, _due(due), _due(made) or 0, _due(changed) or 0)


def _due(text: object) -> int | None:
    """When an entry expires; of what somebody wrote by hand, what never comes is never."""
    return movable_time(milliseconds(text))


_TIMES: Final = ("expires_at", "created_at", "updated_at")


def _bytes_table(space: Space) -> _Table:
    layout = LAYOUTS[space]
    columns = ("key", layout.value, layout.encoding, "version", *_TIMES)
    return _Table(name=layout.table, key=("key",), columns=columns, record=Record, size=Size)


def _plugin_table() -> _Table:
    layout = LAYOUTS[Space.PLUGINS]
    return _Table(
        name=layout.table,
        key=("plugin_name", "key"),
        columns=("plugin_name", "key", layout.value, "version", *_TIMES),
        record=_plugin_row,
        size=lambda plugin, key, size, expires_at: Size((plugin, key), size, _due(expires_at)),
    )


_TABLES: Final[Mapping[Space, _Table]] = {
    Space.TUPLES: _bytes_table(Space.TUPLES),
    Space.SEMANTIC: _bytes_table(Space.SEMANTIC),
    Space.PLUGINS: _plugin_table(),
}


class SqliteMaintenance:
    """An SQLite file as a whole."""

    @classmethod
    async def open(cls, path: str, *, make: bool) -> "SqliteMaintenance":
        """Open a file.

        Args:
            path: Which.
            make: Make it if need be; otherwise nothing is written until something is to be put.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        maintenance = cls(SqliteFile(path, "full"))
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
        def sizes() -> tuple[int, int]:
            log = Path(f"{self.file.path}-wal")
            return Path(self.file.path).stat().st_size, log.stat().st_size if log.exists() else 0

        database, log = sizes()
        return Facts(f"SQLite {apsw.sqlite_lib_version()}", REVISION, database, log)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator["SqliteSnapshot"]:
        reader = await self.do(partial(self.file.open_reader, cache_mib=2))
        try:
            yield await self.do(partial(SqliteSnapshot, self, reader))
        finally:
            await self.do(partial(self.file.close, reader))

    async def load(self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing) -> Loaded:
        writer = await self.do(self.writer)
        return await self.do(partial(self._load, writer, rows, version, existing), writer)

    async def become(self, source: Snapshot, progress: Progress, *, expected_version: int | None = None) -> int:
        writer = await self.do(self.writer)
        done = 0
        try:
            await self.do(partial(_begin, writer, "IMMEDIATE"), writer)
            check_unchanged(await self.do(partial(_clock, writer, self.file)), expected_version)
            for layout in LAYOUTS.values():
                await self.do(partial(_clear, writer, layout), writer)
            for part in EVERYTHING:
                async for rows in source.rows(part):
                    await self.do(partial(_put, writer, part.space, rows), writer)
                    done += len(rows)
                    progress(done, done)
            await self.do(partial(self._settle_clock, writer, source.version))
        except BaseException:
            await self.do(partial(_roll_back, writer))
            raise
        return done

    def _settle_clock(self, writer: apsw.Connection, clock: int) -> None:
        """Move on from the higher clock, and commit."""
        before = _clock(writer, self.file)
        writer.execute(WRITE_CLOCK, (before + 1 if before >= clock else clock,)).fetchall()
        writer.execute("COMMIT").fetchall()

    async def damage(self, progress: Progress) -> list[str]:
        reader = await self.do(partial(self.file.open_reader, cache_mib=16))

        def look() -> list[str]:
            there = {name for (name,) in reader.execute("SELECT name FROM sqlite_schema").fetchall()}
            missing = [f"{name} is missing" for name in _MADE if name not in there]
            told = [line for (text,) in reader.execute("PRAGMA integrity_check(100)") for line in text.splitlines()]
            if missing or told != ["ok"]:
                return missing + [line for line in told if line != "ok" and not line.startswith("***")]
            return [line for layout in LAYOUTS.values() for line in _astray(reader, layout)]

        try:
            return await self.do(look, reader)
        finally:
            await self.do(partial(self.file.close, reader))

    async def compact(self) -> None:
        writer = await self.do(self.writer)

        def work() -> None:
            writer.execute("VACUUM").fetchall()
            [[is_busy, *_]] = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if is_busy:
                raise Busy(
                    f"{self.file.path} is compact, but others still read it as it was, so its room is not yet given "
                    "back: try again when they are done"
                )

        await self.do(work, writer)

    async def backup(self, target: str, progress: Progress) -> None:
        """Copy the file page by page, other programs' tables included."""
        reader = await self.do(partial(self.file.open_reader, cache_mib=2))
        copy = SqliteMaintenance(SqliteFile(target, "full"))
        try:
            # An open transaction holds the moment: without it, each commit of others would begin the copy anew.
            await self.do(partial(_hold, reader))
            await copy.take_pages(reader, progress)
            await copy.make_plain()
        finally:
            await copy.aclose()
            await self.do(partial(self.file.close, reader))

    async def take_pages(self, source: apsw.Connection, progress: Progress) -> None:
        """Become a copy of another file, whose connection is used by nobody else meanwhile."""
        self._writer = await self.do(partial(apsw.Connection, self.file.path))
        copying = await self.do(partial(self._writer.backup, "main", source, "main"))
        try:
            while not copying.done:
                await self.do(partial(copying.step, _PAGES_AT_ONCE), self._writer)
                progress(copying.page_count - copying.remaining, copying.page_count)
        except BaseException:
            # It would fail once more, and know less of why.
            with contextlib.suppress(DatabaseError):
                await self.do(copying.finish)
            raise
        await self.do(copying.finish, self._writer)

    async def make_plain(self) -> None:
        """Leave one file, without a log beside it, that can be read where nothing can be written."""
        await self.do(self._make_plain)

    def _make_plain(self) -> None:
        self.writer().execute("PRAGMA journal_mode = DELETE").fetchall()

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._worker.call(partial(self.file.close, self._writer))
        self._worker.stop()

    async def do(self, job: Callable[[], T], connection: apsw.Connection | None = None) -> T:
        """Do something on the thread; whoever is cancelled stops what its connection is at."""
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
            writer.set_busy_handler(wait_patiently(lambda: writer.is_interrupted))
            writer.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}").fetchall()
        return self._writer

    def _load(
        self, writer: apsw.Connection, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing
    ) -> Loaded:
        told, all_written = Loaded(), list[Record]()
        with _transaction(writer):
            before, now = _clock(writer, self.file), SystemClock().now()
            new_version = max(before, version) + 1
            for space in Space:
                if some := [row for at, row in rows if at is space]:
                    written, of_space = merge(space, some, _stored(writer, space, some), existing, now, new_version)
                    _put(writer, space, written)
                    told.add(of_space)
                    all_written += written
            if all_written:
                writer.execute(WRITE_CLOCK, (version_after_load(before, version, all_written, new_version),)).fetchall()
        return told


class SqliteSnapshot:
    """A file at one moment: a read transaction that stays open. Made on the thread."""

    def __init__(self, maintenance: SqliteMaintenance, connection: apsw.Connection) -> None:
        self._upkeep = maintenance
        self._connection = connection
        _hold(connection)
        self.version = _clock(connection, maintenance.file)
        self.now = SystemClock().now()

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        table = _TABLES[part.space]
        return self._pages(part, after, table.columns, table.record)

    async def count(self, part: Range) -> int:
        [[count]] = await self._upkeep.do(partial(self._counted, part), self._connection)
        return int(count)

    def _counted(self, part: Range) -> list[Row]:
        statement, bindings = _TABLES[part.space].select(part, None, ("1",))
        return self._connection.execute(f"SELECT count(*) FROM ({statement})", bindings).fetchall()

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        table = _TABLES[part.space]
        return self._pages(part, None, (*table.key, LAYOUTS[part.space].length, "expires_at"), table.size)

    async def _pages(
        self, part: Range, after: Key | None, columns: Sequence[str], made: Callable[..., R]
    ) -> AsyncIterator[Sequence[R]]:
        while rows := await self._upkeep.do(partial(self._page, part, after, columns), self._connection):
            some = [made(*row) for row in rows]
            before, after = after, some[-1].key
            # Through an index that is damaged, one could go round and round.
            if before is not None and type(before) is type(after) and before >= after:
                raise DatabaseError(
                    f"{self._upkeep.file.path} is damaged: {_TABLES[part.space].name} is not in the order of its keys; "
                    "restore it from a backup"
                )
            yield some

    def _page(self, part: Range, after: Key | None, columns: Sequence[str]) -> list[Row]:
        """Some rows: as many as weigh about a megabyte, and one at least."""
        found: list[Row] = []
        weight = 0
        cursor = self._connection.cursor()
        for row in cursor.execute(*_TABLES[part.space].select(part, after, columns)):
            found.append(row)
            for cell in row:
                if type(cell) is bytes:
                    weight += len(cell)
            if weight > limits.SCAN_BYTES or len(found) == limits.MAINTENANCE_ROWS:
                break
        cursor.close()
        return found


@contextlib.contextmanager
def _transaction(writer: apsw.Connection) -> Iterator[None]:
    writer.execute("BEGIN IMMEDIATE").fetchall()
    try:
        yield
        writer.execute("COMMIT").fetchall()
    except BaseException:
        _roll_back(writer)
        raise


def _begin(connection: apsw.Connection, kind: str = "") -> None:
    connection.execute(f"BEGIN {kind}").fetchall()


def _hold(reader: apsw.Connection) -> None:
    """Keep to this moment: a transaction sees what was there when it first read."""
    _begin(reader)
    reader.execute(READ_CLOCK).fetchall()


def _clear(writer: apsw.Connection, layout: Layout) -> None:
    writer.execute(f"DELETE FROM {layout.table}").fetchall()
    if layout.aside is not None:
        writer.execute(f"DELETE FROM {layout.aside.table}").fetchall()


def _astray(reader: apsw.Connection, layout: Layout) -> list[str]:
    """What is wrong between a table and the one aside."""
    if layout.aside is None:
        return []
    table = layout.table
    wrong = {
        "have lost their value": f"{layout.encoding} = {LOST}",
        "have two values": "value IS NOT NULL AND large IS NOT NULL",
    }
    found = {what: reader.execute(f"SELECT count(*) FROM {table} WHERE {where}").get for what, where in wrong.items()}
    return [f"{number} rows of {table} {what}" for what, number in found.items() if number]


def _roll_back(writer: apsw.Connection) -> None:
    if writer.in_transaction:
        writer.execute("ROLLBACK").fetchall()


def _clock(connection: apsw.Connection, file: SqliteFile) -> int:
    rows: list[Row] = connection.execute(READ_CLOCK).fetchall()
    if not rows:
        raise DatabaseError(
            f"{file.path}: the row of keyloft_version_counter is gone; restore it: its version is at least the "
            "largest one in Keyloft's tables"
        )
    clock: int = rows[0][0]
    return clock


def _stored(connection: apsw.Connection, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
    """What is stored under the keys of some rows."""
    table = _TABLES[space]
    keys = [row.key for row in rows]
    between = Range(space, min(keys), max(keys))
    # Most rows go where nothing is: to find that out takes one step instead of one per row.
    statement, bindings = table.select(between, None, ("1",))
    if not connection.execute(f"SELECT EXISTS ({statement})", bindings).get:
        # The largest key is not in that range, and need not come last: a file by hand is in no order.
        keys = [max(keys)]
    found: dict[Key, Record] = {}
    cursor = connection.cursor()
    for key in keys:
        if (there := point(cursor, space, key)) is not None:
            found[key] = replace(there, expires_at=movable_time(there.expires_at)) if space is Space.PLUGINS else there
    return found


def _put(writer: apsw.Connection, space: Space, rows: Sequence[Record]) -> None:
    layout, cursor = LAYOUTS[space], writer.cursor()
    if layout.aside is None or not any(map(layout.aside.takes, rows)):
        before = writer.total_changes()
        cursor.executemany(layout.put, [layout.bind_put(row, True) for row in rows]).fetchall()
        if writer.total_changes() - before == len(rows):
            return
    # Some of them are large, or take the place of a large one.
    for row in rows:
        put(cursor, layout, row, anew=True)
