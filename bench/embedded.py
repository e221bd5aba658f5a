"""The embedded store against its bars, row by row: `scripts/bench embedded`."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bench import orm, ours, peers
from bench.harness import Row, compare, race
from bench.latency import waiting
from bench.resident import remembering
from bench.sweep import sweeping


class Scale(Struct, frozen=True):
    """How much is measured."""

    stored: int
    rounds: int
    share: float
    """Of the operations of a full run's round."""
    sweep_stored: int
    sweep_expired: int
    sweep_rounds: int


FULL = Scale(100_000, 9, 1.0, 1_000_000, 10_000, 5)
QUICK = Scale(20_000, 3, 0.25, 100_000, 2_000, 2)


def rows(scale: Scale, folder: Path) -> dict[str, Callable[[], Row]]:
    """What there is to measure, by name."""
    measure = _Measure(scale, folder)
    return {
        "get": measure.gets,
        "get_many": measure.many_gets,
        "set-concurrent": measure.concurrent_sets,
        "set-latency": lambda: waiting(folder, scale.stored, measure.share(6400), scale.rounds),
        "set": measure.lone_sets,
        "list": measure.lists,
        "memory": measure.memory,
        "sweep": lambda: sweeping(folder, scale.sweep_stored, scale.sweep_expired, scale.sweep_rounds),
        "resident": lambda: remembering(folder, scale.stored, 3),
    }


class _Measure:
    def __init__(self, scale: Scale, folder: Path) -> None:
        self._stored = scale.stored
        self._rounds = scale.rounds
        self._share = scale.share
        self._folder = folder

    def share(self, operations: int) -> int:
        return max(1, int(operations * self._share))

    def gets(self) -> Row:
        stored = self._stored
        keyloft = ours.getting(stored, self.share(20_000))
        alchemy = orm.getting(stored, self.share(200))
        diskcache = peers.getting_diskcache(stored, self.share(10_000))
        turns = ours.getting(stored, self.share(10_000), name="keyloft, a turn of the loop per get", turns=True)
        aiosqlite = peers.getting_aiosqlite(stored, self.share(600))
        limit = peers.getting_inline(stored, self.share(20_000))
        found = race([keyloft, alchemy, diskcache, turns, aiosqlite, limit], self._folder, self._rounds)
        return Row(
            "get, awaited one by one",
            tuple(found.values()),
            (
                compare(found[keyloft.name], found[alchemy.name], at_least=100),
                compare(found[keyloft.name], found[diskcache.name], at_least=1.4),
            ),
        )

    def many_gets(self) -> Row:
        keyloft = ours.getting_many(self._stored, self.share(2000))
        aiosqlite = peers.getting_ten_aiosqlite(self._stored, self.share(100))
        found = race([keyloft, aiosqlite], self._folder, self._rounds)
        return Row(
            "get_many of 10",
            tuple(found.values()),
            (compare(found[keyloft.name], found[aiosqlite.name], at_least=5),),
        )

    def concurrent_sets(self) -> Row:
        keyloft = ours.setting(self._stored, self.share(6400), workers=64)
        apsw = peers.setting_inline(self._stored, self.share(1200))
        found = race([keyloft, apsw], self._folder, self._rounds)
        return Row(
            "set, 64 concurrent, synchronous=FULL",
            tuple(found.values()),
            (compare(found[keyloft.name], found[apsw.name], at_least=4),),
        )

    def lone_sets(self) -> Row:
        stored, operations = self._stored, self.share(1200)
        keyloft = ours.setting(stored, operations)
        fast = ours.setting(stored, operations, name="keyloft on uvloop", loop="uvloop")
        apsw = peers.setting_inline(stored, operations)
        relaxed = ours.setting(stored, self.share(3000), name="keyloft, durability=relaxed", durability="relaxed")
        found = race([keyloft, apsw, fast, relaxed], self._folder, self._rounds)
        return Row(
            "set, one by one, synchronous=FULL",
            tuple(found.values()),
            (
                compare(found[keyloft.name], found[apsw.name], at_least=0.5),
                compare(found[fast.name], found[apsw.name], at_least=0.6),
            ),
        )

    def lists(self) -> Row:
        keyloft = ours.listing(self._stored, self.share(40))
        like = peers.listing_by_like(self._stored, self.share(20))
        found = race([keyloft, like], self._folder, self._rounds)
        return Row(
            "list of 1,000 entries with values",
            tuple(found.values()),
            (compare(found[keyloft.name], found[like.name], at_least=5),),
        )

    def memory(self) -> Row:
        getting = ours.getting(self._stored, self.share(20_000), name="keyloft in memory, get", in_memory=True)
        setting = ours.setting(self._stored, self.share(10_000), name="keyloft in memory, set", in_memory=True)
        found = race([getting, setting], self._folder, self._rounds)
        return Row("in memory, one by one", tuple(found.values()))
