"""The arms that Keyloft is held against: SQLite through apsw and aiosqlite, diskcache, and a list by LIKE.

Each has a file of its own: two SQLite libraries on one file in one process would drop each other's locks.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiosqlite
import apsw
import diskcache  # type: ignore[import-untyped]
import msgspec

from bench import plans
from bench.data import Value, group_of, joined, key_of, shuffled, value_of
from bench.harness import Arm
from bench.ours import CHUNK
from bench.plans import Listed, Reads, Writes, as_bytes, as_text, same

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

# As Keyloft sets them, so that no arm wins by syncing less or by checkpointing more rarely.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 8000")

_TABLE = (
    "CREATE TABLE entries (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, version INTEGER NOT NULL, "
    "expires_at INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, value BLOB NOT NULL)"
)
_TABLE_INDEX = "CREATE INDEX entries_expires ON entries (expires_at) WHERE expires_at IS NOT NULL"
_PUT = (
    "INSERT INTO entries (key, value, encoding, version, expires_at, created_at, updated_at) "
    "VALUES (?1, ?2, 0, ?3, NULL, ?4, ?4) ON CONFLICT (key) DO UPDATE SET "
    "value = ?2, encoding = 0, version = ?3, expires_at = NULL, updated_at = ?4"
)
_GET = "SELECT value FROM entries WHERE key = ?1"

_PLAN_TABLE = "CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL, expires_at INTEGER)"
_PLAN_INDEX = "CREATE INDEX idx_kv_expires ON kv (expires_at) WHERE expires_at IS NOT NULL"
_PLAN_PUT = "INSERT INTO kv (key, value) VALUES (?1, ?2)"
_PLAN_LIST = "SELECT key, value FROM kv WHERE key LIKE ?1 AND (expires_at IS NULL OR expires_at > ?2) ORDER BY key ASC"


class Inline:
    """apsw called straight from the loop, a commit per set: what SQLite itself takes."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.execute = connection.cursor().execute
        self.version = 0

    def set(self, key: bytes, value: Value) -> None:
        self.version += 1
        self.execute(_PUT, (key, _to_json(value), self.version, time.time_ns() // 1_000_000))

    def get(self, key: bytes) -> Value:
        rows: list[Any] = self.execute(_GET, (key,)).fetchall()
        value: Value = _from_json(rows[0][0])
        return value

    def close(self) -> None:
        self.connection.close()


def inline(stored: int, *, reopened: bool) -> Callable[[Path], Inline]:
    """Filled in the same steps as Keyloft, so that both have a log of the same length; reopened, both have none."""

    def set_up(folder: Path) -> Inline:
        connection = _connected(folder, _TABLE, _TABLE_INDEX)
        rows = [(as_bytes(key_of(index)), _to_json(value_of(index)), 0, 0) for index in shuffled(stored)]
        for first in range(0, stored, CHUNK):
            with connection:
                connection.executemany(_PUT, rows[first : first + CHUNK])
        if reopened:
            connection.close()
            connection = _connected(folder)
        return Inline(connection)

    return set_up


def getting_inline(stored: int, operations: int) -> Arm[Inline, Reads[bytes], list[Value]]:
    return Arm(
        name="apsw in a tight loop (the limit)",
        operations=operations,
        set_up=inline(stored, reopened=True),
        plan=plans.reads(stored, as_bytes),
        run=lambda peer, plan: [peer.get(key) for key in plan.keys],
        check=lambda _, plan, found: same(found, plan.expected),
        tear_down=Inline.close,
    )


def setting_inline(stored: int, operations: int) -> Arm[Inline, Writes[bytes], None]:
    def run(peer: Inline, plan: Writes[bytes]) -> None:
        for key, value in plan:
            peer.set(key, value)

    return Arm(
        name="apsw inline",
        operations=operations,
        set_up=inline(stored, reopened=False),
        plan=plans.writes(stored, as_bytes),
        run=run,
        check=lambda peer, plan, _: same([peer.get(key) for key, _ in plan], [value for _, value in plan]),
        tear_down=Inline.close,
    )


def _aiosqlite(stored: int) -> Callable[[Path], Awaitable[aiosqlite.Connection]]:
    async def set_up(folder: Path) -> aiosqlite.Connection:
        connection = await aiosqlite.connect(folder / "aiosqlite.db")
        for pragma in _PRAGMAS:
            await connection.execute(f"PRAGMA {pragma}")
        await connection.execute(_PLAN_TABLE)
        rows = [(joined(key_of(index)), _to_json(value_of(index)).decode()) for index in shuffled(stored)]
        await connection.executemany(_PLAN_PUT, rows)
        await connection.commit()
        return connection

    return set_up


async def _aiosqlite_get(connection: aiosqlite.Connection, key: str) -> Value:
    async with connection.execute("SELECT value FROM kv WHERE key = ?", (key,)) as cursor:
        row = await cursor.fetchone()
    assert row is not None
    value: Value = _from_json(row[0])
    return value


def getting_aiosqlite(stored: int, operations: int) -> Arm[aiosqlite.Connection, Reads[str], list[Value]]:
    async def run(connection: aiosqlite.Connection, plan: Reads[str]) -> list[Value]:
        return [await _aiosqlite_get(connection, key) for key in plan.keys]

    return Arm(
        name="aiosqlite",
        operations=operations,
        set_up=_aiosqlite(stored),
        plan=plans.reads(stored, as_text),
        run=run,
        check=lambda _, plan, found: same(found, plan.expected),
        tear_down=aiosqlite.Connection.close,
    )


def getting_ten_aiosqlite(
    stored: int, operations: int
) -> Arm[aiosqlite.Connection, list[Reads[str]], list[list[Value]]]:
    async def run(connection: aiosqlite.Connection, plan: list[Reads[str]]) -> list[list[Value]]:
        return [[await _aiosqlite_get(connection, key) for key in ten.keys] for ten in plan]

    return Arm(
        name="aiosqlite, ten single gets",
        operations=operations,
        set_up=_aiosqlite(stored),
        plan=plans.tens(stored, as_text),
        run=run,
        check=lambda _, plan, found: same(found, [ten.expected for ten in plan]),
        tear_down=aiosqlite.Connection.close,
        lap=plans.TENS,
    )


def getting_diskcache(stored: int, operations: int) -> Arm[Any, Reads[str], list[Value]]:
    def set_up(folder: Path) -> Any:
        cache = diskcache.Cache(str(folder), sqlite_synchronous=2)
        with cache.transact():
            for index in shuffled(stored):
                cache.set(joined(key_of(index)), value_of(index))
        return cache

    return Arm(
        name="diskcache",
        operations=operations,
        set_up=set_up,
        plan=plans.reads(stored, as_text),
        run=lambda cache, plan: [cache.get(key) for key in plan.keys],
        check=lambda _, plan, found: same(found, plan.expected),
        tear_down=lambda cache: cache.close(),
    )


def listing_by_like(stored: int, operations: int) -> Arm[apsw.Connection, list[int], Listed[Any]]:
    """A list as one would write it first: keys joined by a zero byte, found by LIKE."""

    def set_up(folder: Path) -> apsw.Connection:
        connection = _connected(folder, _PLAN_TABLE, _PLAN_INDEX)
        rows = [(joined(key_of(index)), _to_json(value_of(index)).decode()) for index in shuffled(stored)]
        with connection:
            connection.executemany(_PLAN_PUT, rows)
        return connection

    def run(connection: apsw.Connection, plan: list[int]) -> Listed[Any]:
        counts = []
        for number in plan:
            bindings = (f"{group_of(number)}\x00%", time.time_ns() // 1_000_000)
            rows: list[Any] = connection.execute(_PLAN_LIST, bindings).fetchall()
            entries = [(tuple(key.split("\x00")), _from_json(value)) for key, value in rows]
            counts.append(len(entries))
        return Listed(counts, entries)

    return Arm(
        name="LIKE 'prefix\\0%' through apsw",
        operations=operations,
        set_up=set_up,
        plan=plans.groups(stored),
        run=run,
        check=lambda _, plan, found: plans.check_lists(plan, found.counts, found.last),
        tear_down=apsw.Connection.close,
        lap=plans.LISTS,
    )


def _connected(folder: Path, *schema: str) -> apsw.Connection:
    connection = apsw.Connection(str(folder / "apsw.db"))
    for statement in (*[f"PRAGMA {pragma}" for pragma in _PRAGMAS], *schema):
        connection.execute(statement).fetchall()
    return connection
