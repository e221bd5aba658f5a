"""Connects Alembic to the database that is to be migrated, and runs a whole migration as one transaction.

The URL comes from `keyloft.migrations`, from the option `sqlalchemy.url`, or from the environment: DATABASE_URL.
"""

import asyncio
import contextlib
import logging.config
import os
from pathlib import Path
from typing import Any, Final

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, Connection, create_engine, event, pool
from sqlalchemy.exc import DBAPIError

from keyloft import limits
from keyloft.core.files import create_private
from keyloft.core.schema import REVISION_TABLE
from keyloft.core.urls import DatabaseUrl, PostgresAddress
from keyloft.engines import find_primary
from keyloft.errors import CannotOpen, InvalidArgument
from keyloft.migrations import earlier
from keyloft.plugins.models import Base

# A database without revisions has no revision table: opening it makes the schema.
_DROP_REVISIONS: Final = f"DROP TABLE IF EXISTS {REVISION_TABLE}"
# The errors of PostgreSQL for the slower of two processes that migrate the same database: unique violation, duplicate
# or undefined table or object, serialization failure, deadlock.
_LOST_A_RACE: Final = {"23505", "42P07", "42710", "42P01", "42704", "40001", "40P01"}


class CannotMigrate(CannotOpen, CommandError):
    """No database to migrate; as a CommandError, Alembic's command line shows it without a traceback."""


def migrate() -> None:
    """Run Alembic's command on the database."""
    if context.config.config_file_name is not None:
        logging.config.fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    database = _database()
    if context.is_offline_mode():
        _write_script("sqlite" if database.postgres is None else "postgresql")
    elif database.postgres is not None:
        _migrate_postgres(database.postgres)
    elif (file := Path(database.path)).exists() or not _is_read_only():
        _migrate_sqlite(file)


def _is_read_only() -> bool:
    """Whether the caller only wants to know which revision the database has."""
    return bool(context.config.attributes.get("read_only"))


def _database() -> DatabaseUrl:
    if "url" in context.config.attributes:
        url = context.config.attributes["url"]
    else:
        url = context.config.get_main_option("sqlalchemy.url") or os.environ.get("DATABASE_URL")
    if not url:
        raise CannotMigrate(
            "no database is named: set DATABASE_URL, to sqlite:///app.db or postgresql://user@host/database"
        )
    try:
        database = DatabaseUrl.parse(url)
    except (CannotOpen, InvalidArgument) as error:
        raise CannotMigrate(str(error)) from None
    if database.is_in_memory:
        raise CannotMigrate(f"{database.shown} is in memory, where nothing can be migrated: name a file or a server")
    if database.http is not None:
        raise CannotMigrate(f"{database.shown} is a service: name the database that it uses")
    if database.etcd is not None:
        raise CannotMigrate(f"{database.shown} has no tables to migrate: opening it makes the store")
    if database.read_only:
        raise CannotMigrate(f"{database.shown} is opened read-only and can't be migrated: leave ?mode=ro out")
    return database


def _migrate_sqlite(file: Path) -> None:
    if _is_open_here(file):
        raise CannotMigrate(
            f"{file} is open in this process, and a second SQLite library would take its locks away: "
            "close it first, or migrate in a process of its own"
        )
    create_private(file)
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        poolclass=pool.NullPool,
        connect_args={"timeout": limits.BUSY_SECONDS, "isolation_level": None},
    )
    # A second process waits here until the first has committed, and then reads what it made. The driver itself would
    # begin a transaction only after the first DDL.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        with engine.connect() as connection:
            _run(connection)
    except DBAPIError as error:
        raise _failed(str(file), error.orig) from error


def _is_open_here(file: Path) -> bool:
    """Whether this process has the file open, where the system lists open files (Linux, macOS)."""
    with contextlib.suppress(OSError):
        wanted = file.stat()
        for handle in Path("/dev/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(int(handle.name)), wanted):
                    return True
    return False


def _migrate_postgres(address: PostgresAddress) -> None:
    try:
        import asyncpg  # type: ignore[import-untyped,unused-ignore]
        from sqlalchemy.ext.asyncio import create_async_engine
    except ImportError as error:
        raise CannotMigrate(
            'migrations on PostgreSQL need a driver: pip install ".[sql,postgres]" in a clone of Keyloft'
        ) from error

    async def attempt() -> None:
        async def connect() -> Any:
            # asyncpg reads the URL itself, as for the engine.
            connection = await asyncpg.connect(address.dsn, **await find_primary(address))
            encoding = await connection.fetchval("SHOW server_encoding")
            if encoding != "UTF8":
                await connection.close()
                raise CannotMigrate(f"{address.name} is encoded as {encoding}: make a database with ENCODING 'UTF8'")
            return connection

        engine = create_async_engine("postgresql+asyncpg://", poolclass=pool.NullPool, async_creator=connect)
        async with engine.connect() as connection:
            await connection.run_sync(_run)

    for remaining in reversed(range(limits.MIGRATION_ATTEMPTS)):
        try:
            asyncio.run(attempt())
            return
        except DBAPIError as error:
            if not remaining or getattr(error.orig, "sqlstate", None) not in _LOST_A_RACE:
                raise _failed(address.name, error.orig) from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise _failed(address.name, error) from error


def _failed(where: str, reason: BaseException | None) -> CommandError:
    return CommandError(f"{where}: the migration failed, and nothing of it was kept: {reason}")


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        version_table=REVISION_TABLE,
        transactional_ddl=True,
        # For `alembic check`: the model is the plugins' table, and Alembic has no opinion on the others.
        target_metadata=Base.metadata,
        include_name=lambda name, kind, _: kind != "table" or name in Base.metadata.tables,
    )
    with context.begin_transaction():
        if not _is_read_only():
            _bring_along(connection)
        context.run_migrations()
        if not context.get_context().get_current_heads() and not _is_read_only():
            connection.exec_driver_sql(_DROP_REVISIONS)


def _bring_along(connection: Connection) -> None:
    """Replace a stamp that today's revisions don't have, and do what that takes."""
    migration = context.get_context()
    stamps = [stamp for stamp in migration.get_current_heads() if stamp in earlier.STAMPS]
    if stamps and "destination_rev" not in migration.opts:  # a command that only reads
        raise CommandError(f"the database has revision {stamps[0]} of an earlier version: run `alembic upgrade head`")
    if stamps:
        for statement in earlier.succession(connection, stamps[0]).statements:
            connection.exec_driver_sql(statement)
        if connection.dialect.name == "sqlite":
            earlier.add_checksums(connection)


def _write_script(dialect: str) -> None:
    left: list[set[str]] = []
    context.configure(
        dialect_name=dialect,
        version_table=REVISION_TABLE,
        transactional_ddl=True,
        literal_binds=True,
        on_version_apply=lambda *, heads, **_: left.append(heads),
    )
    with context.begin_transaction():
        for statement in context.config.attributes.get("first", ()):
            context.execute(statement)
        context.run_migrations()
        if left and not left[-1]:
            context.execute(_DROP_REVISIONS)


migrate()
