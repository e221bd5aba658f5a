"""The command `compact`: gives the space of removed entries back."""

from typing import Final

import msgspec

from keyloft import admin
from keyloft.cli.database import NamedDatabase, size_on_disk
from keyloft.cli.options import Commands, Output
from keyloft.cli.progress import with_progress


def compact(*, out: Output, database: NamedDatabase) -> None:
    """Give the space of removed entries back.

    An SQLite file is written again: that needs as much free space as the file has, and writers wait. PostgreSQL makes
    the space free for new rows, and keeps most of it. etcd forgets old revisions, those of other programs included, and
    its members give the space back one after the other.

    Example: keyloft compact --database app.db
    """
    report = with_progress(admin.compact, database.url())
    sentence = f"{database.shown} took {size_on_disk(report.before)}, and takes {size_on_disk(report.after)}"
    out.show_report({"database": database.shown, **msgspec.to_builtins(report)}, sentence)


COMMANDS: Final[Commands] = (compact,)
