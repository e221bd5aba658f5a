"""Arms for Keyloft on PostgreSQL in one or several processes, of this tree or of another commit."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.arms.commits import ROOT, store_process
from bench.arms.postgres.keyloft_server import ON_DISK
from bench.arms.store_process import StoreProcess
from bench.harness.contest import COUNTERS, IN_FLIGHT, Contestant, Entrant, Operation, PlannedLap, StoreSetup, same
from bench.harness.data import key_of
from bench.harness.race import Timed
from tools import postgres


class StoreProcesses(Contestant):
    """Processes that share a database, and have a part of each lap; sums are made to counters of their own."""

    def __init__(self, processes: Sequence[StoreProcess], closing: ExitStack) -> None:
        self._processes = processes
        self._closing = closing

    async def lap(self, operation: Operation, planned: list[Any], workers: int) -> Timed[Any]:
        """The operations of all, in the time of the one that took longest."""
        count = len(self._processes)
        parts = [planned[number::count] for number in range(count)]
        if operation == "sum":
            parts = [[(str(number), *key) for key in part] for number, part in enumerate(parts)]
        laps = await asyncio.gather(
            *[process.lap(operation, part, workers) for process, part in zip(self._processes, parts, strict=True)]
        )
        seconds = [each for lap in laps for each in lap.seconds]
        answers: list[Any] = [None] * len(planned)
        for number, lap in enumerate(laps):
            answers[number::count] = lap.answers
        return Timed(answers, seconds, max(lap.took for lap in laps))

    async def check(self, operation: Operation, plan: PlannedLap, done: Timed[Any]) -> None:
        if operation == "swap":
            same([answer for answer in done.answers if answer is not True], [])
        await super().check(operation, plan, done)

    async def close(self) -> None:
        for process in self._processes:
            await process.close()
        self._closing.close()


async def sharing(
    url: str, source: Path, setup: StoreSetup, processes: int, use: str = "writes", closing: ExitStack | None = None
) -> StoreProcesses:
    """So many processes with the tuple store of this source, on one database; the first one fills it.

    Args:
        url: Of the database.
        source: Where the store's code is.
        setup: What the database is filled with.
        processes: How many.
        use: As `keyloft_process` takes it.
        closing: What is closed with them.
    """
    started: list[StoreProcess] = []
    contestant = StoreProcesses(started, closing or ExitStack())
    try:
        for number in range(processes):
            own = replace(setup, stored=0 if number else setup.stored)
            started.append(await store_process(own, source, "tuples", url, use))
    except BaseException:
        await contestant.close()
        raise
    return contestant


def entrant(name: str, source: Path, server: str, processes: int = 1) -> Entrant:
    """So many processes with the tuple store of this source, in a database of their own on a server."""

    async def enter(setup: StoreSetup) -> StoreProcesses:
        closing = ExitStack()
        url = closing.enter_context(postgres.fresh_database(server))
        contestant = await sharing(url, source, setup, processes, closing=closing)
        try:
            if setup.task.operation == "sum":
                counters = [key_of(index) for index in range(COUNTERS) for _ in range(processes)]
                await contestant.lap("sum", counters, IN_FLIGHT)
            postgres.query(url, "VACUUM ANALYZE")
        except BaseException:
            await contestant.close()
            raise
        return contestant

    return Entrant(name, enter, frozenset({"get", "set", "swap", "sum"}), durable=ON_DISK, loop="uvloop")


def readers(name: str, url: str, processes: int, use: str) -> Entrant:
    """So many processes that read one database; with the use `standby`, from its standbys."""

    async def enter(setup: StoreSetup) -> StoreProcesses:
        return await sharing(url, ROOT / "src", setup, processes, use)

    return Entrant(name, enter, frozenset({"get"}), durable=ON_DISK, loop="uvloop")
