"""Runs arms in interleaved rounds and compares them: what a benchmark is made of.

An `Arm` is one contestant; `race` runs several in turn (A, B, C, A, B, C, …), so that a noisy neighbour hits all of
them alike, and gives a `Figure` per arm, and more of them if its operations were `timed`. `compare` and `within` hold
figures against a bar; `ratio` has none.
"""

import asyncio
import gc
import inspect
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import uvloop
from msgspec import Struct

State = TypeVar("State")
Plan = TypeVar("Plan")
Result = TypeVar("Result")
T = TypeVar("T")
Ask = TypeVar("Ask")
Maybe: TypeAlias = T | Awaitable[T]

PERCENTS = (50, 95, 99)


class Arm(Struct, Generic[State, Plan, Result], frozen=True):
    """One contestant. Every step may be a plain function or a coroutine function; only `run` is timed."""

    name: str
    operations: int
    """How many operations a round has."""
    set_up: Callable[[Path], Maybe[State]]
    """Opens and fills the store in a folder of its own."""
    plan: Callable[[random.Random, int], Plan]
    """What is to be done next, for so many operations."""
    run: Callable[[State, Plan], Maybe[Result]]
    check: Callable[[State, Plan, Result], Maybe[None]]
    """Raises unless the round did what was planned: no arm wins by doing nothing."""
    tear_down: Callable[[State], Maybe[None]]
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    lap: int = 2000
    """A round is timed in laps of at most so many operations: the results that wait for their check burden the garbage
    collector, and would weigh on the faster arm most."""


class Figure(Struct, frozen=True):
    """What one arm reached, round by round."""

    name: str
    unit: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class Verdict(Struct, frozen=True):
    """A figure held against its bar, which is the least or the most that it may be."""

    name: str
    unit: str
    rounds: tuple[float, ...]
    median: float
    bar: float
    at_least: bool

    @property
    def ok(self) -> bool:
        return self.median >= self.bar if self.at_least else self.median <= self.bar


class Row(Struct, frozen=True):
    """One line of the question, and all that was measured to answer it."""

    title: str
    figures: tuple[Figure, ...]
    verdicts: tuple[Verdict, ...] = ()


class Timed(Struct, Generic[T], frozen=True):
    """What came of a lap's operations, in their order, and how long each one took."""

    answers: list[T]
    seconds: list[float]


Planning: TypeAlias = Callable[[random.Random, int], Plan]
Running: TypeAlias = Callable[[State, Plan], Awaitable[Timed[T]]]
Checking: TypeAlias = Callable[[State, Plan, Timed[T]], Maybe[None]]
"""The steps of an arm whose operations are timed."""


async def timed(call: Callable[[Ask], Awaitable[T]], asks: Sequence[Ask], workers: int = 1) -> Timed[T]:
    """Make a call per ask, one after the other in each of so many concurrent tasks."""
    answers: list[Any] = [None] * len(asks)
    seconds = [0.0] * len(asks)

    async def work(todo: Iterator[tuple[int, Ask]]) -> None:
        for number, ask in todo:
            began = time.perf_counter()
            answers[number] = await call(ask)
            seconds[number] = time.perf_counter() - began

    todo = iter(enumerate(asks))
    await asyncio.gather(*[work(todo) for _ in range(workers)])
    return Timed(answers, seconds)


def ratio(subject: Figure, against: Figure) -> Figure:
    """How many times as much the subject reached; rounds are paired, so that noise common to both cancels out."""
    ratios = tuple(one / other for one, other in zip(subject.rounds, against.rounds, strict=True))
    return Figure(f"{subject.name} : {against.name}", "x", ratios)


def compare(subject: Figure, against: Figure, at_least: float) -> Verdict:
    found = ratio(subject, against)
    return Verdict(found.name, found.unit, found.rounds, found.median, at_least, at_least=True)


def within(figure: Figure, at_most: float) -> Verdict:
    return Verdict(figure.name, figure.unit, figure.rounds, figure.median, at_most, at_least=False)


def race(arms: Sequence[Arm[Any, Any, Any]], folder: Path, rounds: int) -> dict[str, Figure]:
    """Operations per second of each arm, by its name; a round before the first warms up.

    Arms whose operations are timed also have figures named «name, p50» and so on: how many milliseconds those took.
    """
    reached: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as closing:
        runners = {
            "asyncio": closing.enter_context(asyncio.Runner()),
            "uvloop": closing.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop)),
        }
        states: list[Any] = []
        for arm in arms:
            own = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            state = runners[arm.loop].run(_settled(arm.set_up, own))
            closing.callback(lambda arm, state: runners[arm.loop].run(_settled(arm.tear_down, state)), arm, state)
            states.append(state)
        chances = random.Random(1)
        for number in range(rounds + 1):
            for arm, state in zip(arms, states, strict=True):
                seconds, each = runners[arm.loop].run(_measured(arm, state, chances))
                if number > 0:
                    reached.setdefault((arm.name, "/s"), []).append(arm.operations / seconds)
                    for percent in PERCENTS if each else ():
                        took = percentile(each, percent) * 1000
                        reached.setdefault((f"{arm.name}, p{percent}", "ms"), []).append(took)
    return {name: Figure(name, unit, tuple(rounds)) for (name, unit), rounds in reached.items()}


def percentile(sample: Sequence[float], percent: float) -> float:
    ordered = sorted(sample)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def _measured(
    arm: Arm[State, Plan, Result], state: State, chances: random.Random
) -> tuple[float, Sequence[float]]:
    """How many seconds a round took, and each of its operations if they were timed."""
    seconds = 0.0
    each: list[float] = []
    for done in range(0, arm.operations, arm.lap):
        plan = arm.plan(chances, min(arm.lap, arm.operations - done))
        # What the benchmark itself holds is no business of the collector during the lap.
        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        result = await _settled(arm.run, state, plan)
        seconds += time.perf_counter() - began
        gc.unfreeze()
        if isinstance(result, Timed):
            each += result.seconds
        await _settled(arm.check, state, plan, result)
    return seconds, each


async def _settled(step: Callable[..., Maybe[T]], *given: Any) -> T:
    outcome = step(*given)
    if inspect.isawaitable(outcome):
        settled: T = await outcome
        return settled
    return outcome
