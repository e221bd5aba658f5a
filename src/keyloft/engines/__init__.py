"""What stores the data: `open_engine` for the interfaces, `open_maintenance` and `inspect_database` for operators."""

import os
from pathlib import Path
from typing import Literal

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.engine import Engine
from keyloft.core.maintenance import Maintenance
from keyloft.engines.inspection import Inspection
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import LIBRARY_VERSION as SQLITE_VERSION
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.worker import Worker
from keyloft.errors import CannotOpen, InvalidArgument

__all__ = ["SQLITE_VERSION", "Inspection", "inspect_database", "open_engine", "open_maintenance"]


async def open_engine(
    url: str | os.PathLike[str] | None,
    clock: Clock | None = None,
    *,
    durability: str = "full",
    cache_mib: int = limits.SQLITE_CACHE_MIB,
    patience: float = limits.SERVER_SECONDS,
) -> Engine:
    """Open the engine that a URL or path names; nothing and `:memory:` mean memory.

    Args:
        url: What to open.
        clock: Another clock than the database's own, for tests.
        durability: "full" or "relaxed".
        cache_mib: How much of an SQLite file is kept in memory to read from.
        patience: How many seconds a call waits for a database server that is away or silent.

    Raises:
        CannotOpen: No engine goes by that name.
        DatabaseError: The engine can't open its database.
    """
    if durability not in ("full", "relaxed"):
        raise InvalidArgument('durability is "full" or "relaxed"')
    local_clock = clock or SystemClock()
    match _named(url):
        case "memory", _:
            return MemoryEngine(local_clock)
        case "sqlite", path:
            return await SqliteEngine.open(path, local_clock, durability=durability, cache_mib=cache_mib)
        case _, dsn:
            from keyloft.engines.postgres.engine import PostgresEngine  # its driver is not installed everywhere

            return await PostgresEngine.open(dsn, clock, durability=durability, patience=patience)


async def open_maintenance(url: str | os.PathLike[str], *, make: bool = False) -> Maintenance:
    """Open a database as a whole, for whoever runs it.

    Args:
        url: What to open.
        make: Make it, or its tables, if need be; otherwise nothing is written until something is to be put.

    Raises:
        CannotOpen: There is no such database, or it is in memory.
        DatabaseError: It can't be opened.
    """
    match _named(url):
        case "memory", _:
            raise CannotOpen("a database in memory is nobody's but its process's: name a file, or a PostgreSQL server")
        case "sqlite", path:
            from keyloft.engines.sqlite.maintenance import SqliteMaintenance

            return await SqliteMaintenance.open(path, make=make)
        case _, dsn:
            from keyloft.engines.postgres.maintenance import PostgresMaintenance

            return await PostgresMaintenance.open(dsn, make=make)


async def inspect_database(
    url: str | os.PathLike[str] | None, *, patience: float = limits.SERVER_SECONDS
) -> Inspection | None:
    """Look at a database without making or changing anything; None for one in memory.

    Raises:
        InvalidArgument: This is no URL.
        CannotOpen: No engine goes by that name, or there is no such file.
        DatabaseError: It can't be read; the message says why.
    """
    match _named(url):
        case "sqlite", path if path != ":memory:":
            worker = Worker(f"keyloft look at {path}")
            try:
                return await worker.call(SqliteFile(path, "full").look)
            finally:
                worker.stop()
        case "postgres", dsn:
            from keyloft.engines.postgres import inspection

            return await inspection.look(dsn, patience)
    return None


def _named(url: str | os.PathLike[str] | None) -> tuple[Literal["memory", "sqlite", "postgres"], str]:
    """What a URL or path names: the engine, and what it opens."""
    target = ":memory:" if url is None else os.fspath(url) if isinstance(url, (str, os.PathLike)) else ""
    if not isinstance(target, str) or not target or "\x00" in target or not _is_text(target):
        raise InvalidArgument("a database is named by a path or a URL; leave it out for one in memory")
    if target == ":memory:":
        return "memory", target
    if target.lower().startswith(("sqlite:", "file:", "postgresql:", "postgres:", "memory:")) and "://" not in target:
        raise InvalidArgument(
            f"{target.partition(':')[0]}:…: a URL has slashes after its scheme, as in sqlite:///app.db or "
            "postgresql://host/app; a path has no scheme"
        )
    if "://" not in target:
        return "sqlite", _absolute(target)
    scheme, _, rest = target.partition("://")
    match scheme.partition("+")[0].lower():
        case "sqlite":
            return "sqlite", _sqlite_path(rest, target)
        case "postgresql" | "postgres":
            return "postgres", f"postgresql://{rest}"
        case "memory":
            return "memory", target
    raise CannotOpen(f"no engine for {scheme}://…; use a path, sqlite:///path, postgresql://… or :memory:")


def _sqlite_path(rest: str, url: str) -> str:
    """SQLAlchemy's slash rules: three slashes and a relative path, four for an absolute one, nothing for memory."""
    path, _, query = rest.partition("?")
    if query:
        raise InvalidArgument(f"{url}: options after ? are not known to Keyloft")
    if path in ("", "/:memory:"):
        return ":memory:"
    if path == "/":
        raise InvalidArgument("sqlite:/// names no file; sqlite:// is a database in memory")
    if not path.startswith("/"):
        raise InvalidArgument(f"{url}: a relative path takes three slashes, as in sqlite:///{path}")
    return _absolute(path[1:])


def _absolute(path: str) -> str:
    """Fixed at opening, so that a later change of the working directory does not lead elsewhere."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise CannotOpen(f"{path} can't be opened: there is no such user on this machine") from error


def _is_text(target: str) -> bool:
    try:
        os.fsencode(target)
    except UnicodeEncodeError:
        return False
    return True
