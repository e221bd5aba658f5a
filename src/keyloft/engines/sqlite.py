"""Stores records in an SQLite file: reads inline on the event loop, writes in groups on a thread of their own.

A point read takes a few microseconds from the page cache, less than handing it to a thread would. A durable write
takes a disk's time, so it never happens on the event loop.
"""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import apsw
from msgspec import Struct

from keyloft import limits
from keyloft.clock import Clock
from keyloft.engine import Watch
from keyloft.engines.groups import Groups
from keyloft.engines.layouts import LAYOUTS, READ_CLOCK, WRITE_CLOCK, Row
from keyloft.engines.notify import Notifier
from keyloft.engines.settle import Put, Remove, Retime, Verdict, Write, deciding, settle
from keyloft.engines.sqlite_file import SqliteFile
from keyloft.engines.worker import Worker
from keyloft.errors import Closed, DatabaseError
from keyloft.records import Address, Ask, Batch, Committed, Conflict, Count, Expired, Get, Latest, Record, Scan

logger = logging.getLogger(__name__)


class SqliteEngine:
    """An engine on one SQLite file, or on a private database in memory (`:memory:`)."""

    @classmethod
    async def open(cls, path: str, clock: Clock, *, durability: str = "full", vfs: str | None = None) -> "SqliteEngine":
        """Open a file, creating it if need be.

        Raises:
            DatabaseError: The file can't be used; the message says why.
        """
        file = SqliteFile(path, durability, vfs)
        worker = Worker(f"keyloft writer of {path}")
        try:
            writer = await worker.call(file.open_writer)
            reader = writer if file.in_memory else file.open_reader()
        except BaseException:
            worker.stop()
            raise
        return cls(file, clock, worker, writer, reader)

    def __init__(
        self, file: SqliteFile, clock: Clock, worker: Worker, writer: apsw.Connection, reader: apsw.Connection
    ) -> None:
        self._file = file
        self._clock = clock
        self._worker = worker
        self._writer = _Writer(file, clock, writer)
        self._reader = reader
        self._view = _View(reader, own_transaction=not file.in_memory)
        self._long_reader: _LongReader | None = None
        self._groups = Groups(self._start)
        self._notifier = Notifier(self, clock)
        self._seen_clock: int | None = None
        self._poller: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def read(self, *asks: Ask) -> list[Any]:
        if self._closing is not None:
            raise Closed("this store is closed: open it again to go on")
        for ask in asks:
            if type(ask) is not Get and _is_long(ask) and not self._file.in_memory:
                return await self._read_aside(asks)
        now = self._clock.now()
        try:
            cursor = self._view.cursor(now)
            return [answer(cursor, ask, now) for ask in asks]
        except apsw.Error as error:
            raise self._file.explain(error, self._reader) from error

    async def commit(self, batch: Batch) -> Committed | Conflict:
        return await self._groups.commit(batch)

    def watch(self, *asks: Get | Scan) -> Watch:
        if self._closing is not None:
            raise Closed("this store is closed: open it again to go on")
        watch = self._notifier.watch(asks, self._latest())
        if not self._file.in_memory and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll())
        return watch

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # Closing goes on even if the caller is cancelled: half closed is no state to be left in.
        await asyncio.shield(self._closing)

    def _start(self, group: list[Batch]) -> None:
        if self._file.in_memory:
            self._finished(self._writer.commit(group))
        else:
            self._worker.submit(partial(self._writer.commit, group), self._finished)

    def _finished(self, outcome: "_Outcome") -> None:
        # What these callers read next must show what they wrote.
        self._view.end()
        self._observe(outcome.clock_before, outcome.clock_after)
        self._notifier.committed(outcome.touched, outcome.clock_after)
        self._groups.finished(outcome.verdicts)

    def _observe(self, before: int, after: int) -> None:
        """Notice from the clock that somebody else committed."""
        if before != self._seen_clock:
            self._notifier.committed_elsewhere()
        self._seen_clock = after

    async def _poll(self) -> None:
        """SQLite has no way to announce a commit to other processes: while somebody watches, look at the clock."""
        while self._notifier.watched:
            await asyncio.sleep(limits.WATCH_POLL_SECONDS)
            if not self._groups.idle:
                continue  # our own group is under way, and will find out by itself
            try:
                latest = self._latest()
            except DatabaseError as error:
                logger.warning("looking for changes failed, trying again: %s", error)
            else:
                self._observe(latest, latest)

    def _latest(self) -> int:
        try:
            return _number(self._view.cursor(self._clock.now()), READ_CLOCK)
        except apsw.Error as error:
            raise self._file.explain(error, self._reader) from error

    async def _read_aside(self, asks: tuple[Ask, ...]) -> list[Any]:
        if self._long_reader is None:
            self._long_reader = _LongReader(self._file)
        return await self._long_reader.read(asks, self._clock.now())

    async def _close(self) -> None:
        await self._groups.close()
        if self._poller is not None:
            self._poller.cancel()
        self._notifier.close()
        self._view.end()
        if self._long_reader is not None:
            await self._long_reader.aclose()
        if self._reader is not self._writer.connection:
            self._reader.close()
        try:
            await self._worker.call(self._writer.connection.close)
        except apsw.Error as error:
            # The log stays beside the file, and the next opening takes it in: nothing is lost.
            logger.warning("closing failed: %s", self._file.explain(error))
        self._worker.stop()


def _is_long(ask: Ask) -> bool:
    return isinstance(ask, Count) or (isinstance(ask, (Scan, Expired)) and ask.limit > limits.SCAN_ROWS)


def answer(cursor: apsw.Cursor, ask: Ask, now: int) -> Record | list[Record] | int | None:
    """Answer one ask. Rows are always fetched to the end: a statement left half-way keeps its lock."""
    if isinstance(ask, Latest):
        return _number(cursor, READ_CLOCK)
    layout = LAYOUTS[ask.space]
    if type(ask) is Get:
        rows = cursor.execute(layout.get, layout.bind_key(ask.key)).fetchall()
        if not rows:
            return None
        record = layout.record(*rows[0])
        return record if record.expires_at is None or ask.include_expired or now < record.expires_at else None
    match ask:
        case Scan():
            bindings = (*layout.bind_key(ask.start), *layout.bind_key(ask.end), now, ask.limit)
            return [layout.record(*row) for row in cursor.execute(layout.scan(ask), bindings).fetchall()]
        case Count():
            bindings = (*layout.bind_key(ask.start), *layout.bind_key(ask.end), now)
            return _number(cursor, layout.count, bindings)
        case Expired():
            return [layout.record(*row) for row in cursor.execute(layout.expired, (now, ask.limit)).fetchall()]
    raise TypeError(f"an engine can't answer {type(ask).__name__}")


def _number(cursor: apsw.Cursor, statement: str, bindings: Row = ()) -> int:
    rows: list[tuple[Any, ...]] = cursor.execute(statement, bindings).fetchall()
    number: int = rows[0][0]
    return number


class _View:
    """One read transaction per turn of the event loop, which halves the cost of a read.

    All that a task can know of other processes' commits reached it before the turn began, so it never reads less than
    it knows. A task that reads on and on without ever waiting gets a new view each millisecond.
    """

    def __init__(self, connection: apsw.Connection, *, own_transaction: bool) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        self._own_transaction = own_transaction
        self._loop = asyncio.get_running_loop()
        self._at: int | None = None
        self._end_is_due = False

    def cursor(self, now: int) -> apsw.Cursor:
        if self._at != now and self._own_transaction:
            self._renew(now)
        return self._cursor

    def end(self) -> None:
        self._end_is_due = False
        if self._at is not None:
            self._at = None
            if self._connection.in_transaction:
                self._cursor.execute("ROLLBACK")

    def _renew(self, now: int) -> None:
        due = self._end_is_due
        self.end()
        self._cursor.execute("BEGIN")
        self._at = now
        if not due:
            self._loop.call_soon(self.end)
        self._end_is_due = True


class _LongReader:
    """A connection and a thread for what would hold up the event loop."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._worker = Worker(f"keyloft reader of {file.path}")
        self._connection: apsw.Connection | None = None

    async def read(self, asks: tuple[Ask, ...], now: int) -> list[Any]:
        return await self._worker.call(partial(self._read, asks, now))

    async def aclose(self) -> None:
        if self._connection is not None:
            await self._worker.call(self._connection.close)
        self._worker.stop()

    def _read(self, asks: tuple[Ask, ...], now: int) -> list[Any]:
        if self._connection is None:
            self._connection = self._file.open_reader()
        cursor = self._connection.cursor()
        try:
            cursor.execute("BEGIN")
            return [answer(cursor, ask, now) for ask in asks]
        except apsw.Error as error:
            raise self._file.explain(error, self._connection) from error
        finally:
            if self._connection.in_transaction:
                cursor.execute("ROLLBACK")


class _Outcome(Struct, frozen=True):
    """What became of a group, and between which clocks it stands."""

    verdicts: list[Verdict]
    clock_before: int
    clock_after: int
    touched: Iterable[Address] = ()


# The disk, the file or a lock refused: asking again, batch by batch, would get the same answer 64 times.
_HOPELESS = (
    apsw.FullError,
    apsw.IOError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.ReadOnlyError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
)


def _address(write: tuple[Address, Write]) -> Address:
    return write[0]


class _Writer:
    """Commits groups on the writing connection; runs on the worker's thread."""

    def __init__(self, file: SqliteFile, clock: Clock, connection: apsw.Connection) -> None:
        self._file = file
        self._clock = clock
        self.connection = connection
        self._cursor = connection.cursor()
        self._last_clock = 0

    def commit(self, group: list[Batch]) -> _Outcome:
        """Decide a group; never raises, whatever becomes of it."""
        try:
            return self._commit(group)
        except apsw.Error as error:
            failure = self._file.explain(error, self.connection)
            failure.__cause__ = error
            hopeless = isinstance(error, _HOPELESS)
        except Exception as error:
            failure = DatabaseError(f"{self._file.path}: a write failed unexpectedly: {type(error).__name__}")
            failure.__cause__ = error
            hopeless = False
        self._roll_back()
        if hopeless or len(group) == 1:
            return _Outcome([failure] * len(group), self._last_clock, self._last_clock)
        outcomes = [self.commit([batch]) for batch in group]
        return _Outcome(
            [verdict for outcome in outcomes for verdict in outcome.verdicts],
            outcomes[0].clock_before,
            outcomes[-1].clock_after,
            [address for outcome in outcomes for address in outcome.touched],
        )

    def _commit(self, group: list[Batch]) -> _Outcome:
        execute = self._cursor.execute
        execute("BEGIN IMMEDIATE")
        clock = _number(self._cursor, READ_CLOCK)
        now = self._clock.now()
        current = {}
        for space, key in deciding(group):
            layout = LAYOUTS[space]
            for row in execute(layout.get, layout.bind_key(key)).fetchall():
                current[space, key] = layout.record(*row)
        settled = settle(group, current, clock, now)
        if settled.clock != clock:
            self._apply(settled.writes)
            execute(WRITE_CLOCK, (settled.clock,))
            execute("COMMIT")
        else:
            execute("ROLLBACK")
        self._last_clock = settled.clock
        return _Outcome(settled.verdicts, clock, settled.clock, settled.writes)

    def _apply(self, writes: dict[Address, Write]) -> None:
        execute = self._cursor.execute
        # In the order of the keys, so that neighbours on one page are written together.
        for (space, key), write in sorted(writes.items(), key=_address):
            layout = LAYOUTS[space]
            match write:
                case Put():
                    execute(layout.put, layout.bind_put(write.record, write.anew))
                case Remove():
                    execute(layout.remove, layout.bind_key(key))
                case Retime():
                    execute(layout.retime, (write.expires_at, *layout.bind_key(key)))

    def _roll_back(self) -> None:
        try:
            if self.connection.in_transaction:
                self._cursor.execute("ROLLBACK")
        except apsw.Error as error:
            logger.error("rolling back failed: %s", self._file.explain(error, self.connection))
