"""Reads, loads, checks, backs up and compacts a PostgreSQL database as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import (
    LAST_MOMENT,
    Existing,
    Facts,
    Loaded,
    Progress,
    Range,
    Size,
    Snapshot,
    movable_time,
    plugin_text,
)
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import REVISION, Row
from keyloft.core.urls import PostgresAddress
from keyloft.core.values import JSON
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
    moment,
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


class _RowFormat(Struct, frozen=True):
    """How whole rows of a space are read and stored, with their times."""

    columns: str
    """What `record` takes."""
    expiry: str
    """SQL: when a row expires, in milliseconds."""
    record: Callable[..., Record]
    put: str
    bind: Callable[[Sequence[Record]], Row]


def _upsert(layout: PostgresLayout, columns: Sequence[str], select: str) -> str:
    replaced = ", ".join([f"{column} = excluded.{column}" for column in columns if column not in layout.key])
    return (
        f"INSERT INTO {layout.table} ({', '.join(columns)}) {select} "
        f"ON CONFLICT ({', '.join(layout.key)}) DO UPDATE SET {replaced}"
    )


def _times(rows: Sequence[Record]) -> Row:
    return [row.created_at for row in rows], [row.updated_at for row in rows]


def _bytes_format(layout: PostgresLayout) -> _RowFormat:
    columns = ("key", "value", "encoding", "version", *_TIMES)
    arrays = "$1::bytea[], $2::bytea[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]"
    return _RowFormat(
        columns=", ".join(columns),
        expiry="expires_at",
        record=Record,
        put=_upsert(layout, columns, f"SELECT * FROM unnest({arrays})"),
        bind=lambda rows: (*layout.bind_puts(rows), *_times(rows)),
    )


def _plugin_format(layout: PostgresLayout) -> _RowFormat:
    def milliseconds(column: str) -> str:
        # A time written by hand is rounded up to a whole millisecond within what any database can hold; 'infinity' is
        # never reached, '-infinity' is long past.
        whole = f"ceil(extract(epoch FROM {column}) * 1000)"
        return (
            f"CASE WHEN {column} = 'infinity' THEN NULL WHEN isfinite({column}) "
            f"THEN least(greatest({whole}, 0), {LAST_MOMENT})::bigint WHEN {column} IS NOT NULL THEN 0 END"
        )

    def record(plugin: str, key: str, value: str, version: int, due: int | None, *times: int | None) -> Record:
        created_at, updated_at = times
        return Record((plugin, key), value.encode(), JSON, version, due, created_at or 0, updated_at or 0)

    def bind(rows: Sequence[Record]) -> Row:
        plugins, keys = layout.bind_keys([row.key for row in rows])
        versions, expiries = [row.version for row in rows], [row.expires_at for row in rows]
        return plugins, keys, list(map(plugin_text, rows)), versions, expiries, *_times(rows)

    columns = (*layout.key, layout.value, "version")
    put_times = ", ".join([moment(f"new.{time}") for time in _TIMES])
    arrays = "$1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]"
    names = ", ".join(columns)
    new = f"new ({names}, {', '.join(_TIMES)})"
    return _RowFormat(
        columns=f"{names}, {', '.join(map(milliseconds, _TIMES))}",
        expiry=milliseconds("expires_at"),
        record=record,
        put=_upsert(layout, (*columns, *_TIMES), f"SELECT {names}, {put_times} FROM unnest({arrays}) AS {new}"),
        bind=bind,
    )


_FORMATS: Final[Mapping[Space, _RowFormat]] = {
    space: (_plugin_format if space is Space.PLUGINS else _bytes_format)(layout) for space, layout in LAYOUTS.items()
}


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

    async def damage(self, progress: Progress) -> list[str]:
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
        return {key: replace(row, expires_at=movable_time(row.expires_at)) for key, row in stored.items()}

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        if rows:
            await self._transaction.fetch(_FORMATS[space].put, *_FORMATS[space].bind(rows))

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
        row_format = _FORMATS[part.space]
        return self._pages(part, after, row_format.columns, row_format.record, with_values=True)

    async def count(self, part: Range) -> int:
        layout = LAYOUTS[part.space]
        where, bindings = loading.range_condition(part, None, layout.key, "$")
        [[count]] = await self._fetch(f"SELECT count(*) FROM {layout.table}{where}", bindings)
        return int(count)

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        layout = LAYOUTS[part.space]
        columns = f"{', '.join(layout.key)}, octet_length({layout.value}), {_FORMATS[part.space].expiry}"
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
    return Size((plugin, key), value_bytes, expires_at)
