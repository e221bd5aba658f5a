"""Makes and checks the tables and the functions of a PostgreSQL database."""

import asyncio
import logging
import shlex

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.core import schema
from keyloft.core.adoption import CHAPTER
from keyloft.core.records import Space
from keyloft.engines.postgres import errors, function, log, tables
from keyloft.engines.postgres.adoption import find_adoption
from keyloft.engines.postgres.server import Connection, PostgresServer
from keyloft.engines.tables import create_beside
from keyloft.errors import CannotOpen, NotADatabase

logger = logging.getLogger(__name__)


async def set_up_schema(server: PostgresServer, connection: Connection) -> None:
    """Make Keyloft's tables in a database without them; two processes may do so at once.

    Raises:
        SchemaTooOld: It is to be migrated.
        SchemaTooNew: A later version of Keyloft wrote it.
        DatabaseError: It can't be read, or tables can't be made.
    """
    attempts = 0
    while (revision := await read_revision(connection)) is None:
        attempts += 1
        adoption = await find_adoption(connection)
        if adoption is not None:
            adoption.check(server.name)
            logger.info("%s: adopting its table %s", server.name, schema.PLUGIN_TABLE)
        create = create_beside(tables.CREATE, tables.LAYOUTS[Space.PLUGINS].create, adoption)
        # In the same transaction, so that a failover can't lose this and keep the tables.
        create = [*create, f"UPDATE {log.COUNTER} SET timeline = coalesce({server.timeline}, 0)"]
        try:
            await connection.execute("; ".join(("BEGIN", *create, "COMMIT")))
        except asyncpg.PostgresError as error:
            await connection.execute("ROLLBACK")
            if error.sqlstate not in errors.CREATED_BY_ANOTHER:
                if adoption is not None and not errors.may_pass(error):
                    raise CannotOpen(
                        f"{server.name} has a table {schema.PLUGIN_TABLE} that this user can't adopt: "
                        f"{errors.message_of(error, server.address)}; nothing was changed. Let its owner run "
                        f"`keyloft migrate`, or see {CHAPTER}"
                    ) from error
                raise
            if attempts == limits.POSTGRES_SETUP_ATTEMPTS:
                raise CannotOpen(
                    f"{server.name}: {errors.message_of(error, server.address)}, but {schema.REVISION_TABLE} names no "
                    "revision of Keyloft: rename that table, or give Keyloft a database or a schema of its own"
                ) from error
            await asyncio.sleep(limits.POSTGRES_CONNECT_PAUSES[0])
    await _check_revision(server, connection, revision)


async def check_schema(server: PostgresServer, connection: Connection) -> None:
    """Check that the database has Keyloft's tables, without writing anything.

    Raises:
        DatabaseError: It has none, or those of another version.
    """
    revision = await read_revision(connection)
    if revision is None:
        raise NotADatabase(f"{server.name} has no tables of Keyloft; it was left as it is")
    await _check_revision(server, connection, revision)


async def _check_revision(server: PostgresServer, connection: Connection, revision: str) -> None:
    remark = " (with the password, which is left out here)" if server.address.secrets else ""
    schema.check_revision(revision, server.name, shlex.quote(server.address.shown), remark)
    async with connection.transaction():
        found = {name: (home, number) for name, home, number in await connection.fetch(function.FIND_TABLES)}
    homes = [(name, home) for name, (home, _) in sorted(found.items())]
    server.functions = function.functions_in(*homes, timeline=server.timeline)
    # Stores in several schemas of one database share the channel of notifications: this number tells them apart.
    _, store = found.get(schema.VERSION_COUNTER_TABLE, ("", 0))
    server.process = f"{store}.{server.token}"


async def set_up_commits(server: PostgresServer, connection: Connection) -> None:
    """Find out what the server has: notifications, and functions; make those that commit."""
    server.has_notifications = True
    try:
        async with connection.transaction():
            await connection.execute(log.NOTIFY.format(name=server.process, version=0))
    except asyncpg.PostgresError as error:
        if errors.is_lost(error):
            raise
        server.has_notifications = errors.may_be_full_queue(error)
        logger.info("%s sends no notifications: %s", server.name, errors.message_of(error, server.address))
    await make_functions(server, connection)


async def make_functions(server: PostgresServer, connection: Connection) -> None:
    """Make the functions that commit, unless they are there; without them, commits take their locks first."""
    server.has_function = await _has_function(server, connection)
    if not server.has_function:
        try:
            async with connection.transaction():
                await connection.execute(server.functions.create)
            server.has_function = True
        except asyncpg.PostgresError as error:
            if errors.is_lost(error):
                raise
            server.has_function = await _has_function(server, connection)  # another process may have made them
            if not server.has_function:
                message = errors.message_of(error, server.address)
                logger.info("%s: functions can't be made, so commits hold locks for longer: %s", server.name, message)
        else:
            await _drop_other_functions(server, connection)


async def _drop_other_functions(server: PostgresServer, connection: Connection) -> None:
    """Drop the functions of earlier revisions of the schema. Those of this one may be in use, by other versions."""
    try:
        async with connection.transaction():
            for [other] in await connection.fetch(server.functions.find_others):
                await connection.execute(f"DROP FUNCTION IF EXISTS {other}")
    except asyncpg.PostgresError as error:
        if errors.is_lost(error):
            raise
        logger.info("%s: %s", server.name, errors.message_of(error, server.address))


async def _has_function(server: PostgresServer, connection: Connection) -> bool:
    async with connection.transaction():
        return bool(await connection.fetchval(server.functions.may_call))


async def read_revision(connection: Connection) -> str | None:
    """The revision of the schema; None in a database without Keyloft's tables."""
    async with connection.transaction():
        if await connection.fetchval(f"SELECT to_regclass('{schema.REVISION_TABLE}')") is None:
            return None
        revision: str | None = await connection.fetchval(f"SELECT version_num FROM {schema.REVISION_TABLE}")
        return revision
