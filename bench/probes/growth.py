"""How the number of keys affects gets, sets, lists and sweeps: stores of a thousand to five million keys."""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import keyloft
from bench.arms.keyloft_file import EVERYTHING, Keyloft, fill
from bench.harness.contest import IN_FLIGHT, Contestant, Entrant, StoreSetup, Task, arm, same
from bench.harness.data import fresh_pair
from bench.harness.figures import Figure, Row, Verdict, of_rates
from bench.harness.race import Arm, Course, Timed

READS = (
    Task("growth-get", "get, one by one", "get"),
    Task("growth-list", "list of 1,000 entries with values", "list"),
)
WRITES = (
    Task("growth-set", "durable set, one by one", "set"),
    Task("growth-set-64", f"durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT),
)
_HELD_UP_TO = 1_000_000
_BAR = 0.5
_SAMPLE = 100_000
_BYTES_PER_KEY = 400
"""Upper bound for a file and its write-ahead log."""
_SWEPT = 500
_CHUNK = 100_000
"""Keys per commit while filling: five million keys by thousands would take four times as long."""


def fitting(sizes: tuple[int, ...], folder: Path) -> tuple[int, ...]:
    """The sizes that fit on the disk, and leave as much free again."""
    free = shutil.disk_usage(folder).free
    return tuple(size for size in sizes if size * _BYTES_PER_KEY * 2 < free)


class Grown(Keyloft):
    """A store of a certain size with a clock that the benchmark advances."""

    def __init__(self, kv: keyloft.Store, clock: keyloft.ManualClock, path: Path, stored: int) -> None:
        super().__init__(kv)
        self.clock = clock
        self.path = path
        self.stored = stored

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    def read_through(self) -> None:
        """Bring the file into the page cache, from which larger files may have displaced it.

        Another process reads it: closing a file would drop the locks that this process holds on it.
        """
        subprocess.run(["cat", str(self.path)], stdout=subprocess.DEVNULL, check=True, timeout=600)


class Growth:
    """Stores of several sizes, each filled once; rows that read run before rows that write."""

    def __init__(self, course: Course, sizes: tuple[int, ...], seconds: float) -> None:
        self._course = course
        self._sizes = sizes
        self._seconds = seconds
        self._grown: dict[int, Grown] = {}

    def rows(self) -> dict[str, Callable[[], Row]]:
        reads = {task.name: partial(self._points, task) for task in READS}
        writes = {task.name: partial(self._points, task) for task in WRITES}
        return {**reads, "growth-size": self._sizes_of_stores, **writes, "growth-sweep": self._sweeps}

    def _points(self, task: Task) -> Row:
        arms = [arm(self._entrant(size), task, size, self._seconds, home=name_of(size)) for size in self._sizes]
        return self._row(task.title, [replace(one, ready=_read_through) for one in arms], _BAR)

    def _sweeps(self) -> Row:
        title = f"sweep of {_SWEPT} expired entries"
        return self._row(title, [self._sweeping(size) for size in self._sizes if size > _SWEPT])

    def _row(self, title: str, arms: list[Arm[Any, Any, Any]], bar: float | None = None) -> Row:
        found = self._course.race(arms)
        least, most = name_of(self._sizes[0]), name_of(min(self._sizes[-1], _HELD_UP_TO))
        verdicts: tuple[Verdict, ...] = () if bar is None else of_rates(found, most, {least: bar})
        return Row(f"growth: {title}", tuple(found.values()), least, verdicts=verdicts)

    def _entrant(self, size: int) -> Entrant:
        def enter(setup: StoreSetup) -> Awaitable[Contestant]:
            return self._grow(setup.folder, size)

        return Entrant(name_of(size), enter, EVERYTHING, durable="on disk")

    async def _grow(self, folder: Path, size: int) -> Grown:
        path, clock = folder / "grown.db", keyloft.ManualClock()
        async with keyloft.open(path, clock=clock, sweep_every=None) as kv:
            await fill(kv, size, _CHUNK)
        kv = await keyloft.open(path, clock=clock, sweep_every=None)
        self._grown[size] = Grown(kv, clock, path, size)
        return self._grown[size]

    def _sweeping(self, size: int) -> Arm[Grown, list[int], int]:
        async def run(grown: Grown, due: list[int]) -> Timed[int]:
            await grown.kv.set_many([fresh_pair(index) for index in due], expire_in=1)
            grown.clock.advance(2)
            began = time.perf_counter()
            swept = await grown.kv.sweep()
            took = time.perf_counter() - began
            return Timed([swept], [took], took)

        async def check(grown: Grown, due: list[int], done: Timed[int]) -> None:
            same(done.answers, [_SWEPT])
            pairs = [fresh_pair(index) for index in due]
            same(any(entry.exists for entry in await grown.kv.get_many([key for key, _ in pairs])), False)
            await grown.kv.set_many(pairs)

        def plan(chances: random.Random, _: int) -> list[int]:
            return chances.sample(range(size), _SWEPT)

        return Arm(
            name=name_of(size),
            operations=1,
            set_up=lambda folder: self._grow(folder, size),
            plan=plan,
            run=run,
            check=check,
            tear_down=lambda grown: grown.close(),
            home=name_of(size),
        )

    def _sizes_of_stores(self) -> Row:
        """Memory of a fresh process that reads a sample, and size of the file."""
        self._points(READS[0])
        figures = []
        for size, grown in self._grown.items():
            held = _held_by_a_reader(grown.path, size)
            figures.append(Figure(f"{name_of(size)}, file", "bytes/key", (grown.file_bytes / size,)))
            figures.append(Figure(f"{name_of(size)}, memory", "MB", (held,)))
            figures.append(Figure(f"{name_of(size)}, memory per key", "bytes/key", (held * 1024 * 1024 / size,)))
        return Row(
            f"growth: size of the file, and memory of a fresh process that has read up to {_SAMPLE:,} keys "
            "(without the memory of Python and Keyloft)",
            figures=tuple(figures),
        )


def _read_through(grown: Any) -> None:
    grown.read_through()


def _held_by_a_reader(path: Path, size: int) -> float:
    """Megabytes."""
    command = [sys.executable, "-m", "bench.probes.memory_reader", str(path), str(size), str(_SAMPLE)]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    return float(after) - float(before)


def name_of(size: int) -> str:
    return f"{size:,} keys"
