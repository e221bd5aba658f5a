"""Commits groups of batches to an SQLite file, each group in one transaction."""

import logging
from typing import Final

import apsw

from keyloft.clock import Clock
from keyloft.engines.layouts import LAYOUTS, READ_CLOCK, WRITE_CLOCK
from keyloft.engines.outcomes import Outcome, failed, joined
from keyloft.engines.settle import Put, Remove, Retime, Write, deciding, settle
from keyloft.engines.sqlite_file import SqliteFile
from keyloft.engines.sqlite_reads import number
from keyloft.errors import DatabaseError
from keyloft.records import Address, Batch

logger = logging.getLogger(__name__)

# In pages of 4 KiB: the log goes into the file when it has 8 MiB and nothing is to be written, at 128 MiB in any case.
_WORTH_A_CHECKPOINT: Final = 2_000
_DUE_FOR_A_CHECKPOINT: Final = 32_000
# After small commits, at 16 MiB: it begins anew, and a commit that writes over it takes 180 µs instead of 300 where
# it grows. Large commits gain less by that than by pages that gather, and are moved once.
_SMALL_COMMIT: Final = 16  # pages
_DUE_AFTER_SMALL_COMMITS: Final = 4_000

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


class Writer:
    """Commits groups on the writing connection; runs on the worker's thread."""

    def __init__(self, file: SqliteFile, clock: Clock, connection: apsw.Connection) -> None:
        self._file = file
        self._clock = clock
        self.connection = connection
        self._cursor = connection.cursor()
        self._last_clock = 0
        self._log_pages = 0
        self._moved_pages = 0
        self._commits = 0
        connection.set_wal_hook(self._log_grew)

    def commit(self, group: list[Batch]) -> Outcome:
        """Decide a group; never raises, whatever becomes of it."""
        try:
            return self._commit(group)
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
        self._roll_back()
        if hopeless or len(group) == 1:
            return failed(group, failure, self._last_clock)
        return joined([self.commit([batch]) for batch in group])

    def checkpoint(self, quiet: bool) -> bool:
        """Take the log into the file if it is time, between two groups; returns whether a quiet moment is wanted.

        SQLite would do it within a commit, and the callers of that commit would wait for it: 80 ms for 32 MiB.
        """
        if self._is_due(quiet):
            self._moved_pages = self._log_pages
            self._commits = 0
            try:
                self.connection.wal_checkpoint()
            except apsw.Error as error:
                # Another process is at it, or the disk is full: nothing is lost, and it is tried again later.
                logger.debug("a checkpoint has to wait: %s", self._file.explain(error, self.connection))
        return self._log_pages - self._moved_pages >= _WORTH_A_CHECKPOINT

    def _is_due(self, quiet: bool) -> bool:
        pages = self._log_pages - self._moved_pages
        if quiet:
            return pages >= _WORTH_A_CHECKPOINT
        were_small = pages <= self._commits * _SMALL_COMMIT
        return pages >= _DUE_FOR_A_CHECKPOINT or (were_small and pages >= _DUE_AFTER_SMALL_COMMITS)

    def _log_grew(self, connection: apsw.Connection, name: str, pages: int) -> int:
        if pages < self._log_pages:
            self._moved_pages = 0  # it begins anew; while somebody reads what is in it, it can't, and grows on
        self._log_pages = pages
        self._commits += 1
        return apsw.SQLITE_OK

    def _commit(self, group: list[Batch]) -> Outcome:
        execute = self._cursor.execute
        execute("BEGIN IMMEDIATE")
        self._file.check_in_place(self.connection)
        clock = number(self._cursor, READ_CLOCK)
        now = self._clock.now()
        current = {}
        for space, key in deciding(group):
            layout = LAYOUTS[space]
            for row in execute(layout.get, layout.bind_key(key)).fetchall():
                current[space, key] = layout.record(key, *row)
        settled = settle(group, current, clock, now)
        if settled.clock != clock:
            self._apply(settled.writes)
            execute(WRITE_CLOCK, (settled.clock,))
            execute("COMMIT")
        else:
            execute("ROLLBACK")
        self._last_clock = settled.clock
        return Outcome(settled.verdicts, clock, settled.clock, settled.writes)

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
                    execute(layout.retime, (layout.bind_time(write.expires_at), *layout.bind_key(key)))

    def _roll_back(self) -> None:
        try:
            if self.connection.in_transaction:
                self._cursor.execute("ROLLBACK")
        except apsw.Error as error:
            logger.error("rolling back failed: %s", self._file.explain(error, self.connection))
