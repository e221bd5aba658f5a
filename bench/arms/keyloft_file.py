"""Keyloft as a contestant: a file with the settings that `keyloft.open` has by default, and variants of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

import keyloft
from bench.harness.contest import CHUNK, Contestant, Entrant, Opening, Operation, same
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


class InTurns(Keyloft):
    """Each get in a turn of the event loop of its own, as a server's are."""

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        async def get(key: Any) -> keyloft.Entry:
            entry = await self.kv.get(key)
            await asyncio.sleep(0)
            return entry

        return get if operation == "get" else super().call(operation)


async def enter(opening: Opening) -> Keyloft:
    """To be read, the file is closed in between, so that the keys lie in it and not in its log.

    To be written to, it is not: filling it takes the log to its full length. While a log still grows, each sync costs
    about twice as much on ext4, which hides what else a set costs.
    """
    task, path = opening.task, opening.folder / "keyloft.db"
    kv = await keyloft.open(path, durability="full" if task.durable else "relaxed", sweep_every=None)
    for pairs in opening.chunks(100 if task.large else CHUNK):
        await kv.set_many(pairs)
    if not task.writes:
        await kv.aclose()
        kv = await keyloft.open(path, sweep_every=None)
    return Keyloft(kv)


async def _enter_in_turns(opening: Opening) -> InTurns:
    return InTurns((await enter(opening)).kv)


async def _enter_relaxed(opening: Opening) -> Keyloft:
    return await enter(replace(opening, task=replace(opening.task, durable=False)))


async def _enter_memory(opening: Opening) -> Keyloft:
    kv = await keyloft.open(sweep_every=None)
    await fill(kv, opening.stored)
    return Keyloft(kv)


ENTRANT = Entrant(
    NAME, enter, EVERYTHING, durable="on disk (WAL, synced, group commit)", relaxed="the last may be lost (WAL)"
)
ON_UVLOOP = replace(ENTRANT, name="Keyloft on uvloop", loop="uvloop")
RELAXED = replace(
    ENTRANT, name="Keyloft, durability=relaxed", enter=_enter_relaxed, durable=ENTRANT.relaxed, relaxed=None
)
IN_TURNS = replace(ENTRANT, name="Keyloft, a turn of the loop per get", enter=_enter_in_turns)
IN_MEMORY = replace(ENTRANT, name="Keyloft in memory", enter=_enter_memory, durable="gone")


async def fill(kv: keyloft.Store, stored: int, chunk: int = CHUNK) -> None:
    order = shuffled(stored)
    for first in range(0, stored, chunk):
        await kv.set_many([(key_of(index), value_of(index)) for index in order[first : first + chunk]])
