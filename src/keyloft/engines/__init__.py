"""What stores the data: one module per engine, behind `open_engine`."""

import os
from pathlib import Path

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.engine import Engine
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite import SqliteEngine
from keyloft.errors import CannotOpen, InvalidArgument


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
    target = ":memory:" if url is None else os.fspath(url) if isinstance(url, (str, os.PathLike)) else ""
    if not isinstance(target, str) or not target or "\x00" in target or not _is_text(target):
        raise InvalidArgument("a database is named by a path or a URL; leave it out for one in memory")
    local_clock = clock or SystemClock()
    if target == ":memory:":
        return MemoryEngine(local_clock)
    if target.lower().startswith(("sqlite:", "file:", "postgresql:", "postgres:", "memory:")) and "://" not in target:
        raise InvalidArgument(
            f"{target.partition(':')[0]}:…: a URL has slashes after its scheme, as in sqlite:///app.db or "
            "postgresql://host/app; a path has no scheme"
        )
    if "://" not in target:
        return await SqliteEngine.open(_absolute(target), local_clock, durability=durability, cache_mib=cache_mib)
    scheme, _, rest = target.partition("://")
    match scheme.partition("+")[0].lower():
        case "sqlite":
            path = _sqlite_path(rest, target)
            return await SqliteEngine.open(path, local_clock, durability=durability, cache_mib=cache_mib)
        case "postgresql" | "postgres":
            from keyloft.engines.postgres import PostgresEngine  # its driver is not installed everywhere

            url = f"postgresql://{rest}"
            return await PostgresEngine.open(url, clock, durability=durability, patience=patience)
        case "memory":
            return MemoryEngine(local_clock)
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
