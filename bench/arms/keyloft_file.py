"""Arms for Keyloft on a file: with the default settings of `keyloft.open`, and variants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

import keyloft
from bench.harness.contest import CHUNK, Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Pair, key_of, shuffled, value_of

Entries: TypeAlias = list[keyloft.Entry]
NAME = "Keyloft"
EVERYTHING: frozenset[Operation] = frozenset({"get", "set", "get_many", "list", "swap"})


class Keyloft(Contestant):
    """An open store."""

    def __init__(self, kv: keyloft.Store) -> None:
        self.kv = kv

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        direct: dict[Operation, Callable[[Any], Any]] = {
            "get": self.kv.get,
            "get_many": self.kv.get_many,
            "set": lambda pair: self.kv.set(*pair),
        }
        return direct.get(operation) or super().call(operation)

    async def list(self, group: str) -> Entries:
        return [entry async for entry in self.kv.list(prefix=(group,))]

    async def swap(self, pair: Pair) -> None:
        key, value = pair
        done = await self.kv.atomic().check(await self.kv.get(key)).set(key, value).commit()
        same(done.ok, True)

    def seen(self, operation: Operation, answer: Any) -> Any:
        match operation:
            case "get_many":
                return [entry.value for entry in answer]
            case "list":
                return [(entry.key, entry.value) for entry in answer]
            case _:
                return answer.value

    def close(self) -> Awaitable[None]:
        return self.kv.aclose()


class PerIteration(Keyloft):
    """Each get in its own iteration of the event loop, as in a server."""

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        async def get(key: Any) -> keyloft.Entry:
            entry = await self.kv.get(key)
            await asyncio.sleep(0)
            return entry

        return get if operation == "get" else super().call(operation)


async def _enter_expiring(setup: StoreSetup) -> Keyloft:
    return await enter(setup, expire_in=3600)


async def enter(setup: StoreSetup, expire_in: float | None = None) -> Keyloft:
    """Open and fill a file.

    For reads it is closed in between, so that the keys are in the file, not in its write-ahead log. For writes it stays
    open, with a log of full size: while a log grows, a sync takes twice as long on ext4, which hides the cost of a set.
    """
    task, path = setup.task, setup.folder / "keyloft.db"
    kv = await keyloft.open(path, durability="full" if task.durable else "relaxed", sweep_every=None)
    for pairs in setup.chunks(100 if task.large else CHUNK):
        await kv.set_many(pairs, expire_in=expire_in)
    if not task.writes:
        await kv.aclose()
        kv = await keyloft.open(path, sweep_every=None)
    return Keyloft(kv)


async def _enter_per_iteration(setup: StoreSetup) -> PerIteration:
    return PerIteration((await enter(setup)).kv)


async def _enter_relaxed(setup: StoreSetup) -> Keyloft:
    return await enter(replace(setup, task=replace(setup.task, durable=False)))


async def _enter_memory(setup: StoreSetup) -> Keyloft:
    kv = await keyloft.open(sweep_every=None)
    await fill(kv, setup.stored)
    return Keyloft(kv)


ENTRANT = Entrant(
    NAME, enter, EVERYTHING, durable="on disk (WAL, synced, group commit)", relaxed="the newest may be lost (WAL)"
)
ON_UVLOOP = replace(ENTRANT, name="Keyloft on uvloop", loop="uvloop")
RELAXED = replace(
    ENTRANT, name="Keyloft, durability=relaxed", enter=_enter_relaxed, durable=ENTRANT.relaxed, relaxed=None
)
PER_ITERATION = replace(ENTRANT, name="Keyloft, one get per event-loop iteration", enter=_enter_per_iteration)
EXPIRING = replace(ENTRANT, name="Keyloft, entries that expire in an hour", enter=_enter_expiring)
IN_MEMORY = replace(ENTRANT, name="Keyloft in memory", enter=_enter_memory, durable="lost (in memory)")


async def fill(kv: keyloft.Store, stored: int, chunk: int = CHUNK) -> None:
    order = shuffled(stored)
    for first in range(0, stored, chunk):
        await kv.set_many([(key_of(index), value_of(index)) for index in order[first : first + chunk]])
