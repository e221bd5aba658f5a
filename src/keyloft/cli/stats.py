"""The command that tells how much a database holds, of whom, and what expires: `stats`."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from msgspec import Struct

from keyloft.cli.database import named_database, with_maintenance
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import progress
from keyloft.cli.terminal import is_for_people, say, show_json, sized, table
from keyloft.core.maintenance import Facts, Maintenance, Progress, Range, Size, Snapshot
from keyloft.core.records import Space
from keyloft.core.urls import without_password
from keyloft.errors import InvalidArgument
from keyloft.semantic.keys import is_entry
from keyloft.semantic.row_checks import project_of
from keyloft.server.config import Flags

_LONGEST_SECONDS = 1000 * 366 * 86_400


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"stats": stats})


def stats(
    *,
    soon: Annotated[
        float, typer.Option(metavar="SECONDS", help="What expires within so many seconds expires soon.")
    ] = 3600.0,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Tell how much a database holds, per face, plugin and project, and what expires.

    Bytes are those of keys and values. What has expired and is not yet swept is no entry any more: it is counted apart.

    Example: keyloft stats --soon 86400
    """
    if not 0 <= soon <= _LONGEST_SECONDS:
        raise InvalidArgument("--soon: a number of seconds, 0 or more")
    url = named_database(flags)

    async def work(maintenance: Maintenance) -> tuple[Facts, _Totals]:
        with progress("counting") as advance:
            async with maintenance.snapshot() as snapshot:
                totals = await _count(snapshot, int(soon * 1000), advance)
        return await maintenance.facts(), totals

    facts, totals = with_maintenance(url, work)
    if as_json or not is_for_people():
        show_json(_shown(without_password(url), facts, totals, soon), as_json=True)
    else:
        _show(without_password(url), facts, totals, soon)
    return 0


class Tally(Struct):
    """What there is of something."""

    entries: int = 0
    bytes: int = 0
    others: int = 0
    """Rows that are no entries: the audit trail, what can be restored, requests, dead letters."""
    other_bytes: int = 0
    soon: int = 0
    """Entries that expire soon."""
    expired: int = 0
    """Rows that have expired, and are not yet swept; they are counted nowhere else."""
    oldest: int | None = None
    """The first moment at which a row expires, or has."""

    def add(self, size: int, expires_at: int | None, now: int, soon: int, *, is_entry: bool) -> None:
        if isinstance(expires_at, int):
            if self.oldest is None or expires_at < self.oldest:
                self.oldest = expires_at
            if expires_at <= now:
                self.expired += 1
                return
        if not is_entry:
            self.others += 1
            self.other_bytes += size
            return
        self.entries += 1
        self.bytes += size
        if isinstance(expires_at, int) and expires_at <= soon:
            self.soon += 1

    def include(self, other: "Tally") -> None:
        self.entries += other.entries
        self.bytes += other.bytes
        self.others += other.others
        self.other_bytes += other.other_bytes
        self.soon += other.soon
        self.expired += other.expired
        moments = [moment for moment in (self.oldest, other.oldest) if moment is not None]
        self.oldest = min(moments, default=None)


class _Totals(Struct):
    clock: int
    faces: dict[Space, dict[Any, Tally]]
    """Of each face, what belongs to whom: a plugin, a project as tenant and name; None for what belongs to nobody."""

    def of(self, space: Space) -> Tally:
        total = Tally()
        for tally in self.faces[space].values():
            total.include(tally)
        return total

    def all(self) -> Tally:
        total = Tally()
        for space in Space:
            total.include(self.of(space))
        return total

    def owners(self, space: Space) -> list[tuple[Any, Tally]]:
        return sorted([(owner, tally) for owner, tally in self.faces[space].items() if owner is not None])


async def _count(snapshot: Snapshot, soon: int, advance: Progress) -> _Totals:
    now, then, seen = snapshot.now, snapshot.now + soon, 0
    totals = _Totals(snapshot.version, {space: defaultdict(Tally) for space in Space})
    for space in Space:
        owned = totals.faces[space]
        async for sizes in snapshot.sizes(Range(space)):
            for row in sizes:
                owner, key_bytes, counts = _about(space, row)
                owned[owner].add(key_bytes + row.value_bytes, row.expires_at, now, then, is_entry=counts)
            seen += len(sizes)
            advance(seen, seen)
    return totals


def _about(space: Space, row: Size) -> tuple[Any, int, bool]:
    """Whose row it is, how many bytes its key has, and whether it is an entry."""
    match space:
        case Space.PLUGINS:
            plugin, key = row.key
            return plugin, len(str(plugin).encode()) + len(str(key).encode()), True
        case Space.SEMANTIC:
            if isinstance(row.key, bytes):
                return project_of(row.key), len(row.key), is_entry(row.key)
    # Of whatever type somebody gave it.
    return None, len(row.key if isinstance(row.key, bytes) else str(row.key)), True


def _shown(name: str, facts: Facts, totals: _Totals, soon: float) -> dict[str, Any]:
    return {
        "database": name,
        "engine": facts.engine,
        "schema": facts.revision,
        "clock": totals.clock,
        "database_bytes": facts.database_bytes,
        "log_bytes": facts.wal_bytes,
        "soon_seconds": soon,
        **_fields(totals.all()),
        "faces": {space.value: _fields(totals.of(space)) for space in Space},
        "plugins": [{"plugin": plugin, **_fields(tally)} for plugin, tally in totals.owners(Space.PLUGINS)],
        "projects": [
            {"tenant": tenant, "project": project, **_fields(tally)}
            for (tenant, project), tally in totals.owners(Space.SEMANTIC)
        ],
    }


def _fields(tally: Tally) -> dict[str, Any]:
    return {
        "entries": tally.entries,
        "bytes": tally.bytes,
        "other_rows": tally.others,
        "other_bytes": tally.other_bytes,
        "expiring_soon": tally.soon,
        "expired": tally.expired,
        "oldest_expiry": None if tally.oldest is None else _moment(tally.oldest).isoformat(timespec="milliseconds"),
    }


def _show(name: str, facts: Facts, totals: _Totals, soon: float) -> None:
    log = "" if facts.wal_bytes is None else f", and {sized(facts.wal_bytes)} of log"
    say(f"{name}: {facts.engine}, schema {facts.revision}, version {totals.clock}")
    say(f"{sized(facts.database_bytes)} on disk{log}")
    names = ["entries", "keys and values", "trail and others", f"expire within {soon:g} s", "expired", "oldest expiry"]
    faces = [(space.value, totals.of(space)) for space in Space]
    table(["face", *names], [[face, *_cells(tally)] for face, tally in [*faces, ("all", totals.all())]])
    if plugins := totals.owners(Space.PLUGINS):
        table(["plugin", *names], [[str(plugin), *_cells(tally)] for plugin, tally in plugins])
    if projects := totals.owners(Space.SEMANTIC):
        table(["project", *names], [["/".join(project), *_cells(tally)] for project, tally in projects])


def _cells(tally: Tally) -> list[str]:
    oldest = "" if tally.oldest is None else _moment(tally.oldest).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    others = f"{tally.others:,}" if tally.others else ""
    return [f"{tally.entries:,}", sized(tally.bytes), others, f"{tally.soon:,}", f"{tally.expired:,}", oldest]


def _moment(milliseconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError):
        return datetime.max.replace(tzinfo=UTC)
