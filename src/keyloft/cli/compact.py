"""The command `compact`: gives the space of removed entries back."""

import msgspec
import typer

from keyloft import admin
from keyloft.cli.database import named_database
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import show_result, sized
from keyloft.core.urls import DatabaseUrl
from keyloft.server.config import Flags


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"compact": compact})


def compact(*, as_json: AsJson = False, flags: Flags) -> None:
    """Give the space of removed entries back.

    An SQLite file is written again: that needs as much free space as the file has, and writers wait. PostgreSQL makes
    the space free for new rows, and keeps most of it.

    Example: keyloft compact --database app.db
    """
    url = named_database(flags)
    report = with_progress(lambda progress: admin.compact(url, progress=progress))
    name = DatabaseUrl.parse(url).shown
    show_result(
        {"database": name, **msgspec.to_builtins(report)},
        f"{name} took {_size(report.before)}, and takes {_size(report.after)}",
        as_json=as_json,
    )


def _size(usage: admin.DiskUsage) -> str:
    wal = f" and {sized(usage.wal_bytes)} of write-ahead log" if usage.wal_bytes else ""
    return f"{sized(usage.database_bytes)}{wal}"
