"""Arms for apsw in a plain loop, one commit per set: the time that SQLite itself takes, and so the limit."""

import time
from typing import Any, ClassVar

import apsw
import msgspec

from bench.harness.contest import Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Key, Pair, Value, joined

to_json = msgspec.json.Encoder().encode
from_json = msgspec.json.Decoder().decode

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
_GET = "SELECT value, version FROM entries WHERE key = ?1"
_RANGE = "SELECT key, value FROM entries WHERE key >= ?1 AND key < ?2 ORDER BY key"
_SWAP = "UPDATE entries SET value = ?2, version = ?3, updated_at = ?4 WHERE key = ?1 AND version = ?5"

_SIMPLE_TABLE = "CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL, expires_at INTEGER)"
_SIMPLE_INDEX = "CREATE INDEX idx_kv_expires ON kv (expires_at) WHERE expires_at IS NOT NULL"
_SIMPLE_PUT = "INSERT INTO kv (key, value) VALUES (?1, ?2)"
_SIMPLE_LIST = (
    "SELECT key, value FROM kv WHERE key LIKE ?1 AND (expires_at IS NULL OR expires_at > ?2) ORDER BY key ASC"
)

NAME = "apsw in a tight loop (the limit)"
LIKE = "LIKE 'prefix\\0%' through apsw"


class Inline(Contestant):
    """One connection."""

    inline: ClassVar[bool] = True

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self._execute = connection.cursor().execute
        self._version = 0

    def shaped(self, key: Key) -> bytes:
        return joined(key).encode()

    def set(self, pair: tuple[bytes, Value]) -> None:
        key, value = pair
        self._version += 1
        self._execute(_PUT, (key, to_json(value), self._version, _now()))

    def get(self, key: bytes) -> Value:
        rows: list[Any] = self._execute(_GET, (key,)).fetchall()
        value: Value = from_json(rows[0][0])
        return value

    def get_many(self, keys: list[bytes]) -> list[Value]:
        return [self.get(key) for key in keys]

    def list(self, group: str) -> list[Pair]:
        prefix = group.encode()
        rows: list[Any] = self._execute(_RANGE, (prefix + b"\x00", prefix + b"\x01")).fetchall()
        return [(tuple(key.decode().split("\x00")), from_json(value)) for key, value in rows]

    def swap(self, pair: tuple[bytes, Value]) -> None:
        key, value = pair
        rows: list[Any] = self._execute(_GET, (key,)).fetchall()
        from_json(rows[0][0])
        self._version += 1
        self._execute(_SWAP, (key, to_json(value), self._version, _now(), rows[0][1])).fetchall()
        same(self.connection.changes(), 1)

    def close(self) -> None:
        self.connection.close()


class ByLike(Contestant):
    """A list by LIKE over keys joined by a zero byte."""

    inline: ClassVar[bool] = True

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def list(self, group: str) -> list[Pair]:
        rows: list[Any] = self._connection.execute(_SIMPLE_LIST, (f"{group}\x00%", _now())).fetchall()
        return [(tuple(key.split("\x00")), from_json(value)) for key, value in rows]

    def close(self) -> None:
        self._connection.close()


def pragmas(durable: bool) -> tuple[str, ...]:
    """As Keyloft sets them, so that no arm wins by syncing less or by checkpointing more rarely."""
    return ("journal_mode = WAL", f"synchronous = {'FULL' if durable else 'NORMAL'}", "wal_autocheckpoint = 8000")


def _enter(setup: StoreSetup) -> Inline:
    """Filled in the same steps as Keyloft, so that both write-ahead logs have one size; for reads both are empty."""
    task = setup.task
    # As Keyloft stores them: small rows in the order of their keys, large ones not.
    connection = _connected(setup, _TABLE if task.large else f"{_TABLE} WITHOUT ROWID", _TABLE_INDEX)
    contestant = Inline(connection)
    for pairs in setup.chunks(100 if task.large else 2000):
        with connection:
            connection.executemany(_PUT, [(contestant.shaped(key), to_json(value), 0, 0) for key, value in pairs])
    if not task.writes:
        connection.close()
        contestant = Inline(_connected(setup))
    return contestant


def _enter_like(setup: StoreSetup) -> ByLike:
    connection = _connected(setup, _SIMPLE_TABLE, _SIMPLE_INDEX)
    with connection:
        rows = [(joined(key), to_json(value).decode()) for key, value in setup.pairs()]
        connection.executemany(_SIMPLE_PUT, rows)
    return ByLike(connection)


def _connected(setup: StoreSetup, *schema: str) -> apsw.Connection:
    connection = apsw.Connection(str(setup.folder / "apsw.db"))
    for statement in (*[f"PRAGMA {pragma}" for pragma in pragmas(setup.task.durable)], *schema):
        connection.execute(statement).fetchall()
    return connection


def _now() -> int:
    return time.time_ns() // 1_000_000


_EVERYTHING: frozenset[Operation] = frozenset({"get", "set", "get_many", "list", "swap"})
ENTRANT = Entrant(NAME, _enter, _EVERYTHING, durable="on disk (WAL, synced)", relaxed="the newest may be lost (WAL)")
BY_LIKE = Entrant(LIKE, _enter_like, frozenset({"list"}), durable=None)
