"""Engines store the data: functions that open them for interfaces, for operators, for doctor and for migrations."""

import os
from collections.abc import Mapping
from typing import Any

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.engine import Engine
from keyloft.core.maintenance import Maintenance
from keyloft.core.urls import AnyUrl, DatabaseUrl, HttpAddress, PostgresAddress, check_reads
from keyloft.engines.change_log import KeptHistory
from keyloft.engines.inspection import Inspection
from keyloft.engines.log_checks import LogChecker
from keyloft.engines.memory import MemoryEngine
from keyloft.engines.sqlite.blocking.engine import BlockingSqliteEngine
from keyloft.engines.sqlite.blocking.on_a_loop import MemoryOnLoop
from keyloft.engines.sqlite.engine import SqliteEngine
from keyloft.engines.sqlite.file import LIBRARY_VERSION as SQLITE_VERSION
from keyloft.engines.sqlite.file import SqliteFile
from keyloft.engines.sqlite.worker import Worker
from keyloft.errors import CannotOpen, InvalidArgument

__all__ = [
    "SQLITE_VERSION",
    "Inspection",
    "KeptHistory",
    "LogChecker",
    "MemoryOnLoop",
    "find_primary",
    "inspect_database",
    "open_blocking_engine",
    "open_engine",
    "open_maintenance",
    "open_service",
    "opens_on_this_thread",
]


async def open_engine(
    url: AnyUrl,
    clock: Clock | None = None,
    *,
    durability: str = "full",
    sync: str = "auto",
    cache_mib: int = limits.SQLITE_CACHE_MIB,
    patience: float = limits.SERVER_SECONDS,
    history: KeptHistory | None = None,
    reads: str | None = None,
    max_lag: float | None = None,
) -> Engine:
    """Open the engine that a URL or path names; nothing and `:memory:` mean memory.

    Args:
        url: What to open.
        clock: Another clock than the database's, for tests.
        durability: "full" or "relaxed".
        sync: "auto" or "thread"; of an SQLite file.
        cache_mib: How much of an SQLite file is cached in memory.
        patience: How many seconds a call waits for a database server that does not answer.
        history: How far back the change log reaches.
        reads: "primary", or "standby" to let standbys of PostgreSQL answer gets and lists; None for what the URL says.
        max_lag: How many seconds such a standby may be behind; None for what the URL says.

    Raises:
        InvalidArgument: `url`, `durability`, `sync`, `reads` or `max_lag` is wrong.
        DatabaseError: The database can't be opened; the message says why.
    """
    _check_durability(durability)
    if sync not in ("auto", "thread"):
        raise InvalidArgument('sync: expected "auto" or "thread"')
    check_reads(reads, max_lag)
    database = _database_itself(url)
    if database.postgres is not None:
        from keyloft.engines.postgres.engine import PostgresEngine  # its driver is not installed everywhere
        from keyloft.engines.postgres.server import PostgresServer

        server = PostgresServer(database.postgres, clock, durability=durability, patience=patience)
        lag = max_lag or database.postgres.max_lag or limits.MAX_LAG_SECONDS
        from_standbys = (reads or database.postgres.reads) == "standby"
        return await PostgresEngine.open(server, history, max_lag=lag if from_standbys else None)
    if database.etcd is not None:
        from keyloft.engines.etcd.cluster import EtcdCluster
        from keyloft.engines.etcd.engine import EtcdEngine

        return await EtcdEngine.open(EtcdCluster(database.etcd, clock, patience=patience), history)
    if database.engine == "memory":
        return MemoryEngine(clock or SystemClock(), history)
    file = SqliteFile(
        database.path,
        durability,
        sync,
        cache_mib=cache_mib,
        read_only=database.read_only,
        immutable=database.immutable,
    )
    return await SqliteEngine.open(file, clock or SystemClock(), history)


async def open_service(address: HttpAddress, token: str | None, *, patience: float = limits.SERVER_SECONDS) -> Engine:
    """Open a tuple store of a running service, over HTTP.

    Args:
        address: Where it is.
        token: Who calls; None for what the variable KEYLOFT_HTTP_TOKEN says.
        patience: How many seconds a call waits for a service that does not answer.

    Raises:
        InvalidArgument: `token` can't be a token.
        NotPermitted: The service does not accept the token.
        DatabaseError: The service can't be reached, or another program answers there; the message says why.
    """
    from keyloft.engines.remote.api import HttpApi  # its library is not installed everywhere
    from keyloft.engines.remote.engine import RemoteEngine

    return await RemoteEngine.open(HttpApi(address, token or os.environ.get("KEYLOFT_HTTP_TOKEN"), patience))


def opens_on_this_thread(database: DatabaseUrl) -> bool:
    """Whether there is an engine for this database whose coroutines never suspend."""
    return database.postgres is None and database.etcd is None and database.http is None


def open_blocking_engine(
    database: DatabaseUrl, clock: Clock | None = None, *, durability: str = "full", history: KeptHistory | None = None
) -> BlockingSqliteEngine:
    """Open an engine for threads, on a file or in memory: its coroutines never suspend.

    Raises:
        InvalidArgument: `durability` is wrong.
        DatabaseError: The file can't be opened; the message says why.
    """
    _check_durability(durability)
    path = ":memory:" if database.is_in_memory else database.path
    file = SqliteFile(path, durability, read_only=database.read_only, immutable=database.immutable)
    return BlockingSqliteEngine(file, clock or SystemClock(), history)


def _database_itself(url: AnyUrl) -> DatabaseUrl:
    database = DatabaseUrl.parse(url)
    if database.http is not None:
        raise CannotOpen(
            f"{database.shown} is a service: this works on the database itself; name the file or the server that the "
            "service uses"
        )
    return database


def _check_durability(durability: str) -> None:
    if durability not in ("full", "relaxed"):
        raise InvalidArgument('durability: expected "full" or "relaxed"')


async def open_maintenance(
    url: AnyUrl, *, make: bool = False, patience: float = limits.OPERATOR_SERVER_SECONDS
) -> Maintenance:
    """Open a database as a whole, for its operator.

    Args:
        url: What to open.
        make: Make the database, or its tables, if there are none; otherwise nothing is written before the first change.
        patience: How many seconds to wait for a server.

    Raises:
        InvalidArgument: `url` is not a database URL.
        CannotOpen: There is no such database, or it is in memory.
        DatabaseError: It can't be opened.
    """
    database = _database_itself(url)
    if database.postgres is not None:
        from keyloft.engines.postgres.maintenance import PostgresMaintenance
        from keyloft.engines.postgres.server import PostgresServer

        return await PostgresMaintenance.open(PostgresServer(database.postgres, patience=patience), make=make)
    if database.etcd is not None:
        from keyloft.engines.etcd.cluster import EtcdCluster
        from keyloft.engines.etcd.maintenance import EtcdMaintenance

        return await EtcdMaintenance.open(EtcdCluster(database.etcd, patience=patience), make=make)
    if database.is_in_memory:
        raise CannotOpen(
            "another process can't read a database in memory: name a file, a PostgreSQL server or an etcd cluster"
        )
    from keyloft.engines.sqlite.maintenance import SqliteMaintenance

    file = SqliteFile(database.path, read_only=database.read_only, immutable=database.immutable)
    return await SqliteMaintenance.open(file, make=make)


async def find_primary(
    address: PostgresAddress, *, patience: float = limits.OPERATOR_SERVER_SECONDS
) -> Mapping[str, Any]:
    """Of the hosts of a PostgreSQL database, the one that its engine would write to, as asyncpg takes it.

    Raises:
        DatabaseError: None of several can be written; the message says what each has answered.
    """
    if len(address.hosts) == 1:
        return address.hosts[0]
    from keyloft.engines.postgres.server import PostgresServer

    server = PostgresServer(address, patience=patience)
    try:
        return await server.hosts.find()
    finally:
        await server.aclose()


async def inspect_database(url: AnyUrl, *, patience: float = limits.OPERATOR_SERVER_SECONDS) -> Inspection | None:
    """Inspect a database without making or changing anything; None for one in memory.

    Raises:
        InvalidArgument: `url` is not a database URL.
        CannotOpen: There is no such file.
        DatabaseError: It can't be read; the message says why.
    """
    database = _database_itself(url)
    if database.postgres is not None:
        from keyloft.engines.postgres import inspection

        return await inspection.inspect(database.postgres, patience)
    if database.etcd is not None:
        from keyloft.engines.etcd import inspection as etcd_inspection

        return await etcd_inspection.inspect(database.etcd, patience)
    if database.is_in_memory:
        return None
    worker = Worker(f"keyloft inspection of {database.path}")
    try:
        return await worker.call(SqliteFile(database.path).inspect)
    finally:
        worker.stop()
