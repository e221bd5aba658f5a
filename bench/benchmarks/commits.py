"""Keyloft as it is here against another commit, row by row: `scripts/bench commits --against COMMIT`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec import Struct

from bench.arms.commits import ROOT, semantic_entrant, service_entrant, source_of, tuple_entrant
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Entrant, Task, arm
from bench.harness.figures import CPU, Row, of_rates, ratio, within
from bench.harness.race import Course

HERE = "Keyloft, this tree"
BAR = 0.95
"""A row may get slower by five percent."""


class CommitScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    seconds: float
    """Of each arm's round."""


# Many short rounds: a disturbance then mostly hits both arms of a round.
FULL = CommitScale(20_000, 41, 0.1)
QUICK = CommitScale(2000, 2, 0.03)

_TUPLES = (
    Task("get", "get, one by one", "get"),
    Task("get-1-writer", "get beside 1 writing task, 4 concurrent", "get", 4, writers=1),
    Task("get-16-writers", "get beside 16 writing tasks, 4 concurrent", "get", 4, writers=16),
    Task("get_many", "get_many of 10", "get_many"),
    Task("list", "list of 1,000 entries with values", "list"),
    Task("get-large", "get of 64 KiB, one by one", "get", large=True),
    Task("set", "durable set, one by one", "set"),
    Task("set-64", f"durable set, {IN_FLIGHT} concurrent", "set", IN_FLIGHT),
    Task("check-and-set", "check-and-set, durable, one by one", "swap"),
    Task("set-relaxed", "relaxed set, one by one", "set", durable=False),
)
_SEMANTIC = (
    Task("semantic-get", "semantic get, one by one", "get"),
    Task("semantic-list", "semantic list of 1,000 entries with values", "list"),
    Task("semantic-put", "semantic put, one by one", "set"),
    Task("semantic-put-64", f"semantic put, {IN_FLIGHT} concurrent", "set", IN_FLIGHT),
    Task("semantic-swap-64", f"semantic get and put, {IN_FLIGHT} concurrent", "swap", IN_FLIGHT),
)
_SERVICE = (
    Task("service-get", "service: get, one in flight", "get"),
    Task("service-get-64", f"service: get, {IN_FLIGHT} in flight", "get", IN_FLIGHT),
    Task("service-set", "service: durable set, one in flight", "set"),
    Task("service-set-64", f"service: durable set, {IN_FLIGHT} in flight", "set", IN_FLIGHT),
)
_LARGE_STORED = 500


def prepared(quick: bool, folder: Path, closing: ExitStack, commit: str = "HEAD") -> Benchmark:
    scale = QUICK if quick else FULL
    course = closing.enter_context(Course(folder, scale.rounds))
    earlier = source_of(commit, folder)
    rows: dict[str, Callable[[], Row]] = {}
    for entrant_of, tasks in ((tuple_entrant, _TUPLES), (semantic_entrant, _SEMANTIC), (service_entrant, _SERVICE)):
        entrants = [entrant_of(HERE, ROOT / "src"), entrant_of(f"Keyloft, {commit}", earlier)]
        rows |= {task.name: partial(_race, course, task, entrants, scale) for task in tasks}
    return Benchmark(
        rows=rows,
        notes=[
            f"{scale.stored:,} keys, {scale.rounds} interleaved rounds of {scale.seconds} s per arm after a warm-up",
            f"the code of {commit} runs with the libraries that are installed for this tree",
        ],
    )


def _race(course: Course, task: Task, entrants: Sequence[Entrant], scale: CommitScale) -> Row:
    stored = _LARGE_STORED if task.large else scale.stored
    found = course.race([arm(entrant, task, stored, scale.seconds) for entrant in entrants])
    before = entrants[1].name
    verdicts = of_rates(found, HERE, {before: BAR})
    if task.writers:
        verdicts += (within(ratio(found[HERE].figures["p99"], found[before].figures["p99"]), 1 / BAR),)
    if CPU in found[HERE].figures:
        verdicts += (within(ratio(found[HERE].figures[CPU], found[before].figures[CPU]), 1 / BAR),)
    return Row(task.title, tuple(found.values()), before, verdicts=verdicts)
