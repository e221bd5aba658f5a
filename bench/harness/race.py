"""Runs arms in interleaved rounds: what every benchmark is made of.

An `Arm` is one store at one operation: set-up, plan, operation, check, tear-down. A `Course` races several: every round
runs each arm once, in random order, so that other load on the machine hits all of them alike.
"""

import asyncio
import gc
import inspect
import random
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import uvloop
from msgspec import Struct

from bench.harness.figures import CPU, PERCENTS, RATE, Figure, Reached, percentile

State = TypeVar("State")
Plan = TypeVar("Plan")
T = TypeVar("T")
Ask = TypeVar("Ask")
Maybe: TypeAlias = T | Awaitable[T]

_REST_SECONDS = 0.1
"""Time to finish what a round leaves behind, such as a checkpoint. It counts to this round's CPU time, not to the next
arm's."""


class Unavailable(Exception):
    """A store can't take part on this machine; the text gives the reason."""


class Timed(Struct, Generic[T], frozen=True):
    """Answers and times of a lap's operations, in their order, and the time of the whole lap."""

    answers: list[T]
    seconds: list[float]
    took: float


Planning: TypeAlias = Callable[[random.Random, int], Plan]
Running: TypeAlias = Callable[[State, Plan], Maybe[Timed[T]]]
Checking: TypeAlias = Callable[[State, Plan, Timed[T]], Maybe[None]]


class Arm(Struct, Generic[State, Plan, T], frozen=True):
    """One store at one operation. Every step may be a plain or a coroutine function; `run` takes the times itself."""

    name: str
    operations: int
    """Operations of a round; with `seconds`, operations of the first warm-up, whose time sets the number."""
    set_up: Callable[[Path], Maybe[State]]
    """Opens and fills the store in a folder of its own."""
    plan: Planning[Plan]
    """Plans the next operations."""
    run: Running[State, Plan, T]
    check: Checking[State, Plan, T]
    """Raises unless the round did what was planned, so that no arm wins by doing nothing."""
    tear_down: Callable[[State], Maybe[None]]
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    lap: int = 2000
    """A round is timed in laps of at most this many operations: results held for the check burden the garbage
    collector, and would slow the fastest arm most."""
    seconds: float | None = None
    """How long a round is to take."""
    home: str | None = None
    """Arms of one home share the store that the first of them set up, until the course ends. Readers run first."""
    kept: str = ""
    """What happens to an acknowledged write if power fails."""
    cpu_seconds: Callable[[State], float] | None = None
    """CPU seconds that the serving process has used so far."""
    ready: Callable[[State], None] | None = None
    """Called once all arms are set up, which may take minutes, before the first round."""


def freeze_objects() -> None:
    """Exclude all objects that exist now from garbage collection until the race is over.

    A collection of all of them before each lap would take longer than the laps.
    """
    gc.collect()
    gc.freeze()


async def timed(call: Callable[[Ask], Awaitable[T]], asks: Sequence[Ask], workers: int = 1) -> Timed[T]:
    """Make one call per ask, in `workers` concurrent tasks, each one call at a time."""
    answers: list[Any] = [None] * len(asks)
    seconds = [0.0] * len(asks)
    now = time.perf_counter

    async def work(todo: Iterator[tuple[int, Ask]]) -> None:
        before = now()
        for index, ask in todo:
            answers[index] = await call(ask)
            after = now()
            seconds[index] = after - before
            before = after

    todo = iter(enumerate(asks))
    freeze_objects()
    began = now()
    if workers == 1:
        await work(todo)
    else:
        await asyncio.gather(*[work(todo) for _ in range(workers)])
    took = now() - began
    return Timed(answers, seconds, took)


def timed_inline(call: Callable[[Ask], T], asks: Sequence[Ask]) -> Timed[T]:
    """The same for a library without asyncio: each call blocks the next."""
    answers: list[Any] = [None] * len(asks)
    seconds = [0.0] * len(asks)
    now = time.perf_counter
    freeze_objects()
    began = before = now()
    for index, ask in enumerate(asks):
        answers[index] = call(ask)
        after = now()
        seconds[index] = after - before
        before = after
    took = now() - began
    return Timed(answers, seconds, took)


def timed_in_threads(
    call: Callable[[Ask], T], asks: Sequence[Ask], workers: int, enter: Callable[[], object] = lambda: None
) -> Timed[T]:
    """The same in several threads, each one call at a time. Each calls `enter` before the time begins."""
    answers: list[Any] = [None] * len(asks)
    seconds = [0.0] * len(asks)
    now = time.perf_counter
    todo = iter(list(enumerate(asks)))  # of a list: threads may share it
    start = threading.Barrier(workers + 1)
    ended: list[float] = []

    def work() -> None:
        enter()
        start.wait()
        before = now()
        for index, ask in todo:
            answers[index] = call(ask)
            after = now()
            seconds[index] = after - before
            before = after
        ended.append(now())  # not after `join`: to close what the thread has opened takes time, too

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    freeze_objects()
    start.wait()
    began = now()
    for thread in threads:
        thread.join()
    took = max(ended) - began
    return Timed(answers, seconds, took)


class Course:
    """Runs races: holds event loops, a folder per arm, and the stores that stay open until the end."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.absent: dict[str, str] = {}
        """Arms that could not take part, and why."""
        self._closing = ExitStack()
        self._runners: dict[str, asyncio.Runner] = {}
        self._homes: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._runners = {
            "asyncio": self._closing.enter_context(asyncio.Runner()),
            "uvloop": self._closing.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop)),
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def run(self, coroutine: Any, loop: Literal["asyncio", "uvloop"] = "asyncio") -> Any:
        return self._runners[loop].run(coroutine)

    def race(self, arms: Sequence[Arm[Any, Any, Any]]) -> dict[str, Reached]:
        """Return what each arm reached, by its name; one round before the first warms up."""
        with ExitStack() as closing:
            closing.callback(gc.unfreeze)
            entered = []
            for arm in arms:
                try:
                    entered.append(_ArmRounds(arm, self._state_of(arm, closing), self._runners[arm.loop]))
                except Unavailable as reason:
                    self.absent[arm.name] = str(reason)
            chances = random.Random(1)
            for rounds_of_arm in entered:
                rounds_of_arm.make_ready()
            for rounds_of_arm in entered:
                rounds_of_arm.warm_up(chances)
            for _ in range(self.rounds):
                for rounds_of_arm in chances.sample(entered, len(entered)):
                    rounds_of_arm.take(chances)
            return {rounds_of_arm.arm.name: rounds_of_arm.reached() for rounds_of_arm in entered}

    def _state_of(self, arm: Arm[Any, Any, Any], closing: ExitStack) -> Any:
        if arm.home in self._homes:
            return self._homes[arm.home]
        if arm.home is not None:
            closing = self._closing
        own = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=self.folder)))
        runner = self._runners[arm.loop]
        state = runner.run(_settled(arm.set_up, own))
        closing.callback(lambda: runner.run(_settled(arm.tear_down, state)))
        if arm.home is not None:
            self._homes[arm.home] = state
        return state


class _ArmRounds:
    """One arm's rounds."""

    def __init__(self, arm: Arm[Any, Any, Any], state: Any, runner: asyncio.Runner) -> None:
        self.arm = arm
        self._state = state
        self._runner = runner
        self._operations = arm.operations
        self._figures: dict[str, tuple[str, list[float]]] = {}

    def make_ready(self) -> None:
        if self.arm.ready is not None:
            self.arm.ready(self._state)

    def warm_up(self, chances: random.Random) -> None:
        """One round, or two with `seconds`: the first is too cold to show how many operations fill the time."""
        self._warm(chances)
        if self.arm.seconds is not None:
            self._warm(chances)

    def _warm(self, chances: random.Random) -> None:
        took = self._runner.run(self._round(chances)).took
        if self.arm.seconds is not None:
            self._operations = max(1, int(self._operations * self.arm.seconds / took))

    def take(self, chances: random.Random) -> None:
        done = self._runner.run(self._round(chances))
        self._add(RATE, "/s", len(done.seconds) / done.took)
        for percent in PERCENTS:
            self._add(f"p{percent}", "ms", percentile(done.seconds, percent) * 1000)
        if self.arm.cpu_seconds is not None:
            self._add(CPU, "µs", done.cpu_seconds / len(done.seconds) * 1e6)

    def reached(self) -> Reached:
        name = self.arm.name
        figures = {
            what: Figure(name if what == RATE else f"{name}, {what}", unit, tuple(rounds))
            for what, (unit, rounds) in self._figures.items()
        }
        return Reached(name, figures, self.arm.kept)

    def _add(self, what: str, unit: str, amount: float) -> None:
        self._figures.setdefault(what, (unit, []))[1].append(amount)

    async def _round(self, chances: random.Random) -> "_Round":
        arm, state = self.arm, self._state
        done = _Round()
        for first in range(0, self._operations, arm.lap):
            plan = arm.plan(chances, min(arm.lap, self._operations - first))
            before = arm.cpu_seconds(state) if arm.cpu_seconds else 0.0
            lap: Timed[Any] = await _settled(arm.run, state, plan)
            if arm.cpu_seconds:
                await asyncio.sleep(_REST_SECONDS)
                done.cpu_seconds += arm.cpu_seconds(state) - before
            done.took += lap.took
            done.seconds += lap.seconds
            await _settled(arm.check, state, plan, lap)
        return done


class _Round(Struct):
    """The sums over a round's laps."""

    took: float = 0.0
    seconds: list[float] = []
    cpu_seconds: float = 0.0


async def _settled(step: Callable[..., Maybe[T]], *given: Any) -> T:
    outcome = step(*given)
    if inspect.isawaitable(outcome):
        settled: T = await outcome
        return settled
    return outcome
