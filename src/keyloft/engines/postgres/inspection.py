"""Inspects a PostgreSQL database without changing it: its schema, its clock, and this user's rights."""

import time
from typing import Final

from msgspec.structs import replace

from keyloft.core import schema
from keyloft.core.urls import PostgresAddress
from keyloft.engines.inspection import Inspection
from keyloft.engines.postgres import setup
from keyloft.engines.postgres.adoption import find_adoption
from keyloft.engines.postgres.errors import Failure
from keyloft.engines.postgres.log import milliseconds
from keyloft.engines.postgres.server import Connection, PostgresServer

_ALL: Final = "SELECT, INSERT, UPDATE, DELETE"
_RIGHTS: Final = {
    schema.PLUGIN_TABLE: _ALL,
    schema.TUPLE_TABLE: _ALL,
    schema.SEMANTIC_TABLE: _ALL,
    schema.VERSION_COUNTER_TABLE: "SELECT, UPDATE",
    schema.CHANGES_TABLE: "SELECT, INSERT, DELETE",
    schema.STORE_TABLE: "SELECT",
}
"""By table, the rights that a service needs."""

_TIME: Final = f"SELECT {milliseconds('clock_timestamp()')}"
_STATE: Final = (
    "SELECT current_setting('server_version'), pg_is_in_recovery() OR current_setting('default_transaction_read_only')"
    "::bool, current_schema(), coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), "
    "current_setting('data_checksums', true)"
)


async def inspect(address: PostgresAddress, patience: float) -> Inspection:
    """Connect, inspect, disconnect.

    Raises:
        DatabaseError: It can't be connected to, or does not answer; the message says why.
    """
    server = PostgresServer(address, patience=patience)
    try:
        connection = await server.connect_once()
        try:
            inspection = await _inspect(server, connection)
            if inspection.store and server.hosts.several:
                await _measure_lag(server)
            return replace(inspection, servers=server.hosts.health({}, 0))
        except Failure as error:
            raise server.explain(error) from error
        finally:
            server.close_later(connection)
    finally:
        await server.aclose()


async def _measure_lag(server: PostgresServer) -> None:
    """Ask all hosts twice: a standby is not behind if it shows now what the primary showed before."""
    for _ in range(2):
        await server.hosts.ask_all()


async def _inspect(server: PostgresServer, connection: Connection) -> Inspection:
    before = time.time()
    now = await connection.fetchval(_TIME) / 1000
    after = time.time()
    async with connection.transaction(readonly=True):
        version, is_read_only, namespace, may_create, checksums = await connection.fetchrow(_STATE)
    revision = await setup.read_revision(connection)
    obstacles: list[tuple[str, str]] = []
    store = None
    if is_read_only:
        obstacles.append(("it is a standby, or set to read-only", "name the primary in the URL"))
    if revision is None and namespace is None:
        obstacles.append(("no schema of the search_path exists", "CREATE SCHEMA, or set search_path to another"))
    elif revision is None and not may_create:
        granted = f"GRANT USAGE, CREATE ON SCHEMA {namespace} TO it, or let its owner run `keyloft migrate`"
        obstacles.append((f"this user may not make tables in the schema {namespace}", granted))
    elif revision == schema.REVISION:
        missing = await _missing_rights(connection)
        obstacles += missing
        if not missing:
            async with connection.transaction(readonly=True):
                store = await connection.fetchval(schema.READ_STORE_ID)
    return Inspection(
        software=f"PostgreSQL {version.split(' ')[0]}",
        revision=revision,
        wanted=schema.REVISION,
        store=store,
        # The server read its clock somewhere between the two: certain is only a difference beyond them.
        ahead=round(now - after if now > after else min(0.0, now - before), 3),
        has_checksums=None if checksums is None else checksums == "on",
        obstacles=tuple(obstacles),
        adoption=await find_adoption(connection) if revision is None else None,
    )


async def _missing_rights(connection: Connection) -> list[tuple[str, str]]:
    missing: dict[str, tuple[str, str]] = {}
    async with connection.transaction(readonly=True):
        for table, right in [(table, right) for table, rights in _RIGHTS.items() for right in rights.split(", ")]:
            has = await connection.fetchval("SELECT has_table_privilege(to_regclass($1), $2)", table, right)
            if has is None:
                missing[table] = f"there is no table {table}", "restore it from a backup"
            elif not has and table not in missing:
                missing[table] = f"this user may not {right} on {table}", f"GRANT {_RIGHTS[table]} ON {table} TO it"
    return list(missing.values())
