"""Reads, loads, checks, backs up and compacts a PostgreSQL database as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from keyloft import limits
from keyloft.core.maintenance import Existing, Facts, Loaded, LogRow, Progress, Range, Snapshot, version_after_jump
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import CHANGES_TABLE, REVISION, STORE_TABLE, Row
from keyloft.engines import loading
from keyloft.engines.loading import TIMES, TableSnapshot
from keyloft.engines.postgres import log, setup, tables
from keyloft.engines.postgres.attempts import clock_set_back
from keyloft.engines.postgres.connections import Slot, Transaction
from keyloft.engines.postgres.errors import Failure, is_lost
from keyloft.engines.postgres.log import READ_VERSION
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, PostgresLayout
from keyloft.engines.sqlite.maintenance import save_as_file
from keyloft.engines.tables import Layout, created_names

T = TypeVar("T")

# The reader of a snapshot may pause for any time.
_HOLD: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL idle_in_transaction_session_timeout = 0; "
    "SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on"
)


def _put_whole_rows(layout: PostgresLayout) -> str:
    """The statement that puts rows with their versions and times, in place of stored rows with the same keys."""
    columns = (*layout.columns, "version", *TIMES)
    bound = tables.arrays([*layout.columns.values(), *["bigint"] * (len(TIMES) + 1)], 1)
    selected = ", ".join((*layout.columns, "version", *[layout.moment(f"new.{time}") for time in TIMES]))
    replaced = ", ".join([f"{column} = excluded.{column}" for column in columns if column not in layout.key])
    names = ", ".join(columns)
    return (
        f"INSERT INTO {layout.table} ({names}) SELECT {selected} FROM unnest({bound}) AS new ({names}) "
        f"ON CONFLICT ({', '.join(layout.key)}) DO UPDATE SET {replaced}"
    )


def _lock_rows(layout: PostgresLayout) -> str:
    """The statement that locks the rows of some keys, and waits for those that others have locked."""
    keys = [f"${at}::{layout.columns[column]}[]" for at, column in enumerate(layout.key, 1)]
    return f"SELECT count(*) FROM {layout.of_keys(*keys, lock='FOR UPDATE')}"


_LOG: Final = (
    f"INSERT INTO {CHANGES_TABLE} (version, part, base, at, size, changes) SELECT * FROM unnest"
    "($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bytea[])"
)
"""versions, parts, bases, times, sizes, changes: an array each"""


@asynccontextmanager
async def _separate_reads(slot: Slot, connection: Any) -> AsyncIterator[Transaction]:
    """Statements that are a transaction each."""
    yield Transaction(connection.execute, slot.fetch)


class PostgresMaintenance:
    """A PostgreSQL database as a whole."""

    @classmethod
    async def open(cls, server: PostgresServer, *, make: bool) -> "PostgresMaintenance":
        """Connect to a database; `make` makes its tables if there are none.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        maintenance = cls(server)
        try:
            async with asyncio.timeout(server.patience), maintenance.explained():
                connection = await maintenance.slot.connected()
                await (setup.set_up_schema if make else setup.check_schema)(server, connection)
        except BaseException as error:
            await maintenance.aclose()
            if isinstance(error, TimeoutError):
                raise server.unreachable(server.patience) from None
            raise
        return maintenance

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.slot = Slot(server, commits=True)

    async def facts(self) -> Facts:
        [[version, size]] = await self._fetch(
            "SELECT current_setting('server_version'), pg_database_size(current_database())::bigint"
        )
        return Facts(f"PostgreSQL {version}", REVISION, size, None)

    @asynccontextmanager
    async def snapshot(self, *, held: bool = True) -> AsyncIterator["PostgresSnapshot"]:
        slot = Slot(self.server)
        try:
            async with self.explained():
                connection = await slot.connected()
            async with slot.transaction(_HOLD) if held else _separate_reads(slot, connection) as transaction:
                async with self.explained():
                    version, now = self.server.counter_row(await transaction.fetch(READ_VERSION, None))
                yield PostgresSnapshot(self, transaction, version, now)
        finally:
            slot.abandon()

    async def load(
        self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing, *, is_copy: bool = False
    ) -> Loaded:
        return await self._write(
            lambda transaction: loading.load(transaction, rows, version, existing, is_copy=is_copy), rows
        )

    async def become(
        self,
        source: Snapshot,
        progress: Progress,
        *,
        expected_version: int | None = None,
        with_history: bool = False,
    ) -> int:
        done: tuple[int, int] | None = None

        async def work(transaction: "_PostgresLoad") -> tuple[int, int | None]:
            nonlocal done
            if done is not None and transaction.version == done[1]:
                # The commit was made, and its reply lost: no other process moved the version counter.
                return done[0], None
            done = await loading.replace_all(
                transaction, source, progress, expected_version=expected_version, with_history=with_history
            )
            return done

        return await self._write(work)

    async def restart_history(self) -> int:
        async def work(transaction: "_PostgresLoad") -> tuple[int, int]:
            version = version_after_jump(transaction.version)
            await loading.restart_history(transaction, version)
            return version, version

        return await self._write(work)

    async def damage(self) -> list[str]:
        """Whether Keyloft's tables and indexes exist and are valid; PostgreSQL checks its pages itself."""
        missing = await self._fetch(
            "SELECT name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NULL", created_names(tables.CREATE)
        )
        invalid = await self._fetch(
            "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid "
            "AND indrelid = ANY(SELECT to_regclass(name) FROM unnest($1::text[]) AS name)",
            [layout.table for layout in LAYOUTS.values()],
        )
        return [f"{row[0]} is missing" for row in missing] + [f"the index {row[0]} is not valid" for row in invalid]

    async def backup(self, target: str, progress: Progress) -> None:
        async with self.snapshot() as snapshot:
            await save_as_file(snapshot, target, progress)

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

    async def _write(
        self,
        work: Callable[["_PostgresLoad"], Awaitable[tuple[T, int | None]]],
        rows: Sequence[tuple[Space, Record]] | None = None,
    ) -> T:
        """Do something in one transaction that holds the version counter; repeat it after a failure that may pass.

        If it is repeated after a commit whose reply was lost, it meets its own rows, and leaves them as they are.

        Args:
            work: Returns its result, and the new version counter, or None if it wrote nothing.
            rows: The rows that it may write; None for all, and the change log then begins with one empty row.
        """
        deadline = asyncio.get_running_loop().time() + limits.BUSY_SECONDS
        begin = self.server.begin if rows is None else self.server.begin_commit
        while True:
            try:
                async with self.slot.transaction(begin) as transaction:
                    load = await self._locked(transaction, rows)
                    result, after = await work(load)
                    if after is not None:
                        await transaction.execute(f"{log.write_version(self.server.timeline, after, load.now)}; COMMIT")
                if after is not None:
                    # Where the server has no notifications, watches poll the version counter.
                    with suppress(*Failure):
                        await self.slot.fetch(log.NOTIFY.format(name=self.server.process, version=after))
                return result
            except Failure as error:
                may_succeed = self.server.may_succeed_after(error)
                if not may_succeed or asyncio.get_running_loop().time() > deadline:
                    raise self.server.explain(error) from error
                if is_lost(error):
                    self.slot.drop()
                await asyncio.sleep(limits.POSTGRES_RETRY_SECONDS)

    async def _locked(self, transaction: Transaction, rows: Sequence[tuple[Space, Record]] | None) -> "_PostgresLoad":
        """Lock rows, or all tables, and then the version counter: the order in which commits do it."""
        if rows is None:
            tables_ = ", ".join([layout.table for layout in LAYOUTS.values()])
            await transaction.execute(f"LOCK TABLE {tables_} IN EXCLUSIVE MODE")
        for space, layout in LAYOUTS.items():
            if some := sorted({row.key for at, row in rows or () if at is space}):
                await transaction.fetch(_lock_rows(layout), *layout.bind_keys(some))
        await transaction.execute(log.LOCK_VERSION)
        found = await transaction.fetch(log.read_counter(self.server.timeline), None)
        version, last_commit, clock, size = self.server.counter_row(found)
        if rows is not None:
            if last_commit - clock > 1000 * limits.CLOCK_AHEAD_SECONDS:
                raise clock_set_back(self.server.name, last_commit - clock)
            clock = max(clock, last_commit)
        return _PostgresLoad(transaction, version, clock, size or 0)

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Explain failures of the database; nothing else may raise an OSError within."""
        try:
            yield
        except Failure as error:
            raise self.server.explain(error) from error


class _PostgresLoad(Struct):
    """A transaction that loads rows."""

    transaction: Transaction
    version: int
    now: int
    log_size: int

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        layout = LAYOUTS[space]
        keys = layout.bind_keys([row.key for row in rows])
        return layout.found(await self.transaction.fetch(layout.load_values, *keys))

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        if rows:
            layout = LAYOUTS[space]
            await self.transaction.fetch(_put_whole_rows(layout), *layout.bind_rows(rows))

    async def clear(self) -> None:
        for layout in LAYOUTS.values():
            await self.transaction.execute(f"DELETE FROM {layout.table}")

    async def log(self, rows: Sequence[LogRow]) -> None:
        await self.transaction.fetch(_LOG, *zip(*map(astuple, rows), strict=True))

    async def clear_log(self) -> None:
        await self.transaction.execute(f"DELETE FROM {CHANGES_TABLE}")

    async def name_store(self, store_id: str) -> None:
        await self.transaction.fetch(f"UPDATE {STORE_TABLE} SET store_id = $1", store_id)


class PostgresSnapshot(TableSnapshot):
    """A database at one moment."""

    def __init__(self, maintenance: PostgresMaintenance, transaction: Transaction, version: int, now: int) -> None:
        super().__init__(maintenance.server.name, LAYOUTS, version, now)
        self._maintenance = maintenance
        self._transaction = transaction

    async def fetch(self, statement: str, bindings: Row) -> list[Row]:
        async with self._maintenance.explained():
            return await self._transaction.fetch(statement, *bindings)

    async def page(
        self, layout: Layout, columns: str, part: Range, after: Key | None, *, with_values: bool
    ) -> list[Row]:
        statement, bindings = loading.select(layout, "*", part, after)
        key = ", ".join(layout.key)
        page = f"{statement} ORDER BY {key} LIMIT {limits.MAINTENANCE_ROWS}"
        if with_values:
            # PostgreSQL knows the size of a value without reading it, so a page of large values ends early.
            before = f"sum({layout.length}) OVER (ORDER BY {key}) - {layout.length} AS before"
            sized = f"SELECT *, {before} FROM ({page}) AS page"
            page = f"SELECT * FROM ({sized}) AS sized WHERE before <= {limits.SCAN_BYTES}"
        return await self.fetch(f"SELECT {columns} FROM ({page}) AS page ORDER BY {key}", bindings)
