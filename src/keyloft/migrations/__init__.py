"""Brings the schema of a database to another revision, with Alembic.

A migration blocks, and goes through another SQLite library than the engine: run it while the file is not open in this
process, or in a process of its own.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, Final

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


def _migrate(url: str | os.PathLike[str], work: Callable[[Any, Any], None]) -> None:
    if _in_an_event_loop():
        raise WrongLoop("a migration would block this event loop: use `await asyncio.to_thread(upgrade, url)`")
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError
    except ImportError as error:
        raise CannotOpen('migrations need Alembic: pip install "keyloft[sql]"') from error
    config = Config(attributes={"url": os.fspath(url)})
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
