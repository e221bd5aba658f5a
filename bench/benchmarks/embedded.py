"""The embedded store against its bars, row by row: `scripts/bench embedded`."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench.arms import apsw_loop, keyloft_file, python_libraries, sqlalchemy_orm
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Entrant, Task, arm
from bench.harness.figures import Reached, Row, Verdict, of_rates
from bench.harness.race import Course
from bench.probes import watches
from bench.probes.long_calls import holding_the_loop
from bench.probes.memory import remembering
from bench.probes.sweep import sweeping


class EmbeddedScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""
    sweep_stored: int
    sweep_expired: int
    sweep_rounds: int
    watches: int


FULL = EmbeddedScale(100_000, 9, 0.15, 1_000_000, 10_000, 5, 10_000)
QUICK = EmbeddedScale(10_000, 3, 0.03, 20_000, 2_000, 1, 500)


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    scale = QUICK if quick else FULL
    measure = _EmbeddedRows(scale, closing.enter_context(Course(folder, scale.rounds)))
    return Benchmark(
        rows={
            "get": measure.gets,
            "get-expiring": measure.expiring_gets,
            "get_many": measure.many_gets,
            "set-concurrent": measure.concurrent_sets,
            "set": measure.lone_sets,
            "list": measure.lists,
            "memory": measure.memory,
            "sweep": lambda: sweeping(folder, scale.sweep_stored, scale.sweep_expired, scale.sweep_rounds),
            "long-calls": lambda: holding_the_loop(folder, scale.stored, scale.sweep_rounds),
            "watches": lambda: watches.beside_watches(folder, scale.watches, scale.watches // 10, scale.sweep_rounds),
            "watch-stall": lambda: watches.stalled_by_another_process(folder, scale.watches, scale.sweep_rounds),
            "watch-prefix": lambda: watches.large_prefix(folder, scale.sweep_stored, scale.sweep_rounds),
            "resident": lambda: remembering(folder, scale.stored, scale.sweep_rounds),
        },
        notes=[
            f"{scale.stored:,} keys, {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up"
        ],
    )


class _EmbeddedRows:
    def __init__(self, scale: EmbeddedScale, course: Course) -> None:
        self._scale = scale
        self._course = course

    def _race(self, task: Task, *entrants: Entrant) -> dict[str, Reached]:
        scale = self._scale
        return self._course.race([arm(entrant, task, scale.stored, scale.seconds) for entrant in entrants])

    def _row(self, task: Task, entrants: list[Entrant], bars: Mapping[str, float] | None = None) -> Row:
        found = self._race(task, *entrants)
        return Row(
            task.title,
            tuple(found.values()),
            keyloft_file.NAME,
            verdicts=of_rates(found, keyloft_file.NAME, bars or {}),
        )

    def gets(self) -> Row:
        entrants = [
            keyloft_file.ENTRANT,
            sqlalchemy_orm.ENTRANT,
            python_libraries.DISKCACHE,
            keyloft_file.PER_ITERATION,
            python_libraries.AIOSQLITE,
            apsw_loop.ENTRANT,
        ]
        bars = {sqlalchemy_orm.ENTRANT.name: 100, python_libraries.DISKCACHE.name: 1.4}
        return self._row(Task("get", "get, awaited one by one", "get"), entrants, bars)

    def expiring_gets(self) -> Row:
        entrants = [keyloft_file.EXPIRING, keyloft_file.ENTRANT]
        found = self._race(Task("get", "", "get"), *entrants)
        verdicts = of_rates(found, keyloft_file.EXPIRING.name, {keyloft_file.NAME: 0.87})
        return Row(
            "get of entries that expire, one by one", tuple(found.values()), keyloft_file.NAME, verdicts=verdicts
        )

    def many_gets(self) -> Row:
        entrants = [keyloft_file.ENTRANT, python_libraries.AIOSQLITE, python_libraries.AIOSQLITE_ONE_BY_ONE]
        bars = {python_libraries.AIOSQLITE_ONE_BY_ONE.name: 5}
        return self._row(Task("get_many", "get_many of 10", "get_many"), entrants, bars)

    def concurrent_sets(self) -> Row:
        task = Task("set-concurrent", f"durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT)
        return self._row(task, [keyloft_file.ENTRANT, apsw_loop.ENTRANT], {apsw_loop.NAME: 4})

    def lone_sets(self) -> Row:
        task = Task("set", "durable set, one by one", "set")
        found = self._race(task, keyloft_file.ENTRANT, apsw_loop.ENTRANT, keyloft_file.ON_UVLOOP, keyloft_file.RELAXED)
        verdicts: tuple[Verdict, ...] = (
            *of_rates(found, keyloft_file.NAME, {apsw_loop.NAME: 0.5}),
            *of_rates(found, keyloft_file.ON_UVLOOP.name, {apsw_loop.NAME: 0.6}),
        )
        return Row(task.title, tuple(found.values()), keyloft_file.NAME, verdicts=verdicts)

    def lists(self) -> Row:
        task = Task("list", "list of 1,000 entries with values", "list")
        return self._row(task, [keyloft_file.ENTRANT, apsw_loop.BY_LIKE], {apsw_loop.LIKE: 5})

    def memory(self) -> Row:
        gets = self._race(Task("get", "", "get"), replace(keyloft_file.IN_MEMORY, name="get"))
        sets = self._race(Task("set", "", "set"), replace(keyloft_file.IN_MEMORY, name="set"))
        return Row("in memory, one by one", (*gets.values(), *sets.values()))
