"""Keyloft on PostgreSQL against asyncpg used the ordinary way, row by row: `scripts/bench postgres`.

All arms use the same server, one at a time, over a Unix socket and on uvloop: a new server that waits for the disk, as
servers do by default, or the one that KEYLOFT_TEST_POSTGRES names. With `--against COMMIT`, rows whose names end with
`-before` compare this tree with that commit.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from bench.arms.commits import ROOT, source_of
from bench.arms.keyloft_file import NAME
from bench.arms.postgres import asyncpg_pool, keyloft_server, processes
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Entrant, Task, arm
from bench.harness.data import GROUP
from bench.harness.figures import Reached, Row, of_rates
from bench.harness.postgres_server import serving
from bench.harness.race import Course
from bench.probes.disk import syncing
from bench.probes.stopped import beside_a_stopped_client
from bench.probes.sweep import cleaning_up
from tools import postgres


class PostgresScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    sum_seconds: float
    """The same for sums: processes that share a round don't end it at the same moment."""
    watched: int
    """How many changes a round of watches has."""
    stops: int
    stop_seconds: float
    expired: int
    """How many entries a round of clean-ups removes."""


FULL = PostgresScale(100_000, 9, 0.25, 1.0, 500, 25, 2.0, 10_000)
QUICK = PostgresScale(10_000, 2, 0.05, 0.05, 50, 2, 0.2, 500)


NOTES = (
    "asyncpg pool: create_pool(url) with default settings, ten connections; a release resets the connection, which is "
    "another round trip to the server",
)


def prepared(quick: bool, folder: Path, closing: ExitStack, commit: str | None = None) -> Benchmark:
    scale = QUICK if quick else FULL
    server = closing.enter_context(serving(folder))
    course = closing.enter_context(Course(folder, scale.rounds))
    measure = _PostgresRows(scale, course, server.url, closing)
    rows: dict[str, Callable[[], Row]] = {} if server.is_named else {"fsync": lambda: syncing(folder, scale.rounds)}
    for name, (task, peers_of, bar) in _RACES.items():
        rows[name] = partial(measure.race, task, peers_of, bar)
    rows |= {"sums": measure.sums, "watch": measure.watches, "stopped": measure.stopped, "sweep": measure.sweep}
    if commit is not None:
        source = source_of(commit, folder)
        rows |= {
            f"{name}-before": partial(measure.against, task, commit, source, bar)
            for name, (task, bar) in _BEFORE.items()
        }
    return Benchmark(
        rows=rows,
        notes=[
            f"{scale.stored:,} keys, {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up; "
            f"rounds of sums: {scale.sum_seconds} s",
            *NOTES,
        ],
        about=server.software(),
    )


_Peers: TypeAlias = Callable[[str], list[Entrant]]


def _pools(url: str) -> list[Entrant]:
    return [asyncpg_pool.pool(url), asyncpg_pool.pool(url, reset=False)]


def _pools_and_plugins(url: str) -> list[Entrant]:
    return [*_pools(url), keyloft_server.plugins(url)]


def _pools_and_limit(url: str) -> list[Entrant]:
    return [*_pools(url), asyncpg_pool.held(url)]


def _pool(url: str) -> list[Entrant]:
    return [asyncpg_pool.pool(url)]


_RACES: dict[str, tuple[Task, _Peers, float | None]] = {
    "get": (Task("get", f"get, {IN_FLIGHT} concurrent", "get", IN_FLIGHT), _pools_and_plugins, 5),
    "set": (Task("set", f"durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT), _pools_and_plugins, 3),
    "get-lone": (Task("get-lone", "get, one after the other", "get"), _pools_and_limit, 1),
    "set-lone": (Task("set-lone", "durable set, one after the other", "set"), _pools, None),
    "list": (Task("list", f"list of {GROUP:,} entries with values, one after the other", "list"), _pools_and_limit, 1),
    "get_many": (Task("get_many", "get_many of 10, one after the other", "get_many"), _pool, None),
    "atomic": (
        Task("atomic", f"durable check-and-set of different keys, {IN_FLIGHT} concurrent", "swap", IN_FLIGHT),
        _pool,
        None,
    ),
}
"""Task, peers, and how many times the pool's rate Keyloft must reach."""

_SUMS = Task("sums", f"durable sum, {IN_FLIGHT} concurrent in each process", "sum", IN_FLIGHT)
_ONE, _TWO, _FOUR = "1 process", "2 processes", "4 processes"
_BEFORE: dict[str, tuple[Task, float]] = {
    "sums": (_SUMS, 1.15),
    "set": (_RACES["set"][0], 0.95),
    "set-lone": (_RACES["set-lone"][0], 0.95),
    "atomic": (_RACES["atomic"][0], 0.95),
    "get": (_RACES["get"][0], 0.95),
}
"""Task, and how many times the rate of an earlier commit this tree must reach."""


class _PostgresRows:
    def __init__(self, scale: PostgresScale, course: Course, server: str, closing: ExitStack) -> None:
        self._scale = scale
        self._course = course
        self._server = server
        self._closing = closing

    @cached_property
    def _to_read(self) -> str:
        return self._filled()

    @cached_property
    def _to_write(self) -> str:
        return self._filled()

    def _filled(self) -> str:
        """A database with the same entries in Keyloft's tables and in the table of the asyncpg arms."""
        url = self._closing.enter_context(postgres.fresh_database(self._server))
        asyncio.run(keyloft_server.fill(url, self._scale.stored))
        asyncio.run(asyncpg_pool.fill(url, self._scale.stored))
        postgres.query(url, "VACUUM ANALYZE")
        return url

    def race(self, task: Task, peers_of: _Peers, bar: float | None) -> Row:
        scale = self._scale
        url = self._to_write if task.writes else self._to_read
        entrants = [keyloft_server.store(url), *peers_of(url)]
        found = self._course.race([arm(entrant, task, scale.stored, scale.seconds) for entrant in entrants])
        bars = {} if bar is None else {asyncpg_pool.NAME: bar}
        return Row(task.title, tuple(found.values()), NAME, verdicts=of_rates(found, NAME, bars))

    def _race_processes(self, task: Task, entrants: list[Entrant]) -> dict[str, Reached]:
        scale = self._scale
        seconds = scale.sum_seconds if task is _SUMS else scale.seconds
        return self._course.race([arm(entrant, task, scale.stored, seconds) for entrant in entrants])

    def sums(self) -> Row:
        entrants = [
            processes.entrant(name, ROOT / "src", self._server, count)
            for name, count in ((_ONE, 1), (_TWO, 2), (_FOUR, 4))
        ]
        found = self._race_processes(_SUMS, entrants)
        verdicts = (*of_rates(found, _TWO, {_ONE: 1.5}), *of_rates(found, _FOUR, {_ONE: 1.3}))
        return Row(_SUMS.title, tuple(found.values()), _ONE, verdicts=verdicts)

    def against(self, task: Task, commit: str, source: Path, bar: float) -> Row:
        here, before = "Keyloft, this tree", f"Keyloft, {commit}"
        entrants = [processes.entrant(name, of, self._server) for name, of in ((here, ROOT / "src"), (before, source))]
        found = self._race_processes(task, entrants)
        return Row(task.title, tuple(found.values()), before, verdicts=of_rates(found, here, {before: bar}))

    def stopped(self) -> Row:
        return beside_a_stopped_client(self._to_write, self._scale.stops, self._scale.stop_seconds)

    def sweep(self) -> Row:
        return cleaning_up(self._to_write, self._scale.expired, self._scale.rounds)

    def watches(self) -> Row:
        url, operations = self._to_write, self._scale.watched
        found = self._course.race([keyloft_server.watching(url, operations), asyncpg_pool.hearing(url, operations)])
        return Row("from the call of a durable set until another store's watch reports it", tuple(found.values()))
