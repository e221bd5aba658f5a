"""Reads records from an SQLite file: on the event loop, or, if that takes long, on a thread."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple, cast
from zlib import adler32

import apsw
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import (
    Ask,
    Changes,
    Count,
    Due,
    Expired,
    Get,
    Key,
    Latest,
    Now,
    Page,
    Record,
    Scan,
    Space,
    StoreId,
    Usage,
)
from keyloft.core.schema import READ_STORE_ID, Row, lost_store_id
from keyloft.core.values import DAMAGED, JSON, LOST
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.inherited import lock_of
from keyloft.engines.sqlite.log import read_log, read_version
from keyloft.engines.sqlite.tables import (
    CHECKSUM_BASE,
    LAYOUTS,
    PLUGIN_USAGE,
    LargeValueTable,
    StoredHead,
    time_text,
)
from keyloft.engines.sqlite.worker import Worker
from keyloft.engines.tables import usage_slice

_TUPLE_LAYOUT: Final = LAYOUTS[Space.TUPLES]
_POSITIONS: Final = tuple(range(limits.SQLITE_GETS_PER_STATEMENT))
_ALL_JSON: Final = (int(JSON),) * limits.SQLITE_GETS_PER_STATEMENT
_NO_EXPIRIES: Final = (None,) * limits.SQLITE_GETS_PER_STATEMENT
_add_base: Final = CHECKSUM_BASE.__add__

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def point(cursor: apsw.Cursor, space: Space, key: Key) -> Record | None:
    """The stored entry at a key, whether expired or not."""
    layout = LAYOUTS[space]
    if layout.large is None:
        for row in cursor.execute(layout.get, layout.bind_key(key)).fetchall():
            return layout.record(key, *row)
        return None
    try:
        found: Any = cursor.execute(layout.get, (key,)).get
        if found is None:
            return None
        value, encoding, version, expires_at, created_at, updated_at, stored = found
        # As `checksum` does it, without the call.
        if adler32(value, adler32(key, encoding)) + CHECKSUM_BASE == stored:
            return Record(key, value, encoding, version, expires_at, created_at, updated_at)
    except TypeError:
        pass
    except UnicodeDecodeError:
        return _damaged_text(cursor, key)
    if _needs_view(cursor, value):
        return _in_one_view(cursor, point, space, key)
    return _unusual(cursor, layout.large, key, found)


def point_without_times(cursor: apsw.Cursor, space: Space, key: Key) -> Record | None:
    """The same without the times of creation and last change, which a get does not need."""
    layout = LAYOUTS[space]
    if layout.large is None:
        return point(cursor, space, key)
    try:
        found: Any = cursor.execute(layout.get_without_times, (key,)).get
        if found is None:
            return None
        value, encoding, version, expires_at, stored = found
        if adler32(value, adler32(key, encoding)) + CHECKSUM_BASE == stored:
            return Record(key, value, encoding, version, expires_at)
    except TypeError:
        pass
    except UnicodeDecodeError:
        return _damaged_text(cursor, key)
    if _needs_view(cursor, value):
        return _in_one_view(cursor, point_without_times, space, key)
    return _unusual(cursor, layout.large, key, found)


def _needs_view(cursor: apsw.Cursor, value: object) -> bool:
    """Whether a row has the id of a large value, and no view is open: a commit might replace it before it is read."""
    return type(value) is int and not cursor.connection.in_transaction


def _in_one_view(cursor: apsw.Cursor, read: Callable[[apsw.Cursor, *Arguments], T], *args: *Arguments) -> T:
    """What a function reads with several statements, all of which see the same moment."""
    cursor.execute("BEGIN")
    try:
        return read(cursor, *args)
    finally:
        cursor.execute("ROLLBACK")


def _unusual(cursor: apsw.Cursor, large: LargeValueTable, key: Key, found: Row) -> Record:
    """The record of a row that does not match its checksum: it has none, or its value is large, or it is damaged."""
    value, stored = found[0], found[-1]
    if type(value) is int:
        # With a statement of its own: for a subquery, SQLite would copy the value once more. The value is not compared
        # with its checksum, which would take as long as reading it; `keyloft check` does that.
        value = _large_value(cursor, large, key, value)
    elif stored is not None:
        value = DAMAGED
    elif value is None:
        value = LOST
    if type(value) is not int:
        return Record(key, value, *found[1:-1])
    return _damaged(key, found[2]) if value == DAMAGED else Record(key, b"", LOST, *found[2:-1])


def _damaged_text(cursor: apsw.Cursor, key: Key) -> Record:
    cursor.execute("")  # ends the failed statement, which would keep its view of the file open
    return _damaged(key)


def _damaged(key: Key, version: object = None) -> Record:
    # One changed bit can change the type of a column, and then the columns after it are wrong, too.
    return Record(key, b"", DAMAGED, version if type(version) is int else 0, None)


def _large_value(cursor: apsw.Cursor, large: LargeValueTable, key: Key, number: int) -> bytes | int:
    """A large value; LOST if it is missing, DAMAGED if it is no longer bytes."""
    try:
        value: object = cursor.execute(large.get, (key, number)).get
    except UnicodeDecodeError:
        cursor.execute("")  # as `_damaged_text` does
        return DAMAGED
    if value is None:
        return LOST
    return value if isinstance(value, bytes) else DAMAGED


def head(cursor: apsw.Cursor, space: Space, key: Key) -> StoredHead | None:
    """The stored entry at a key, whether expired or not, without its value."""
    layout = LAYOUTS[space]
    for row in cursor.execute(layout.get_head, layout.bind_key(key)).fetchall():
        return layout.head_record(key, *row)
    return None


def heads(cursor: apsw.Cursor, space: Space, keys: Sequence[Key]) -> list[StoredHead]:
    """The stored entries at some keys, where there are any; read with one call for all."""
    layout = LAYOUTS[space]
    rows = cursor.executemany(layout.get_heads, map(layout.bind_key, keys)).fetchall()
    if len(layout.key) == 1:
        return [layout.head_record(*row) for row in rows]
    return [layout.head_record(row[:2], *row[2:]) for row in rows]


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
        try:
            rows: list[Row] = cursor.execute(layout.gets[len(keys)], layout.bind_keys(keys)).fetchall()
        except UnicodeDecodeError:  # read one by one, so that a damaged row does not hide the others
            found += [_alive(point(cursor, space, ask.key), ask, now) for ask in some]
            continue
        if layout.large is None:
            records: list[Record | None] = [None] * len(some)
            for position, value, version, expires_at in rows:
                record = layout.record(keys[position], value, version, expires_at)
                records[position] = record if expires_at is None else _alive(record, some[position], now)
        else:
            records = _records(cursor, layout.large, some, rows, now)
        found += records
    return found


def _records(
    cursor: apsw.Cursor, large: LargeValueTable, asks: Sequence[Get], rows: Sequence[Row], now: int
) -> list[Record | None]:
    """The live entries of the rows that `gets` has found, in the order asked."""
    records: list[Record | None] = [None] * len(asks)
    for row in rows:
        position, value, encoding, version, expires_at, created_at, updated_at, stored = row
        key = asks[position].key
        try:
            is_intact = adler32(value, adler32(key, encoding)) + CHECKSUM_BASE == stored
        except TypeError:
            is_intact = False
        if is_intact:
            record = Record(key, value, encoding, version, expires_at, created_at, updated_at)
        else:
            record = _unusual(cursor, large, key, row[1:])
        records[position] = record if record.expires_at is None else _alive(record, asks[position], now)
    return records


def points_by_column(cursor: apsw.Cursor, keys: Sequence[bytes], now: Callable[[], int]) -> Page | list[Record | None]:
    """The live entries at some keys of the tuple store, in their order; as a page, if all are JSON that never expires.

    Most calls find such entries, and a page takes a tenth less of a get_many than records do (`scripts/bench peers`,
    row «sync-get_many»).
    """
    rows: list[Row] | None = None
    if limits.SQLITE_GETS_WORTH_A_STATEMENT <= len(keys) <= limits.SQLITE_GETS_PER_STATEMENT:
        try:
            statement = _TUPLE_LAYOUT.gets_without_times[len(keys)]
            rows = cursor.execute(statement, _TUPLE_LAYOUT.bind_keys(keys)).fetchall()
            if (page := _intact_page(keys, rows)) is not None:
                return page
        except (UnicodeDecodeError, TypeError):
            pass  # a row is damaged, or has no small value: read one by one, so that it does not hide the others
    if not cursor.connection.in_transaction:  # a large value is read with a statement of its own
        return _in_one_view(cursor, points_by_column, keys, now)
    space = Space.TUPLES
    asks = [Get(space, key) for key in keys]
    if rows is None:
        return points(cursor, asks, now())
    # Records have times of creation and change; a page does not show them.
    as_of_gets = [(*row[:-1], 0, 0, row[-1]) for row in rows]
    return _records(cursor, cast(LargeValueTable, _TUPLE_LAYOUT.large), asks, as_of_gets, now())


def _intact_page(keys: Sequence[bytes], rows: Sequence[Row]) -> Page | None:
    """The rows of `gets_without_times`, if each key has one of JSON that never expires, and all checksums match.

    Raises:
        TypeError: A row has no small value.
    """
    if len(rows) != len(keys):
        return None
    positions, values, encodings, versions, expiries, stored = zip(*rows, strict=True)
    expected = _POSITIONS[: len(keys)], _ALL_JSON[: len(keys)], _NO_EXPIRIES[: len(keys)]
    if (positions, encodings, expiries) != expected:
        return None
    if stored != tuple(map(_add_base, map(adler32, values, map(adler32, keys, _ALL_JSON)))):
        return None
    return Page(keys, values, encodings, versions, expiries)


def _alive(record: Record | None, ask: Get, now: int) -> Record | None:
    if record is None or record.expires_at is None or ask.include_expired or now < record.expires_at:
        return record
    return None


def answer(cursor: apsw.Cursor, ask: Ask, now: int) -> object:
    """Answer one ask. All rows are fetched, because a statement that is not finished keeps its lock."""
    if type(ask) is Get:
        return _alive(point(cursor, ask.space, ask.key), ask, now)
    if isinstance(ask, Latest):
        return read_version(cursor)
    if isinstance(ask, Now):
        return now
    if isinstance(ask, StoreId):
        for [store_id] in cursor.execute(READ_STORE_ID).fetchall():
            return store_id
        raise lost_store_id(cursor.connection.filename)
    if isinstance(ask, Changes):
        return read_log(cursor, ask.after)
    if isinstance(ask, Usage):
        rows = cursor.execute(PLUGIN_USAGE, (time_text(now), *ask.after, ask.limit)).fetchall()
        return usage_slice(rows, ask.limit, read_version(cursor))
    layout = LAYOUTS[ask.space]
    moment = layout.bind_time(now)
    match ask:
        case Scan():
            bindings = (moment, *layout.bind_range(ask.start, ask.end), ask.limit)
            page = layout.page(cursor.execute(layout.scan(ask), bindings))
            if layout.large is None or page.value_bytes is not None:
                return page
            if not cursor.connection.in_transaction:
                return _in_one_view(cursor, answer, ask, now)
            return _with_large_values(cursor, layout.large, page)
        case Count():
            count: int = cursor.execute(layout.count, (moment, *layout.bind_range(ask.start, ask.end))).get
            return count
        case Expired():
            return list(layout.page(cursor.execute(layout.expired, (moment, ask.limit)).fetchall()))
        case Due():
            version = read_version(cursor)  # first: without a transaction, the rows may be newer, but not older
            rows = cursor.execute(layout.due, (moment, layout.bind_time(ask.after), ask.limit)).fetchall()
            next_expiry = cursor.execute(layout.next_expiry, (moment,)).get
            return layout.due_page(rows, next_expiry, ask, now, version)
    raise TypeError(f"an engine can't answer {type(ask).__name__}")


def _with_large_values(cursor: apsw.Cursor, large: LargeValueTable, page: Page) -> Page:
    """A page with the large values of its rows, some of which have an id, or no valid value, instead of a value."""
    stored: Sequence[Any] = page.values
    values, encodings = list(stored), list(page.encodings)
    for at, (key, value) in enumerate(zip(page.keys, stored, strict=True)):
        if type(value) is int:
            value = _large_value(cursor, large, key, value)
        elif value is None:
            value = LOST
        elif type(value) is str and encodings[at] != JSON:  # JSON may have been written by hand
            value = DAMAGED
        if isinstance(value, int):
            encodings[at] = value
            value = b""
        values[at] = value
    return replace(page, values=values, encodings=encodings)


class View:
    """One read transaction per iteration of the event loop, which makes a get a third faster (ADR 2).

    A task learns about another process's commit through the event loop, so before the iteration in which the view
    began. So it never reads a state older than what it knows.
    """

    def __init__(self, connection: apsw.Connection, *, own_transaction: bool) -> None:
        self.connection = connection
        self.lock = lock_of(connection)
        """Held while the view is open."""
        self._cursor = connection.cursor()
        self._own_transaction = own_transaction
        self._is_open = False

    def cursor(self) -> apsw.Cursor:
        """A cursor for this iteration, at whose end `end` must be called."""
        if not self._is_open:
            # Set before BEGIN and unset after ROLLBACK, so that `end` works if a signal's handler raised in between.
            self._is_open = True
            self.lock.acquire()
            if self._own_transaction and not self.connection.in_transaction:
                self._cursor.execute("BEGIN")
        return self._cursor

    def end(self) -> None:
        if self._is_open:
            # After an error of the disk, SQLite has ended the transaction already.
            with contextlib.suppress(apsw.Error):
                if self._own_transaction and self.connection.in_transaction:
                    self._cursor.execute("ROLLBACK")
            with contextlib.suppress(RuntimeError):  # a signal's handler interrupted `cursor` before it had the lock
                self.lock.release()
            self._is_open = False


class LongReader:
    """A connection and a thread for reads that would block the event loop."""

    def __init__(self, file: SqliteFile, open_reader: Callable[[int], apsw.Connection]) -> None:
        """`open_reader` opens a connection, given the size of its cache in MiB."""
        self._file = file
        self._open_reader = open_reader
        self._worker = Worker(f"keyloft reader of {file.path}")
        self._connection: apsw.Connection | None = None

    async def read(self, asks: tuple[Ask, ...], read_time: Callable[[], int]) -> list[Any]:
        """Answers from one view; the thread asks for the time once the read no longer waits for others."""
        return await self._worker.call(partial(self._read, asks, read_time))

    async def aclose(self) -> None:
        # On the worker, after the reads under way: the first of them may still be opening the connection.
        await self._worker.call(self._close)
        self._worker.stop()

    def _close(self) -> None:
        if self._connection is not None:
            self._file.close(self._connection)

    def _read(self, asks: tuple[Ask, ...], read_time: Callable[[], int]) -> list[Any]:
        if self._connection is None:
            # A small cache: this connection scans tables, and rarely reads a page twice.
            self._connection = self._open_reader(1)
        cursor = self._connection.cursor()
        with self._file.explained(self._connection):
            try:
                cursor.execute("BEGIN")
                now = read_time()
                if all([type(ask) is Get for ask in asks]):
                    return points(cursor, cast("Sequence[Get]", asks), now)
                return [answer(cursor, ask, now) for ask in asks]
            finally:
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
