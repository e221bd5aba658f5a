"""Reads, loads, checks, backs up and compacts a PostgreSQL database as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import Existing, Facts, Loaded, Progress, Range, Size, Snapshot, movable_time
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import REVISION
from keyloft.core.urls import PostgresAddress
from keyloft.engines import loading
from keyloft.engines.postgres.connections import Slot, Transaction
from keyloft.engines.postgres.errors import Failure, is_lost
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import (
    CREATE,
    LAYOUTS,
    LOCK_VERSION,
    READ_VERSION,
    WRITE_VERSION_AND_COMMIT,
    PostgresLayout,
)
from keyloft.engines.sqlite.maintenance import SqliteMaintenance

T = TypeVar("T")
R = TypeVar("R", Record, Size)

# The reader of a snapshot may pause for any time.
_HOLD: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL idle_in_transaction_session_timeout = 0; "
    "SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on"
)
_CREATED: Final = [statement.split()[2] for statement in CREATE if statement.startswith("CREATE")]
"""The names of Keyloft's tables and indexes."""
_TIMES: Final = ("expires_at", "created_at", "updated_at")


def _whole_row(layout: PostgresLayout) -> str:
    """The columns of a row with all its times, which `layout.record` takes."""
    return ", ".join((*layout.columns, "version", *map(layout.milliseconds, _TIMES)))


def _put_whole_rows(layout: PostgresLayout) -> str:
    """The statement that puts rows with their versions and times, over whatever is stored."""
    columns = (*layout.columns, "version", *_TIMES)
    types = [*layout.columns.values(), *["bigint"] * (len(_TIMES) + 1)]
    arrays = ", ".join([f"${at}::{kind}[]" for at, kind in enumerate(types, 1)])
    selected = ", ".join((*layout.columns, "version", *[layout.moment(f"new.{time}") for time in _TIMES]))
    replaced = ", ".join([f"{column} = excluded.{column}" for column in columns if column not in layout.key])
    names = ", ".join(columns)
    return (
        f"INSERT INTO {layout.table} ({names}) SELECT {selected} FROM unnest({arrays}) AS new ({names}) "
        f"ON CONFLICT ({', '.join(layout.key)}) DO UPDATE SET {replaced}"
    )


def _movable(row: Record) -> Record:
    """A plugin's row with times that any database can hold: people may have written others."""
    expires_at, created_at, updated_at = map(movable_time, (row.expires_at, row.created_at, row.updated_at))
    return replace(row, expires_at=expires_at, created_at=created_at or 0, updated_at=updated_at or 0)


def _select(part: Range, after: Key | None, columns: str, *, with_values: bool) -> tuple[str, list[Any]]:
    """The statement that reads a page of a range, or of what is left of it after a key."""
    layout = LAYOUTS[part.space]
    where, bindings = loading.range_condition(part, after, layout.key, "$")
    order = ", ".join(layout.key)
    page = f"SELECT * FROM {layout.table}{where} ORDER BY {order} LIMIT {limits.MAINTENANCE_ROWS}"
    if with_values:
        # PostgreSQL knows the size of a value without reading it, so a page of large values ends early.
        size = f"octet_length({layout.value})"
        before = f"sum({size}) OVER (ORDER BY {order}) - {size} AS before"
        sized = f"SELECT *, {before} FROM ({page}) AS page"
        page = f"SELECT * FROM ({sized}) AS sized WHERE before <= {limits.SCAN_BYTES}"
    return f"SELECT {columns} FROM ({page}) AS page ORDER BY {order}", bindings


class PostgresMaintenance:
    """A PostgreSQL database as a whole."""

    @classmethod
    async def open(
        cls, address: PostgresAddress, *, make: bool, patience: float = limits.SERVER_SECONDS
    ) -> "PostgresMaintenance":
        """Connect to a database.

        Args:
            address: Where it is.
            make: Make its tables if there are none.
            patience: How many seconds to wait for a server that does not answer.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        server = PostgresServer(address, durability="full", patience=patience)
        maintenance = cls(server)
        try:
            async with asyncio.timeout(patience), maintenance.explained():
                connection = await maintenance.slot.connected()
                await (server.set_up_schema if make else server.check_schema)(connection)
        except BaseException as error:
            await maintenance.aclose()
            if isinstance(error, TimeoutError):
                raise server.unreachable() from None
            raise
        return maintenance

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.slot = Slot(server)

    async def facts(self) -> Facts:
        [[version, size]] = await self._fetch(
            "SELECT current_setting('server_version'), pg_database_size(current_database())::bigint"
        )
        return Facts(f"PostgreSQL {version}", REVISION, size, None)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator["PostgresSnapshot"]:
        slot = Slot(self.server)
        try:
            async with self.explained():
                await slot.connected()
            async with slot.transaction(_HOLD) as transaction:
                async with self.explained():
                    version, now = self.server.counter_row(await transaction.fetch(READ_VERSION, None))
                yield PostgresSnapshot(self, transaction, version, now)
        finally:
            slot.abandon()

    async def load(self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing) -> Loaded:
        return await self._write(lambda transaction: loading.load(transaction, rows, version, existing))

    async def become(self, source: Snapshot, progress: Progress, *, expected_version: int | None = None) -> int:
        done: tuple[int, int] | None = None

        async def work(transaction: "_PostgresLoad") -> tuple[int, int | None]:
            nonlocal done
            if expected_version is not None and done is not None and transaction.version == done[1]:
                # The commit was made, and its reply lost: no other process moved the version counter.
                return done[0], None
            done = await loading.replace_all(transaction, source, progress, expected_version)
            return done

        return await self._write(work)

    async def damage(self) -> list[str]:
        """Whether Keyloft's tables and indexes exist and are valid; PostgreSQL checks its pages itself."""
        missing = await self._fetch(
            "SELECT name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NULL", _CREATED
        )
        invalid = await self._fetch(
            "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid "
            "AND indrelid = ANY(SELECT to_regclass(name) FROM unnest($1::text[]) AS name)",
            [layout.table for layout in LAYOUTS.values()],
        )
        return [f"{row[0]} is missing" for row in missing] + [f"the index {row[0]} is not valid" for row in invalid]

    async def backup(self, target: str, progress: Progress) -> None:
        copy = await SqliteMaintenance.open(target, make=True)
        try:
            async with self.snapshot() as snapshot:
                await copy.become(snapshot, progress)
            await copy.make_plain()
        finally:
            await copy.aclose()

    async def compact(self) -> None:
        connection = await self.slot.connected()
        async with self.explained():
            for layout in LAYOUTS.values():
                await connection.execute(f"VACUUM (ANALYZE) {layout.table}")

    async def aclose(self) -> None:
        self.slot.abandon()
        await self.server.aclose()

    async def _fetch(self, statement: str, *bindings: Any) -> list[Any]:
        async with self.explained():
            return await self.slot.fetch(statement, *bindings)

    async def _write(self, work: Callable[["_PostgresLoad"], Awaitable[tuple[T, int | None]]]) -> T:
        """Do something in one transaction that holds the version counter, and again if that failed and may succeed.

        If it is repeated after a commit whose reply was lost, it meets its own rows, and leaves them as they are.
        """
        deadline = asyncio.get_running_loop().time() + limits.BUSY_SECONDS
        while True:
            try:
                async with self.slot.transaction(f"{self.server.begin}; {LOCK_VERSION}") as transaction:
                    version, now = self.server.counter_row(await transaction.fetch(READ_VERSION, None))
                    result, after = await work(_PostgresLoad(transaction, version, now))
                    if after is not None:
                        await transaction.execute(
                            WRITE_VERSION_AND_COMMIT.format(version=after, name=self.server.token)
                        )
                return result
            except Failure as error:
                may_succeed = self.server.may_succeed_after(error)
                if not may_succeed or asyncio.get_running_loop().time() > deadline:
                    raise self.server.explain(error) from error
                if is_lost(error):
                    self.slot.drop()
                await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Explain failures of the database; nothing else may raise an OSError within."""
        try:
            yield
        except Failure as error:
            raise self.server.explain(error) from error


class _PostgresLoad:
    """A transaction that loads rows."""

    def __init__(self, transaction: Transaction, version: int, now: int) -> None:
        self._transaction = transaction
        self.version = version
        self.now = now

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        layout = LAYOUTS[space]
        found = await self._transaction.fetch(layout.load, None, *layout.bind_keys([row.key for row in rows]))
        stored = layout.found([row[2:] for row in found if row[2] is not None])
        if space is not Space.PLUGINS:
            return dict(stored)
        return {key: _movable(row) for key, row in stored.items()}

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        if rows:
            layout = LAYOUTS[space]
            times = [row.created_at for row in rows], [row.updated_at for row in rows]
            await self._transaction.fetch(_put_whole_rows(layout), *layout.bind_puts(rows), *times)

    async def clear(self) -> None:
        for layout in LAYOUTS.values():
            await self._transaction.execute(f"DELETE FROM {layout.table}")


class PostgresSnapshot:
    """A database at one moment: a transaction that stays open."""

    def __init__(self, maintenance: PostgresMaintenance, transaction: Transaction, version: int, now: int) -> None:
        self._maintenance = maintenance
        self._transaction = transaction
        self.version = version
        self.now = now

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        layout = LAYOUTS[part.space]
        made = layout.record if part.space is not Space.PLUGINS else lambda *row: _movable(layout.record(*row))
        return self._pages(part, after, _whole_row(layout), made, with_values=True)

    async def count(self, part: Range) -> int:
        layout = LAYOUTS[part.space]
        where, bindings = loading.range_condition(part, None, layout.key, "$")
        [[count]] = await self._fetch(f"SELECT count(*) FROM {layout.table}{where}", bindings)
        return int(count)

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        layout = LAYOUTS[part.space]
        columns = f"{', '.join(layout.key)}, octet_length({layout.value}), {layout.milliseconds('expires_at')}"
        return self._pages(part, None, columns, _plugin_size if len(layout.key) > 1 else Size, with_values=False)

    async def _pages(
        self, part: Range, after: Key | None, columns: str, made: Callable[..., R], *, with_values: bool
    ) -> AsyncIterator[Sequence[R]]:
        while rows := await self._fetch(*_select(part, after, columns, with_values=with_values)):
            page = [made(*row) for row in rows]
            after = page[-1].key
            yield page

    async def _fetch(self, statement: str, bindings: Sequence[Any]) -> list[Any]:
        async with self._maintenance.explained():
            return await self._transaction.fetch(statement, *bindings)


def _plugin_size(plugin: str, key: str, value_bytes: int, expires_at: int | None) -> Size:
    return Size((plugin, key), value_bytes, movable_time(expires_at))
