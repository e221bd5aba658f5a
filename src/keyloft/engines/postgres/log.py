"""The version counter and the change log in PostgreSQL: their tables and statements.

The counter is one row, which every commit locks. It remembers the timeline of the last commit. The log has rows for
each group of commits: `base` is the version before the group, and `size` the bytes of the log up to and including the
row. The first part of a group carries the random id of its commit. A row whose `changes` are NULL stands for a commit
that was abandoned.
"""

from functools import cache
from typing import Any, Final

from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.core.records import WHOLE, LogPosition, LogSlice
from keyloft.core.schema import Row
from keyloft.engines import change_log
from keyloft.engines.tables import oldest_kept

CHANNEL: Final = "keyloft"
"""The channel of NOTIFY that announces commits to other processes."""

COUNTER: Final = schema.VERSION_COUNTER_TABLE
CHANGES: Final = schema.CHANGES_TABLE


class LogEnd(Struct, frozen=True):
    """The last commit, as the holder of the version counter reads it."""

    version: int
    now: int
    """The time of the next commit."""
    size: int
    """The bytes of the log."""


def milliseconds(moment: str) -> str:
    """SQL: a timestamptz in milliseconds since 1970."""
    return f"floor(extract(epoch FROM {moment}) * 1000)::bigint"


CREATE: Final = (
    f"CREATE TABLE {COUNTER} (id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL, "
    "at BIGINT NOT NULL, timeline BIGINT NOT NULL DEFAULT 0)",
    f"INSERT INTO {COUNTER} (id, version, at) VALUES (1, {schema.VERSION_BY_HAND}, 0)",
    f"CREATE TABLE {CHANGES} (version BIGINT NOT NULL, part INTEGER NOT NULL, base BIGINT NOT NULL, "
    "at BIGINT NOT NULL, size BIGINT NOT NULL, commit_id BYTEA, changes BYTEA, PRIMARY KEY (version, part))",
    f"CREATE INDEX {CHANGES}_commit ON {CHANGES} (commit_id) WHERE commit_id IS NOT NULL",
    f"INSERT INTO {CHANGES} (version, part, base, at, size, changes) "
    f"VALUES ({schema.VERSION_BY_HAND}, 0, -1, 0, 0, decode('90', 'hex'))",
    f"CREATE TABLE {schema.STORE_TABLE} (id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1), store_id TEXT NOT NULL)",
    f"INSERT INTO {schema.STORE_TABLE} (id, store_id) "
    "VALUES (1, md5(random()::text || clock_timestamp()::text || random()::text))",
)

# The time never goes below that of the newest commit: expired entries would come back to life.
READ_VERSION: Final = (
    f"SELECT version, greatest(coalesce($1::bigint, {milliseconds('clock_timestamp()')}), at) AS now "
    f"FROM {COUNTER} WHERE id = 1"
)
"""now; selects the version counter and the time"""


@cache
def beside_counter(statement: str) -> str:
    """A statement that selects the version counter, too, in the first column; it selects NULLs where no row fits."""
    counter = f"(SELECT version FROM {COUNTER} WHERE id = 1)"
    return f"SELECT {counter}, found.* FROM (SELECT) AS one LEFT JOIN LATERAL ({statement}) AS found ON true"


READ_SNAPSHOT_VERSION: Final = READ_VERSION.replace("clock_timestamp()", "now()")
"""READ_VERSION, with the time by which all reads of a transaction decide what has expired."""

LOCK_VERSION: Final = f"SELECT version FROM {COUNTER} WHERE id = 1 FOR UPDATE"
JUMPED: Final = f"(version / {limits.VERSION_JUMP} + 1) * {limits.VERSION_JUMP}"
"""SQL: where the version counter goes on when a commit is the first one on a new timeline."""


@cache
def read_counter(timeline: str) -> str:
    """The statement that the holder of the version counter reads it with; `timeline` is SQL for the current one.

    It binds the time, and selects the version, the time of the last commit, the time by the clock, and the size of the
    log. On a new timeline the version has jumped: the former primary may have given versions that no one here knows of.
    """
    return (
        f"SELECT CASE WHEN timeline NOT IN (0, {timeline}) THEN {JUMPED} ELSE version END AS version, at, "
        f"coalesce($1::bigint, {milliseconds('clock_timestamp()')}) AS clock, "
        f"(SELECT size FROM {CHANGES} ORDER BY version DESC, part DESC LIMIT 1) AS size FROM {COUNTER} WHERE id = 1"
    )


def write_version(timeline: str, version: int, at: int) -> str:
    """The statement that sets the version counter, its time, and the timeline, which is SQL."""
    return (
        f"UPDATE {COUNTER} SET version = {version}, at = {at}, timeline = coalesce({timeline}, timeline) WHERE id = 1"
    )


NOTIFY: Final = f"SELECT pg_notify('{CHANNEL}', '{{name}} {{version}}')"

# Also clients that still wait for such a lock: a commit would wait behind them. NOWAIT would log an error each time.
LOCKED_TABLES: Final = (
    "SELECT name FROM unnest($1::text[]) AS name WHERE EXISTS (SELECT FROM pg_locks WHERE locktype = 'relation' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND relation = to_regclass(name) "
    "AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') "
    "AND pid <> pg_backend_pid())"
)
"""names of tables; selects those that a client has locked so that no one else can write to them"""

LOG: Final = (
    f"INSERT INTO {CHANGES} (version, base, at, part, size, commit_id, changes) "
    "SELECT $1::bigint, $2::bigint, $3::bigint, * FROM unnest($4::int[], $5::bigint[], $6::bytea[], $7::bytea[])"
)
"""version, the version before, time, then arrays: parts, sizes, commit ids, changes"""
FIND_COMMIT: Final = f"SELECT base, at, changes IS NOT NULL FROM {CHANGES} WHERE commit_id = $1"
"""commit id; selects the version before it, its time, and whether it was made: otherwise it was abandoned"""


def trim(now: str, size: str, seconds: str, most_bytes: str) -> str:
    """The statement that removes what the log need not keep: whole versions, TRIM_ROWS rows or one version at most.

    The newest row that may go stays: `base` of the oldest row is then the oldest position that can be read. Rows
    that the sender of a lost commit may still ask for stay in any case.

    Args:
        now: SQL: the time of the commit.
        size: SQL: the size of the log.
        seconds: SQL: how many milliseconds the log keeps a change.
        most_bytes: SQL: how large it may grow.
    """
    spared = f"{now} - {round(1000 * limits.TRIM_SPARED_SECONDS)}"
    may_go = f"at < {spared} AND (at < {now} - {seconds} OR size <= {size} - {most_bytes})"
    return f"DELETE FROM {CHANGES} WHERE version < ({oldest_kept(may_go, str(limits.TRIM_ROWS))})"


TRIM: Final = trim("$1::bigint", "$2::bigint", "$3::bigint", "$4::bigint")
"""time, size of the log, how many milliseconds to keep, how many bytes to keep"""

_AFTER: Final = f"FROM {CHANGES} WHERE (version, part) > ($1::bigint, $2::int)"
READ_LOG: Final = (
    "SELECT start.base, start.at, start.version, logged.* FROM "
    f"(SELECT base, at, version FROM {CHANGES} WHERE version >= $1::bigint ORDER BY version, part LIMIT 1) AS start "
    f"LEFT JOIN LATERAL (SELECT version, part, base, at, CASE WHEN size - coalesce(octet_length(changes), 0) < "
    f"$3::bigint + (SELECT size {_AFTER} ORDER BY version, part LIMIT 1) "
    f"THEN coalesce(changes, decode('90', 'hex')) END {_AFTER} ORDER BY version, part LIMIT $4::int) AS logged ON true"
)
"""version, part, bytes, rows.

Selects base, time and version of the row that holds the version; then, for each later row, its version, part, base,
time and changes. Changes beyond as many bytes are NULL. Selects no row if the log ends before that version.
"""
LOG_ENDS: Final = (
    f"SELECT (SELECT base FROM {CHANGES} ORDER BY version, part LIMIT 1), "
    f"(SELECT version FROM {CHANGES} ORDER BY version DESC, part DESC LIMIT 1)"
)
"""Selects the base of the oldest row, and the version of the newest."""


def read_log_bindings(after: LogPosition) -> tuple[Any, ...]:
    return after.version, min(after.part, WHOLE - 1), limits.LOG_SLICE_BYTES, limits.LOG_SLICE_ROWS + 1


def holds(after: LogPosition, rows: list[Row]) -> bool:
    """Whether the log holds a position, of which `rows` are what READ_LOG selects."""
    return bool(rows) and change_log.is_of_group(after.version, rows[0][0], rows[0][2])


def log_slice(after: LogPosition, rows: list[Row]) -> LogSlice:
    """The slice that READ_LOG has selected after a position that the log holds."""
    began = rows[0][1]
    logged = [row[3:] for row in rows if row[3] is not None]
    read = [row for row in logged[: limits.LOG_SLICE_ROWS] if row[4] is not None]
    changes = [
        change
        for _, _, base, at, part in read
        for change in change_log.unpack(base, at, part)
        if change.version > after.version or after.part != WHOLE
    ]
    if not read:
        return LogSlice((), after, is_last=True, began=began, ended=began)
    version, part, _, ended = read[-1][:4]
    is_whole = len(read) == len(logged) or logged[len(read)][0] != version
    end = LogPosition(version) if is_whole else LogPosition(version, part)
    return LogSlice(changes, end, is_last=len(read) == len(logged), began=began, ended=ended)
