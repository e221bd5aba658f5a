"""Runs arms in interleaved rounds: what every benchmark is made of.

An `Arm` is one contestant in one operation: set-up, plan, operation, check, tear-down. A `Course` races several: each
has its turn in every round, in an order that chance decides, so that a noisy neighbour hits all of them alike.
"""

import asyncio
import gc
import inspect
import random
import tempfile
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
"""Time to finish what a round leaves behind, such as taking in the log: it counts to the round's CPU time, and is not
to fall into the next one's turn."""


class Unavailable(Exception):
    """A contestant can't take part here; its text says why."""


class Timed(Struct, Generic[T], frozen=True):
    """What came of a lap's operations, in their order, how long each one took, and all of them."""

    answers: list[T]
    seconds: list[float]
    took: float


Planning: TypeAlias = Callable[[random.Random, int], Plan]
Running: TypeAlias = Callable[[State, Plan], Maybe[Timed[T]]]
Checking: TypeAlias = Callable[[State, Plan, Timed[T]], Maybe[None]]


class Arm(Struct, Generic[State, Plan, T], frozen=True):
    """One contestant. Every step may be a plain or a coroutine function; `run` says itself how long it took."""

    name: str
    operations: int
    """How many operations a round has; with `seconds`, how many there are at first, to learn how long they take."""
    set_up: Callable[[Path], Maybe[State]]
    """Opens and fills the store in a folder of its own."""
    plan: Planning[Plan]
    """What is to be done next, for so many operations."""
    run: Running[State, Plan, T]
    check: Checking[State, Plan, T]
    """Raises unless the round did what was planned: no arm wins by doing nothing."""
    tear_down: Callable[[State], Maybe[None]]
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    lap: int = 2000
    """A round is timed in laps of at most so many operations: the results that wait for their check burden the garbage
    collector, and would weigh on the faster arm most."""
    seconds: float | None = None
    """How long a round is to take."""
    home: str | None = None
    """Arms of one home share what the first of them set up, until the course ends. Those that read come first."""
    kept: str = ""
    """What becomes of a write that was acknowledged, if power fails."""
    cpu_seconds: Callable[[State], float] | None = None
    """What the process that serves has used up so far."""
    ready: Callable[[State], None] | None = None
    """Called when all arms are set up, which may take minutes, and before the first round."""


def set_aside() -> None:
    """What is held by now is no business of the garbage collector in what follows.

    It stays aside until the race is over: to look through all of it before each lap would take longer than the laps.
    """
    gc.collect()
    gc.freeze()


async def timed(call: Callable[[Ask], Awaitable[T]], asks: Sequence[Ask], workers: int = 1) -> Timed[T]:
    """Make a call per ask, one after the other in each of so many concurrent tasks."""
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
    set_aside()
    began = now()
    if workers == 1:
        await work(todo)
    else:
        await asyncio.gather(*[work(todo) for _ in range(workers)])
    took = now() - began
    return Timed(answers, seconds, took)


def timed_inline(call: Callable[[Ask], T], asks: Sequence[Ask]) -> Timed[T]:
    """The same for a library that knows no tasks: each call blocks the next."""
    answers: list[Any] = [None] * len(asks)
    seconds = [0.0] * len(asks)
    now = time.perf_counter
    set_aside()
    began = before = now()
    for index, ask in enumerate(asks):
        answers[index] = call(ask)
        after = now()
        seconds[index] = after - before
        before = after
    took = now() - began
    return Timed(answers, seconds, took)


class Course:
    """Where arms race: event loops, a folder per arm, and homes that stay open until the end."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.absent: dict[str, str] = {}
        """Who could not take part, and why."""
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
        """What each arm reached, by its name; a round before the first warms up."""
        with ExitStack() as closing:
            closing.callback(gc.unfreeze)
            entered = []
            for arm in arms:
                try:
                    entered.append(_Turns(arm, self._state_of(arm, closing), self._runners[arm.loop]))
                except Unavailable as reason:
                    self.absent[arm.name] = str(reason)
            chances = random.Random(1)
            for turns in entered:
                turns.make_ready()
            for turns in entered:
                turns.warm_up(chances)
            for _ in range(self.rounds):
                for turns in chances.sample(entered, len(entered)):
                    turns.take(chances)
            return {turns.arm.name: turns.reached() for turns in entered}

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


class _Turns:
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
        """A round or two; the first one is too cold to tell how many operations fill the time."""
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
    """What the laps of a round add up to."""

    took: float = 0.0
    seconds: list[float] = []
    cpu_seconds: float = 0.0


async def _settled(step: Callable[..., Maybe[T]], *given: Any) -> T:
    outcome = step(*given)
    if inspect.isawaitable(outcome):
        settled: T = await outcome
        return settled
    return outcome
