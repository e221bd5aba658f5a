"""The semantic store against its bars, row by row: `scripts/bench semantic`.

What an entry's envelope, audit record and hash cost beside a bare tuple, on the same kind of file.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bench.arms import keyloft_file
from bench.arms import semantic as arms
from bench.harness.benchmark import Benchmark
from bench.harness.contest import IN_FLIGHT, Task, arm
from bench.harness.data import GROUP
from bench.harness.figures import Row, of_rates, within
from bench.harness.postgres_server import serving
from bench.harness.race import Arm, Course
from bench.probes import disk
from tools import postgres

NOTES = (
    "SQLite files with durability=full, and JSON objects of about 100 bytes; no key is written twice in a round",
    "log level WARNING; no arm runs into a conflict, and each checks all that it stored and recorded",
)


class SemanticScale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""


# Many short rounds: a disturbance then mostly hits all arms of a round.
FULL = SemanticScale(10_000, 25, 1.0)
QUICK = SemanticScale(2000, 2, 0.2)


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    scale = QUICK if quick else FULL
    logging.getLogger("keyloft").setLevel(logging.WARNING)
    server = closing.enter_context(serving(folder))
    measure = _SemanticRows(scale, closing.enter_context(Course(folder, scale.rounds)), server.url, closing)
    return Benchmark(
        rows={
            "get": measure.gets,
            "put": measure.puts,
            "lock": measure.locks,
            "put-lone": measure.lone_puts,
            "list": measure.lists,
            "delete": measure.deletes,
            "batch": measure.batches,
        },
        notes=[f"{scale.stored:,} keys, {scale.rounds} interleaved rounds after a warm-up", *NOTES],
        about=server.software(),
    )


class _SemanticRows:
    def __init__(self, scale: SemanticScale, course: Course, server: str, closing: ExitStack) -> None:
        self._stored = scale.stored
        self._share = scale.share
        self._course = course
        self._server = server
        self._closing = closing

    def _operations(self, operations: int) -> int:
        return max(1, int(operations * self._share))

    def _beside(
        self, title: str, base: Arm[Any, Any, Any], *others: Arm[Any, Any, Any], bar: tuple[str, float] | None = None
    ) -> Row:
        """The tuple store's arm and others; with a bar for one of them."""
        found = self._course.race([base, *others])
        verdicts = () if bar is None else of_rates(found, bar[0], {base.name: bar[1]})
        return Row(title, tuple(found.values()), base.name, verdicts=verdicts)

    def _tuples(self, task: Task, operations: int, name: str) -> Arm[Any, Any, Any]:
        return replace(arm(keyloft_file.ENTRANT, task, self._stored, operations=operations), name=name)

    def gets(self) -> Row:
        operations, title = self._operations(4000), "get, awaited one by one"
        semantic = arms.getting(self._stored, operations)
        plain = self._tuples(Task("get", title, "get"), operations, "tuple get")
        return self._beside(title, plain, semantic, bar=(semantic.name, 0.5))

    def puts(self) -> Row:
        stored, operations = self._stored, self._operations(1600)
        semantic = arms.putting(stored, operations, IN_FLIGHT)
        plain = arms.swapping(stored, operations, IN_FLIGHT)
        again = arms.requesting(stored, operations, IN_FLIGHT)
        title = f"put with audit, {IN_FLIGHT} concurrent"
        return self._beside(title, plain, semantic, again, bar=(semantic.name, 0.4))

    def locks(self) -> Row:
        url = self._closing.enter_context(postgres.fresh_database(self._server))
        operations = self._operations(100)
        on_file = arms.locking("lock", self._stored, operations)
        on_server = arms.locking("lock on PostgreSQL", self._stored, operations, url)
        found = self._course.race([on_file, on_server, disk.syncing_among()])
        median = within(found[on_file.name].figures["p50"], 5)
        return Row("acquire and release a free lock, one after the other", tuple(found.values()), verdicts=(median,))

    def lone_puts(self) -> Row:
        stored, operations = self._stored, self._operations(200)
        title = "put with audit, one after the other"
        return self._beside(title, arms.swapping(stored, operations, 1), arms.putting(stored, operations, 1))

    def lists(self) -> Row:
        operations, title = self._operations(10), f"list of {GROUP:,} entries"
        plain = self._tuples(Task("list", title, "list"), operations, "tuple list, with values")
        return self._beside(title, plain, arms.listing(self._stored, operations))

    def deletes(self) -> Row:
        stored, operations = self._stored, self._operations(1600)
        title = f"delete with audit, {IN_FLIGHT} concurrent"
        return self._beside(
            title, arms.removing(stored, operations, IN_FLIGHT), arms.deleting(stored, operations, IN_FLIGHT)
        )

    def batches(self) -> Row:
        stored, operations = self._stored, self._operations(160)
        title = f"batch of {arms.TEN} puts with audit, {IN_FLIGHT} concurrent"
        return self._beside(
            title, arms.swapping_ten(stored, operations, IN_FLIGHT), arms.putting_ten(stored, operations, IN_FLIGHT)
        )
