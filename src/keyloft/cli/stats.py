"""The command `stats`: shows how much a database holds."""

from typing import Annotated, Final

import msgspec

from keyloft import admin, limits
from keyloft.cli.database import NamedDatabase, size_on_disk
from keyloft.cli.options import Commands, Output, seconds_option
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, say, sized, table, to_json


def stats(
    *,
    soon: Annotated[
        float, seconds_option("Count what expires within this many seconds.", limits.SOON_SECONDS)
    ] = limits.SOON_SECONDS,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Show how much a database holds, and what expires. Counts per interface, named store, plugin and project.

    Bytes are those of keys and values. What has expired and is not yet swept is counted apart.

    Example: keyloft stats --soon 86400
    """
    report = with_progress(admin.stats, database.url(), soon=soon)
    if out.is_for_people:
        _show(database.shown, report)
    else:
        say(to_json({"database": database.shown, **msgspec.to_builtins(report)}))


def _show(name: str, report: admin.StatsReport) -> None:
    say(f"{name}: {report.engine}, schema {report.schema}, version {report.version}")
    say(f"{size_on_disk(report)} on disk, store {report.store}")
    log = report.change_log
    when = "" if log.oldest_at is None else f", {log.oldest_at.isoformat(' ', 'seconds')}"
    say(f"change log: {counted(log.rows, 'row', 'rows')}, {sized(log.bytes)}, since version {log.oldest_version}{when}")
    soon = f"expire within {report.soon_seconds:g} s"
    columns = ["entries", "keys and values", "other rows", soon, "expired", "oldest expiry"]
    interfaces = {**report.interfaces, "all": report.total}
    for kind, tallies in (
        ("interface", interfaces),
        ("store", report.stores),
        ("plugin", report.plugins),
        ("project", report.projects),
    ):
        if tallies:
            table([kind, *columns], [[owner, *_cells(tally)] for owner, tally in tallies.items()])


def _cells(tally: admin.Tally) -> list[object]:
    return [
        f"{tally.entries:,}",
        sized(tally.bytes),
        f"{tally.other_rows:,}" if tally.other_rows else None,
        f"{tally.expiring_soon:,}",
        f"{tally.expired:,}",
        tally.oldest_expiry,
    ]


COMMANDS: Final[Commands] = (stats,)
