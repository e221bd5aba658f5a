"""Opens the database that a function of this package is called with."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from keyloft.core.maintenance import Maintenance
from keyloft.core.urls import DatabaseUrl
from keyloft.engines import open_maintenance
from keyloft.errors import CannotOpen

Database: TypeAlias = str | os.PathLike[str]
"""A path, `sqlite:///…` or `postgresql://…`."""


@asynccontextmanager
async def opened(database: Database | DatabaseUrl, *, make: bool = False) -> AsyncIterator[Maintenance]:
    """A whole database, until the block ends; `make` creates it, or its tables.

    Raises:
        CannotOpen: There is no such file.
        DatabaseError: It can't be opened.
    """
    url = DatabaseUrl.parse(database)
    if not make and url.file is not None and not url.file.exists():
        raise CannotOpen(f"there is no file {url.file}")
    maintenance = await open_maintenance(url, make=make)
    try:
        yield maintenance
    finally:
        await maintenance.aclose()
