"""Arms for asyncpg used the ordinary way: its pool with default settings, ten connections, one acquire per call.

One arm leaves out the pool's reset of a released connection, which is a round trip to the server. One held connection,
with nothing decoded, is the limit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import msgspec

from bench.harness import plans
from bench.harness.contest import CHUNK, Contestant, Entrant, Operation, PlannedLap, StoreSetup, same
from bench.harness.data import GROUP, Key, Value, key_of, shuffled, value_of
from bench.harness.plans import Writes, as_bytes
from bench.harness.race import Arm, Timed, timed

NAME = "asyncpg pool"
WITHOUT_RESET = "asyncpg pool without reset"
HELD = "one held connection (the limit)"

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

_TABLE = (
    "CREATE TABLE ordinary (key bytea PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL, "
    "updated_at timestamptz NOT NULL)"
)
_FILL = (
    "INSERT INTO ordinary SELECT new.key, new.value, 1, now() FROM unnest($1::bytea[], $2::bytea[]) AS new (key, value)"
)
_GET = "SELECT value FROM ordinary WHERE key = $1"
_GET_MANY = "SELECT key, value FROM ordinary WHERE key = ANY($1::bytea[])"
_LIST = "SELECT key, value FROM ordinary WHERE key >= $1 AND key < $2 ORDER BY key LIMIT $3"
_SET = (
    "INSERT INTO ordinary AS old (key, value, version, updated_at) VALUES ($1, $2, 1, now()) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = old.version + 1, updated_at = now()"
)
_NOTIFY = "SELECT pg_notify('ordinary', '')"
_LOCK = "SELECT value, version FROM ordinary WHERE key = $1 FOR UPDATE"
_UPDATE = "UPDATE ordinary SET value = $2, version = version + 1, updated_at = now() WHERE key = $1"

_Pool: TypeAlias = Any
"""asyncpg's, which has no types; or a single connection."""
_Rows: TypeAlias = list[tuple[bytes, Any]]


async def fill(url: str, stored: int) -> None:
    """Fill the table in the same steps and order as Keyloft's rows: the speed of lists depends on it."""
    connection = await asyncpg.connect(url)
    await connection.execute(_TABLE)
    order = shuffled(stored)
    for first in range(0, stored, CHUNK):
        rows = sorted((as_bytes(key_of(index)), _to_json(value_of(index))) for index in order[first : first + CHUNK])
        await connection.execute(_FILL, [key for key, _ in rows], [value for _, value in rows])
    await connection.close()


class Pooled(Contestant):
    """Acquires a connection for each statement or transaction, then releases it."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool

    def shaped(self, key: Key) -> bytes:
        return as_bytes(key)

    async def get(self, key: bytes) -> Value:
        async with self.pool.acquire() as connection:
            value: Value = _from_json(await connection.fetchval(_GET, key))
        return value

    async def get_many(self, keys: list[bytes]) -> list[Value]:
        async with self.pool.acquire() as connection:
            found = dict(await connection.fetch(_GET_MANY, keys))
        return [_from_json(found[key]) for key in keys]

    async def list(self, group: str) -> _Rows:
        """The bare query; keys stay encoded, values are decoded."""
        async with self.pool.acquire() as connection:
            rows = await connection.fetch(_LIST, *_range(group))
        return [(key, _from_json(value)) for key, value in rows]

    async def set(self, pair: tuple[bytes, Value]) -> None:
        async with self.pool.acquire() as connection:
            await connection.execute(_SET, pair[0], _to_json(pair[1]))

    async def swap(self, pair: tuple[bytes, Value]) -> None:
        """Read a row and lock it, replace it, and commit."""
        key, value = pair
        async with self.pool.acquire() as connection, connection.transaction():
            old, _ = await connection.fetchrow(_LOCK, key)
            _from_json(old)
            await connection.execute(_UPDATE, key, _to_json(value))

    def seen(self, operation: Operation, answer: Any) -> Any:
        return [(tuple(key.decode().split("\x00")), value) for key, value in answer] if operation == "list" else answer

    async def check(self, operation: Operation, plan: PlannedLap, done: Timed[Any]) -> None:
        if not plan.pairs:
            return await super().check(operation, plan, done)
        found = dict(await self.pool.fetch(_GET_MANY, [self.shaped(key) for key, _ in plan.pairs]))
        return same([_from_json(found[self.shaped(key)]) for key, _ in plan.pairs], plan.expected)

    async def close(self) -> None:
        await self.pool.close()


class Held(Pooled):
    """What server and driver take: one call at a time on one connection."""

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        if operation == "get":
            return lambda key: self.pool.fetchval(_GET, key)
        return lambda group: self.pool.fetch(_LIST, *_range(group))

    def seen(self, operation: Operation, answer: Any) -> Any:
        if operation == "get":
            return _from_json(answer)
        return super().seen(operation, [(key, _from_json(value)) for key, value in answer])


def _range(group: str) -> tuple[bytes, bytes, int]:
    prefix = group.encode()
    return prefix + b"\x00", prefix + b"\x01", GROUP


async def _no_reset(_: Any) -> None:
    pass


def pool(url: str, *, reset: bool = True) -> Entrant:
    async def enter(_: StoreSetup) -> Pooled:
        return Pooled(await (asyncpg.create_pool(url) if reset else asyncpg.create_pool(url, reset=_no_reset)))

    return Entrant(
        NAME if reset else WITHOUT_RESET,
        enter,
        frozenset({"get", "set", "get_many", "list", "swap"}),
        durable="on disk (WAL, synced)",
        loop="uvloop",
    )


def held(url: str) -> Entrant:
    async def enter(_: StoreSetup) -> Held:
        return Held(await asyncpg.connect(url))

    return Entrant(HELD, enter, frozenset({"get", "list"}), durable=None, loop="uvloop")


class Listeners(msgspec.Struct, frozen=True):
    """A pool for writes and reads, and a connection that listens for notifications."""

    pooled: Pooled
    listener: Any
    heard: asyncio.Queue[None]


def hearing(url: str, operations: int) -> Arm[Listeners, Writes[bytes], Value]:
    """From the call of a set with NOTIFY until another connection has read it, one at a time."""

    async def set_up(_: Path) -> Listeners:
        peer = Listeners(Pooled(await asyncpg.create_pool(url)), await asyncpg.connect(url), asyncio.Queue())
        await peer.listener.add_listener("ordinary", lambda *_: peer.heard.put_nowait(None))
        return peer

    def run(peer: Listeners, plan: Writes[bytes]) -> Awaitable[Timed[Value]]:
        async def put(key: bytes, value: Value) -> None:
            async with peer.pooled.pool.acquire() as connection, connection.transaction():
                await connection.execute(_SET, key, _to_json(value))
                await connection.execute(_NOTIFY)

        async def seen(key: bytes) -> Value:
            await peer.heard.get()
            return await peer.pooled.get(key)

        async def put_and_seen(pair: tuple[bytes, Value]) -> Value:
            _, value = await asyncio.gather(put(*pair), seen(pair[0]))
            return value

        return timed(put_and_seen, plan)

    async def tear_down(peer: Listeners) -> None:
        await peer.listener.close()
        await peer.pooled.close()

    def check(_: Listeners, plan: Writes[bytes], found: Timed[Value]) -> None:
        same(found.answers, [value for _, value in plan])

    name, plan = "asyncpg pool, LISTEN and NOTIFY", plans.rewrites(as_bytes)
    return Arm(name, operations, set_up, plan, run, check, tear_down, "uvloop", operations)
