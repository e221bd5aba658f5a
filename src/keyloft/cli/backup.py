"""The commands that save a database, and bring it back: `backup`, `restore`."""

from typing import Annotated, Final

from keyloft import admin
from keyloft.cli.database import NamedDatabase
from keyloft.cli.options import Commands, Output, Yes, argument, flag
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import confirm, counted, remark, sized
from keyloft.errors import NotEmpty


def backup(
    file: Annotated[str, argument("FILE", "Where to write it: an SQLite file.")],
    *,
    force: Annotated[bool, flag("--force", "FILE may exist already; it is replaced.")] = False,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Write the whole database into a file. The file holds one moment of it; others may write meanwhile.

    The file is an SQLite database, also for PostgreSQL and etcd. It gets its name once it is complete, checked and on
    disk, and only its owner can read it.

    Example: keyloft backup nightly.db
    """
    report = with_progress(admin.backup, database.url(), file, overwrite=force)
    held = f"{counted(report.rows, 'row')} in {sized(report.bytes)}"
    out.show_report(report, f"{report.file} holds {held}, up to version {report.version}")


def restore(
    file: Annotated[str, argument("FILE", "What `keyloft backup` wrote.")],
    *,
    replace: Annotated[
        bool, flag("--replace", "What the database holds now is lost; asks before, with the number.")
    ] = False,
    yes: Yes = False,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Bring back what a backup holds. Without --replace, into a database that is empty, or not there yet.

    All of it or nothing; afterwards the database is compared with the backup. A running service goes on.

    Example: keyloft restore nightly.db --database app.db
    """
    url = database.url(make=True)

    try:
        report = with_progress(admin.restore, file, url, replace=replace and yes)
    except NotEmpty as error:
        if not replace:
            raise
        rows = counted(error.rows, "row")
        confirm(f"Replace the {rows} in {error.database} by the {error.backup_rows:,} of the backup?")
        report = with_progress(admin.restore, file, url, replace=True)
    if not report.verified:
        remark("Others wrote into the database meanwhile: it can't be compared with the backup any more.")
    verified = ", the same as in the backup" if report.verified else " of the backup, and what others wrote since"
    held = f"{counted(report.rows, 'row')}{verified}"
    out.show_report(report, f"{report.database} holds {held}, up to version {report.version}")


COMMANDS: Final[Commands] = (backup, restore)
