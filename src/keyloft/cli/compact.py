"""The command `compact`: returns the space of removed entries."""

from typing import Any

import typer

from keyloft.cli.database import named_database, with_maintenance
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import progress
from keyloft.cli.terminal import is_for_people, say, show_json, sized
from keyloft.core.maintenance import Facts, Maintenance
from keyloft.core.urls import without_password
from keyloft.server.config import Flags


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"compact": compact})


def compact(*, as_json: AsJson = False, flags: Flags) -> int:
    """Give back the room of what was removed.

    An SQLite file is written anew: it needs as much free space again meanwhile, and whoever writes waits. PostgreSQL
    frees the room for new rows, and keeps most of it.

    Example: keyloft compact --database app.db
    """
    url = named_database(flags)

    async def work(maintenance: Maintenance) -> tuple[Facts, Facts]:
        before = await maintenance.facts()
        with progress("compacting"):
            await maintenance.compact()
        return before, await maintenance.facts()

    before, after = with_maintenance(url, work)
    if as_json or not is_for_people():
        sizes = {"before": _sizes(before), "after": _sizes(after)}
        show_json({"database": without_password(url), **sizes}, as_json=True)
    else:
        say(f"{without_password(url)} took {_taken(before)}, and takes {_taken(after)}")
    return 0


def _sizes(facts: Facts) -> dict[str, Any]:
    return {"database_bytes": facts.database_bytes, "log_bytes": facts.wal_bytes}


def _taken(facts: Facts) -> str:
    log = f" and {sized(facts.wal_bytes)} of log" if facts.wal_bytes else ""
    return f"{sized(facts.database_bytes)}{log}"
