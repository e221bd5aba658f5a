"""Runs workers against a cluster, makes faults meanwhile, and judges what the workers saw."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.support.fork_server import ForkedProcess
from tests.withstand.faults import Arena, Ending, hold
from tests.withstand.history import BEGUN, Entered, read_history
from tests.withstand.verdict import Findings, judge, longest_gap, successes
from tests.withstand.worker import finish
from tools.machines import Machine

_ROOT = Path(__file__).parents[2]
_CALLS_SECONDS = 120.0


class MadeFault(Struct, frozen=True):
    """A fault, and what clients noticed of it."""

    name: str
    began: float
    ended: float
    """When the cluster was whole again."""
    writes_out: float
    """The longest time without an acknowledged write, in seconds."""
    reads_out: float


class ClusterTrial(Struct, frozen=True):
    """What a run found."""

    seconds: float
    faults: list[MadeFault]
    findings: Findings
    errors: dict[str, int]
    """How often callers got which error."""


class Workload:
    """Workers at work."""

    def __init__(self, folder: Path, start: "Callable[[str], WorkerProcess]") -> None:
        self._folder = folder
        self._start = start
        self.workers: list[WorkerProcess] = []
        self._started = 0
        self._made: list[tuple[str, float, float]] = []

    def join(self) -> None:
        """One more worker, which does not know what the others know of the cluster; returns at once."""
        self.workers.append(self._start(f"w{self._started}"))
        self._started += 1

    def wait_for_calls(self, count: int) -> None:
        """Return once all workers together have made so many more calls."""
        wanted, deadline = self._calls() + count, time.monotonic() + _CALLS_SECONDS
        while self._calls() < wanted:
            assert time.monotonic() < deadline, "the workers do nothing"
            time.sleep(0.02)

    def _calls(self) -> int:
        entered = [file.read_bytes() for file in self._folder.glob("*.jsonl")]
        return sum(lines.count(b"\n") - lines.count(BEGUN) for lines in entered)

    def suffer(
        self,
        name: str,
        begin: Callable[[], Ending],
        seconds: float,
        whole: Callable[[], None] = lambda: None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a fault that lasts for so long, and wait until the cluster is whole again."""
        began = time.monotonic()
        end = begin()
        try:
            meanwhile()
            hold(seconds)
        finally:
            end()
        whole()
        self._made.append((name, began, time.monotonic()))

    def suffer_frozen_client(self, number: int, seconds: float) -> None:
        self.suffer("a client freezes", self.workers[number].freeze, seconds)

    def suffer_killed_client(self, number: int) -> None:
        """It dies in the middle of what it does, and another one takes its place."""

        def die() -> Ending:
            self.workers.pop(number).end()
            return self.join

        self.suffer("a client dies", die, 0)

    def faults(self, history: Sequence[Entered]) -> list[MadeFault]:
        writes, reads = successes(history, reads=False), successes(history, reads=True)
        return [
            MadeFault(name, began, ended, longest_gap(writes, began, ended), longest_gap(reads, began, ended))
            for name, began, ended in self._made
        ]


class WorkerProcess:
    """A worker, and the lines that are exchanged with it."""

    def __init__(self, *arguments: str, machine: Machine | None = None) -> None:
        """Start it, on this machine, or on that of this process."""
        (stdin, its_input), (printed, stdout) = os.pipe(), os.pipe()
        arguments = "-m", "tests.withstand.worker", *arguments
        self._process: ForkedProcess | subprocess.Popen[bytes]
        if machine is None:
            self._process = ForkedProcess(arguments, cwd=_ROOT, stdin=stdin, stdout=stdout, stderr=2)
        else:
            command = [*machine.command, sys.executable, *arguments]
            self._process = subprocess.Popen(command, cwd=_ROOT, stdin=stdin, stdout=stdout)
        os.close(stdin)
        os.close(stdout)
        self._input, self._printed = os.fdopen(its_input, "w"), os.fdopen(printed)
        self._is_ready = False

    def hear(self, expected: str) -> None:
        """Wait for a line."""
        line = self._printed.readline().strip()
        assert line == expected, f"a worker said {line!r} instead of {expected}; exit code {self._process.poll()}"

    def wait_until_ready(self) -> None:
        """Return once it has opened the store."""
        if not self._is_ready:
            self.hear("ready")
            self._is_ready = True

    def go_on(self) -> None:
        """Say that it may enter its next phase."""
        self.wait_until_ready()
        self._input.write("\n")
        self._input.flush()

    def freeze(self) -> Ending:
        """It stops in the middle of what it does, as on a machine that sleeps."""
        self._process.send_signal(signal.SIGSTOP)
        return lambda: self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._printed.close()
        with suppress(BrokenPipeError):
            self._input.close()


@contextmanager
def _workers(
    arena: Arena, folder: Path, count: int, seed: str, pause: float, options: dict[str, Any]
) -> Iterator[Workload]:
    with ExitStack() as stack:

        def start(name: str) -> WorkerProcess:
            given = (arena.url, name, str(folder), f"{seed}-{name}", str(pause), json.dumps(options))
            worker = WorkerProcess(*given, machine=arena.client if name == "w0" else None)
            stack.callback(worker.end)
            return worker

        load = Workload(folder, start)
        for _ in range(count):
            load.join()
            load.workers[-1].wait_until_ready()  # one after the other: the first one makes the tables
        yield load


def tried(
    arena: Arena,
    folder: Path,
    make_faults: Callable[[Workload], None],
    *,
    workers: int = 2,
    seed: str = "1",
    pause: float = 0.01,
    options: dict[str, Any] | None = None,
) -> ClusterTrial:
    """Run workers while faults are made, then judge their history.

    Args:
        arena: The cluster.
        folder: An empty one, in which the history stays.
        make_faults: Returns when there were enough.
        workers: How many processes use the store.
        seed: Chooses what they do.
        pause: The longest that each of their tasks pauses after a call, in seconds.
        options: With which they open the store.
    """
    began = time.monotonic()
    options = {"patience": 60.0} if options is None else options
    with _workers(arena, folder, workers, seed, pause, options) as load:
        make_faults(load)
        for worker in load.workers:
            worker.go_on()
        for worker in load.workers:
            worker.hear("idle")
        asyncio.run(finish(arena.url, folder, {"patience": 60.0}))
        for worker in load.workers:
            worker.go_on()
        for worker in load.workers:
            worker.hear("ended")
    history = read_history(folder)
    findings = judge(history, reads_from_standbys=options.get("reads") == "standby")
    errors: dict[str, int] = {}
    for one in history:
        if one.error is not None:
            name = one.error.partition(":")[0]
            errors[name] = errors.get(name, 0) + 1
    return ClusterTrial(time.monotonic() - began, load.faults(history), findings, errors)
