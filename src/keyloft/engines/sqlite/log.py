"""Reads the change log of an SQLite file, whose newest row is the version counter."""

import apsw

from keyloft import limits
from keyloft.core.records import WHOLE, LogPosition, LogSlice
from keyloft.core.schema import Row, damaged_counter, lost_counter
from keyloft.engines import change_log
from keyloft.engines.sqlite.tables import (
    CHANGES,
    FIND_LOGGED,
    IS_LOGGED_AFTER,
    OLDEST_LOGGED,
    READ_LOG,
    READ_VERSION,
)
from keyloft.errors import HistoryGone


def read_version(cursor: apsw.Cursor) -> int:
    """The version of the last commit."""
    return last_logged(cursor)[0]


def last_logged(cursor: apsw.Cursor) -> tuple[int, int, int]:
    """The version and the time of the last commit, and the size of the change log.

    Raises:
        DatabaseError: The newest row of the log is gone or damaged.
    """
    return _newest_logged(cursor)[:3]


def last_to_follow(cursor: apsw.Cursor) -> tuple[int, int, int]:
    """What `last_logged` returns, for a commit that gives the next version.

    Raises:
        DatabaseError: The newest row of the log is gone or damaged. A changed bit may have made its version lower, and
            then versions would be given twice. If its group was one commit, it is then not above `base` any more.
    """
    version, at, size, base = _newest_logged(cursor)
    if base >= version:
        raise damaged_counter(cursor.connection.filename, CHANGES)
    return version, at, size


def _newest_logged(cursor: apsw.Cursor) -> tuple[int, int, int, int]:
    rows: list[Row] = cursor.execute(READ_VERSION).fetchall()
    for version, at, size, base in rows:
        if type(version) is type(at) is type(size) is type(base) is int:
            return version, at, size, base
        raise damaged_counter(cursor.connection.filename, CHANGES)  # a changed bit may have changed a type
    raise lost_counter(cursor.connection.filename, CHANGES)


def read_log(cursor: apsw.Cursor, after: LogPosition) -> LogSlice:
    """A slice of the change log.

    Raises:
        HistoryGone: The log does not hold that position.
    """
    latest = read_version(cursor)
    oldest: Row = cursor.execute(OLDEST_LOGGED).fetchall()[0]
    change_log.check_kept(after, oldest[0], latest)
    found: Row = cursor.execute(FIND_LOGGED, (after.version,)).fetchall()[0]
    if not change_log.is_of_group(after.version, found[0], found[2]):
        raise HistoryGone(after.version, oldest[0] + 1, latest)
    bindings = (after.version, after.part, limits.LOG_SLICE_BYTES, limits.LOG_SLICE_ROWS)
    rows: list[Row] = cursor.execute(READ_LOG, bindings).fetchall()
    changes = [change for _, _, base, at, part in rows for change in change_log.unpack(base, at, part)]
    if changes and changes[0].version <= after.version and after.part == WHOLE:
        # The position is within a group.
        changes = [change for change in changes if change.version > after.version]
    end = LogPosition(rows[-1][0], rows[-1][1]) if rows else after
    is_last = not cursor.execute(IS_LOGGED_AFTER, (end.version, end.part)).get
    ended = rows[-1][3] if rows else found[1]
    return LogSlice(changes, LogPosition(latest) if is_last else end, is_last, found[1], ended)
