"""Counts what a database holds, for whom, and what expires."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.core.maintenance import LAST_MOMENT, Range, Size, Snapshot
from keyloft.core.records import Space
from keyloft.errors import InvalidArgument
from keyloft.semantic.keys import is_entry
from keyloft.semantic.row_checks import project_of


class Tally(Struct):
    """How much there is of something."""

    entries: int = 0
    bytes: int = 0
    """The size of the entries' keys and values."""
    other_rows: int = 0
    """Rows that are not entries: the audit trail, what can be restored, remembered requests, dead letters."""
    other_bytes: int = 0
    expiring_soon: int = 0
    """Entries that expire within `soon` seconds."""
    expired: int = 0
    """Rows that have expired and are not yet swept; they are counted nowhere else."""
    oldest_expiry: datetime | None = None
    """The first moment at which a row expires, or has."""

    def _add(self, size: int, expires_at: int | None, now: int, soon: int, *, is_entry: bool) -> None:
        if isinstance(expires_at, int):
            moment = datetime.fromtimestamp(min(max(expires_at, 0), LAST_MOMENT) / 1000, UTC)
            self.oldest_expiry = min(self.oldest_expiry or moment, moment)
        else:
            expires_at = None
        if expires_at is not None and expires_at <= now:
            self.expired += 1
        elif not is_entry:
            self.other_rows += 1
            self.other_bytes += size
        else:
            self.entries += 1
            self.bytes += size
            self.expiring_soon += expires_at is not None and expires_at <= soon


class StatsReport(Struct, frozen=True, kw_only=True):
    """What a database holds."""

    engine: str
    """As in `SQLite 3.51.0`."""
    schema: str
    version: int
    """The version of the last commit."""
    database_bytes: int
    wal_bytes: int | None
    """The size of SQLite's write-ahead log; None for PostgreSQL, whose log belongs to the server."""
    soon_seconds: float
    total: Tally
    interfaces: Mapping[str, Tally]
    """By interface: tuples, semantic, plugins."""
    plugins: Mapping[str, Tally]
    projects: Mapping[str, Tally]
    """By tenant and project, as in `acme/web`."""


async def stats(
    database: Database, *, soon: float = limits.SOON_SECONDS, progress: Progress | None = None
) -> StatsReport:
    """Count what a database holds, per interface, plugin and project, and what expires.

    Example:
        >>> report = await admin.stats("app.db")
        >>> report.total.entries

    Args:
        database: A path, `sqlite:///…` or `postgresql://…`.
        soon: What expires within this many seconds counts as expiring soon.
        progress: Called with the stage, how many rows are counted, and the total, which is None until the end.

    Returns:
        The counts. What has expired and is not yet swept is not an entry any more.

    Raises:
        InvalidArgument: `soon` is out of range.
        DatabaseError: The database can't be read.
    """
    if not 0 <= soon <= limits.LONGEST_EXPIRY_SECONDS:
        raise InvalidArgument(f"soon: expected a number of seconds from 0 to {limits.LONGEST_EXPIRY_SECONDS:,}")
    async with opened(database) as maintenance:
        async with maintenance.snapshot() as snapshot:
            counted = await _count(snapshot, int(soon * 1000), progress)
        facts = await maintenance.facts()
    interfaces = {space.value: _sum(owners.values()) for space, owners in counted.items()}
    return StatsReport(
        engine=facts.engine,
        schema=facts.revision,
        version=snapshot.version,
        database_bytes=facts.database_bytes,
        wal_bytes=facts.wal_bytes,
        soon_seconds=soon,
        total=_sum(interfaces.values()),
        interfaces=interfaces,
        plugins=_owned(counted[Space.PLUGINS]),
        projects=_owned(counted[Space.SEMANTIC]),
    )


async def _count(snapshot: Snapshot, soon: int, progress: Progress | None) -> dict[Space, dict[Any, Tally]]:
    """By space and owner, a plugin or a project; None for rows without an owner."""
    now, then, rows = snapshot.now, snapshot.now + soon, 0
    counted: dict[Space, dict[Any, Tally]] = {space: defaultdict(Tally) for space in Space}
    with stage(progress, "counting") as advance:
        for space, owners in counted.items():
            async for sizes in snapshot.sizes(Range(space)):
                for row in sizes:
                    owner, key_bytes, counts = _about(space, row)
                    owners[owner]._add(key_bytes + row.value_bytes, row.expires_at, now, then, is_entry=counts)
                rows += len(sizes)
                advance(rows, None)
    return counted


def _about(space: Space, row: Size) -> tuple[Any, int, bool]:
    """The owner of a row, the size of its key, and whether it is an entry."""
    match space:
        case Space.PLUGINS:
            plugin, key = row.key
            return plugin, len(str(plugin).encode()) + len(str(key).encode()), True
        case Space.SEMANTIC if isinstance(row.key, bytes):
            project = project_of(row.key)
            return project and f"{project.tenant}/{project.name}", len(row.key), is_entry(row.key)
    # A row written by hand may have a key of any type.
    return None, len(row.key if isinstance(row.key, bytes) else str(row.key)), True


def _sum(tallies: Collection[Tally]) -> Tally:
    expiries = [tally.oldest_expiry for tally in tallies if tally.oldest_expiry is not None]
    total = Tally(oldest_expiry=min(expiries, default=None))
    for field in ("entries", "bytes", "other_rows", "other_bytes", "expiring_soon", "expired"):
        setattr(total, field, sum([getattr(tally, field) for tally in tallies]))
    return total


def _owned(owners: dict[Any, Tally]) -> dict[Any, Tally]:
    # By text: a plugin's name that was written by hand may be bytes.
    return dict(sorted([one for one in owners.items() if one[0] is not None], key=lambda one: str(one[0])))
