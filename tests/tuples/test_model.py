"""The whole store against a plain dict, under random operations, on every engine."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import keyloft
from keyloft import U64, Entry, ManualClock, NotACounter, Store, Watching
from keyloft.core import keys
from keyloft.core.keys import TupleKey, encode
from tests.support.etcd import EtcdPrefixes
from tests.support.examples import examples
from tests.support.postgres import ReusedDatabase
from tests.support.threads import StoreInThreads

pytestmark = pytest.mark.slow

T = TypeVar("T")

parts = st.sampled_from(["a", "b", "", 1, 2, -1, 1.5, True, b"x", "a\x00"])
tuple_keys = st.lists(parts, min_size=1, max_size=3).map(tuple)
prefixes = st.lists(parts, max_size=2).map(tuple)
stored_values = st.sampled_from([None, 0, 1.5, "text", [1, {"a": None}], b"raw", U64(3), U64(2**64 - 1)])
LONGEST_SECONDS = 20
WATCHED: list[TupleKey] = [("a",), ("b", 1), ("a", "b")]
expiries = st.none() | st.sampled_from([0.001, 1, 2.5])


class ModelEntry(NamedTuple):
    key: TupleKey
    value: Any
    stamp: int
    due: int | None = None


class StoreModel:
    """What a store should hold, by encoded key: a dict would take 1, 1.0 and True for one key."""

    def __init__(self) -> None:
        self.now = 0
        self.entries: dict[bytes, ModelEntry] = {}

    def is_live(self, held: ModelEntry) -> bool:
        return held.due is None or self.now < held.due

    def live(self, start: bytes = b"\x00", end: bytes = b"\xff") -> list[ModelEntry]:
        return [held for at, held in sorted(self.entries.items()) if start <= at < end and self.is_live(held)]

    def below(self, prefix: TupleKey) -> list[ModelEntry]:
        return self.live(*keys.below(keys.encode_prefix(prefix)))

    def get(self, key: TupleKey) -> ModelEntry | None:
        held = self.entries.get(encode(key))
        return held if held and self.is_live(held) else None

    def set(self, key: TupleKey, value: Any, stamp: int, expire_in: float | None) -> None:
        due = None if expire_in is None else self.now + round(expire_in * 1000)
        self.entries[encode(key)] = ModelEntry(key, value, stamp, due)

    def delete(self, key: TupleKey) -> None:
        if self.get(key):
            del self.entries[encode(key)]


class StoreMachine(RuleBasedStateMachine):
    """Subclasses say which database to open."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.model = StoreModel()
        self.began = self.clock.now()
        self.kv: Store = self.run(self.opened())
        self.stamp = 0
        self.watch_again()

    def url(self) -> str | None:
        return None

    async def opened(self) -> Store:
        return await keyloft.open(self.url(), clock=self.clock, durability="relaxed", sweep_every=None)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.kv.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def held(self, entry: Entry) -> ModelEntry:
        assert entry.versionstamp is not None
        due = None if entry.expires_at is None else round(entry.expires_at.timestamp() * 1000) - self.began
        return ModelEntry(entry.key, entry.value, entry.versionstamp, due)

    def watch_again(self) -> None:
        async def made() -> tuple[Watching, Watching]:
            return self.kv.watch(prefix=("a",)), self.kv.watch(*WATCHED)

        self.below_a, self.some_keys = self.run(made())
        self.seen_below_a = {encode(held.key): held for held in self.model.below(("a",))}
        self.seen_keys: list[int | None] = []

    def grew(self, stamp: int | None) -> int:
        assert stamp is not None
        assert stamp > self.stamp
        self.stamp = stamp
        return stamp

    @rule(key=tuple_keys, value=stored_values, expire_in=expiries)
    def set(self, key: TupleKey, value: Any, expire_in: float | None) -> None:
        stamp = self.grew(self.run(self.kv.set(key, value, expire_in=expire_in)))
        self.model.set(key, value, stamp, expire_in)

    @rule(pairs=st.lists(st.tuples(tuple_keys, stored_values), max_size=4), expire_in=expiries)
    def set_many(self, pairs: list[tuple[TupleKey, Any]], expire_in: float | None) -> None:
        stamp = self.grew(self.run(self.kv.set_many(pairs, expire_in=expire_in)))
        for key, value in pairs:
            self.model.set(key, value, stamp, expire_in)

    @rule(many=st.lists(tuple_keys, max_size=4))
    def delete_many(self, many: list[TupleKey]) -> None:
        doomed = {encode(key) for key in many if self.model.get(key)}
        assert self.run(self.kv.delete_many(many)) == len(doomed)
        for key in many:
            self.model.delete(key)

    @rule(key=tuple_keys)
    def delete(self, key: TupleKey) -> None:
        assert self.run(self.kv.delete(key)) == (self.model.get(key) is not None)
        self.model.delete(key)

    @rule(prefix=prefixes)
    def delete_range(self, prefix: TupleKey) -> None:
        doomed = self.model.below(prefix)
        assert self.run(self.kv.delete_range(prefix)) == len(doomed)
        for held in doomed:
            self.model.delete(held.key)

    @rule(key=tuple_keys, expire_in=expiries)
    def touch(self, key: TupleKey, expire_in: float | None) -> None:
        held = self.model.get(key)
        assert self.run(self.kv.touch(key, expire_in=expire_in)) == (held is not None)
        if held is not None:
            self.model.set(key, held.value, held.stamp, expire_in)

    @rule(
        checked=tuple_keys,
        right=st.booleans(),
        key=tuple_keys,
        value=stored_values,
        counter=tuple_keys,
        gone=tuple_keys,
    )
    def atomic(
        self, checked: TupleKey, right: bool, key: TupleKey, value: Any, counter: TupleKey, gone: TupleKey
    ) -> None:
        known = self.model.get(checked)
        stamp = None if known is None else known.stamp
        batch = self.kv.atomic().check(checked, stamp if right else (stamp or 0) + 1)
        batch.set(key, value).sum(counter, 2).min(counter, 2**40).max(counter, 4).delete(gone)
        counted = ModelEntry(key, value, 0) if encode(counter) == encode(key) else self.model.get(counter)
        countable = counted is None or type(counted.value) is U64
        try:
            done = self.run(batch.commit())
        except NotACounter:
            assert right
            assert not countable
            return
        assert done.ok == right
        if not done.ok:
            [conflict] = done.conflicts
            assert (conflict.key, conflict.versionstamp) == (checked, stamp)
            return
        assert countable
        new = self.grew(done.versionstamp)
        self.model.set(key, value, new, None)
        number, due = (counted.value, counted.due) if counted else (0, None)
        self.model.entries[encode(counter)] = ModelEntry(
            counter, U64(max(min((number + 2) % 2**64, 2**40), 4)), new, due
        )
        self.model.delete(gone)

    @rule(seconds=st.sampled_from([0.001, 0.5, 2]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now += round(seconds * 1000)

    @rule()
    def sweep(self) -> None:
        live = self.model.live()
        assert self.run(self.kv.sweep()) == len(self.model.entries) - len(live)
        self.model.entries = {encode(held.key): held for held in live}

    @precondition(lambda self: self.url() is not None)
    @rule()
    def reopen(self) -> None:
        self.run(self.kv.aclose())
        self.kv = self.run(self.opened())
        self.watch_again()

    @rule()
    def watches_catch_up(self) -> None:
        self.run(self.listen())
        assert self.seen == self.to_be_seen

    @property
    def seen(self) -> tuple[list[Any], list[int | None]]:
        # A touch is no news, so what was seen may show an older expiry.
        return [held[:3] for _, held in sorted(self.seen_below_a.items())], self.seen_keys

    @property
    def to_be_seen(self) -> tuple[list[Any], list[int | None]]:
        stamps = [held and held.stamp for held in map(self.model.get, WATCHED)]
        return [held[:3] for held in self.model.below(("a",))], stamps

    async def listen(self) -> None:
        for entry in await self.news(self.below_a):
            if entry.exists:
                self.seen_below_a[encode(entry.key)] = self.held(entry)
            else:
                self.seen_below_a.pop(encode(entry.key), None)
        if entries := (await self.news(self.some_keys))[-len(WATCHED) :]:
            assert [entry.key for entry in entries] == WATCHED
            self.seen_keys = [entry.versionstamp for entry in entries]

    async def news(self, watching: Watching) -> list[Entry]:
        """Everything a watch has to say, without waiting for more."""
        entries: list[Entry] = []
        while True:
            step = asyncio.ensure_future(anext(watching))
            for _ in range(5):
                await asyncio.sleep(0)
            if not step.done():
                step.cancel()
                await asyncio.wait([step])
                return entries
            entries += step.result()

    @rule(prefix=prefixes, reverse=st.booleans(), limit=st.integers(1, 4))
    def list_in_pages(self, prefix: TupleKey, reverse: bool, limit: int) -> None:
        expected = self.model.below(prefix)
        assert self.run(self.paged(prefix, reverse, limit)) == (expected[::-1] if reverse else expected)

    async def paged(self, prefix: TupleKey, reverse: bool, limit: int) -> list[ModelEntry]:
        found: list[ModelEntry] = []
        cursor = None
        while page := await self.kv.list(prefix, reverse=reverse, limit=limit, cursor=cursor):
            found += [self.held(entry) for entry in page]
            cursor = page.cursor
        assert page.cursor == cursor, "the cursor of an empty page is the one that was given"
        return found

    @rule(start=tuple_keys, end=tuple_keys)
    def ranges(self, start: TupleKey, end: TupleKey) -> None:
        if encode(start) > encode(end):
            start, end = end, start
        expected = [held.key for held in self.model.live(encode(start), encode(end))]
        assert self.run(self.all_keys(start, end)) == expected
        assert self.run(self.kv.count(start=start, end=end)) == len(expected)

    @rule(prefix=prefixes, one=tuple_keys, other=tuple_keys)
    def ranges_within_a_prefix(self, prefix: TupleKey, one: TupleKey, other: TupleKey) -> None:
        start, end = sorted([prefix + one, prefix + other], key=encode)
        [low, high] = [encode(start), encode(end)]
        below = [held for held in self.model.below(prefix) if low <= encode(held.key)]
        assert self.run(self.kv.count(prefix, start=start)) == len(below)
        assert self.run(self.kv.count(prefix, start=start, end=end)) == len([h for h in below if encode(h.key) < high])

    async def all_keys(self, start: TupleKey, end: TupleKey) -> list[TupleKey]:
        return [key async for key in self.kv.keys(start=start, end=end)]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        live = self.model.live()
        entries = self.run(self.kv.get_many([held.key for held in live]))
        assert [self.held(entry) for entry in entries] == live
        assert self.run(self.kv.count()) == len(live)


class SqliteMachine(StoreMachine):
    def url(self) -> str:
        return str(self.folder / "app.db")


class SqliteInMemoryMachine(StoreMachine):
    async def opened(self) -> Store:
        return await keyloft.open("sqlite://", clock=self.clock, sweep_every=None)


class PatientMachine(StoreMachine):
    """Changes arrive later than the commits that made them return."""

    def watch_again(self) -> None:
        super().watch_again()
        self.steps: dict[Watching, asyncio.Future[list[Entry]]] = {}
        # A read waits until the watch has started: what expires before was never there for it.
        self.run(asyncio.wait_for(self.kv.get(("a",)), LONGEST_SECONDS))

    async def listen(self) -> None:
        # A server or a thread takes its time, and nothing but the model tells that there is no more to come.
        async with asyncio.timeout(LONGEST_SECONDS):
            while self.seen != self.to_be_seen:
                await super().listen()

    async def news(self, watching: Watching) -> list[Entry]:
        step = self.steps.pop(watching, None)
        if step is None:
            step = asyncio.ensure_future(anext(watching))
            step.add_done_callback(lambda step: step.cancelled() or step.exception())  # closing the store ends it
        await asyncio.wait([step], timeout=0.01)
        if step.done():
            return step.result()
        self.steps[watching] = step
        return []


class SyncMachine(PatientMachine):
    """A synchronous store, each call in a thread."""

    def url(self) -> str:
        return str(self.folder / "app.db")

    async def opened(self) -> Store:
        store = keyloft.open_sync(self.url(), clock=self.clock, durability="relaxed", sweep_every=None)
        return cast(Store, StoreInThreads(store))


class ServerMachine(PatientMachine):
    """In a database that a test emptied; what other machines left there is thrown away."""

    database: ReusedDatabase | EtcdPrefixes

    def url(self) -> str:
        return self.emptied

    async def opened(self) -> Store:
        if not hasattr(self, "kv"):
            self.emptied = self.database.emptied()
        return await super().opened()


def test_postgresql_model(postgres_database: ReusedDatabase) -> None:
    class StoreOnPostgres(ServerMachine):
        database = postgres_database

    run_state_machine_as_test(StoreOnPostgres, settings=examples(4, stateful_step_count=30))


def test_etcd_model(etcd_prefixes: EtcdPrefixes) -> None:
    class StoreOnEtcd(ServerMachine):
        database = etcd_prefixes

    run_state_machine_as_test(StoreOnEtcd, settings=examples(6, stateful_step_count=30))


TestMemoryModel = StoreMachine.TestCase
TestMemoryModel.settings = examples(20, stateful_step_count=30)
TestSqliteModel = SqliteMachine.TestCase
TestSqliteModel.settings = examples(12, stateful_step_count=30)
TestSyncModel = SyncMachine.TestCase
TestSyncModel.settings = examples(4, stateful_step_count=30)
TestSqliteInMemoryModel = SqliteInMemoryMachine.TestCase
TestSqliteInMemoryModel.settings = examples(8, stateful_step_count=30)
