"""Arms for what a Python program might use instead: diskcache, sqlitedict, py-key-value-aio, aiosqlite.

Each has files of its own: two SQLite libraries on one file in one process would drop each other's locks.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, cast

import aiosqlite
import diskcache  # type: ignore[import-untyped]
from key_value.aio.stores.disk import DiskStore
from msgspec.structs import replace
from sqlitedict import SqliteDict  # type: ignore[import-untyped]

from bench.arms.apsw_loop import from_json, pragmas, to_json
from bench.harness.contest import Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Key, Pair, Value, joined

_ON_DISK = "on disk (WAL, synced)"
_MAY_LOSE = "the newest may be lost (WAL)"


class DiskCache(Contestant):
    """diskcache, whose values are pickled."""

    inline: ClassVar[bool] = True

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def shaped(self, key: Key) -> str:
        return joined(key)

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        direct: dict[Operation, Callable[[Any], Any]] = {
            "get": self.cache.get,
            "set": lambda pair: self.cache.set(*pair),
        }
        return direct.get(operation) or super().call(operation)

    def get_many(self, keys: list[str]) -> list[Value]:
        """It has no call for several keys; a transaction makes them one view."""
        with self.cache.transact():
            return [self.cache.get(key) for key in keys]

    def swap(self, pair: tuple[str, Value]) -> None:
        """It has no check, but a transaction that excludes other writers."""
        with self.cache.transact():
            self.cache.get(pair[0])
            self.cache.set(*pair)

    def close(self) -> None:
        self.cache.close()


class DiskCacheInThreads(DiskCache):
    """The same cache, used by several threads; it opens a connection for each, with the first call."""

    threaded: ClassVar[bool] = True

    def enter_thread(self) -> None:
        self.cache.get("")


def _disk_cache(setup: StoreSetup) -> Any:
    # Keep everything: by default it evicts entries over 1 GiB.
    settings: dict[str, Any] = {"eviction_policy": "none"}
    if setup.task.durable:
        settings["sqlite_synchronous"] = 2
    if setup.task.durable and setup.task.writes:
        # By default values over 32 KiB go to files of their own, which it does not sync.
        settings["disk_min_file_size"] = 2**20
    return diskcache.Cache(str(setup.folder), **settings)


def _enter_diskcache(setup: StoreSetup) -> DiskCache:
    contestant = DiskCache(_disk_cache(setup))
    for pairs in setup.chunks():
        with contestant.cache.transact():
            for key, value in pairs:
                contestant.cache.set(joined(key), value)
    return contestant


DISKCACHE = Entrant(
    "diskcache", _enter_diskcache, frozenset({"get", "set", "get_many", "swap"}), durable=_ON_DISK, relaxed=_MAY_LOSE
)


def _enter_diskcache_threads(setup: StoreSetup) -> DiskCacheInThreads:
    return DiskCacheInThreads(_enter_diskcache(setup).cache)


DISKCACHE_IN_THREADS = replace(DISKCACHE, enter=_enter_diskcache_threads)


class Dict(Contestant):
    """sqlitedict, which disables syncing and writes on its own thread."""

    inline: ClassVar[bool] = True

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def shaped(self, key: Key) -> str:
        return joined(key)

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        getting: Callable[[Any], Any] = self._stored.__getitem__
        return getting if operation == "get" else super().call(operation)

    def set(self, pair: tuple[str, Value]) -> None:
        self._stored[pair[0]] = pair[1]
        self._stored.commit()

    def close(self) -> None:
        self._stored.close()


def _enter_dict(setup: StoreSetup) -> Dict:
    stored = SqliteDict(setup.folder / "dict.db")
    for pairs in setup.chunks():
        stored.update([(joined(key), value) for key, value in pairs])
    stored.commit()
    return Dict(stored)


SQLITEDICT = Entrant(
    "sqlitedict", _enter_dict, frozenset({"get", "set"}), durable=None, relaxed="never synced: the file may be broken"
)


class DiskStored(Contestant):
    """py-key-value-aio's disk store, which is built on diskcache; each group of keys is a collection."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        cache.set("made", True)  # DiskStore treats an empty cache as if none was given
        self._store = DiskStore(disk_cache=cache)

    async def get(self, key: Key) -> Any:
        return await self._store.get(key[1], collection=key[0])

    async def get_many(self, keys: list[Key]) -> list[Any]:
        """Its own get_many takes keys of one collection only."""
        return [await self._store.get(key, collection=group) for group, key in keys]

    async def set(self, pair: Pair) -> None:
        key, value = pair
        await self._store.put(key[1], value, collection=key[0])

    def close(self) -> None:
        self._cache.close()


async def _enter_disk_store(setup: StoreSetup) -> DiskStored:
    cache = _disk_cache(setup)
    contestant = DiskStored(cache)
    for pairs in setup.chunks():
        with cache.transact():
            for pair in pairs:
                await contestant.set(pair)
    return contestant


DISK_STORE = Entrant(
    "py-key-value-aio, disk",
    _enter_disk_store,
    frozenset({"get", "set", "get_many"}),
    durable=_ON_DISK,
    relaxed=_MAY_LOSE,
)


class Aiosqlite(Contestant):
    """A table with text keys through aiosqlite, on one connection."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self.connection = connection

    def shaped(self, key: Key) -> str:
        return joined(key)

    async def _fetch(self, statement: str, *bindings: Any) -> list[Any]:
        return list(await self.connection.execute_fetchall(statement, bindings))

    async def get(self, key: str) -> Value:
        [[value]] = await self._fetch("SELECT value FROM kv WHERE key = ?", key)
        return cast(Value, from_json(value))

    async def get_many(self, keys: list[str]) -> list[Value]:
        marks = ", ".join("?" * len(keys))
        found = dict(await self._fetch(f"SELECT key, value FROM kv WHERE key IN ({marks})", *keys))
        return [from_json(found[key]) for key in keys]

    async def list(self, group: str) -> list[Pair]:
        statement = "SELECT key, value FROM kv WHERE key >= ? AND key < ? ORDER BY key"
        rows = await self._fetch(statement, f"{group}\x00", f"{group}\x01")
        return [(tuple(key.split("\x00")), from_json(value)) for key, value in rows]

    async def set(self, pair: tuple[str, Value]) -> None:
        key, value = pair
        statement = "INSERT INTO kv VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        await self.connection.execute(statement, (key, to_json(value).decode()))

    async def swap(self, pair: tuple[str, Value]) -> None:
        key, value = pair
        [[old]] = await self._fetch("SELECT value FROM kv WHERE key = ?", key)
        statement = "UPDATE kv SET value = ? WHERE key = ? AND value = ?"
        cursor = await self.connection.execute(statement, (to_json(value).decode(), key, old))
        same(cursor.rowcount, 1)

    def close(self) -> Awaitable[None]:
        return self.connection.close()


class OneByOne(Aiosqlite):
    """Ten gets instead of one statement."""

    async def get_many(self, keys: list[str]) -> list[Value]:
        return [await self.get(key) for key in keys]


async def _enter_one_by_one(setup: StoreSetup) -> OneByOne:
    return OneByOne((await _enter_aiosqlite(setup)).connection)


async def _enter_aiosqlite(setup: StoreSetup) -> Aiosqlite:
    # No isolation level: each statement is a transaction of its own, without a call to commit it.
    connection = await aiosqlite.connect(setup.folder / "aiosqlite.db", isolation_level=None)
    for pragma in pragmas(setup.task.durable):
        await connection.execute_fetchall(f"PRAGMA {pragma}")
    await connection.execute("CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    for pairs in setup.chunks():
        await connection.execute("BEGIN")
        rows = [(joined(key), to_json(value).decode()) for key, value in pairs]
        await connection.executemany("INSERT INTO kv VALUES (?, ?)", rows)
        await connection.execute("COMMIT")
    return Aiosqlite(connection)


AIOSQLITE = Entrant(
    "aiosqlite",
    _enter_aiosqlite,
    frozenset({"get", "set", "get_many", "list", "swap"}),
    durable=_ON_DISK,
    relaxed=_MAY_LOSE,
)
AIOSQLITE_ONE_BY_ONE = Entrant("aiosqlite, ten single gets", _enter_one_by_one, frozenset({"get_many"}), durable=None)
