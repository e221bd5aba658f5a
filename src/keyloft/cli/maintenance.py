"""The commands about the state and size of a whole database: `stats`, `check`, `compact`."""

from typing import Annotated, Final

import msgspec

from keyloft import admin
from keyloft.cli.database import NamedDatabase
from keyloft.cli.findings import show_findings
from keyloft.cli.options import Commands, Output, option
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, remark, say, sized, table, to_json


def stats(
    *,
    soon: Annotated[float, option("SECONDS", "What expires within so many seconds expires soon.")] = 3600.0,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Show how much a database holds, per interface, plugin and project, and what expires.

    Bytes are those of keys and values. What has expired and is not yet swept is counted apart.

    Example: keyloft stats --soon 86400
    """
    url = database.url()
    report = with_progress(lambda progress: admin.stats(url, soon=soon, progress=progress))
    if out.is_for_people:
        _show(database.shown, report)
    else:
        say(to_json({"database": database.shown, **msgspec.to_builtins(report)}))


def check(
    *,
    limit: Annotated[int, option("N", "Show so many problems; all are counted.")] = 100,
    out: Output,
    database: NamedDatabase,
) -> int:
    """Find what is wrong with a database; exit code 1 if something is.

    Pages and indexes, the schema, keys and values that can't be decoded, versions that were never given, rows that
    point to nothing. Changes nothing, and shows no values. It may run beside a service.

    Example: keyloft check --database nightly.db
    """
    url = database.url()
    report = with_progress(lambda progress: admin.check(url, limit=limit, progress=progress))
    if out.is_for_people:
        show_findings(report.findings)
    else:
        say(to_json(report.findings))
    if not report.problems:
        remark(f"{database.shown}: nothing is wrong with its {counted(report.rows, 'row')}")
        return 0
    shown = f", of which {len(report.findings):,} are shown" if len(report.findings) < report.problems else ""
    problems = f"{counted(report.problems, 'problem')}{shown}"
    remark(f"{database.shown}: {problems}, in {counted(report.rows, 'row')} that were read")
    return 1


def compact(*, out: Output, database: NamedDatabase) -> None:
    """Give the space of removed entries back.

    An SQLite file is written again: that needs as much free space as the file has, and writers wait. PostgreSQL makes
    the space free for new rows, and keeps most of it.

    Example: keyloft compact --database app.db
    """
    url = database.url()
    report = with_progress(lambda progress: admin.compact(url, progress=progress))
    sentence = f"{database.shown} took {_size(report.before)}, and takes {_size(report.after)}"
    out.show_report({"database": database.shown, **msgspec.to_builtins(report)}, sentence)


def _show(name: str, report: admin.StatsReport) -> None:
    say(f"{name}: {report.engine}, schema {report.schema}, version {report.version}")
    say(f"{_size(report)} on disk")
    soon = f"expire within {report.soon_seconds:g} s"
    columns = ["entries", "keys and values", "trail and others", soon, "expired", "oldest expiry"]
    interfaces = {**report.interfaces, "all": report.total}
    for kind, tallies in (("interface", interfaces), ("plugin", report.plugins), ("project", report.projects)):
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


def _size(usage: admin.DiskUsage | admin.StatsReport) -> str:
    wal = f" and {sized(usage.wal_bytes)} of write-ahead log" if usage.wal_bytes else ""
    return f"{sized(usage.database_bytes)}{wal}"


COMMANDS: Final[Commands] = (stats, check, compact)
