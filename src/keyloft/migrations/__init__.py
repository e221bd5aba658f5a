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
from typing import TYPE_CHECKING, Any, Final, TextIO

from msgspec import Struct

from keyloft.core.schema import REVISION
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import CannotOpen, DatabaseError, InvalidArgument, KeyloftError, WrongLoop

if TYPE_CHECKING:
    from keyloft.core.adoption import Adoption
    from keyloft.migrations.earlier import Succession

# Alembic keeps what it is working on in globals.
_ONE_AT_A_TIME: Final = threading.Lock()


def upgrade(url: str | os.PathLike[str], revision: str = "head") -> None:
    """Bring a database up to a revision; a database that is already there is left as it is.

    Args:
        url: A path, or a URL as `keyloft.open` takes it.
        revision: `head` for what this version of Keyloft reads and writes.

    Raises:
        InvalidArgument: The URL is malformed, or there is no such revision.
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The migration failed, and nothing of it was kept.
        WrongLoop: It would block an event loop; from a coroutine, use `asyncio.to_thread`.
    """

    def run(command: Any, config: Any) -> None:
        _check_revision(revision, config)
        command.upgrade(config, revision)

    _migrate(url, run)


def downgrade(url: str | os.PathLike[str], revision: str, *, drop: bool = False) -> None:
    """Take a database back to an earlier revision; what only the later ones can hold is deleted.

    Args:
        url: A path, or a URL as `keyloft.open` takes it.
        revision: `-1` for one step, `base` for a database without Keyloft.
        drop: Drop the plugins' table also if it has rows.

    Raises:
        InvalidArgument: The URL is malformed, or there is no such revision.
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The migration failed, and nothing of it was kept; or the plugins' table has rows.
        WrongLoop: It would block an event loop; from a coroutine, use `asyncio.to_thread`.
    """

    def run(command: Any, config: Any) -> None:
        _check_revision(revision, config)
        command.downgrade(config, revision)

    _migrate(url, run, drop=drop)


class MigrationStep(Struct, frozen=True):
    """A migration that would be made, or undone."""

    revision: str
    name: str


class MigrationPlan(Struct, frozen=True):
    """What a migration would do."""

    current: str | None
    """The revision that the database has; None if it has nothing of Keyloft's."""
    target: str | None
    """The one that it would have."""
    steps: tuple[MigrationStep, ...]
    sql: str
    """What would run, on a database that is as this one is now."""
    is_down: bool


def current_revision(url: str | os.PathLike[str]) -> str | None:
    """The revision that a database has; None if it has nothing of Keyloft's. Nothing is changed.

    Raises:
        InvalidArgument: The URL is malformed.
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The database can't be read.
        WrongLoop: It would block an event loop.
    """
    return _inspect(url).revision


class _Found(Struct):
    """What a database has before a migration."""

    revision: str | None = None
    succession: "Succession | None" = None
    """What is to be done if its revision is one that today's revisions replace."""
    adoption: "Adoption | None" = None
    """What is to be done with a plugins' table that another program made."""


def _inspect(url: str | os.PathLike[str]) -> _Found:
    found = _Found()

    def read(heads: tuple[str, ...], context: Any) -> list[Any]:
        from keyloft.migrations import earlier, tables

        if heads:
            found.revision = heads[0]
            if heads[0] in earlier.STAMPS:
                found.succession = earlier.succession(context.connection, heads[0])
        stamp = found.succession.stamp if found.succession else found.revision
        if stamp != REVISION:
            found.adoption = tables.plugin_table_adoption(context.connection)
        return []

    def run(command: Any, config: Any) -> None:
        from alembic.runtime.environment import EnvironmentContext
        from alembic.script import ScriptDirectory

        script = ScriptDirectory.from_config(config)
        with EnvironmentContext(config, script, fn=read, dont_mutate=True):
            script.run_env()

    _migrate(url, run, read_only=True)
    return found


def plan(url: str | os.PathLike[str], revision: str = "head", *, down: bool = False) -> MigrationPlan:
    """What `upgrade`, or `downgrade`, would do; nothing is changed.

    Raises:
        InvalidArgument: The URL is malformed, or there is no such revision.
        CannotOpen: Alembic is not installed, or the URL names nothing that can be migrated.
        DatabaseError: The database can't be read.
        WrongLoop: It would block an event loop.
    """
    found = _inspect(url)
    current, succession = found.revision, found.succession
    if found.adoption is not None and not down:
        found.adoption.check(DatabaseUrl.parse(url).shown)
    start = succession.stamp if succession else current
    written = io.StringIO()
    names: dict[str, str] = {}

    def write(command: Any, config: Any) -> None:
        from alembic.script import ScriptDirectory

        _check_revision(revision, config)
        names.update({one.revision: one.doc for one in ScriptDirectory.from_config(config).walk_revisions()})
        if start is None and down:
            return
        wanted = revision if start is None else f"{start}:{revision}"
        (command.downgrade if down else command.upgrade)(config, wanted, sql=True)

    _migrate(url, write, output=written, first=succession.statements if succession else (), adoption=found.adoption)
    sql = written.getvalue().strip()
    moves = _RUNNING.findall(sql)
    target = (moves[-1][1] or None) if moves else start
    steps = [MigrationStep(at, names[at]) for at in [before if down else after for before, after in moves]]
    if succession:
        steps.insert(0, MigrationStep(succession.stamp, f"What a database with the earlier revision {current} lacks"))
    return MigrationPlan(current, target, tuple(steps), sql if steps else "", down)


def _check_revision(revision: str, config: Any) -> None:
    """Refuse what is no revision, before Alembic does so in its own words."""
    from alembic.script import ScriptDirectory

    known = sorted([one.revision for one in ScriptDirectory.from_config(config).walk_revisions()])
    steps = re.fullmatch(r"[+-](\d+)", revision)
    if (steps and int(steps[1]) <= len(known)) or revision in ("head", "heads", "base", *known):
        return
    rule = f"head, base, at most {len(known)} steps back as in -1, or one of {', '.join(known)}"
    raise InvalidArgument(f"revision: expected {rule}, got {revision!a}")


# As Alembic comments each step of a script.
_RUNNING: Final = re.compile(r"^-- Running (?:upgrade|downgrade) (\S*) -> (\S*)$", re.MULTILINE)


def _migrate(
    url: str | os.PathLike[str], work: Callable[[Any, Any], None], *, output: TextIO | None = None, **attributes: object
) -> None:
    """Let Alembic do some work on a database.

    Args:
        url: The database.
        work: Called with Alembic's module `command`, and the configuration that its commands take.
        output: Where a script is written.
        attributes: What `env.py` reads from the configuration.
    """
    if _in_an_event_loop():
        raise WrongLoop("a migration would block this event loop: use `await asyncio.to_thread(upgrade, url)`")
    DatabaseUrl.parse(url)  # a malformed URL is refused as everywhere
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError
    except ImportError as error:
        raise CannotOpen('migrations need Alembic: pip install ".[sql]" in a clone of Keyloft') from error
    config = Config(attributes={"url": url, **attributes}, output_buffer=output)
    config.set_main_option("script_location", "keyloft:migrations")
    config.set_main_option("path_separator", "os")
    try:
        with _ONE_AT_A_TIME:
            work(command, config)
    except KeyloftError:
        raise
    except CommandError as error:
        raise DatabaseError(str(error)) from error
    except Exception as error:
        # The databases' own errors come with the whole statement: the first line says what is wrong.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DatabaseError(f"the migration failed: {reason}") from error


def _in_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
