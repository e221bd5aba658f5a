"""Reads records from an SQLite file: on the event loop, or on a thread for what takes long."""

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import starmap
from typing import Any, Final

import apsw

from keyloft import limits
from keyloft.core.records import Ask, Count, Expired, Get, Key, Latest, Now, Page, Record, Scan, Space, Usage, Used
from keyloft.core.schema import Row, lost_counter
from keyloft.core.values import LOST
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.tables import LAYOUTS, PLUGIN_USAGE, READ_VERSION, time_text
from keyloft.engines.sqlite.worker import Worker

_VALUE_TYPES: Final = (bytes, str)  # a text was written by hand; an int is the id of a large value


def point(cursor: apsw.Cursor, space: Space, key: Key) -> Record | None:
    """The stored entry at a key, whether expired or not."""
    layout = LAYOUTS[space]
    for row in cursor.execute(layout.get, layout.bind_key(key)).fetchall():
        if type(row[0]) not in _VALUE_TYPES and layout.large is not None:
            # With a statement of its own: as a subquery, SQLite would copy the value once more.
            for [value] in cursor.execute(layout.large.get, (key, row[0])).fetchall():
                return layout.record(key, value, *row[1:])
            return layout.record(key, b"", LOST, *row[2:])
        return layout.record(key, *row)
    return None


def points(cursor: apsw.Cursor, asks: Sequence[Get], now: int) -> list[Record | None]:
    """The live entries at several keys, in the order asked."""
    found: list[Record | None] = []
    for first in range(0, len(asks), limits.SQLITE_GETS_PER_STATEMENT):
        some = asks[first : first + limits.SQLITE_GETS_PER_STATEMENT]
        space = some[0].space
        if len(some) < limits.SQLITE_GETS_WORTH_A_STATEMENT or any([ask.space is not space for ask in some]):
            found += [_alive(point(cursor, ask.space, ask.key), ask, now) for ask in some]
            continue
        layout, keys = LAYOUTS[space], [ask.key for ask in some]
        records: list[Record | None] = [None] * len(some)
        rows: list[Row] = cursor.execute(layout.gets, layout.bind_keys(keys)).fetchall()
        for position, *columns in rows:
            if columns[0] is None:
                columns[:2] = b"", LOST
            records[position] = _alive(layout.record(keys[position], *columns), some[position], now)
        found += records
    return found


def _alive(record: Record | None, ask: Get, now: int) -> Record | None:
    if record is None or record.expires_at is None or ask.include_expired or now < record.expires_at:
        return record
    return None


def answer(cursor: apsw.Cursor, ask: Ask, now: int) -> Record | Page | list[Record] | list[Used] | int | None:
    """Answer one ask. All rows are fetched: a statement that is left half-way keeps its lock."""
    if type(ask) is Get:
        return _alive(point(cursor, ask.space, ask.key), ask, now)
    if isinstance(ask, Latest):
        return read_version(cursor)
    if isinstance(ask, Now):
        return now
    if isinstance(ask, Usage):
        return list(starmap(Used, cursor.execute(PLUGIN_USAGE, (time_text(now),)).fetchall()))
    layout = LAYOUTS[ask.space]
    moment = layout.bind_time(now)
    match ask:
        case Scan():
            bindings = (moment, *layout.bind_range(ask.start, ask.end), ask.limit)
            return layout.page(cursor.execute(layout.scan(ask), bindings).fetchall())
        case Count():
            count: int = cursor.execute(layout.count, (moment, *layout.bind_range(ask.start, ask.end))).get
            return count
        case Expired():
            return list(layout.page(cursor.execute(layout.expired, (moment, ask.limit)).fetchall()))
    raise TypeError(f"an engine can't answer {type(ask).__name__}")


def read_version(cursor: apsw.Cursor) -> int:
    """The version counter.

    Raises:
        DatabaseError: It is lost.
    """
    version: int | None = cursor.execute(READ_VERSION).get
    if version is None:
        raise lost_counter(cursor.connection.filename)
    return version


class View:
    """One read transaction per iteration of the event loop, which makes a get a third faster (ADR 2).

    A task learns of another process's commit through the event loop, so before the iteration in which the view began:
    it never reads a state older than what it knows.
    """

    def __init__(self, connection: apsw.Connection, *, own_transaction: bool) -> None:
        self.connection = connection
        self._cursor = connection.cursor()
        self._own_transaction = own_transaction
        self._is_open = False

    def cursor(self) -> apsw.Cursor:
        """For use in this iteration, whose end is to call `end`."""
        if not self._is_open:
            # Set before BEGIN and unset after ROLLBACK: a signal's handler may raise in between, and `end` still works.
            self._is_open = True
            if self._own_transaction and not self.connection.in_transaction:
                self._cursor.execute("BEGIN")
        return self._cursor

    def end(self) -> None:
        if self._is_open:
            with contextlib.suppress(apsw.Error):  # SQLite has ended it already, after an error of the disk
                if self._own_transaction and self.connection.in_transaction:
                    self._cursor.execute("ROLLBACK")
            self._is_open = False


class LongReader:
    """A connection and a thread for reads that would block the event loop."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._worker = Worker(f"keyloft reader of {file.path}")
        self._connection: apsw.Connection | None = None

    async def read(self, asks: tuple[Ask, ...], now: int) -> list[Any]:
        return await self._worker.call(partial(self._read, asks, now))

    async def aclose(self) -> None:
        # On the worker, after the reads under way: the first of them may still be opening the connection.
        await self._worker.call(self._close)
        self._worker.stop()

    def _close(self) -> None:
        if self._connection is not None:
            self._file.close(self._connection)

    def _read(self, asks: tuple[Ask, ...], now: int) -> list[Any]:
        if self._connection is None:
            # A small cache: it scans tables, and rarely reads a page twice.
            self._connection = self._file.open_reader(cache_mib=1)
        cursor = self._connection.cursor()
        with self._file.explained(self._connection):
            try:
                cursor.execute("BEGIN")
                return [answer(cursor, ask, now) for ask in asks]
            finally:
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
