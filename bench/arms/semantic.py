"""Arms for the semantic store, and for the same operations on the tuple store.

Each arm tracks what must be stored, as a dict, and compares all of it after each round. Semantic arms also check the
audit trail: one record per write, with the versions before and after it, and no conflict.
"""

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

import keyloft
from bench.harness import plans
from bench.harness.contest import expected_group, same
from bench.harness.data import Key, Value, group_of, key_of, shuffled, value_of
from bench.harness.plans import Reads, Writes, as_tuple
from bench.harness.race import Arm, Checking, Plan, Planning, Running, T, Timed, timed
from keyloft.semantic import Envelope, Intent, Semantics, SemanticStore

PROJECT = "tenant/acme/project/web"
WRITER = "harvester:sync"
CURSOR = Semantics("cursor", producer="harvester", consumer_hints=("indexer", "search"))
TEN = 10
_FILLERS = 64
_LISTS = 8
"""Lists per lap: all their entries are held until the check."""

Written: TypeAlias = tuple[str, int | None, int | None]
"""A key, and its versions before and after a write, as the audit trail has them."""


def as_path(key: Key) -> str:
    return f"{PROJECT}/{'/'.join(key)}"


# Tuples


class Tuples(Struct):
    """A store of tuples, and what must be in it: values and versionstamps."""

    kv: keyloft.Store
    there: dict[Key, tuple[Value, int]]

    @classmethod
    async def opened(cls, folder: Path, stored: int) -> "Tuples":
        kv = await keyloft.open(folder / "keyloft.db", durability="full", sweep_every=None)
        tuples = cls(kv, {})
        await tuples.fill([(key_of(index), value_of(index)) for index in shuffled(stored)])
        return tuples

    async def fill(self, pairs: Writes[Key]) -> None:
        """Write enough that SQLite's write-ahead log has its full size: see `keyloft_file.enter`."""
        made = await timed(lambda pair: self.kv.set(*pair), pairs, _FILLERS)
        self.wrote(pairs, made.answers)

    def wrote(self, pairs: Writes[Key], versions: Sequence[int | None]) -> None:
        for (key, value), version in zip(pairs, versions, strict=True):
            assert version is not None, "no one else writes these keys"
            self.there[key] = (value, version)

    async def verify(self) -> None:
        found = {entry.key: (entry.value, entry.versionstamp) async for entry in self.kv.list(prefix=())}
        same(found, self.there)

    async def aclose(self) -> None:
        await self.kv.aclose()


def _tuple_arm(
    name: str,
    stored: int,
    operations: int,
    plan: Planning[Plan],
    run: Running[Tuples, Plan, T],
    check: Checking[Tuples, Plan, T],
) -> Arm[Tuples, Plan, T]:
    def set_up(folder: Path) -> Awaitable[Tuples]:
        return Tuples.opened(folder, stored)

    return Arm(name, operations, set_up, plan, run, check, Tuples.aclose, lap=operations)


def swapping(stored: int, operations: int, workers: int) -> Arm[Tuples, Writes[Key], int | None]:
    """A compare-and-set of a version that is known."""

    def run(tuples: Tuples, plan: Writes[Key]) -> Awaitable[Timed[int | None]]:
        async def swap(pair: tuple[Key, Value]) -> int | None:
            key, value = pair
            done = await tuples.kv.atomic().check(key, tuples.there[key][1]).set(key, value).commit()
            return done.versionstamp

        return timed(swap, plan, workers)

    async def check(tuples: Tuples, plan: Writes[Key], made: Timed[int | None]) -> None:
        tuples.wrote(plan, made.answers)
        await tuples.verify()

    return _tuple_arm("tuple compare-and-set", stored, operations, plans.writes(stored, as_tuple), run, check)


def removing(stored: int, operations: int, workers: int) -> Arm[Tuples, Writes[Key], int | None]:
    """A compare-and-delete; after the round, what was deleted is stored again."""

    def run(tuples: Tuples, plan: Writes[Key]) -> Awaitable[Timed[int | None]]:
        async def remove(pair: tuple[Key, Value]) -> int | None:
            key, _ = pair
            done = await tuples.kv.atomic().check(key, tuples.there[key][1]).delete(key).commit()
            return done.versionstamp

        return timed(remove, plan, workers)

    async def check(tuples: Tuples, plan: Writes[Key], made: Timed[int | None]) -> None:
        same(None in made.answers, False)
        for key, _ in plan:
            del tuples.there[key]
        await tuples.verify()
        await tuples.fill(plan)

    return _tuple_arm("tuple compare-and-delete", stored, operations, plans.writes(stored, as_tuple), run, check)


def swapping_ten(stored: int, operations: int, workers: int) -> Arm[Tuples, list[Writes[Key]], int | None]:
    """An atomic of ten checks and sets."""

    def run(tuples: Tuples, plan: list[Writes[Key]]) -> Awaitable[Timed[int | None]]:
        async def swap(ten: Writes[Key]) -> int | None:
            atomic = tuples.kv.atomic()
            for key, value in ten:
                atomic.check(key, tuples.there[key][1]).set(key, value)
            return (await atomic.commit()).versionstamp

        return timed(swap, plan, workers)

    async def check(tuples: Tuples, plan: list[Writes[Key]], made: Timed[int | None]) -> None:
        for ten, version in zip(plan, made.answers, strict=True):
            tuples.wrote(ten, [version] * TEN)
        await tuples.verify()

    return _tuple_arm("tuple atomic of 10", stored, operations, _tens(stored, as_tuple), run, check)


# Semantic entries


class SemanticEntries(Struct):
    """A semantic store, and what must be in it: values and versions, and the last audit record that was checked."""

    kv: keyloft.Store
    store: SemanticStore
    there: dict[str, tuple[Value, int]]
    audited: int = 0

    @classmethod
    async def opened(cls, url: Path | str, stored: int) -> "SemanticEntries":
        kv = await keyloft.open(url, durability="full", sweep_every=None)
        semantic = cls(kv, SemanticStore(kv, sweep_every=None), {})
        await semantic.fill([(as_path(key_of(index)), value_of(index)) for index in shuffled(stored)])
        return semantic

    async def fill(self, pairs: Writes[str]) -> None:
        """Put what is not there."""
        made = await timed(lambda pair: self.put(*pair, expected_version=0), pairs, _FILLERS)
        await self.wrote(pairs, made.answers)

    def put(
        self, key: str, value: Value, *, expected_version: int | None = None, request_id: str | None = None
    ) -> Awaitable[Envelope]:
        """Put over the version that must be there."""
        return self.store.put(
            key,
            value,
            expected_version=self.there[key][1] if expected_version is None else expected_version,
            writer=WRITER,
            semantics=CURSOR,
            request_id=request_id,
        )

    async def wrote(self, pairs: Writes[str], entries: Sequence[Envelope | None]) -> None:
        """Raises unless these puts were made, each with its audit record, and nothing else."""
        written: list[Written] = []
        for (key, value), entry in zip(pairs, entries, strict=True):
            assert entry is not None
            same((entry.key, entry.value, entry.last_writer, entry.semantics), (key, value, WRITER, CURSOR))
            before = self.there.get(key)
            written.append((key, None if before is None else before[1], entry.version))
            self.there[key] = (value, entry.version)
        await self.verify(written)

    async def deleted(self, keys: Sequence[str], entries: Sequence[Envelope | None]) -> None:
        """Raises unless these deletes were made, each with its audit record, and nothing else."""
        written: list[Written] = []
        for key, entry in zip(keys, entries, strict=True):
            assert entry is not None
            same((entry.value, entry.version), self.there.pop(key))
            written.append((key, entry.version, None))
        await self.verify(written)

    async def verify(self, written: list[Written]) -> None:
        # Not by `get`, which would cache the entries for the next puts.
        found = {entry.key: (entry.value, entry.version) async for entry in self.store.list(PROJECT, values=True)}
        same(found, self.there)
        trail = [record async for record in self.store.audit(PROJECT, after=self.audited)]
        recorded = [(record.key, record.version_before, record.version_after) for record in trail]
        same(sorted(recorded, key=str), sorted(written, key=str))
        same(any(record.action == "conflict" for record in trail), False)
        self.audited = trail[-1].sequence

    async def aclose(self) -> None:
        await self.store.aclose()
        await self.kv.aclose()


def _semantic_arm(
    name: str,
    stored: int,
    operations: int,
    plan: Planning[Plan],
    run: Running[SemanticEntries, Plan, T],
    check: Checking[SemanticEntries, Plan, T],
) -> Arm[SemanticEntries, Plan, T]:
    def set_up(folder: Path) -> Awaitable[SemanticEntries]:
        return SemanticEntries.opened(folder / "keyloft.db", stored)

    return Arm(name, operations, set_up, plan, run, check, SemanticEntries.aclose, lap=operations)


def _opened_to_read(stored: int) -> Callable[[Path], Awaitable[SemanticEntries]]:
    """A set-up: a file that was closed in between, as in `keyloft_file.enter`."""

    async def set_up(folder: Path) -> SemanticEntries:
        filled = await SemanticEntries.opened(folder / "keyloft.db", stored)
        await filled.aclose()
        kv = await keyloft.open(folder / "keyloft.db", durability="full", sweep_every=None)
        return SemanticEntries(kv, SemanticStore(kv, sweep_every=None), filled.there)

    return set_up


def getting(stored: int, operations: int) -> Arm[SemanticEntries, Reads[str], Envelope | None]:
    """`get`, awaited one by one."""

    def run(semantic: SemanticEntries, plan: Reads[str]) -> Awaitable[Timed[Envelope | None]]:
        return timed(semantic.store.get, plan.keys)

    def check(semantic: SemanticEntries, plan: Reads[str], done: Timed[Envelope | None]) -> None:
        for key, value, entry in zip(plan.keys, plan.expected, done.answers, strict=True):
            assert entry is not None
            same((entry.key, entry.value, entry.semantics), (key, value, CURSOR))
            same((entry.value, entry.version), semantic.there[key])

    plan = plans.reads(stored, as_path)
    return Arm("semantic get", operations, _opened_to_read(stored), plan, run, check, SemanticEntries.aclose)


def listing(stored: int, operations: int) -> Arm[SemanticEntries, list[int], list[Envelope]]:
    """`list` of a group of 1000 entries, which shows no values."""

    def run(semantic: SemanticEntries, plan: list[int]) -> Awaitable[Timed[list[Envelope]]]:
        async def listed(number: int) -> list[Envelope]:
            return await semantic.store.list(f"{PROJECT}/{group_of(number)}/")

        return timed(listed, plan)

    def check(semantic: SemanticEntries, plan: list[int], done: Timed[list[Envelope]]) -> None:
        for number, entries in zip(plan, done.answers, strict=True):
            keys = [as_path(key) for key, _ in expected_group(number)]
            shown = [(entry.key, entry.value, entry.version, entry.semantics) for entry in entries]
            same(shown, [(key, None, semantic.there[key][1], CURSOR) for key in keys])

    return Arm(
        name="semantic list, no values",
        operations=operations,
        set_up=_opened_to_read(stored),
        plan=plans.groups(stored),
        run=run,
        check=check,
        tear_down=SemanticEntries.aclose,
        lap=_LISTS,
    )


def putting(stored: int, operations: int, workers: int) -> Arm[SemanticEntries, Writes[str], Envelope]:
    """`put` over a version that is known."""

    def run(semantic: SemanticEntries, plan: Writes[str]) -> Awaitable[Timed[Envelope]]:
        return timed(lambda pair: semantic.put(*pair), plan, workers)

    async def check(semantic: SemanticEntries, plan: Writes[str], made: Timed[Envelope]) -> None:
        await semantic.wrote(plan, made.answers)

    return _semantic_arm("semantic put", stored, operations, plans.writes(stored, as_path), run, check)


def requesting(stored: int, operations: int, workers: int) -> Arm[SemanticEntries, Writes[str], Envelope]:
    """The same with a request id each; after the round, a repeated request gets its first result."""
    serials = itertools.count(1)

    def run(semantic: SemanticEntries, plan: Writes[str]) -> Awaitable[Timed[Envelope]]:
        return timed(lambda pair: semantic.put(*pair, request_id=f"sync-{next(serials):012d}"), plan, workers)

    async def check(semantic: SemanticEntries, plan: Writes[str], made: Timed[Envelope]) -> None:
        (key, value), first = plan[-1], made.answers[-1]
        expected = semantic.there[key][1]
        await semantic.wrote(plan, made.answers)
        again = await semantic.put(key, value, expected_version=expected, request_id=first.request_id)
        same(again, first)
        same(len({entry.request_id for entry in made.answers}), len(plan))

    return _semantic_arm(
        "semantic put with a request id", stored, operations, plans.writes(stored, as_path), run, check
    )


def deleting(stored: int, operations: int, workers: int) -> Arm[SemanticEntries, Writes[str], Envelope | None]:
    """`delete` of a version that is known; after the round, what was deleted is put again."""

    def run(semantic: SemanticEntries, plan: Writes[str]) -> Awaitable[Timed[Envelope | None]]:
        async def delete(pair: tuple[str, Value]) -> Envelope | None:
            key, _ = pair
            return await semantic.store.delete(key, expected_version=semantic.there[key][1], writer=WRITER)

        return timed(delete, plan, workers)

    async def check(semantic: SemanticEntries, plan: Writes[str], made: Timed[Envelope | None]) -> None:
        await semantic.deleted([key for key, _ in plan], made.answers)
        await semantic.fill(plan)

    return _semantic_arm("semantic delete", stored, operations, plans.writes(stored, as_path), run, check)


def putting_ten(
    stored: int, operations: int, workers: int
) -> Arm[SemanticEntries, list[Writes[str]], Sequence[Envelope | None]]:
    """`batch` of ten puts."""

    def run(semantic: SemanticEntries, plan: list[Writes[str]]) -> Awaitable[Timed[Sequence[Envelope | None]]]:
        def put(ten: Writes[str]) -> Awaitable[Sequence[Envelope | None]]:
            there = semantic.there
            return semantic.store.batch(
                [
                    Intent.put(key, value, expected_version=there[key][1], writer=WRITER, semantics=CURSOR)
                    for key, value in ten
                ]
            )

        return timed(put, plan, workers)

    async def check(semantic: SemanticEntries, plan: list[Writes[str]], made: Timed[Sequence[Envelope | None]]) -> None:
        await semantic.wrote([*itertools.chain(*plan)], [*itertools.chain(*made.answers)])

    return _semantic_arm("semantic batch", stored, operations, _tens(stored, as_path), run, check)


def locking(name: str, stored: int, operations: int, url: str | None = None) -> Arm[SemanticEntries, list[str], int]:
    """`async with store.lock(…)` with an empty body, one at a time, each a free lock."""

    async def set_up(folder: Path) -> SemanticEntries:
        return await SemanticEntries.opened(url or folder / "keyloft.db", stored)

    def plan(_: object, operations: int) -> list[str]:
        return [f"{PROJECT}/locks/{number:04d}" for number in range(operations)]

    def run(semantic: SemanticEntries, plan: list[str]) -> Awaitable[Timed[int]]:
        async def hold(key: str) -> int:
            async with semantic.store.lock(key, writer=WRITER) as lock:
                return lock.fence

        return timed(hold, plan)

    async def check(semantic: SemanticEntries, plan: list[str], made: Timed[int]) -> None:
        """Each was held under a token larger than all before it, and none is held any more."""
        same(made.answers, sorted(set(made.answers)))
        taken: list[Written] = [(key, None, fence) for key, fence in zip(plan, made.answers, strict=True)]
        given_back: list[Written] = [(key, fence, None) for key, fence in zip(plan, made.answers, strict=True)]
        await semantic.verify(taken + given_back)

    return Arm(name, operations, set_up, plan, run, check, SemanticEntries.aclose, lap=operations)


def _tens(stored: int, shape: Callable[[Key], plans.K]) -> Planning[list[Writes[plans.K]]]:
    """New values for ten keys per operation, no key twice in a round."""
    writes = plans.writes(stored, shape)

    def plan(chances: random.Random, operations: int) -> list[Writes[plans.K]]:
        pairs = writes(chances, TEN * operations)
        return [pairs[first : first + TEN] for first in range(0, len(pairs), TEN)]

    return plan
