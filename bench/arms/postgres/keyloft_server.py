"""Arms for Keyloft on PostgreSQL: the store, the plugins' storage, and a watch, on a database filled before."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

import keyloft
from bench.arms import keyloft_file
from bench.arms.nats import keyloft_service
from bench.harness import plans
from bench.harness.contest import Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Key, Pair, stored_pairs
from bench.harness.plans import Writes
from bench.harness.race import Arm, Timed, timed
from keyloft.plugins import BotDatabase

ON_DISK = "on disk (WAL, synced, group commit)"


async def fill(url: str, stored: int) -> None:
    """Put the keys into the key spaces of both."""
    async with keyloft.open(url, sweep_every=None) as kv:
        await keyloft_file.fill(kv, stored)
    db = BotDatabase(url)
    await keyloft_service.fill(db, stored_pairs(stored))
    await db.close()


def store(url: str) -> Entrant:
    async def enter(_: StoreSetup) -> keyloft_file.Keyloft:
        return keyloft_file.Keyloft(await keyloft.open(url, sweep_every=None))

    return Entrant(keyloft_file.NAME, enter, keyloft_file.EVERYTHING, durable=ON_DISK, loop="uvloop")


class Plugins(Contestant):
    """The plugins' storage."""

    def __init__(self, db: BotDatabase) -> None:
        self._db = db

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        def get(key: Key) -> Any:
            return self._db.kv_get(*key)

        def put(pair: Pair) -> Any:
            (plugin, key), value = pair
            return self._db.kv_set(plugin, key, value)

        return get if operation == "get" else put

    def seen(self, operation: Operation, answer: Any) -> Any:
        return answer["value"]

    def close(self) -> Awaitable[None]:
        return self._db.close()


def plugins(url: str) -> Entrant:
    async def enter(_: StoreSetup) -> Plugins:
        db = BotDatabase(url)
        await db.create_tables()
        return Plugins(db)

    return Entrant("Keyloft's plugin storage", enter, frozenset({"get", "set"}), durable=ON_DISK, loop="uvloop")


class Watchers(Struct, frozen=True):
    """One store that writes and one that watches, each with its own connections."""

    writer: keyloft.Store
    watcher: keyloft.Store


def watching(url: str, operations: int) -> Arm[Watchers, Writes[Key], keyloft.Entry]:
    """From the call of `set` until another store's watch reports it, one at a time."""

    async def set_up(_: Path) -> Watchers:
        return Watchers(await keyloft.open(url, sweep_every=None), await keyloft.open(url, sweep_every=None))

    async def run(stores: Watchers, plan: Writes[Key]) -> Timed[keyloft.Entry]:
        async with stores.watcher.watch(plan[0][0]) as watch:
            await anext(watch)

            async def seen(pair: Pair) -> keyloft.Entry:
                entry: keyloft.Entry
                version, [entry] = await asyncio.gather(stores.writer.set(*pair), anext(watch))
                same(entry.versionstamp, version)
                return entry

            return await timed(seen, plan)

    def check(_: Watchers, plan: Writes[Key], found: Timed[keyloft.Entry]) -> None:
        same([(entry.key, entry.value) for entry in found.answers], plan)

    async def tear_down(stores: Watchers) -> None:
        await stores.writer.aclose()
        await stores.watcher.aclose()

    plan = plans.rewrites(plans.as_tuple)
    return Arm("Keyloft, watch", operations, set_up, plan, run, check, tear_down, "uvloop", operations)
