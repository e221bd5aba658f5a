"""The ordinary way as arms: asyncpg's pool as it is by default, ten connections, one acquire per call.

Some are also shown without what the pool does to a connection that comes back: that reset is a trip to the server.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import msgspec

from bench import plans
from bench.data import GROUP, Value, group_of, key_of, shuffled, value_of
from bench.harness import Arm, Checking, Plan, Planning, Running, T, Timed, timed
from bench.ours import CHUNK
from bench.plans import Reads, Writes, as_bytes, same
from bench.postgres_ours import LISTS

NAME = "asyncpg pool"
WITHOUT_RESET = "asyncpg pool without reset"
HELD = "the limit: one held connection"

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

Pool: TypeAlias = Any
"""asyncpg's, which has no types; or a single connection."""
Listed: TypeAlias = list[tuple[bytes, Any]]


async def fill(url: str, stored: int) -> None:
    """Put the keys into a table, in the same steps and the same order as Keyloft's rows: lists depend on it."""
    connection = await asyncpg.connect(url)
    await connection.execute(_TABLE)
    order = shuffled(stored)
    for first in range(0, stored, CHUNK):
        rows = sorted((as_bytes(key_of(index)), _to_json(value_of(index))) for index in order[first : first + CHUNK])
        await connection.execute(_FILL, [key for key, _ in rows], [value for _, value in rows])
    await connection.close()


async def _no_reset(_: Any) -> None:
    pass


_OPENERS: dict[str, Callable[[str], Awaitable[Pool]]] = {
    NAME: asyncpg.create_pool,
    WITHOUT_RESET: lambda url: asyncpg.create_pool(url, reset=_no_reset),
    HELD: asyncpg.connect,
}


def _arm(
    url: str,
    operations: int,
    plan: Planning[Plan],
    run: Running[Pool, Plan, T],
    check: Checking[Pool, Plan, T],
    name: str = NAME,
    lap: int | None = None,
) -> Arm[Pool, Plan, Timed[T]]:
    """One that uses a pool, or a single connection, as its name says."""

    async def set_up(_: Path) -> Pool:
        return await _OPENERS[name](url)

    async def tear_down(pool: Pool) -> None:
        await pool.close()

    return Arm(name, operations, set_up, plan, run, check, tear_down, "uvloop", lap or operations)


async def _get(pool: Pool, key: bytes) -> Value:
    async with pool.acquire() as connection:
        value: Value = _from_json(await connection.fetchval(_GET, key))
    return value


def getting(
    url: str, stored: int, operations: int, workers: int, *, name: str = NAME
) -> Arm[Pool, Reads[bytes], Timed[Value]]:
    def run(pool: Pool, plan: Reads[bytes]) -> Awaitable[Timed[Value]]:
        return timed(lambda key: _get(pool, key), plan.keys, workers)

    def check(_: Pool, plan: Reads[bytes], found: Timed[Value]) -> None:
        same(found.answers, plan.expected)

    return _arm(url, operations, plans.reads(stored, as_bytes), run, check, name)


def getting_held(url: str, stored: int, operations: int) -> Arm[Pool, Reads[bytes], Timed[bytes]]:
    """What a trip to the server costs, one after the other, with nothing decoded."""

    def run(connection: Pool, plan: Reads[bytes]) -> Awaitable[Timed[bytes]]:
        return timed(lambda key: connection.fetchval(_GET, key), plan.keys)

    def check(_: Pool, plan: Reads[bytes], found: Timed[bytes]) -> None:
        same([_from_json(value) for value in found.answers], plan.expected)

    return _arm(url, operations, plans.reads(stored, as_bytes), run, check, HELD)


def getting_many(url: str, stored: int, operations: int) -> Arm[Pool, list[Reads[bytes]], Timed[list[Value]]]:
    """Ten keys with one statement, one after the other."""

    def run(pool: Pool, plan: list[Reads[bytes]]) -> Awaitable[Timed[list[Value]]]:
        async def get_many(ten: Reads[bytes]) -> list[Value]:
            async with pool.acquire() as connection:
                found = dict(await connection.fetch(_GET_MANY, ten.keys))
            return [_from_json(found[key]) for key in ten.keys]

        return timed(get_many, plan)

    def check(_: Pool, plan: list[Reads[bytes]], found: Timed[list[Value]]) -> None:
        same(found.answers, [ten.expected for ten in plan])

    return _arm(url, operations, plans.tens(stored, as_bytes), run, check)


def _range(number: int) -> tuple[bytes, bytes, int]:
    prefix = group_of(number).encode()
    return prefix + b"\x00", prefix + b"\x01", GROUP


def listing(url: str, stored: int, operations: int, *, name: str = NAME) -> Arm[Pool, list[int], Timed[Listed]]:
    """The bare query; its keys are left as they are, its values decoded."""

    def run(pool: Pool, plan: list[int]) -> Awaitable[Timed[Listed]]:
        async def listed(number: int) -> Listed:
            async with pool.acquire() as connection:
                rows = await connection.fetch(_LIST, *_range(number))
            return [(key, _from_json(value)) for key, value in rows]

        return timed(listed, plan)

    def check(_: Pool, plan: list[int], found: Timed[Listed]) -> None:
        for number, rows in zip(plan, found.answers, strict=True):
            _is_group(number, rows)

    return _arm(url, operations, plans.groups(stored), run, check, name, LISTS)


def listing_held(url: str, stored: int, operations: int) -> Arm[Pool, list[int], Timed[list[Any]]]:
    """What the server and the driver take for it, with nothing decoded."""

    def run(connection: Pool, plan: list[int]) -> Awaitable[Timed[list[Any]]]:
        return timed(lambda number: connection.fetch(_LIST, *_range(number)), plan)

    def check(_: Pool, plan: list[int], found: Timed[list[Any]]) -> None:
        for number, rows in zip(plan, found.answers, strict=True):
            _is_group(number, [(key, _from_json(value)) for key, value in rows])

    return _arm(url, operations, plans.groups(stored), run, check, HELD, LISTS)


def _is_group(number: int, rows: Listed) -> None:
    same(rows, [(as_bytes(key), value) for key, value in plans.expected_group(number)])


def setting(
    url: str, stored: int, operations: int, workers: int, *, name: str = NAME
) -> Arm[Pool, Writes[bytes], Timed[None]]:
    async def put(pool: Pool, key: bytes, value: Value) -> None:
        async with pool.acquire() as connection:
            await connection.execute(_SET, key, _to_json(value))

    return _writing(url, stored, operations, workers, put, name)


def swapping(
    url: str, stored: int, operations: int, workers: int, *, name: str = NAME
) -> Arm[Pool, Writes[bytes], Timed[None]]:
    """Read a row and lock it, replace it, and commit."""

    async def swap(pool: Pool, key: bytes, value: Value) -> None:
        async with pool.acquire() as connection, connection.transaction():
            old, _ = await connection.fetchrow(_LOCK, key)
            _from_json(old)
            await connection.execute(_UPDATE, key, _to_json(value))

    return _writing(url, stored, operations, workers, swap, name)


def _writing(
    url: str,
    stored: int,
    operations: int,
    workers: int,
    write: Callable[[Pool, bytes, Value], Awaitable[None]],
    name: str,
) -> Arm[Pool, Writes[bytes], Timed[None]]:
    def run(pool: Pool, plan: Writes[bytes]) -> Awaitable[Timed[None]]:
        return timed(lambda pair: write(pool, *pair), plan, workers)

    async def check(pool: Pool, plan: Writes[bytes], _: Timed[None]) -> None:
        found = dict(await pool.fetch(_GET_MANY, [key for key, _ in plan]))
        same([_from_json(found[key]) for key, _ in plan], [value for _, value in plan])

    return _arm(url, operations, plans.writes(stored, as_bytes), run, check, name)


class Listeners(msgspec.Struct, frozen=True):
    """A pool to write and read with, and a connection that hears what others announce."""

    pool: Pool
    listener: Any
    heard: asyncio.Queue[None]


def hearing(url: str, operations: int) -> Arm[Listeners, Writes[bytes], Timed[Value]]:
    """From the call of a set that is announced until another connection has read it, one after the other."""

    async def set_up(_: Path) -> Listeners:
        peer = Listeners(await asyncpg.create_pool(url), await asyncpg.connect(url), asyncio.Queue())
        await peer.listener.add_listener("ordinary", lambda *_: peer.heard.put_nowait(None))
        return peer

    def run(peer: Listeners, plan: Writes[bytes]) -> Awaitable[Timed[Value]]:
        async def put(key: bytes, value: Value) -> None:
            async with peer.pool.acquire() as connection, connection.transaction():
                await connection.execute(_SET, key, _to_json(value))
                await connection.execute(_NOTIFY)

        async def seen(key: bytes) -> Value:
            await peer.heard.get()
            return await _get(peer.pool, key)

        async def put_and_seen(pair: tuple[bytes, Value]) -> Value:
            _, value = await asyncio.gather(put(*pair), seen(pair[0]))
            return value

        return timed(put_and_seen, plan)

    async def tear_down(peer: Listeners) -> None:
        await peer.listener.close()
        await peer.pool.close()

    def check(_: Listeners, plan: Writes[bytes], found: Timed[Value]) -> None:
        same(found.answers, [value for _, value in plan])

    name, plan = "asyncpg pool, LISTEN and NOTIFY", plans.rewrites(as_bytes)
    return Arm(name, operations, set_up, plan, run, check, tear_down, "uvloop", operations)
