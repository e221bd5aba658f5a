"""Opens the databases that a function of this package works on, and reports its progress."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeAlias

from keyloft.core import maintenance
from keyloft.core.urls import DatabaseUrl
from keyloft.engines import open_maintenance
from keyloft.errors import InvalidArgument

Database: TypeAlias = str | os.PathLike[str]
"""A path, `sqlite:///…`, `postgresql://…` or `etcd://…`."""

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a stage, how much of it is done, and how much there is to do; None if that is not known.

The last call of a stage has the same number twice.
"""


@asynccontextmanager
async def opened(database: Database | DatabaseUrl, *, make: bool = False) -> AsyncIterator[maintenance.Maintenance]:
    """A whole database, until the block ends; `make` creates it, or its tables.

    Raises:
        CannotOpen: The file does not exist.
        DatabaseError: The database can't be opened.
    """
    url = DatabaseUrl.parse(database)
    async with aclosing(await open_maintenance(url, make=make)) as whole:
        yield whole


@contextmanager
def stage(progress: Progress | None, name: str, total: int | None = None) -> Iterator[maintenance.Progress]:
    """Report the beginning, the progress and the end of a stage; at the end, the total is how much was done.

    Args:
        progress: Called with each report.
        name: Of the stage.
        total: How much there is to do, if that is known before an engine says it.

    Raises:
        InvalidArgument: `progress` can't be called.
    """
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress: expected a function or None, got {type(progress).__name__}")
    done, of = 0, total

    def report(now_done: int, now_of: int | None) -> None:
        nonlocal done, of
        done, of = now_done, total if now_of is None else now_of
        if progress is not None:
            progress(name, done, None if of is None else max(done, of))

    report(0, None)
    yield report
    if done != of:
        report(done, done)
