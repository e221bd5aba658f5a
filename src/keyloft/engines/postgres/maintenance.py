"""Looks through, fills, checks and compacts a database of PostgreSQL as a whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.maintenance import (
    EVERYTHING,
    LAST_MOMENT,
    Existing,
    Facts,
    Loaded,
    Progress,
    Range,
    Size,
    Snapshot,
    check_unchanged,
    merge,
    movable_time,
    plugin_text,
    version_after_load,
)
from keyloft.core.records import Key, Record, Space
from keyloft.core.schema import REVISION, VERSION_COUNTER_TABLE, Row
from keyloft.core.urls import PostgresAddress
from keyloft.core.values import JSON
from keyloft.engines.postgres.connections import PAUSE_SECONDS, Link, Transaction
from keyloft.engines.postgres.server import Failure, PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, LOCK_CLOCK, READ_CLOCK, WRITE_CLOCK_AND_COMMIT, moment
from keyloft.engines.sqlite.maintenance import SqliteMaintenance

T = TypeVar("T")

# Whoever reads from us may pause for as long as he likes.
_HOLD: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL idle_in_transaction_session_timeout = 0; "
    "SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on"
)


class _Table(Struct, frozen=True):
    """How the rows of a space are read and put, with their times."""

    name: str
    key: tuple[str, ...]
    columns: str
    """As they are read."""
    value: str
    due: str
    """When a row expires, in milliseconds."""
    record: Callable[[Row], Record]
    put: str
    bind: Callable[[Sequence[Record]], Row]

    def select(self, part: Range, after: Key | None, columns: str, *, with_values: bool) -> tuple[str, list[Any]]:
        """The statement that reads a range, or what is left of it after a key: a page, up to a certain weight."""
        where, bindings = self.where(part, after)
        order = ", ".join(self.key)
        page = f"SELECT * FROM {self.name}{where} ORDER BY {order} LIMIT {limits.MAINTENANCE_ROWS}"
        if with_values:
            # The size of a value is known without reading it, so a page of large ones ends early.
            size = f"octet_length({self.value})"
            before = f"sum({size}) OVER (ORDER BY {order}) - {size} AS before"
            weighed = f"SELECT *, {before} FROM ({page}) AS page"
            page = f"SELECT * FROM ({weighed}) AS weighed WHERE before <= {limits.SCAN_BYTES}"
        return f"SELECT {columns} FROM ({page}) AS page ORDER BY {order}", bindings

    def where(self, part: Range, after: Key | None = None) -> tuple[str, list[Any]]:
        """The condition of a range, or of what is left of it after a key."""
        key = f"({', '.join(self.key)})" if len(self.key) > 1 else self.key[0]
        conditions: list[str] = []
        bindings: list[Any] = []

        def place(bound: Key) -> str:
            names = []
            for cell in LAYOUTS[part.space].bind_key(bound):
                bindings.append(cell)
                names.append(f"${len(bindings)}")
            return f"({', '.join(names)})" if len(names) > 1 else names[0]

        start = part.start if after is None else after
        if start is not None:
            conditions.append(f"{key} {'>=' if after is None else '>'} {place(start)}")
        if part.end is not None:
            conditions.append(f"{key} < {place(part.end)}")
        return f" WHERE {' AND '.join(conditions)}" if conditions else "", bindings


def _bytes_table(space: Space) -> _Table:
    name = LAYOUTS[space].table
    columns = "key, value, encoding, version, expires_at, created_at, updated_at"
    return _Table(
        name=name,
        key=("key",),
        columns=columns,
        value="value",
        due="expires_at",
        record=lambda row: Record(*row),
        put=(
            f"INSERT INTO {name} ({columns}) SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::int[], $4::bigint[], "
            "$5::bigint[], $6::bigint[], $7::bigint[]) ON CONFLICT (key) DO UPDATE SET value = excluded.value, "
            "encoding = excluded.encoding, version = excluded.version, expires_at = excluded.expires_at, "
            "created_at = excluded.created_at, updated_at = excluded.updated_at"
        ),
        bind=lambda rows: (
            *LAYOUTS[space].bind_puts(rows),
            [row.created_at for row in rows],
            [row.updated_at for row in rows],
        ),
    )


def _plugin_table() -> _Table:
    name = LAYOUTS[Space.PLUGINS].table
    columns = "plugin_name, key, value_json, version, expires_at, created_at, updated_at"

    def told(column: str) -> str:
        # What somebody wrote by hand: rounded up to a whole millisecond, within what can be moved; 'infinity' never
        # comes, '-infinity' is long past.
        whole = f"ceil(extract(epoch FROM {column}) * 1000)"
        return (
            f"CASE WHEN {column} = 'infinity' THEN NULL WHEN isfinite({column}) "
            f"THEN least(greatest({whole}, 0), {LAST_MOMENT})::bigint WHEN {column} IS NOT NULL THEN 0 END"
        )

    def record(row: Row) -> Record:
        plugin, key, value, version, expires_at, created_at, updated_at = row
        return Record((plugin, key), value.encode(), JSON, version, expires_at, created_at or 0, updated_at or 0)

    times = ("expires_at", "created_at", "updated_at")
    put_times = [moment(f"new.{time}") for time in ("due", "made", "changed")]
    return _Table(
        name=name,
        key=("plugin_name", "key"),
        columns=f"plugin_name, key, value_json, version, {', '.join(map(told, times))}",
        value="value_json",
        due=told("expires_at"),
        record=record,
        put=(
            f"INSERT INTO {name} ({columns}) SELECT plugin_name, key, value, version, {', '.join(put_times)} "
            "FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]) "
            "AS new (plugin_name, key, value, version, due, made, changed) "
            "ON CONFLICT (plugin_name, key) DO UPDATE SET value_json = excluded.value_json, "
            "version = excluded.version, expires_at = excluded.expires_at, "
            "created_at = excluded.created_at, updated_at = excluded.updated_at"
        ),
        bind=lambda rows: (
            *LAYOUTS[Space.PLUGINS].bind_keys([row.key for row in rows]),
            list(map(plugin_text, rows)),
            [row.version for row in rows],
            [row.expires_at for row in rows],
            [row.created_at for row in rows],
            [row.updated_at for row in rows],
        ),
    )


_TABLES: Final[Mapping[Space, _Table]] = {
    Space.TUPLES: _bytes_table(Space.TUPLES),
    Space.SEMANTIC: _bytes_table(Space.SEMANTIC),
    Space.PLUGINS: _plugin_table(),
}


class PostgresMaintenance:
    """A database of PostgreSQL as a whole."""

    @classmethod
    async def open(
        cls, address: PostgresAddress, *, make: bool, patience: float = limits.SERVER_SECONDS
    ) -> "PostgresMaintenance":
        """Connect to a database.

        Args:
            address: Where it is.
            make: Make its tables if need be.
            patience: How many seconds to wait for a server that is away.

        Raises:
            DatabaseError: The database can't be used; the message says why.
        """
        server = PostgresServer(address, durability="full", patience=patience)
        maintenance = cls(server)
        try:
            async with asyncio.timeout(patience):
                connection = await maintenance.link.connected()
                await (server.set_up_schema if make else server.check_schema)(connection)
        except TimeoutError:
            await maintenance.aclose()
            raise server.unreachable() from None
        except Failure as error:
            await maintenance.aclose()
            raise server.explain(error) from error
        except BaseException:
            await maintenance.aclose()
            raise
        return maintenance

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.link = Link(server)

    async def facts(self) -> Facts:
        [[version, size]] = await self._fetch(
            "SELECT current_setting('server_version'), pg_database_size(current_database())::bigint"
        )
        return Facts(f"PostgreSQL {version}", REVISION, size, None)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator["PostgresSnapshot"]:
        link = Link(self.server)
        try:
            async with self.explained():
                await link.connected()
            async with link.transaction(_HOLD) as transaction:
                yield await PostgresSnapshot.of(self, transaction)
        finally:
            link.abandon()

    async def load(self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing) -> Loaded:
        async def work(transaction: Transaction, before: int, now: int) -> tuple[Loaded, int | None]:
            told, all_written = Loaded(), list[Record]()
            new_version = max(before, version) + 1
            for space in Space:
                if some := [row for at, row in rows if at is space]:
                    stored = await _stored(transaction, space, some)
                    written, of_space = merge(space, some, stored, existing, now, new_version)
                    await _put(transaction, space, written)
                    told.add(of_space)
                    all_written += written
            return told, version_after_load(before, version, all_written, new_version) if all_written else None

        return await self._write(work)

    async def become(self, source: Snapshot, progress: Progress, *, expected_version: int | None = None) -> int:
        made: tuple[int, int] | None = None

        async def work(transaction: Transaction, before: int, now: int) -> tuple[int, int | None]:
            nonlocal made
            if expected_version is not None and made is not None and before == made[1]:
                # The commit was made, and its answer lost: no other process moved the version counter.
                return made[0], None
            check_unchanged(before, expected_version)
            done = 0
            for table in _TABLES.values():
                await transaction.execute(f"DELETE FROM {table.name}")
            for part in EVERYTHING:
                async for rows in source.rows(part):
                    await _put(transaction, part.space, rows)
                    done += len(rows)
                    progress(done, done)
            made = done, before + 1 if before >= source.version else source.version
            return made

        return await self._write(work)

    async def damage(self, progress: Progress) -> list[str]:
        """PostgreSQL looks after its own pages; what it can be asked is whether our tables and indexes are there."""
        names = [table.name for table in _TABLES.values()]
        wanted = [*names, VERSION_COUNTER_TABLE, *[f"{name}_expires" for name in names[:2]]]
        wanted += ["idx_plugin_kv_expires", "idx_plugin_kv_prefix"]
        rows = await self._fetch("SELECT name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NULL", wanted)
        invalid = await self._fetch(
            "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid "
            "AND indrelid = ANY(SELECT to_regclass(name) FROM unnest($1::text[]) AS name)",
            names,
        )
        return [f"{row[0]} is missing" for row in rows] + [f"the index {row[0]} is not valid" for row in invalid]

    async def backup(self, target: str, progress: Progress) -> None:
        copy = await SqliteMaintenance.open(target, make=True)
        try:
            async with self.snapshot() as snapshot:
                await copy.become(snapshot, progress)
            await copy.make_plain()
        finally:
            await copy.aclose()

    async def compact(self) -> None:
        connection = await self.link.connected()
        async with self.explained():
            for table in _TABLES.values():
                await connection.execute(f"VACUUM (ANALYZE) {table.name}")

    async def aclose(self) -> None:
        self.link.abandon()
        await self.server.aclose()

    async def _fetch(self, statement: str, *bindings: Any) -> list[Any]:
        async with self.explained():
            return await self.link.fetch(statement, *bindings)

    async def _write(self, work: Callable[[Transaction, int, int], Awaitable[tuple[T, int | None]]]) -> T:
        """Do something in one transaction that holds the clock, again if somebody else was in the way.

        What was done and is done again meets its own rows, and leaves them as they are.
        """
        deadline = asyncio.get_running_loop().time() + limits.BUSY_SECONDS
        while True:
            try:
                async with self.link.transaction(f"{self.server.begin}; {LOCK_CLOCK}") as transaction:
                    before, now = self.server.clock_of(await transaction.fetch(READ_CLOCK, None))
                    result, after = await work(transaction, before, now)
                    if after is not None:
                        await transaction.execute(WRITE_CLOCK_AND_COMMIT.format(clock=after, name=self.server.token))
                return result
            except Failure as error:
                may_succeed = self.server.learn_from(error)
                if not may_succeed or asyncio.get_running_loop().time() > deadline:
                    raise self.server.explain(error) from error
                if self.server.is_lost(error):
                    self.link.drop()
                await asyncio.sleep(PAUSE_SECONDS)

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Let errors tell a user what is wrong with which database; within it, nothing of anybody else's may fail."""
        try:
            yield
        except Failure as error:
            raise self.server.explain(error) from error


class PostgresSnapshot:
    """A database at one moment: a transaction that stays open."""

    @classmethod
    async def of(cls, maintenance: PostgresMaintenance, transaction: Transaction) -> "PostgresSnapshot":
        async with maintenance.explained():
            clock, now = maintenance.server.clock_of(await transaction.fetch(READ_CLOCK, None))
        return cls(maintenance, transaction, clock, now)

    def __init__(self, maintenance: PostgresMaintenance, transaction: Transaction, clock: int, now: int) -> None:
        self._upkeep = maintenance
        self._transaction = transaction
        self.version = clock
        self.now = now

    async def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        table = _TABLES[part.space]
        while rows := await self._page(part, after, table.columns, with_values=True):
            records = [table.record(row) for row in rows]
            after = records[-1].key
            yield records

    async def count(self, part: Range) -> int:
        table = _TABLES[part.space]
        where, bindings = table.where(part)
        [[count]] = await self._fetch(f"SELECT count(*) FROM {table.name}{where}", bindings)
        return int(count)

    async def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        table = _TABLES[part.space]
        columns = f"{', '.join(table.key)}, octet_length({table.value}), {table.due}"
        after = None
        while rows := await self._page(part, after, columns, with_values=False):
            sizes = [Size(tuple(row[:-2]) if len(table.key) > 1 else row[0], row[-2], row[-1]) for row in rows]
            after = sizes[-1].key
            yield sizes

    async def _page(self, part: Range, after: Key | None, columns: str, *, with_values: bool) -> list[Any]:
        statement, bindings = _TABLES[part.space].select(part, after, columns, with_values=with_values)
        return await self._fetch(statement, bindings)

    async def _fetch(self, statement: str, bindings: Sequence[Any]) -> list[Any]:
        async with self._upkeep.explained():
            return await self._transaction.fetch(statement, *bindings)


async def _stored(transaction: Transaction, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
    """What is stored under the keys of some rows."""
    layout = LAYOUTS[space]
    found = await transaction.fetch(layout.load, None, *layout.bind_keys([row.key for row in rows]))
    there = layout.found([row[2:] for row in found if row[2] is not None])
    if space is not Space.PLUGINS:
        return dict(there)
    return {key: replace(row, expires_at=movable_time(row.expires_at)) for key, row in there.items()}


async def _put(transaction: Transaction, space: Space, rows: Sequence[Record]) -> None:
    if rows:
        table = _TABLES[space]
        await transaction.fetch(table.put, *table.bind(rows))
