"""Gives the space of removed entries back."""

from msgspec import Struct

from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.core.maintenance import Facts


class DiskUsage(Struct, frozen=True):
    """How many bytes a database takes."""

    database_bytes: int
    wal_bytes: int | None
    """The size of SQLite's write-ahead log; None for PostgreSQL, whose log belongs to the server."""


class CompactReport(Struct, frozen=True):
    """What a compaction achieved."""

    before: DiskUsage
    after: DiskUsage


async def compact(database: Database, *, progress: Progress | None = None) -> CompactReport:
    """Give the space of removed entries back.

    An SQLite file is written again: that needs as much free space as the file has, and writers wait. PostgreSQL makes
    the space free for new rows, and keeps most of it. etcd forgets old revisions, those of other programs included, and
    its members give the space back one after the other.

    Example:
        >>> report = await admin.compact("app.db")
        >>> report.before.database_bytes - report.after.database_bytes

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        progress: Called when the work begins and when it is done: no engine reports progress in between.

    Returns:
        The sizes before and after.

    Raises:
        Busy: Other processes hold the database for too long.
        DatabaseError: The database can't be opened or written.
    """
    async with opened(database) as maintenance:
        before = await maintenance.facts()
        with stage(progress, "compacting") as advance:
            await maintenance.compact()
            advance(1, 1)
        return CompactReport(_usage(before), _usage(await maintenance.facts()))


def _usage(facts: Facts) -> DiskUsage:
    return DiskUsage(facts.database_bytes, facts.wal_bytes)
