"""Opens the database that a command is about, and shows its entries."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import keyloft
from keyloft import Entry, Store, limits
from keyloft.cli.terminal import to_json
from keyloft.core import key_text
from keyloft.core.maintenance import Maintenance
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import U64
from keyloft.engines import open_maintenance
from keyloft.errors import CannotOpen
from keyloft.server.config import Flags, load

T = TypeVar("T")


def with_store(flags: Flags, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Open the database that the flags name, and do something with it.

    Args:
        flags: Where it is.
        work: What to do.
        make: A file that is not there is made, and so are tables; whoever only looks wants to know that there are none.

    Raises:
        CannotOpen: There is no such file.
        NotADatabase: There are no tables of Keyloft.
    """
    url = named_database(flags)
    if not make:
        check_there(url)

    async def working() -> T:
        if not make:
            # A store would make its tables in whatever database a wrong URL leads to.
            async with maintenance_of(url):
                pass
        async with keyloft.open(url, max_value_bytes=limits.LARGEST_VALUE_BYTES, sweep_every=None) as kv:
            return await work(kv)

    return finished(working())


def with_maintenance(url: str, work: Callable[[Maintenance], Awaitable[T]]) -> T:
    """Open a whole database, and do something with it.

    Raises:
        CannotOpen: There is no such database.
    """
    check_there(url)

    async def working() -> T:
        async with maintenance_of(url) as maintenance:
            return await work(maintenance)

    return finished(working())


@asynccontextmanager
async def maintenance_of(url: str, *, make: bool = False) -> AsyncIterator[Maintenance]:
    """A whole database, for as long as somebody works with it."""
    maintenance = await open_maintenance(url, make=make)
    try:
        yield maintenance
    finally:
        await maintenance.aclose()


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Do something in an event loop, to its end."""
    quiet()
    return asyncio.run(work)


def quiet() -> None:
    """Log nothing: what is worth telling is raised."""
    logging.getLogger("keyloft").addHandler(logging.NullHandler())


def named_database(flags: Flags) -> str:
    """The path or URL of the database that the flags name."""
    return load(flags, only=["database"]).database


def check_there(url: str) -> None:
    """Whoever only looks makes no file.

    Raises:
        CannotOpen: There is none.
    """
    if (file := file_of(url)) is not None and not file.exists():
        raise CannotOpen(f"there is no file {file}: --database, or KEYLOFT_DATABASE_URL, names another")


def file_of(url: str) -> Path | None:
    """The SQLite file that a path or URL names; None for anything else."""
    return DatabaseUrl.parse(url).file


def shown(entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it: bytes in base64, and a counter marked as one."""
    record: dict[str, Any] = {"key": key_text.written(entry.key)}
    record |= shown_value(entry.value)
    record["versionstamp"] = entry.versionstamp
    if entry.expires_at is not None:
        record["expires_at"] = entry.expires_at.isoformat(timespec="milliseconds")
    return record


def shown_value(value: Any) -> dict[str, Any]:
    """A value under the name of its kind."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, U64):
        return {"u64": int(value)}
    return {"value": value}


def in_a_line(entry: Entry) -> str:
    """An entry for people."""
    [(kind, value)] = shown_value(entry.value).items()
    text = to_json(value)
    return f"{key_text.written(entry.key)} = {text if kind == 'value' else f'{kind} {text}'}"
