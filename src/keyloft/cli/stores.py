"""Opens the database that a command is about, and shows its entries."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import keyloft
from keyloft import Entry, Store, limits
from keyloft.cli import keytext
from keyloft.cli.terminal import to_json
from keyloft.errors import CannotOpen
from keyloft.server.config import Flags, load
from keyloft.urls import sqlite_path
from keyloft.values import U64

T = TypeVar("T")


def with_store(flags: Flags, work: Callable[[Store], Awaitable[T]], *, make: bool = False) -> T:
    """Open the database that the flags name, and do something with it.

    Args:
        flags: Where it is.
        work: What to do.
        make: A file that is not there is made; whoever only looks wants to know that it is not there.

    Raises:
        CannotOpen: There is no such file.
    """
    url = load(flags, only=["database"]).database
    path = sqlite_path(url)
    if path is not None and not make and not Path(path).expanduser().exists():
        raise CannotOpen(f"there is no file {path}: --database, or KEYLOFT_DATABASE_URL, names another")

    # What is worth telling is raised.
    logging.getLogger("keyloft").addHandler(logging.NullHandler())

    async def working() -> T:
        async with keyloft.open(url, max_value_bytes=limits.LARGEST_VALUE_BYTES, sweep_every=None) as kv:
            return await work(kv)

    return asyncio.run(working())


def shown(entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it: bytes in base64, and a counter marked as one."""
    record: dict[str, Any] = {"key": keytext.written(entry.key)}
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
    return f"{keytext.written(entry.key)} = {text if kind == 'value' else f'{kind} {text}'}"
