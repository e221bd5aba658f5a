"""Counts what a database holds, for whom, and what expires."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.core import keys
from keyloft.core.maintenance import Range, Size, Snapshot
from keyloft.core.records import Space
from keyloft.core.schema import LAST_MOMENT
from keyloft.errors import InvalidArgument, Undecodable
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
            moment = _datetime(expires_at)
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


class ChangeLogFacts(Struct, frozen=True):
    """How far the change log reaches back, and how large it is."""

    rows: int
    bytes: int
    oldest_version: int
    """A watch can begin after this version, or after any later one."""
    oldest_at: datetime | None
    """When that version was committed; None if that is not known."""


class StatsReport(Struct, frozen=True, kw_only=True):
    """What a database holds."""

    engine: str
    """As in `SQLite 3.51.0`."""
    schema: str
    store: str
    """The id of the store, which `$SRV.INFO` and `/healthz` of a service show, too."""
    version: int
    """The version of the last commit."""
    database_bytes: int
    wal_bytes: int | None
    """The size of SQLite's write-ahead log; None for PostgreSQL, whose log belongs to the server."""
    change_log: ChangeLogFacts
    soon_seconds: float
    total: Tally
    interfaces: Mapping[str, Tally]
    """By interface: tuples, semantic, plugins."""
    stores: Mapping[str, Tally]
    """By name, the tuple stores that have one."""
    plugins: Mapping[str, Tally]
    projects: Mapping[str, Tally]
    """By tenant and project, as in `acme/web`."""


async def stats(
    database: Database, *, soon: float = limits.SOON_SECONDS, progress: Progress | None = None
) -> StatsReport:
    """Count what a database holds, per interface, named store, plugin and project, and what expires.

    Example:
        >>> report = await admin.stats("app.db")
        >>> report.total.entries

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        soon: What expires within this many seconds counts as expiring soon.
        progress: Called with the stage, how many rows are counted, and the total, which is None until the end.

    Returns:
        The counts. An entry that has expired and is not yet swept does not count as an entry. Each slice of some
        thousand rows is counted as it is at that moment, so that nothing waits while a large database is counted.

    Raises:
        InvalidArgument: `soon` is out of range.
        DatabaseError: The database can't be read.
    """
    if type(soon) not in (int, float) or not 0 <= soon <= limits.LONGEST_EXPIRY_SECONDS:
        raise InvalidArgument(f"soon: expected a number of seconds from 0 to {limits.LONGEST_EXPIRY_SECONDS:,}")
    async with opened(database) as maintenance:
        async with maintenance.snapshot(held=False) as snapshot:
            counted = await _count(snapshot, int(soon * 1000), progress)
            log = await snapshot.log_facts()
            store = await snapshot.store_id()
        facts = await maintenance.facts()
    interfaces = {space.value: _sum(owners.values()) for space, owners in counted.items()}
    return StatsReport(
        engine=facts.engine,
        schema=facts.revision,
        store=store,
        version=snapshot.version,
        database_bytes=facts.database_bytes,
        wal_bytes=facts.wal_bytes,
        change_log=ChangeLogFacts(
            log.rows, log.bytes, log.oldest_version, _datetime(log.oldest_at) if log.oldest_at else None
        ),
        soon_seconds=soon,
        total=_sum(interfaces.values()),
        interfaces=interfaces,
        stores=_owned(counted[Space.TUPLES]),
        plugins=_owned(counted[Space.PLUGINS]),
        projects=_owned(counted[Space.SEMANTIC]),
    )


def _datetime(moment: int) -> datetime:
    return datetime.fromtimestamp(min(max(moment, 0), LAST_MOMENT) / 1000, UTC)


async def _count(snapshot: Snapshot, soon: int, progress: Progress | None) -> dict[Space, dict[Any, Tally]]:
    """Tallies by space and owner (a named store, a project or a plugin); None for rows without an owner."""
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
        case Space.TUPLES if isinstance(row.key, bytes):
            with suppress(Undecodable):
                return keys.split_store(row.key)[0], len(row.key), True
    # A row written by hand may have a key of any type.
    return None, len(row.key if isinstance(row.key, bytes) else str(row.key)), True


def _sum(tallies: Collection[Tally]) -> Tally:
    expiries = [tally.oldest_expiry for tally in tallies if tally.oldest_expiry is not None]
    total = Tally(oldest_expiry=min(expiries, default=None))
    for field in ("entries", "bytes", "other_rows", "other_bytes", "expiring_soon", "expired"):
        setattr(total, field, sum([getattr(tally, field) for tally in tallies]))
    return total


def _owned(owners: dict[Any, Tally]) -> dict[Any, Tally]:
    # Sorted as text: a plugin's name that was written by hand may be bytes.
    return dict(sorted([one for one in owners.items() if one[0] is not None], key=lambda one: str(one[0])))
