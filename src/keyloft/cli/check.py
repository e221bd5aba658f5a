"""The command `check`: finds what is wrong with a database."""

from typing import Annotated, Final

from keyloft import admin, limits
from keyloft.cli.database import NamedDatabase
from keyloft.cli.findings import show_findings
from keyloft.cli.options import Commands, Output, number_option
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, remark, say, to_json


def check(
    *,
    limit: Annotated[int, number_option("N", "Show this many problems; all are counted.")] = limits.FINDINGS,
    out: Output,
    database: NamedDatabase,
) -> int:
    """Find what is wrong with a database. Exit code 1 if something is.

    Pages and indexes, the schema, keys and values that can't be decoded, versions that were never given, rows that
    point to nothing. Changes nothing, and shows no values. It may run beside a service.

    Example: keyloft check --database nightly.db
    """
    report = with_progress(admin.check, database.url(), limit=limit)
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


COMMANDS: Final[Commands] = (check,)
