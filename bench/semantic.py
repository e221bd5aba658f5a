"""The semantic store against its bars, row by row: `scripts/bench semantic`.

What an entry's meaning, its audit record and its hash cost beside the bare tuple, on the same kind of file.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bench import disk, ours
from bench import semantic_arms as arms
from bench.data import GROUP
from bench.harness import Arm, Figure, Row, compare, race, ratio, within
from bench.on_postgres import Place
from tools import postgres

WORKERS = 64

NOTES = (
    "SQLite files with durability=full, and JSON objects of about 100 bytes; no key is written twice in a round",
    "the log's level is WARNING; no arm meets a conflict, and each looks at all it should have stored and recorded",
)


class Scale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""


# Short rounds and many: what disturbs one arm of a round then mostly disturbs the others, too.
FULL = Scale(10_000, 25, 1.0)
QUICK = Scale(10_000, 5, 0.5)


def rows(scale: Scale, folder: Path, place: Place, closing: ExitStack) -> dict[str, Callable[[], Row]]:
    """What there is to measure, by name."""
    logging.getLogger("keyloft").setLevel(logging.WARNING)
    measure = _Measure(scale, folder, place.url, closing)
    return {
        "get": measure.gets,
        "put": measure.puts,
        "lock": measure.locks,
        "put-lone": measure.lone_puts,
        "list": measure.lists,
        "delete": measure.deletes,
        "batch": measure.batches,
    }


class _Measure:
    def __init__(self, scale: Scale, folder: Path, server: str, closing: ExitStack) -> None:
        self._stored = scale.stored
        self._rounds = scale.rounds
        self._share = scale.share
        self._folder = folder
        self._server = server
        self._closing = closing

    def _operations(self, operations: int) -> int:
        return max(1, int(operations * self._share))

    def _run(self, *contestants: Arm[Any, Any, Any]) -> dict[str, Figure]:
        return race(contestants, self._folder, self._rounds)

    def gets(self) -> Row:
        semantic = arms.getting(self._stored, self._operations(4000))
        plain = ours.getting(self._stored, self._operations(4000), name="tuple get")
        found = self._run(semantic, plain)
        return Row(
            "get, awaited one by one",
            tuple(found.values()),
            (compare(found[semantic.name], found[plain.name], at_least=0.5),),
        )

    def puts(self) -> Row:
        stored, operations = self._stored, self._operations(1600)
        semantic = arms.putting(stored, operations, WORKERS)
        plain = arms.swapping(stored, operations, WORKERS)
        again = arms.requesting(stored, operations, WORKERS)
        found = self._run(semantic, plain, again)
        return Row(
            f"put with audit, {WORKERS} concurrent",
            (*found.values(), ratio(found[again.name], found[plain.name])),
            (compare(found[semantic.name], found[plain.name], at_least=0.4),),
        )

    def locks(self) -> Row:
        url = self._closing.enter_context(postgres.fresh_database(self._server))
        operations = self._operations(100)
        on_file = arms.locking("lock", self._stored, operations)
        on_server = arms.locking("lock on PostgreSQL", self._stored, operations, url)
        found = self._run(on_file, on_server, disk.syncing_among())
        median = found.pop(f"{on_file.name}, p50")
        return Row(
            "acquire and release a free lock, one after the other",
            tuple(found.values()),
            (within(median, 5),),
        )

    def lone_puts(self) -> Row:
        operations = self._operations(200)
        return self._beside(
            "put with audit, one after the other",
            arms.putting(self._stored, operations, 1),
            arms.swapping(self._stored, operations, 1),
        )

    def lists(self) -> Row:
        plain = replace(ours.listing(self._stored, self._operations(10)), name="tuple list, with values")
        return self._beside(f"list of {GROUP:,} entries", arms.listing(self._stored, self._operations(10)), plain)

    def deletes(self) -> Row:
        operations = self._operations(1600)
        return self._beside(
            f"delete with audit, {WORKERS} concurrent",
            arms.deleting(self._stored, operations, WORKERS),
            arms.removing(self._stored, operations, WORKERS),
        )

    def batches(self) -> Row:
        operations = self._operations(160)
        return self._beside(
            f"batch of {arms.TEN} puts with audit, {WORKERS} concurrent",
            arms.putting_ten(self._stored, operations, WORKERS),
            arms.swapping_ten(self._stored, operations, WORKERS),
        )

    def _beside(self, title: str, semantic: Arm[Any, Any, Any], plain: Arm[Any, Any, Any]) -> Row:
        """What has no bar."""
        found = self._run(semantic, plain)
        return Row(title, (*found.values(), ratio(found[semantic.name], found[plain.name])))
