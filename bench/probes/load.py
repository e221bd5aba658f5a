"""Latency under load: throughput against p99, alone, during a sweep and during a backup."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

import keyloft
from bench.arms.keyloft_file import fill
from bench.harness.children import child
from bench.harness.contest import CHUNK, same
from bench.harness.data import Key, Pair, Value, fresh_pair, key_of, value_of
from bench.harness.figures import Row
from bench.harness.race import Arm, Course, Timed, freeze_objects

CALM, SWEEP, BACKUP = "nothing else", "a sweep", "a backup"
_DUE = "due"

Backup: TypeAlias = Callable[[Path, Path], AbstractAsyncContextManager[object]]
"""Backs a file up to another one, again and again while the block lasts."""


def backing_up(path: Path, to: Path) -> AbstractAsyncContextManager[object]:
    """As `keyloft backup` does it, in another process."""
    return child("bench.probes.backups", path, to)


class LoadedStore(Struct, frozen=True):
    """A store, and the settings of the work that runs beside the calls."""

    kv: keyloft.Store
    clock: keyloft.ManualClock
    path: Path
    due: int
    """How many entries a sweep finds."""
    seconds: float
    """Length of a round; one with a sweep lasts as long as the sweep."""
    backup: Backup


Meanwhile: TypeAlias = Callable[[LoadedStore], AbstractAsyncContextManager[Awaitable[object]]]
"""Starts work beside the calls; the round ends when the awaitable it yields does."""


@asynccontextmanager
async def _nothing(loaded: LoadedStore) -> AsyncIterator[Awaitable[object]]:
    yield asyncio.sleep(loaded.seconds)


@asynccontextmanager
async def _sweep(loaded: LoadedStore) -> AsyncIterator[Awaitable[object]]:
    for first in range(0, loaded.due, CHUNK):
        chunk = range(first, min(loaded.due, first + CHUNK))
        await loaded.kv.set_many([((_DUE, *key_of(index)), value_of(index)) for index in chunk], expire_in=1)
    loaded.clock.advance(2)
    sweeping = asyncio.create_task(loaded.kv.sweep())
    yield sweeping
    same(await sweeping, loaded.due)


@asynccontextmanager
async def _backup(loaded: LoadedStore) -> AsyncIterator[Awaitable[object]]:
    async with loaded.backup(loaded.path, loaded.path.with_suffix(".copy")):
        yield asyncio.sleep(loaded.seconds)


_MEANWHILE: dict[str, Meanwhile] = {CALM: _nothing, SWEEP: _sweep, BACKUP: _backup}


def row(
    course: Course,
    operation: Literal["get", "set"],
    stored: int,
    workers: tuple[int, ...],
    seconds: float,
    backup: Backup = backing_up,
) -> Row:
    """One arm per number of concurrent callers and kind of work beside them."""

    async def set_up(folder: Path) -> LoadedStore:
        clock, path = keyloft.ManualClock(), folder / "loaded.db"
        kv = await keyloft.open(path, clock=clock, sweep_every=None)
        await fill(kv, stored)
        return LoadedStore(kv, clock, path, stored // 10, seconds, backup)

    arms = [
        Arm(
            name=name_of(meanwhile, callers),
            operations=1,
            set_up=set_up,
            plan=lambda chances, _: chances,
            run=_running(operation, stored, callers, _MEANWHILE[meanwhile]),
            check=_check,
            tear_down=lambda loaded: loaded.kv.aclose(),
            home=f"load, {operation}",
        )
        for meanwhile in _MEANWHILE
        for callers in workers
    ]
    found = course.race(arms)
    return Row(f"load: {operation} by concurrent callers, alone and beside other work", tuple(found.values()))


def _running(
    operation: Literal["get", "set"], stored: int, workers: int, meanwhile: Meanwhile
) -> Callable[[LoadedStore, random.Random], Awaitable[Timed[Any]]]:
    def asks(chances: random.Random) -> Iterator[Pair]:
        while True:
            index = chances.randrange(stored)
            yield fresh_pair(index) if operation == "set" else (key_of(index), value_of(index))

    async def run(loaded: LoadedStore, chances: random.Random) -> Timed[Any]:
        kv, todo, over = loaded.kv, asks(chances), asyncio.Event()
        seconds: list[float] = []
        answers: list[tuple[Pair, keyloft.Entry | None]] = []

        async def work() -> None:
            for key, value in todo:
                began = time.perf_counter()
                entry = None
                if operation == "get":
                    await asyncio.sleep(0)  # gives up the event loop before each get, as a server does
                    entry = await kv.get(key)
                else:
                    await kv.set(key, value)
                seconds.append(time.perf_counter() - began)
                answers.append(((key, value), entry))
                if over.is_set():
                    return

        async with meanwhile(loaded) as ending:
            freeze_objects()
            began = time.perf_counter()
            working = [asyncio.create_task(work()) for _ in range(workers)]
            await ending
            over.set()
            await asyncio.gather(*working)
            took = time.perf_counter() - began
        return Timed(answers, seconds, took)

    return run


async def _check(loaded: LoadedStore, _: object, done: Timed[Any]) -> None:
    """Raise unless gets read what is stored, and each written key holds one of its writes."""
    written: dict[Key, list[Value]] = {}
    for (key, value), entry in done.answers:
        if entry is None:
            written.setdefault(key, []).append(value)
        else:
            same(entry.value, value)
    found = await loaded.kv.get_many(list(written))
    same([entry.value in values for entry, values in zip(found, written.values(), strict=True)], [True] * len(found))


def name_of(meanwhile: str, callers: int) -> str:
    return f"{callers} callers, {meanwhile}"
