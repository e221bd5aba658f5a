"""Makes arms of stores and tasks: an `Entrant` (a store) and a `Task` (an operation) make an arm."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import Struct

from bench.harness.data import GROUP, Key, Pair, Value, fresh_pair, group_of, key_of, large_of, shuffled, value_of
from bench.harness.race import Arm, Maybe, Timed, timed, timed_in_threads, timed_inline

Operation: TypeAlias = Literal["get", "set", "get_many", "list", "swap", "sum"]
IN_FLIGHT = 64
CHUNK = 2000

COUNTERS = 2000
"""How many counters sums are made to."""

_WARM_UP = {"get": 200, "set": 64, "get_many": 20, "list": 4, "swap": 64, "sum": 640}
_LAP = {"get": 2000, "set": 6400, "get_many": 200, "list": 8, "swap": 2000, "sum": 102_400}
"""Few lists per lap: all their entries are held until the check. Many sums: processes don't end a lap at one moment."""


class Task(Struct, frozen=True):
    """One operation, and how it is called."""

    name: str
    title: str
    operation: Operation
    workers: int = 1
    durable: bool = True
    """Of writes: whether each is on disk before it is acknowledged."""
    large: bool = False
    writers: int = 0
    """How many tasks write durably, one set after the other, while the operation is timed."""

    @property
    def writes(self) -> bool:
        return self.operation in ("set", "swap", "sum")


class StoreSetup(Struct, frozen=True):
    """A store to be opened and filled."""

    folder: Path
    stored: int
    task: Task

    def pairs(self) -> Iterator[Pair]:
        """The pairs to store, in the order of their writes."""
        value = large_of if self.task.large else value_of
        return ((key_of(index), value(index)) for index in shuffled(self.stored))

    def chunks(self, size: int = CHUNK) -> Iterator[list[Pair]]:
        pairs = self.pairs()
        return iter(lambda: list(islice(pairs, size)), [])


class Contestant:
    """An open store. A subclass has those of `get`, `set`, `get_many`, `list`, `swap` and `sum` that it knows.

    `set` and `swap` take a pair of key and value; `swap` reads an entry and replaces it if it is unchanged. `sum`
    takes the key of a counter, adds 1, and returns True.
    """

    inline: ClassVar[bool] = False
    """Whether its calls block. If so, it is called in a plain loop, whatever the number of tasks."""
    threaded: ClassVar[bool] = False
    """Of one whose calls block: whether threads call it, as many as the task has workers."""

    def shaped(self, key: Key) -> Any:
        """The key as the store takes it; this is not timed."""
        return key

    def asks(self, operation: Operation, planned: Iterable[Any]) -> list[Any]:
        """The planned operations as the store takes them; this is not timed."""
        match operation:
            case "get" | "sum":
                return [self.shaped(key) for key in planned]
            case "get_many":
                return [[self.shaped(key) for key in keys] for keys in planned]
            case "list":
                return [group_of(number) for number in planned]
            case _:
                return [(self.shaped(key), value) for key, value in planned]

    def call(self, operation: Operation) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] = getattr(self, operation)
        return found

    def enter_thread(self) -> None:
        """Make ready for calls of this thread, which is new; this is not timed."""

    def seen(self, operation: Operation, answer: Any) -> Any:
        """The value, values or pairs of key and value in an answer; this is not timed."""
        return answer

    async def lap(self, operation: Operation, planned: list[Any], workers: int) -> Timed[Any]:
        asks = self.asks(operation, planned)
        if self.inline and self.threaded and workers > 1:
            return timed_in_threads(self.call(operation), asks, workers, self.enter_thread)
        if self.inline:
            return timed_inline(self.call(operation), asks)
        return await timed(self.call(operation), asks, workers)

    async def check(self, operation: Operation, plan: "PlannedLap", done: Timed[Any]) -> None:
        """Raise unless every value was read as stored, or stored as written."""
        if plan.pairs:
            done = await self.lap("get", [key for key, _ in plan.pairs], IN_FLIGHT)
            operation = "get"
        same([self.seen(operation, answer) for answer in done.answers], plan.expected)

    def close(self) -> Maybe[None]:
        return None


class Entrant(Struct, frozen=True):
    """A store that can take part in a race."""

    name: str
    enter: Callable[[StoreSetup], Maybe[Contestant]]
    operations: frozenset[Operation]
    durable: str | None
    """What becomes of an acknowledged write if power fails, with the settings for durable writes; None: it has none."""
    relaxed: str | None = None
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    cpu_seconds: Callable[[Any], float] | None = None

    def can(self, task: Task) -> bool:
        if task.operation not in self.operations:
            return False
        return not task.writes or (self.durable if task.durable else self.relaxed) is not None


class PlannedLap(Struct, frozen=True):
    """Operations to do, and the results that they must have."""

    asked: list[Any]
    expected: list[Any]
    pairs: list[Pair] = []
    """The writes among them."""


def same(found: object, expected: object) -> None:
    """Raise unless the arm read or wrote what it should have."""
    if found != expected:
        raise AssertionError("an arm did not read or write what it should have")


def arm(
    entrant: Entrant,
    task: Task,
    stored: int,
    seconds: float | None = None,
    *,
    operations: int | None = None,
    home: str | None = None,
) -> Arm[Contestant, PlannedLap, Any]:
    """One store at one task.

    Args:
        entrant: The store.
        task: The operation.
        stored: Number of keys in the store.
        seconds: Length of a round; or give `operations`.
        operations: Number of operations of a round.
        home: Name of the opened store, if several tasks share it.
    """

    def run(contestant: Contestant, plan: PlannedLap) -> Any:
        return contestant.lap(task.operation, plan.asked, task.workers)

    def check(contestant: Contestant, plan: PlannedLap, done: Timed[Any]) -> Any:
        return contestant.check(task.operation, plan, done)

    kept = (entrant.durable if task.durable else entrant.relaxed) if task.writes else ""
    return Arm(
        name=entrant.name,
        operations=operations or _WARM_UP[task.operation],
        set_up=lambda folder: entrant.enter(StoreSetup(folder, stored, task)),
        plan=planning(task, stored),
        run=run,
        check=check,
        tear_down=lambda contestant: contestant.close(),
        loop=entrant.loop,
        lap=_lap(task, stored),
        seconds=seconds,
        home=home,
        kept=kept or "",
        cpu_seconds=entrant.cpu_seconds,
    )


def _lap(task: Task, stored: int) -> int:
    most = 200 if task.large else _LAP[task.operation]
    return min(stored, most) if task.operation in ("set", "swap") else most


def home_of(entrant: Entrant, task: Task, *, quick: bool = False) -> str:
    """One store for all reads and one per kind of write; with `quick`, one for both, and reads run first.

    Entrants of one name that are opened differently, as one for threads is, have a store each.
    """
    opened = f"{entrant.name} {id(entrant.enter)}"
    return f"{opened}, writes {task.writes and not quick}, durable {task.durable}, large {task.large}"


def planning(task: Task, stored: int) -> Callable[[random.Random, int], PlannedLap]:
    value: Callable[[int], Value] = large_of if task.large else value_of

    def keys(chances: random.Random, operations: int) -> PlannedLap:
        indexes = [chances.randrange(stored) for _ in range(operations)]
        return PlannedLap([key_of(index) for index in indexes], [value(index) for index in indexes])

    def tens(chances: random.Random, operations: int) -> PlannedLap:
        plans = [keys(chances, 10) for _ in range(operations)]
        return PlannedLap([plan.asked for plan in plans], [plan.expected for plan in plans])

    def groups(chances: random.Random, operations: int) -> PlannedLap:
        numbers = [chances.randrange(stored // GROUP) for _ in range(operations)]
        return PlannedLap(numbers, [expected_group(number) for number in numbers])

    def writes(chances: random.Random, operations: int) -> PlannedLap:
        pairs = [fresh_pair(index, large=task.large) for index in chances.sample(range(stored), operations)]
        return PlannedLap(pairs, [value for _, value in pairs], pairs)

    def sums(chances: random.Random, operations: int) -> PlannedLap:
        return PlannedLap([key_of(chances.randrange(COUNTERS)) for _ in range(operations)], [True] * operations)

    by_operation = {"get": keys, "get_many": tens, "list": groups, "sum": sums}
    return by_operation.get(task.operation, writes)


def expected_group(number: int) -> list[Pair]:
    """The entries of a group, in their order."""
    return [(key_of(index), value_of(index)) for index in range(number * GROUP, (number + 1) * GROUP)]
