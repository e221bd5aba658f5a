"""Opens the databases that a function of this package works on, and reports how far its work is."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from keyloft.core import maintenance
from keyloft.core.urls import DatabaseUrl
from keyloft.engines import open_maintenance
from keyloft.errors import CannotOpen

Database: TypeAlias = str | os.PathLike[str]
"""A path, `sqlite:///…` or `postgresql://…`."""

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a stage, how much of it is done, and how much there is to do; None if that is not known."""


@asynccontextmanager
async def opened(database: Database | DatabaseUrl, *, make: bool = False) -> AsyncIterator[maintenance.Maintenance]:
    """A whole database, until the block ends; `make` creates it, or its tables.

    Raises:
        CannotOpen: There is no such file.
        DatabaseError: It can't be opened.
    """
    url = DatabaseUrl.parse(database)
    if not make and url.file is not None and not url.file.exists():
        raise CannotOpen(f"there is no file {url.file}")
    async with aclosing(await open_maintenance(url, make=make)) as whole:
        yield whole


def stage(progress: Progress | None, name: str) -> maintenance.Progress:
    """Report that a stage begins, then how far it is. An engine that does not know a total reports what is done."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(name, done, total if total > done else None)

    report(0, 0)
    return report
