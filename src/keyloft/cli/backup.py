"""The commands that save a database, and bring it back: `backup`, `restore`."""

from typing import Annotated

import typer

from keyloft import admin
from keyloft.cli.database import named_database
from keyloft.cli.options import AsJson, Yes, add_commands
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import confirm, counted, remark, show_result, sized
from keyloft.errors import NotEmpty
from keyloft.server.config import Flags


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"backup": backup, "restore": restore})


def backup(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it: an SQLite file.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="FILE may exist already; it is replaced.")] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Write all that is stored at this moment into a file, while others continue to write.

    The file is an SQLite database, also for PostgreSQL. It gets its name once it is complete, checked and on disk, and
    only its owner can read it.

    Example: keyloft backup nightly.db
    """
    url = named_database(flags)
    report = with_progress(lambda progress: admin.backup(url, file, overwrite=force, progress=progress))
    held = f"{counted(report.rows, 'row')} in {sized(report.bytes)}"
    show_result(report, f"{report.file} holds {held}, up to version {report.version}", as_json=as_json)


def restore(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What `keyloft backup` wrote.")],
    *,
    replace: Annotated[
        bool, typer.Option("--replace", help="All that is in the database now is lost; asks before, with the number.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Bring back what a backup holds, into a database that is empty, or not there yet.

    All of it or nothing; afterwards the database is compared with the backup. A running service goes on.

    Example: keyloft restore nightly.db --database app.db
    """
    url = named_database(flags, make=True)

    def restored(*, replacing: bool) -> admin.RestoreReport:
        return with_progress(lambda progress: admin.restore(file, url, replace=replacing, progress=progress))

    try:
        report = restored(replacing=replace and yes)
    except NotEmpty as error:
        if not replace:
            raise
        confirm(
            f"Replace the {counted(error.rows, 'row')} in {error.database} by the {error.backup_rows:,} of the backup?"
        )
        report = restored(replacing=True)
    if not report.verified:
        remark("Others wrote into the database meanwhile: it can't be compared with the backup any more.")
    verified = ", the same as in the backup" if report.verified else " of the backup, and what others wrote since"
    held = f"{counted(report.rows, 'row')}{verified}"
    show_result(report, f"{report.database} holds {held}, up to version {report.version}", as_json=as_json)
