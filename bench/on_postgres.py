"""Keyloft on PostgreSQL against asyncpg used the ordinary way, row by row: `scripts/bench postgres`.

Everybody uses the same server at a time of his own, over a Unix socket and on uvloop: one of our own that waits for the
disk, as servers do by default, or the one that KEYLOFT_TEST_POSTGRES names.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from bench import postgres_ours as ours
from bench import postgres_peers as peers
from bench.benchmark import Benchmark
from bench.contest import IN_FLIGHT, Entrant, Task, arm
from bench.data import GROUP
from bench.disk import syncing
from bench.figures import Row, of_rates
from bench.harness import Course
from bench.ours import NAME
from tools import postgres


class Scale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    watched: int
    """How many changes a round of watches has."""


FULL = Scale(100_000, 9, 0.25, 500)
QUICK = Scale(10_000, 2, 0.05, 50)


class Place(Struct, frozen=True):
    """A server to measure on."""

    url: str
    is_named: bool
    """Whether it is somebody else's, and its disk may be elsewhere."""

    def software(self) -> dict[str, str]:
        """What the figures depend on, beside what all benchmarks have in common.

        Raises:
            SystemExit: The server does not wait for the disk, so that its figures would say nothing.
        """
        names = ("server_version", "fsync", "synchronous_commit", "wal_sync_method", "shared_buffers")
        settings = {name: postgres.query(self.url, f"SHOW {name}")[0][0] for name in names}
        if settings["fsync"] != "on" or settings["synchronous_commit"] == "off":
            raise SystemExit(
                "this server acknowledges commits before they are on disk: set fsync and synchronous_commit"
            )
        shown = ", ".join(f"{name} {setting}" for name, setting in settings.items() if name != "server_version")
        return {
            "server": f"PostgreSQL {settings['server_version']}, {shown}",
            "asyncpg": version("asyncpg"),
            "uvloop": version("uvloop"),
        }


@contextmanager
def serving(folder: Path) -> Iterator[Place]:
    """The server that the environment names, or one whose files are in a folder of ours."""
    if named := postgres.named_server():
        yield Place(named, is_named=True)
        return
    folder.chmod(0o711)  # the server may have to run as another user
    with postgres.own_server(durable=True, within=folder) as url:
        yield Place(url, is_named=False)


NOTES = (
    "asyncpg pool: create_pool(url) as it is by default, ten connections; a release resets the connection, which is a "
    "trip to the server of its own",
)


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    scale = QUICK if quick else FULL
    place = closing.enter_context(serving(folder))
    course = closing.enter_context(Course(folder, scale.rounds))
    measure = _Measure(scale, course, place.url, closing)
    rows: dict[str, Callable[[], Row]] = {} if place.is_named else {"fsync": lambda: syncing(folder, scale.rounds)}
    for name, (task, peers_of, bar) in _RACES.items():
        rows[name] = partial(measure.race, task, peers_of, bar)
    return Benchmark(
        rows={**rows, "watch": measure.watches},
        notes=[
            f"{scale.stored:,} keys, {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up",
            *NOTES,
        ],
        about=place.software(),
    )


_Peers: TypeAlias = Callable[[str], list[Entrant]]


def _pools(url: str) -> list[Entrant]:
    return [peers.pool(url), peers.pool(url, reset=False)]


def _pools_and_plugins(url: str) -> list[Entrant]:
    return [*_pools(url), ours.plugins(url)]


def _pools_and_limit(url: str) -> list[Entrant]:
    return [*_pools(url), peers.held(url)]


def _pool(url: str) -> list[Entrant]:
    return [peers.pool(url)]


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
"""What is measured, beside whom, and how many times as much as the pool Keyloft is to reach."""


class _Measure:
    def __init__(self, scale: Scale, course: Course, server: str, closing: ExitStack) -> None:
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
        """A database with the same keys and values in Keyloft's tables and in that of the ordinary way."""
        url = self._closing.enter_context(postgres.fresh_database(self._server))
        asyncio.run(ours.fill(url, self._scale.stored))
        asyncio.run(peers.fill(url, self._scale.stored))
        postgres.query(url, "VACUUM ANALYZE")
        return url

    def race(self, task: Task, peers_of: _Peers, bar: float | None) -> Row:
        scale = self._scale
        url = self._to_write if task.writes else self._to_read
        entrants = [ours.store(url), *peers_of(url)]
        found = self._course.race([arm(entrant, task, scale.stored, scale.seconds) for entrant in entrants])
        bars = {} if bar is None else {peers.NAME: bar}
        return Row(task.title, tuple(found.values()), NAME, verdicts=of_rates(found, NAME, bars))

    def watches(self) -> Row:
        url, operations = self._to_write, self._scale.watched
        found = self._course.race([ours.watching(url, operations), peers.hearing(url, operations)])
        return Row("from the call of a durable set until a watch elsewhere shows it", tuple(found.values()))
