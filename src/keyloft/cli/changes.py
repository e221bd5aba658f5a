"""The command `changes`: shows which keys were changed, when and how."""

from typing import Annotated, Final

import msgspec

from keyloft import admin
from keyloft.cli.database import NamedDatabase, run_quietly
from keyloft.cli.options import Commands, Limit, Output, number_option
from keyloft.cli.terminal import Columns
from keyloft.cli.transfer import PartOptions


def changes(
    *,
    since: Annotated[int | None, number_option("VERSION", "Only what changed after this version.")] = None,
    limit: Limit = None,
    part: PartOptions,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Print which keys were changed, oldest change first. Each is a line, in a pipe as JSON, without the value.

    As far back as the change log reaches, or since a version; of all keys, or of some. Exit code 1 if the log does not
    reach back to that version.

    Example: keyloft changes --since 4711
    """
    found = admin.changes(database.url(), since=since, limit=limit, **part.arguments())
    run_quietly(out.show_all(found, msgspec.to_builtins, _COLUMNS, "nothing was changed"))


def _key(change: admin.KeyChange) -> str:
    owner = change.plugin or change.store
    key = change.key if isinstance(change.key, str) else f"hex {change.key_hex}"
    return f"{owner}: {key}" if owner else key


_COLUMNS: Final[Columns[admin.KeyChange]] = {
    "version": lambda change: change.version,
    "time": lambda change: change.at,
    "change": lambda change: change.kind,
    "interface": lambda change: change.space,
    "key": _key,
}

COMMANDS: Final[Commands] = (changes,)
