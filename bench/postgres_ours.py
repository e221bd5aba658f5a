"""Keyloft's arms on PostgreSQL: calls of the store, and of the plugins' storage, on a database filled before."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

import keyloft
from bench import nats_service, ours, plans
from bench.data import GROUP, Key, Pair, group_of
from bench.harness import Arm, Checking, Plan, Planning, Running, T, Timed, timed
from bench.ours import Entries
from bench.plans import Reads, Writes, as_tuple, same
from keyloft.plugins import BotDatabase

NAME = "keyloft"
PLUGINS = "keyloft's plugin storage"
LISTS = 4
"""A lap of lists: their entries wait for the check."""

Answer: TypeAlias = dict[str, Any]
"""What the plugins' storage gives."""


async def fill(url: str, stored: int) -> None:
    """Put the keys into both spaces."""
    async with keyloft.open(url, sweep_every=None) as kv:
        await ours.fill(kv, stored)
    db = BotDatabase(url)
    await nats_service.fill(db, nats_service.stored_pairs(stored))
    await db.close()


def _arm(
    url: str,
    operations: int,
    plan: Planning[Plan],
    run: Running[keyloft.Store, Plan, T],
    check: Checking[keyloft.Store, Plan, T],
    lap: int | None = None,
) -> Arm[keyloft.Store, Plan, Timed[T]]:
    async def set_up(_: Path) -> keyloft.Store:
        return await keyloft.open(url, sweep_every=None)

    return Arm(NAME, operations, set_up, plan, run, check, keyloft.Store.aclose, "uvloop", lap or operations)


def getting(
    url: str, stored: int, operations: int, workers: int
) -> Arm[keyloft.Store, Reads[Key], Timed[keyloft.Entry]]:
    def run(kv: keyloft.Store, plan: Reads[Key]) -> Awaitable[Timed[keyloft.Entry]]:
        return timed(kv.get, plan.keys, workers)

    def check(_: keyloft.Store, plan: Reads[Key], found: Timed[keyloft.Entry]) -> None:
        _as_planned(plan, found.answers)

    return _arm(url, operations, plans.reads(stored, as_tuple), run, check)


def getting_many(url: str, stored: int, operations: int) -> Arm[keyloft.Store, list[Reads[Key]], Timed[Entries]]:
    """`get_many` of ten keys, one after the other."""

    def run(kv: keyloft.Store, plan: list[Reads[Key]]) -> Awaitable[Timed[Entries]]:
        return timed(lambda ten: kv.get_many(ten.keys), plan)

    def check(_: keyloft.Store, plan: list[Reads[Key]], found: Timed[Entries]) -> None:
        for ten, entries in zip(plan, found.answers, strict=True):
            _as_planned(ten, entries)

    return _arm(url, operations, plans.tens(stored, as_tuple), run, check)


def listing(url: str, stored: int, operations: int) -> Arm[keyloft.Store, list[int], Timed[Entries]]:
    """`list` of a group of 1000 entries with their values, one after the other."""

    def run(kv: keyloft.Store, plan: list[int]) -> Awaitable[Timed[Entries]]:
        async def listed(number: int) -> Entries:
            return [entry async for entry in kv.list(prefix=(group_of(number),), limit=GROUP)]

        return timed(listed, plan)

    def check(_: keyloft.Store, plan: list[int], found: Timed[Entries]) -> None:
        for number, entries in zip(plan, found.answers, strict=True):
            same([(entry.key, entry.value) for entry in entries], plans.expected_group(number))

    return _arm(url, operations, plans.groups(stored), run, check, LISTS)


def setting(url: str, stored: int, operations: int, workers: int) -> Arm[keyloft.Store, Writes[Key], Timed[int]]:
    def run(kv: keyloft.Store, plan: Writes[Key]) -> Awaitable[Timed[int]]:
        return timed(lambda pair: kv.set(*pair), plan, workers)

    async def check(kv: keyloft.Store, plan: Writes[Key], found: Timed[int]) -> None:
        await ours.stored_now(kv, plan, found.answers)

    return _arm(url, operations, plans.writes(stored, as_tuple), run, check)


def swapping(
    url: str, stored: int, operations: int, workers: int
) -> Arm[keyloft.Store, Writes[Key], Timed[int | None]]:
    """Read an entry, and replace it if it is still the same."""

    def run(kv: keyloft.Store, plan: Writes[Key]) -> Awaitable[Timed[int | None]]:
        async def swap(pair: Pair) -> int | None:
            key, value = pair
            done = await kv.atomic().check(await kv.get(key)).set(key, value).commit()
            return done.versionstamp

        return timed(swap, plan, workers)

    async def check(kv: keyloft.Store, plan: Writes[Key], found: Timed[int | None]) -> None:
        await ours.stored_now(kv, plan, [version for version in found.answers if version is not None])

    return _arm(url, operations, plans.writes(stored, as_tuple), run, check)


class Watchers(Struct, frozen=True):
    """One store that writes, and another one that watches; each has connections of its own."""

    writer: keyloft.Store
    watcher: keyloft.Store


def watching(url: str, operations: int) -> Arm[Watchers, Writes[Key], Timed[keyloft.Entry]]:
    """From the call of `set` until another store's watch shows what was set, one after the other."""

    async def set_up(_: Path) -> Watchers:
        return Watchers(await keyloft.open(url, sweep_every=None), await keyloft.open(url, sweep_every=None))

    async def run(stores: Watchers, plan: Writes[Key]) -> Timed[keyloft.Entry]:
        async with stores.watcher.watch(plan[0][0]) as watch:
            await anext(watch)

            async def seen(pair: Pair) -> keyloft.Entry:
                version, [entry] = await asyncio.gather(stores.writer.set(*pair), anext(watch))
                same(entry.versionstamp, version)
                return entry

            return await timed(seen, plan)

    def check(_: Watchers, plan: Writes[Key], found: Timed[keyloft.Entry]) -> None:
        same([(entry.key, entry.value) for entry in found.answers], plan)

    async def tear_down(stores: Watchers) -> None:
        await stores.writer.aclose()
        await stores.watcher.aclose()

    plan = plans.rewrites(as_tuple)
    return Arm("keyloft, watch", operations, set_up, plan, run, check, tear_down, "uvloop", operations)


def _plugin_arm(
    url: str,
    operations: int,
    plan: Planning[Plan],
    run: Running[BotDatabase, Plan, T],
    check: Checking[BotDatabase, Plan, T],
) -> Arm[BotDatabase, Plan, Timed[T]]:
    async def set_up(_: Path) -> BotDatabase:
        db = BotDatabase(url)
        await db.create_tables()
        return db

    return Arm(PLUGINS, operations, set_up, plan, run, check, BotDatabase.close, "uvloop", operations)


def getting_of_plugins(
    url: str, stored: int, operations: int, workers: int
) -> Arm[BotDatabase, Reads[Key], Timed[Answer]]:
    def run(db: BotDatabase, plan: Reads[Key]) -> Awaitable[Timed[Answer]]:
        return timed(lambda key: db.kv_get(*key), plan.keys, workers)

    def check(_: BotDatabase, plan: Reads[Key], found: Timed[Answer]) -> None:
        same(found.answers, [{"exists": True, "value": value} for value in plan.expected])

    return _plugin_arm(url, operations, plans.reads(stored, as_tuple), run, check)


def setting_of_plugins(
    url: str, stored: int, operations: int, workers: int
) -> Arm[BotDatabase, Writes[Key], Timed[None]]:
    def run(db: BotDatabase, plan: Writes[Key]) -> Awaitable[Timed[None]]:
        return timed(lambda pair: db.kv_set(*pair[0], pair[1]), plan, workers)

    async def check(db: BotDatabase, plan: Writes[Key], _: Timed[None]) -> None:
        found = await timed(lambda pair: db.kv_get(*pair[0]), plan, workers)
        same(found.answers, [{"exists": True, "value": value} for _, value in plan])

    return _plugin_arm(url, operations, plans.writes(stored, as_tuple), run, check)


def _as_planned(plan: Reads[Key], entries: Entries) -> None:
    same([entry.key for entry in entries], plan.keys)
    same([entry.value for entry in entries], plan.expected)
