"""The command `compact`: gives the space of removed entries back."""

from typing import Final

import msgspec

from keyloft import admin
from keyloft.cli.database import NamedDatabase
from keyloft.cli.options import Commands, Output
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import sized


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


def _size(usage: admin.DiskUsage) -> str:
    wal = f" and {sized(usage.wal_bytes)} of write-ahead log" if usage.wal_bytes else ""
    return f"{sized(usage.database_bytes)}{wal}"


COMMANDS: Final[Commands] = {"compact": compact}
