"""Runs workers against a cluster, makes faults meanwhile, and judges what the workers saw."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.withstand.faults import Arena, Ending, freeze_client, hold
from tests.withstand.history import Entered, read_history
from tests.withstand.verdict import Findings, judge, longest_gap, successes
from tests.withstand.worker import finish

_ROOT = Path(__file__).parents[2]


class MadeFault(Struct, frozen=True):
    """A fault, and what clients noticed of it."""

    name: str
    began: float
    ended: float
    """When the cluster was whole again."""
    writes_out: float
    """The longest time without an acknowledged write, in seconds."""
    reads_out: float


class Trial(Struct, frozen=True):
    """What a run found."""

    seconds: float
    faults: list[MadeFault]
    findings: Findings
    errors: dict[str, int]
    """How often callers got which error."""


class Load:
    """Workers at work."""

    def __init__(self, workers: "list[subprocess.Popen[str]]") -> None:
        self.workers = workers
        self._made: list[tuple[str, float, float]] = []
        self.began = time.monotonic()

    def suffer(self, name: str, begin: Callable[[], Ending], seconds: float, whole: Callable[[], None]) -> None:
        """Make a fault that lasts for so long, and wait until the cluster is whole again."""
        began = time.monotonic()
        end = begin()
        try:
            hold(seconds)
        finally:
            end()
        whole()
        self._made.append((name, began, time.monotonic()))

    def suffer_frozen_client(self, number: int, seconds: float) -> None:
        self.suffer("a client freezes", lambda: freeze_client(self.workers[number]), seconds, lambda: None)

    def faults(self, history: Sequence[Entered]) -> list[MadeFault]:
        writes, reads = successes(history, reads=False), successes(history, reads=True)
        return [
            MadeFault(name, began, ended, longest_gap(writes, began, ended), longest_gap(reads, began, ended))
            for name, began, ended in self._made
        ]


@contextmanager
def _workers(arena: Arena, folder: Path, count: int, seed: str, options: dict[str, Any]) -> Iterator[Load]:
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            arguments = [arena.url, f"w{number}", str(folder), f"{seed}-{number}", json.dumps(options)]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.withstand.worker", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=_ROOT,
                    start_new_session=True,
                )
            )
            _hear(started[-1], "ready")  # one after the other: the first one makes the tables
        yield Load(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _hear(process: "subprocess.Popen[str]", expected: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line == expected, f"a worker said {line!r} instead of {expected}; exit code {process.poll()}"


def _tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def tried(
    arena: Arena,
    folder: Path,
    make_faults: Callable[[Load], None],
    *,
    workers: int = 2,
    seed: str = "1",
    options: dict[str, Any] | None = None,
) -> Trial:
    """Run workers while faults are made, then judge their history, which stays in the folder."""
    began = time.monotonic()
    options = {"patience": 60.0} if options is None else options
    with _workers(arena, folder, workers, seed, options) as load:
        make_faults(load)
        for process in load.workers:
            _tell(process)
        for process in load.workers:
            _hear(process, "idle")
        asyncio.run(finish(arena.url, folder, {"patience": 60.0}))
        for process in load.workers:
            _tell(process)
        for process in load.workers:
            _hear(process, "ended")
    history = read_history(folder)
    findings = judge(history, reads_from_standbys=options.get("reads") == "standby")
    errors: dict[str, int] = {}
    for one in history:
        if one.error is not None:
            name = one.error.partition(":")[0]
            errors[name] = errors.get(name, 0) + 1
    return Trial(time.monotonic() - began, load.faults(history), findings, errors)
