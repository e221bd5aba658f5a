"""Brings the schema of a database to another revision, with Alembic.

A migration blocks, and goes through another SQLite library than the engine: run it while the file is not open in this
process, or in a process of its own.
"""

import asyncio
import io
import os
import re
import threading
from collections.abc import Callable
from typing import Any, Final, TextIO

from msgspec import Struct

from keyloft.errors import CannotOpen, DatabaseError, WrongLoop

# Alembic keeps what it is working on in globals.
_ONE_AT_A_TIME: Final = threading.Lock()


def upgrade(url: str | os.PathLike[str], revision: str = "head") -> None:
    """Bring a database up to a revision; a database that is already there is left as it is.

    Args:
        url: A path, or a URL as `keyloft.open` takes it.
        revision: `head` for what this version of Keyloft reads and writes.

    Raises:
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The migration failed, and nothing of it was kept.
        WrongLoop: It would block an event loop; from a coroutine, use `asyncio.to_thread`.
    """
    _migrate(url, lambda command, config: command.upgrade(config, revision))


def downgrade(url: str | os.PathLike[str], revision: str) -> None:
    """Take a database back to an earlier revision; what only the later ones can hold is deleted.

    Args:
        url: A path, or a URL as `keyloft.open` takes it.
        revision: `-1` for one step, `base` for a database without Keyloft.

    Raises:
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The migration failed, and nothing of it was kept.
        WrongLoop: It would block an event loop; from a coroutine, use `asyncio.to_thread`.
    """
    _migrate(url, lambda command, config: command.downgrade(config, revision))


class Step(Struct, frozen=True):
    """A migration that would be made, or undone."""

    revision: str
    name: str


class Plan(Struct, frozen=True):
    """What a migration would do."""

    current: str | None
    """The revision that the database has; None if it has nothing of Keyloft's."""
    target: str | None
    """The one that it would have."""
    steps: tuple[Step, ...]
    sql: str
    """What would run, on a database that is as this one is now."""
    is_down: bool


def current_revision(url: str | os.PathLike[str]) -> str | None:
    """The revision that a database has; None if it has nothing of Keyloft's. Nothing is changed.

    Raises:
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The database can't be read.
        WrongLoop: It would block an event loop.
    """
    current: str | None = None

    def look(heads: tuple[str, ...], context: Any) -> list[Any]:
        nonlocal current
        current = heads[0] if heads else None
        return []

    def read(command: Any, config: Any) -> None:
        from alembic.runtime.environment import EnvironmentContext
        from alembic.script import ScriptDirectory

        script = ScriptDirectory.from_config(config)
        with EnvironmentContext(config, script, fn=look, dont_mutate=True):
            script.run_env()

    _migrate(url, read, only_look=True)
    return current


def plan(url: str | os.PathLike[str], revision: str = "head", *, down: bool = False) -> Plan:
    """What `upgrade`, or `downgrade`, would do; nothing is changed.

    Raises:
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: There is no such revision, or the database can't be read.
        WrongLoop: It would block an event loop.
    """
    current = current_revision(url)
    written = io.StringIO()
    names: dict[str, str] = {}

    def write(command: Any, config: Any) -> None:
        from alembic.script import ScriptDirectory

        names.update({one.revision: one.doc for one in ScriptDirectory.from_config(config).walk_revisions()})
        if current is None and down:
            return
        wanted = revision if current is None else f"{current}:{revision}"
        (command.downgrade if down else command.upgrade)(config, wanted, sql=True)

    _migrate(url, write, output=written)
    sql = written.getvalue().strip()
    moves = _RUNNING.findall(sql)
    target = (moves[-1][1] or None) if moves else current
    steps = tuple([Step(at, names[at]) for at in [before if down else after for before, after in moves]])
    return Plan(current, target, steps, sql if steps else "", down)


# As Alembic comments each step of a script.
_RUNNING: Final = re.compile(r"^-- Running (?:upgrade|downgrade) (\S*) -> (\S*)$", re.MULTILINE)


def _migrate(
    url: str | os.PathLike[str],
    work: Callable[[Any, Any], None],
    *,
    only_look: bool = False,
    output: TextIO | None = None,
) -> None:
    if _in_an_event_loop():
        raise WrongLoop("a migration would block this event loop: use `await asyncio.to_thread(upgrade, url)`")
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError
    except ImportError as error:
        raise CannotOpen('migrations need Alembic: pip install "keyloft[sql]"') from error
    config = Config(attributes={"url": os.fspath(url), "only_look": only_look}, output_buffer=output)
    config.set_main_option("script_location", "keyloft:migrations")
    config.set_main_option("path_separator", "os")
    try:
        with _ONE_AT_A_TIME:
            work(command, config)
    except CannotOpen:
        raise
    except CommandError as error:
        raise DatabaseError(str(error)) from error


def _in_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
