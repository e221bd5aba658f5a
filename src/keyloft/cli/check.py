"""The command `check`: finds what is wrong with a database."""

from typing import Annotated

import typer

from keyloft import admin
from keyloft.cli.database import named_database
from keyloft.cli.findings import show_findings
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, is_for_people, remark, show_json
from keyloft.core.urls import DatabaseUrl
from keyloft.server.config import Flags


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"check": check})


def check(
    *,
    limit: Annotated[int, typer.Option(metavar="N", help="Show so many problems; all are counted.")] = 100,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Find what is wrong with a database; exit code 1 if something is.

    Pages and indexes, the schema, keys and values that can't be decoded, versions that were never given, rows that
    point to nothing. Changes nothing, and shows no values. It may run beside a service.

    Example: keyloft check --database nightly.db
    """
    url = named_database(flags)
    report = with_progress(lambda progress: admin.check(url, limit=limit, progress=progress))
    if as_json or not is_for_people():
        show_json(report.findings, as_json=True)
    else:
        show_findings(report.findings)
    name = DatabaseUrl.parse(url).shown
    if not report.problems:
        remark(f"{name}: nothing is wrong with its {counted(report.rows, 'row')}")
        return 0
    shown = f", of which {len(report.findings):,} are shown" if len(report.findings) < report.problems else ""
    remark(f"{name}: {counted(report.problems, 'problem')}{shown}, in {counted(report.rows, 'row')} that were read")
    return 1
