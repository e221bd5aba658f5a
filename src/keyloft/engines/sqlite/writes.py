"""Commits groups of batches to an SQLite file, each group in one transaction."""

import contextlib
import logging
import math
from time import perf_counter

import apsw
from msgspec import Struct

from keyloft import limits
from keyloft.clock import Clock
from keyloft.core.records import Address, Batch, Key, Record
from keyloft.core.schema import Row
from keyloft.engines.commit.outcomes import Outcome, failed, joined
from keyloft.engines.commit.settle import PutRow, RemoveRow, SetExpiry, Settled, Write, deciding, settle
from keyloft.engines.sqlite.file import SqliteFile, wait_patiently
from keyloft.engines.sqlite.reads import number, point
from keyloft.engines.sqlite.tables import LAYOUTS, READ_CLOCK, WRITE_CLOCK, Aside, Layout
from keyloft.errors import DatabaseError

logger = logging.getLogger(__name__)

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


def put(cursor: apsw.Cursor, layout: Layout, record: Record, *, anew: bool) -> None:
    """Store a record; its value goes aside if it is large."""
    bindings, aside, key = layout.bind_put(record, anew), layout.aside, record.key
    if aside is not None and aside.takes(record):
        cursor.execute(aside.refer, (key, None, *bindings[2:], _put_aside(cursor, aside, key, record.value)))
        return
    cursor.execute(layout.put, bindings)
    if aside is not None and not cursor.connection.changes():
        # It takes the place of a large one.
        cursor.execute(aside.remove, (key, _place(cursor, aside, key)))
        cursor.execute(aside.refer, (*bindings, None))


def _put_aside(cursor: apsw.Cursor, aside: Aside, key: Key, value: bytes) -> int:
    """Store a value aside; returns where."""
    place = _place(cursor, aside, key)
    if place is not None:
        cursor.execute(aside.replace, (key, place, value))
        if cursor.connection.changes():
            return place
    cursor.execute(aside.add, (key, value))
    return cursor.connection.last_insert_rowid()


def _place(cursor: apsw.Cursor, aside: Aside, key: Key) -> int | None:
    rows: list[Row] = cursor.execute(aside.find, (key,)).fetchall()
    return rows[0][0] if rows else None


def remove(cursor: apsw.Cursor, layout: Layout, record: Record) -> None:
    """Remove a record that is stored, and its value if that lies aside."""
    aside, key = layout.aside, record.key
    # What is no binary value was written by hand, and may lie anywhere.
    if aside is not None and (type(record.value) is not bytes or aside.takes(record)):
        cursor.execute(aside.remove, (key, _place(cursor, aside, key)))
    cursor.execute(layout.remove, layout.bind_key(key))


def _address(write: tuple[Address, Write]) -> Address:
    return write[0]


class Begun(Struct, frozen=True):
    """A group in an open transaction: all of it is written, but for the COMMIT."""

    group: list[Batch]
    settled: Settled
    version_before: int


class _TakesLong(Exception):
    """More than the event loop has time for."""


class Interrupted(Exception):
    """A signal's handler has raised something during a COMMIT."""

    def __init__(self, error: BaseException, outcome: Outcome | None) -> None:
        self.error = error
        self.outcome = outcome
        """What became of the group; None if its transaction is still open."""


class SqliteWriter:
    """Commits groups on the writing connection, which one thread at a time may use."""

    def __init__(self, file: SqliteFile, clock: Clock, connection: apsw.Connection) -> None:
        self._file = file
        self._clock = clock
        self.connection = connection
        self._cursor = connection.cursor()
        self._last_clock = 0
        self._be_patient = wait_patiently()
        connection.set_busy_handler(None)
        self._keep_back(True)

    def begin(self, group: list[Batch]) -> Begun | None:
        """Write all of a group but the COMMIT; wait for nobody, and give up if it takes long. None: it came to nothing.

        So it has if anything is raised, by a signal's handler for one.
        """
        try:
            return self._begin(group, perf_counter() + limits.INLINE_SECONDS)
        except (apsw.Error, DatabaseError, _TakesLong):
            # Another process writes, or something is wrong: `commit` waits for the one, and tells of the other.
            self.roll_back()
            return None
        except BaseException:
            self.roll_back()
            raise

    def finish_at_once(self, begun: Begun) -> Outcome | None:
        """Commit what has begun, on the thread that has begun it; None if it came to nothing.

        Raises:
            Interrupted: The group was committed nevertheless, or its transaction is still open.
        """
        try:
            self._end(begun)
        except apsw.Error:
            self.roll_back()
            return None
        except BaseException as error:
            raise Interrupted(error, None if self.connection.in_transaction else self._outcome(begun)) from error
        return self._outcome(begun)

    def finish(self, begun: Begun) -> Outcome:
        """Commit what has begun; never raises, whatever becomes of it."""
        return self._decided(begun.group, begun)

    def commit(self, group: list[Batch]) -> Outcome:
        """Decide a group, waiting for other processes if need be; never raises, whatever becomes of it."""
        self.roll_back()  # what a signal's exception may have left
        is_large = sum([batch.size for batch in group]) > limits.INLINE_BYTES
        self.connection.set_busy_handler(self._be_patient)
        if is_large:
            self._keep_back(False)
        try:
            return self._decided(group, None)
        finally:
            self.connection.set_busy_handler(None)
            if is_large:
                self._keep_back(True)

    def _decided(self, group: list[Batch], begun: Begun | None) -> Outcome:
        try:
            begun = begun or self._begin(group)
            self._end(begun)
            return self._outcome(begun)
        except apsw.Error as error:
            failure = self._file.explain(error, self.connection)
            failure.__cause__ = error
            hopeless = isinstance(error, _HOPELESS)
        except DatabaseError as error:
            failure, hopeless = error, True
        except BaseException as error:  # on this thread nobody else would hear of it, and all callers would wait
            failure = DatabaseError(f"{self._file.path}: a write failed unexpectedly: {type(error).__name__}")
            failure.__cause__ = error
            hopeless = False
        self.roll_back()
        if hopeless or len(group) == 1:
            return failed(group, failure, self._last_clock)
        return joined([self.commit([batch]) for batch in group])

    def _begin(self, group: list[Batch], until: float = math.inf) -> Begun:
        execute = self._cursor.execute
        execute("BEGIN IMMEDIATE")
        self._file.check_in_place(self.connection)
        clock = number(self._cursor, READ_CLOCK)
        current: dict[Address, Record] = {}
        for space, key in deciding(group):
            if (record := point(self._cursor, space, key)) is not None:
                current[space, key] = record
            if perf_counter() > until:  # a large value: to load or to remove one takes long, however small the batch
                raise _TakesLong
        settled = settle(group, current, clock, self._clock.now())
        if settled.version != clock:
            self._apply(settled.writes, current, until)
            execute(WRITE_CLOCK, (settled.version,))
        return Begun(group, settled, clock)

    def _apply(self, writes: dict[Address, Write], current: dict[Address, Record], until: float) -> None:
        execute = self._cursor.execute
        # In the order of the keys, so that neighbours on one page are written together.
        for (space, key), write in sorted(writes.items(), key=_address):
            layout = LAYOUTS[space]
            match write:
                case PutRow():
                    put(self._cursor, layout, write.record, anew=write.is_new_entry)
                case RemoveRow():
                    if (stored := current.get((space, key))) is not None:
                        remove(self._cursor, layout, stored)
                case SetExpiry():
                    execute(layout.retime, (layout.bind_time(write.expires_at), *layout.bind_key(key)))
            if perf_counter() > until:
                raise _TakesLong

    def _end(self, begun: Begun) -> None:
        self._cursor.execute("ROLLBACK" if begun.settled.version == begun.version_before else "COMMIT")

    def _outcome(self, begun: Begun) -> Outcome:
        settled = begun.settled
        self._last_clock = settled.version
        return Outcome(settled.verdicts, begun.version_before, settled.version, settled.writes)

    def _keep_back(self, everything: bool) -> None:
        """Whether nothing goes to the log before the commit, which is for another thread; what is large had better."""
        with contextlib.suppress(apsw.Error):  # then the next statement fails as well, and tells of it
            self._cursor.execute(f"PRAGMA cache_spill = {0 if everything else 1}").fetchall()

    def roll_back(self) -> None:
        """End a transaction that is open, if one is."""
        try:
            if self.connection.in_transaction:
                self._cursor.execute("ROLLBACK")
        except apsw.Error as error:
            logger.error("rolling back failed: %s", self._file.explain(error, self.connection))
