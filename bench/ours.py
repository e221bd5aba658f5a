"""Keyloft's arms: each public call that has a bar, on a file with the settings that `keyloft.open` has by default."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import keyloft
from bench import plans
from bench.data import GROUP, Key, Pair, Value, group_of, key_of, shuffled, value_of
from bench.harness import Arm
from bench.plans import Listed, Reads, Writes, as_tuple, same

Entries: TypeAlias = list[keyloft.Entry]
Loop: TypeAlias = Literal["asyncio", "uvloop"]
CHUNK = 2000


def opened_to_read(stored: int) -> Callable[[Path], Awaitable[keyloft.Store]]:
    """A set-up: a file with so many keys, closed in between, so that they lie in the file and not in its log."""

    async def set_up(folder: Path) -> keyloft.Store:
        async with keyloft.open(folder / "keyloft.db", sweep_every=None) as kv:
            await fill(kv, stored)
        return await keyloft.open(folder / "keyloft.db", sweep_every=None)

    return set_up


def opened_to_write(
    stored: int, *, durability: Literal["full", "relaxed"] = "full", in_memory: bool = False
) -> Callable[[Path], Awaitable[keyloft.Store]]:
    """A set-up: a store that has been written to for a while.

    Filling it takes the log to its full length. While a log still grows, each sync costs about twice as much on ext4,
    which hides what else a set costs.
    """

    async def set_up(folder: Path) -> keyloft.Store:
        url = None if in_memory else folder / "keyloft.db"
        kv = await keyloft.open(url, durability=durability, sweep_every=None)
        await fill(kv, stored)
        return kv

    return set_up


async def fill(kv: keyloft.Store, stored: int) -> None:
    order = shuffled(stored)
    for first in range(0, stored, CHUNK):
        await kv.set_many([(key_of(index), value_of(index)) for index in order[first : first + CHUNK]])


def getting(
    stored: int, operations: int, *, name: str = "keyloft", in_memory: bool = False, turns: bool = False
) -> Arm[keyloft.Store, Reads[Key], Entries]:
    """`get`, awaited one by one; with `turns`, each in a turn of the event loop of its own, as a server's are."""

    async def run(kv: keyloft.Store, plan: Reads[Key]) -> Entries:
        return [await kv.get(key) for key in plan.keys]

    async def run_in_turns(kv: keyloft.Store, plan: Reads[Key]) -> Entries:
        found = []
        for key in plan.keys:
            found.append(await kv.get(key))
            await asyncio.sleep(0)
        return found

    return Arm(
        name=name,
        operations=operations,
        set_up=opened_to_write(stored, in_memory=True) if in_memory else opened_to_read(stored),
        plan=plans.reads(stored, as_tuple),
        run=run_in_turns if turns else run,
        check=_as_expected,
        tear_down=keyloft.Store.aclose,
    )


def getting_many(stored: int, operations: int) -> Arm[keyloft.Store, list[Reads[Key]], list[Entries]]:
    """`get_many` of ten keys."""

    async def run(kv: keyloft.Store, plan: list[Reads[Key]]) -> list[Entries]:
        return [await kv.get_many(ten.keys) for ten in plan]

    def check(kv: keyloft.Store, plan: list[Reads[Key]], found: list[Entries]) -> None:
        for ten, entries in zip(plan, found, strict=True):
            _as_expected(kv, ten, entries)

    return Arm(
        name="keyloft get_many",
        operations=operations,
        set_up=opened_to_read(stored),
        plan=plans.tens(stored, as_tuple),
        run=run,
        check=check,
        tear_down=keyloft.Store.aclose,
        lap=plans.TENS,
    )


def setting(
    stored: int,
    operations: int,
    *,
    name: str = "keyloft",
    workers: int = 1,
    durability: Literal["full", "relaxed"] = "full",
    in_memory: bool = False,
    loop: Loop = "asyncio",
) -> Arm[keyloft.Store, Writes[Key], list[int]]:
    """`set`, one by one in each of so many concurrent tasks."""

    async def work(kv: keyloft.Store, pairs: Sequence[Pair]) -> list[int]:
        return [await kv.set(key, value) for key, value in pairs]

    async def run(kv: keyloft.Store, plan: Writes[Key]) -> list[int]:
        if workers == 1:
            return await work(kv, plan)
        made = await asyncio.gather(*[work(kv, plan[first::workers]) for first in range(workers)])
        return list(itertools.chain.from_iterable(made))

    return Arm(
        name=name,
        operations=operations,
        set_up=opened_to_write(stored, durability=durability, in_memory=in_memory),
        plan=plans.writes(stored, as_tuple),
        run=run,
        check=stored_now,
        tear_down=keyloft.Store.aclose,
        loop=loop,
        lap=operations,
    )


def listing(stored: int, operations: int) -> Arm[keyloft.Store, list[int], Listed[keyloft.Entry]]:
    """`list` of a group of 1000 entries with their values."""

    async def run(kv: keyloft.Store, plan: list[int]) -> Listed[keyloft.Entry]:
        counts = []
        for number in plan:
            entries = [entry async for entry in kv.list(prefix=(group_of(number),))]
            counts.append(len(entries))
        return Listed(counts, entries)

    def check(_: keyloft.Store, plan: list[int], found: Listed[keyloft.Entry]) -> None:
        plans.check_lists(plan, found.counts, [(entry.key, entry.value) for entry in found.last])

    return Arm(
        name=f"keyloft list of {GROUP:,}",
        operations=operations,
        set_up=opened_to_read(stored),
        plan=plans.groups(stored),
        run=run,
        check=check,
        tear_down=keyloft.Store.aclose,
        lap=plans.LISTS,
    )


async def stored_now(kv: keyloft.Store, plan: Writes[Key], versions: list[int]) -> None:
    """The check of every round of sets: each has a version of its own, and each value is there."""
    same(len(set(versions)), len(plan))
    entries = await kv.get_many([key for key, _ in plan])
    found: list[Value] = [entry.value for entry in entries]
    same(found, [value for _, value in plan])


def _as_expected(_: keyloft.Store, plan: Reads[Key], entries: Entries) -> None:
    same([entry.key for entry in entries], plan.keys)
    same([entry.value for entry in entries], plan.expected)
