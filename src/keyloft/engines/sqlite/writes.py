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
from keyloft.engines.commit.outcomes import Outcome, failed, joined
from keyloft.engines.commit.settle import PutRow, RemoveRow, SetExpiry, Settled, Write, deciding, settle
from keyloft.engines.sqlite.errors import FAILS_WHOLE_GROUP
from keyloft.engines.sqlite.file import SqliteFile, busy_handler
from keyloft.engines.sqlite.reads import point, read_version
from keyloft.engines.sqlite.tables import LAYOUTS, WRITE_VERSION, LargeValueTable, SqliteLayout
from keyloft.errors import DatabaseError

logger = logging.getLogger(__name__)


def put(cursor: apsw.Cursor, layout: SqliteLayout, record: Record, *, is_new_entry: bool) -> None:
    """Store a record; a large value goes into the large value table."""
    bindings, large, key = layout.bind_put(record, is_new_entry), layout.large, record.key
    if large is not None and large.holds(record):
        cursor.execute(layout.put_large, (key, None, *bindings[2:], _put_large(cursor, large, key, record.value)))
        return
    cursor.execute(layout.put, bindings)
    if large is not None and not cursor.connection.changes():
        # `put` changes nothing over a large value: remove that one first.
        cursor.execute(large.remove, (key, cursor.execute(large.find, (key,)).get))
        cursor.execute(layout.put_large, (*bindings, None))


def _put_large(cursor: apsw.Cursor, large: LargeValueTable, key: Key, value: bytes) -> int:
    """Store a large value; returns its id."""
    large_id: int | None = cursor.execute(large.find, (key,)).get
    if large_id is not None:
        cursor.execute(large.replace, (key, large_id, value))
        if cursor.connection.changes():
            return large_id
    cursor.execute(large.add, (key, value))
    return cursor.connection.last_insert_rowid()


def remove(cursor: apsw.Cursor, layout: SqliteLayout, record: Record) -> None:
    """Remove a stored record, and its large value if it has one."""
    large, key = layout.large, record.key
    # A value that is not bytes was written by hand, so its size does not tell which table holds it.
    if large is not None and (type(record.value) is not bytes or large.holds(record)):
        cursor.execute(large.remove, (key, cursor.execute(large.find, (key,)).get))
    cursor.execute(layout.remove, layout.bind_key(key))


class UncommittedGroup(Struct, frozen=True):
    """A group that is written in an open transaction, before its COMMIT."""

    group: list[Batch]
    settled: Settled
    version_before: int


class _TakesTooLong(Exception):
    """The event loop has no time for this group."""


class SqliteWriter:
    """Commits groups on the writing connection, which its owner lends to one thread at a time."""

    def __init__(self, file: SqliteFile, clock: Clock, connection: apsw.Connection) -> None:
        self._file = file
        self._clock = clock
        self.connection = connection
        self._cursor = connection.cursor()
        self._last_version = 0
        self._wait_for_lock = busy_handler()
        self._allow_spill(False)

    def begin(self, group: list[Batch]) -> UncommittedGroup | None:
        """Write a group up to its COMMIT, on the event loop: without waiting for a lock, and for a millisecond at most.

        Returns None, and leaves nothing behind, if that did not work; `commit` then waits, or finds the error.
        """
        try:
            return self._begin(group, perf_counter() + limits.INLINE_SECONDS)
        except BaseException as error:
            self.roll_back()
            if isinstance(error, (apsw.Error, DatabaseError, _TakesTooLong)):
                return None
            raise

    def commit_begun(self, begun: UncommittedGroup) -> Outcome:
        """Commit a group that `begin` has written; never raises, an error is part of the outcome."""
        return self._decided(begun.group, begun)

    def commit(self, group: list[Batch]) -> Outcome:
        """Write and commit a group; waits for other processes' locks. Never raises, an error is part of the outcome."""
        self.roll_back()  # what an exception of a signal's handler may have left open
        is_large = sum([batch.size for batch in group]) > limits.INLINE_BYTES
        self.connection.set_busy_handler(self._wait_for_lock)
        if is_large:
            self._allow_spill(True)
        try:
            return self._decided(group, None)
        finally:
            self.connection.set_busy_handler(None)
            if is_large:
                self._allow_spill(False)

    def _decided(self, group: list[Batch], begun: UncommittedGroup | None) -> Outcome:
        try:
            begun = begun or self._begin(group)
            self.end(begun)
            return self.outcome(begun)
        except apsw.Error as error:
            failure = self._file.explain(error, self.connection)
            failure.__cause__ = error
            fails_whole_group = isinstance(error, FAILS_WHOLE_GROUP)
        except DatabaseError as error:
            failure, fails_whole_group = error, True
        except BaseException as error:  # on this thread no one else would catch it, and all callers would wait for ever
            failure = DatabaseError(f"{self._file.path}: a write failed unexpectedly: {type(error).__name__}")
            failure.__cause__ = error
            fails_whole_group = False
        self.roll_back()
        if fails_whole_group or len(group) == 1:
            return failed(group, failure, self._last_version)
        return joined([self.commit([batch]) for batch in group])

    def _begin(self, group: list[Batch], deadline: float = math.inf) -> UncommittedGroup:
        self._cursor.execute("BEGIN IMMEDIATE")
        self._file.check_in_place(self.connection)
        version = read_version(self._cursor)
        current: dict[Address, Record] = {}
        for space, key in deciding(group):
            if (record := point(self._cursor, space, key)) is not None:
                current[space, key] = record
            if perf_counter() > deadline:  # a large value takes long to load, however small the batch
                raise _TakesTooLong
        settled = settle(group, current, version, self._clock.now())
        if settled.version != version:
            self._apply(settled.writes, current, deadline)
            self._cursor.execute(WRITE_VERSION, (settled.version,))
        return UncommittedGroup(group, settled, version)

    def _apply(self, writes: dict[Address, Write], current: dict[Address, Record], deadline: float) -> None:
        # In the order of the keys, so that neighbours on one page are written together.
        for space, key in sorted(writes):
            layout, write = LAYOUTS[space], writes[space, key]
            match write:
                case PutRow():
                    put(self._cursor, layout, write.record, is_new_entry=write.is_new_entry)
                case RemoveRow():
                    if (stored := current.get((space, key))) is not None:
                        remove(self._cursor, layout, stored)
                case SetExpiry():
                    bindings = (layout.bind_time(write.expires_at), *layout.bind_key(key))
                    self._cursor.execute(layout.set_expiry, bindings)
            if perf_counter() > deadline:
                raise _TakesTooLong

    def end(self, begun: UncommittedGroup) -> None:
        """Commit a group that `begin` has written; on the event loop only where COMMIT does not sync."""
        self._cursor.execute("ROLLBACK" if begun.settled.version == begun.version_before else "COMMIT")

    def outcome(self, begun: UncommittedGroup) -> Outcome:
        settled = begun.settled
        self._last_version = settled.version
        return Outcome(settled.verdicts, begun.version_before, settled.version, settled.writes)

    def _allow_spill(self, allowed: bool) -> None:
        """Whether SQLite may write pages to the WAL before COMMIT: only in a large transaction, on the thread."""
        with contextlib.suppress(apsw.Error):  # then the next statement fails, too, and reports it
            self._cursor.execute(f"PRAGMA cache_spill = {int(allowed)}").fetchall()

    def roll_back(self) -> None:
        """End the open transaction, if there is one."""
        try:
            if self.connection.in_transaction:
                self._cursor.execute("ROLLBACK")
        except apsw.Error as error:
            logger.error("rolling back failed: %s", self._file.explain(error, self.connection))
