"""Opens the database that a command names."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import keyloft
from keyloft import Store, limits
from keyloft.admin.databases import opened
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import CannotOpen
from keyloft.server.config import Flags, load

T = TypeVar("T")


def named_database(flags: Flags, *, make: bool = False) -> str:
    """The path or URL of the database that the flags name; unless a command makes it, its file must exist.

    Raises:
        CannotOpen: There is no such file.
    """
    url = load(flags, only=["database"]).database
    file = DatabaseUrl.parse(url).file
    if not make and file is not None and not file.exists():
        raise CannotOpen(f"there is no file {file}: --database, or KEYLOFT_DATABASE_URL, names another")
    return url


def with_store(flags: Flags, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Open the tuple store of the database that the flags name, and work with it.

    Args:
        flags: The command's settings.
        work: Called with the open store.
        make: Make the file, and the tables; a command that only reads makes neither.

    Raises:
        CannotOpen: There is no such file.
        NotADatabase: There are no tables of Keyloft.
    """
    url = named_database(flags, make=make)

    async def working() -> T:
        if not make:
            # Opening a store makes its tables, also in a database that a wrong URL names.
            async with opened(url):
                pass
        async with keyloft.open(url, max_value_bytes=limits.LARGEST_VALUE_BYTES, sweep_every=None) as kv:
            return await work(kv)

    return finished(working())


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop, to its end, without logging: what concerns the user is raised."""
    logging.getLogger("keyloft").addHandler(logging.NullHandler())
    return asyncio.run(work)
