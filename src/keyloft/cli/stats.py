"""The command `stats`: how much a database holds, for whom, and what expires."""

from typing import Annotated

import msgspec
import typer

from keyloft import admin
from keyloft.cli.database import named_database
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import is_for_people, local_time, say, show_json, sized, table
from keyloft.core.urls import DatabaseUrl
from keyloft.server.config import Flags


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"stats": stats})


def stats(
    *,
    soon: Annotated[
        float, typer.Option(metavar="SECONDS", help="What expires within so many seconds expires soon.")
    ] = 3600.0,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Show how much a database holds, per interface, plugin and project, and what expires.

    Bytes are those of keys and values. What has expired and is not yet swept is counted apart.

    Example: keyloft stats --soon 86400
    """
    url = named_database(flags)
    report = with_progress(lambda progress: admin.stats(url, soon=soon, progress=progress))
    if as_json or not is_for_people():
        show_json({"database": DatabaseUrl.parse(url).shown, **msgspec.to_builtins(report)}, as_json=True)
    else:
        _show(DatabaseUrl.parse(url).shown, report)


def _show(name: str, report: admin.StatsReport) -> None:
    wal = "" if report.wal_bytes is None else f", and {sized(report.wal_bytes)} of write-ahead log"
    say(f"{name}: {report.engine}, schema {report.schema}, version {report.version}")
    say(f"{sized(report.database_bytes)} on disk{wal}")
    soon = f"expire within {report.soon_seconds:g} s"
    columns = ["entries", "keys and values", "trail and others", soon, "expired", "oldest expiry"]
    interfaces = {**report.interfaces, "all": report.total}
    for kind, tallies in (("interface", interfaces), ("plugin", report.plugins), ("project", report.projects)):
        if tallies:
            table([kind, *columns], [[str(owner), *_cells(tally)] for owner, tally in tallies.items()])


def _cells(tally: admin.Tally) -> list[str]:
    return [
        f"{tally.entries:,}",
        sized(tally.bytes),
        f"{tally.other_rows:,}" if tally.other_rows else "",
        f"{tally.expiring_soon:,}",
        f"{tally.expired:,}",
        local_time(tally.oldest_expiry),
    ]
