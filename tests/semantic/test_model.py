"""The semantic store against a plain dict, under random writes, retries, expiries and restores, on every engine."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec import Struct
from msgspec.structs import replace

import keyloft
from keyloft import ManualClock
from keyloft.semantic import (
    Envelope,
    Intent,
    NothingToRestore,
    Semantics,
    SemanticStore,
    StaleFence,
    VersionConflict,
)
from tests.support.etcd import EtcdPrefixes
from tests.support.examples import examples
from tests.support.postgres import ReusedDatabase

from .entries import CURSOR, PROJECT, WRITER, living, locked, trail

pytestmark = pytest.mark.slow

T = TypeVar("T")

KEYS = [f"{PROJECT}/{path}" for path in ("a", "a/b", "a-b")]
RETENTION = 10
MEMORY = 6

keys = st.sampled_from(KEYS)
values = st.sampled_from([None, 0, "text", [1, {"a": None}]])
meanings = st.sampled_from([CURSOR, Semantics("config"), living(2), living(5), locked(3)])
expectations = st.sampled_from(["right", "right", "*", "0", "old", "wrong"])
requests = st.none() | st.sampled_from(["r1", "r2"])
fences = st.sampled_from([None, None, None, "newest", "any"])


class ExpectedEntry(Struct, frozen=True):
    """An entry, or what is left of one."""

    value: Any
    version: int
    semantics: Semantics
    due: int | None
    fence: int | None


class Done(Struct, frozen=True):
    """A request that was carried out."""

    asked: object
    outcome: object
    until: int


class Wanted(Struct, frozen=True):
    """A put or delete."""

    key: str
    expected: int | str
    fence: int | None
    value: Any = None
    semantics: Semantics | None = None

    @property
    def operation(self) -> Intent:
        if self.semantics is None:
            return Intent.delete(self.key, expected_version=self.expected, writer=WRITER, fence=self.fence)
        return Intent.put(
            self.key,
            self.value,
            expected_version=self.expected,
            writer=WRITER,
            semantics=self.semantics,
            fence=self.fence,
        )


class SemanticMachine(RuleBasedStateMachine):
    """Subclasses say which database to open."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.entries: dict[str, ExpectedEntry] = {}
        """What is stored, be it expired."""
        self.restorable: dict[str, tuple[ExpectedEntry, int]] = {}
        self.requests: dict[tuple[str, str], Done] = {}
        self.fences: list[int] = []
        self.recorded: dict[str, list[tuple[str, int | None, int | None]]] = {key: [] for key in KEYS}
        self.last = 0
        self.run(self.open())

    def url(self) -> str | None:
        return None

    async def open(self) -> None:
        self.kv = await keyloft.open(self.url(), clock=self.clock, durability="relaxed", sweep_every=None)
        self.store = await self.made()

    async def made(self) -> SemanticStore:
        return SemanticStore(self.kv, sweep_every=None, restore_within=RETENTION, request_memory=MEMORY)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.kv.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    # The model

    def live(self, key: str) -> ExpectedEntry | None:
        held = self.entries.get(key)
        return held if held and (held.due is None or self.clock.now() < held.due) else None

    def version(self, key: str) -> int:
        held = self.live(key)
        return 0 if held is None else held.version

    def holds(self, fence: int | None) -> bool:
        return fence is None or any(held.fence == fence for held in map(self.live, KEYS) if held)

    def objects_to(self, wanted: Wanted) -> str | None:
        if not self.holds(wanted.fence):
            return "fence"
        return None if wanted.expected in ("*", self.version(wanted.key)) else "version"

    def note_expiry(self, key: str) -> bool:
        """Whether the stored entry has expired; then that is recorded."""
        held = self.entries.get(key)
        if held is None or self.live(key) is not None:
            return False
        self.recorded[key].append(("expire", held.version, None))
        return True

    def restorable_until(self, held: ExpectedEntry) -> int:
        """For so long after it was deleted, which is now, or has expired."""
        gone = self.clock.now() if held.due is None else min(held.due, self.clock.now())
        return gone + 1000 * RETENTION

    def keep_for_restore(self, key: str) -> None:
        held = self.entries.pop(key)
        if self.clock.now() < self.restorable_until(held):
            self.restorable[key] = (held, self.restorable_until(held))

    def apply(self, wanted: Wanted, outcome: Envelope | None) -> None:
        key, before = wanted.key, self.live(wanted.key)
        expired = self.note_expiry(key)
        version = None if before is None else before.version
        if wanted.semantics is None:
            assert (None if outcome is None else outcome.version) == version
            self.recorded[key].append(("delete", version, None))
            if before is not None or expired:
                self.keep_for_restore(key)
            return
        assert outcome is not None
        renews = before is not None and wanted.semantics.purpose == "lock" and before.fence == wanted.fence is not None
        kept = before.fence if renews and before is not None else None
        self.store_as(key, wanted.value, wanted.semantics, outcome, kept)
        self.recorded[key].append(("put", version, outcome.version))

    def store_as(self, key: str, value: Any, semantics: Semantics, outcome: Envelope, kept: int | None = None) -> None:
        fence = None if semantics.purpose != "lock" else outcome.version if kept is None else kept
        due = None if semantics.ttl_seconds is None else self.clock.now() + 1000 * semantics.ttl_seconds
        self.entries[key] = held = ExpectedEntry(value, outcome.version, semantics, due, fence)
        if fence is not None:
            self.fences.append(fence)
        assert as_held(outcome) == held

    def grew(self, version: int) -> None:
        assert version > self.last
        self.last = version

    def remembered(self, scope: str, request_id: str | None) -> Done | None:
        done = self.requests.get((scope, request_id or ""))
        return done if done and self.clock.now() < done.until else None

    def remember(self, scope: str, request_id: str | None, asked: object, outcome: object) -> None:
        if request_id is not None:
            self.requests[scope, request_id] = Done(asked, outcome, self.clock.now() + 1000 * MEMORY)

    def expect(self, key: str, how: str) -> int | str:
        now = self.version(key)
        old = self.entries[key].version if key in self.entries else 1
        versions: dict[str, int | str] = {"right": now, "*": "*", "0": 0, "old": old, "wrong": now + 1}
        return versions[how]

    def token(self, how: str | None) -> int | None:
        if how is None or not self.fences:
            return None
        return self.fences[-1] if how == "newest" else self.fences[len(self.fences) // 2]

    # Writing

    @rule(key=keys, value=values, semantics=meanings, how=expectations, request_id=requests, fence=fences)
    def put(
        self, key: str, value: Any, semantics: Semantics, how: str, request_id: str | None, fence: str | None
    ) -> None:
        self.write([Wanted(key, self.expect(key, how), self.token(fence), value, semantics)], request_id, key)

    @rule(key=keys, how=expectations, request_id=requests, fence=fences)
    def delete(self, key: str, how: str, request_id: str | None, fence: str | None) -> None:
        self.write([Wanted(key, self.expect(key, how), self.token(fence))], request_id, key)

    @rule(
        chosen=st.lists(keys, min_size=1, max_size=3, unique=True),
        each=st.lists(st.tuples(expectations, fences, values, st.none() | meanings), min_size=3, max_size=3),
        request_id=requests,
    )
    def batch(self, chosen: list[str], each: list[Any], request_id: str | None) -> None:
        wanted = [
            Wanted(key, self.expect(key, how), self.token(fence), value if semantics else None, semantics)
            for key, (how, fence, value, semantics) in zip(chosen, each, strict=False)
        ]
        if len([one for one in wanted if one.semantics and one.semantics.purpose == "lock"]) < 2:
            self.write(wanted, request_id, "batch")

    @precondition(lambda self: any(held.fence for held in self.entries.values()))
    @rule(data=st.data(), semantics=st.sampled_from([locked(3), locked(1)]))
    def renew(self, data: st.DataObject, semantics: Semantics) -> None:
        key = data.draw(st.sampled_from([key for key, held in self.entries.items() if held.fence]))
        held = self.entries[key]
        self.write([Wanted(key, held.version, held.fence, "renewed", semantics)], None, key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        scope, request_id = data.draw(st.sampled_from(sorted(self.requests)))
        asked = self.requests[scope, request_id].asked
        if isinstance(asked, list):
            self.write(asked, request_id, scope)
        else:
            self.restore(scope, request_id)

    def write(self, wanted: list[Wanted], request_id: str | None, scope: str) -> None:
        done = self.remembered(scope, request_id)
        reasons = {one.key: self.objects_to(one) for one in wanted}
        if done is not None:
            reasons = dict.fromkeys(reasons, None if done.asked == wanted else "request_id")
        failed = {key: reason for key, reason in reasons.items() if reason}
        if failed:
            with pytest.raises(StaleFence if "fence" in failed.values() else VersionConflict) as raised:
                self.run(self.carry_out(wanted, request_id, scope))
            if isinstance(raised.value, VersionConflict):
                assert {one.key: one.reason for one in raised.value.conflicts} == failed
                for one in raised.value.conflicts:
                    assert (one.current and as_held(one.current)) == self.live(one.key)
            for key in failed:
                self.recorded[key].append(("conflict", self.version(key) or None, None))
            return
        outcomes = self.run(self.carry_out(wanted, request_id, scope))
        if done is not None:
            assert outcomes == done.outcome
            return
        versions = {one.version for one, asked in zip(outcomes, wanted, strict=True) if one and asked.semantics}
        for version in versions:
            self.grew(version)
        assert len(versions) <= 1
        for one, outcome in zip(wanted, outcomes, strict=True):
            self.apply(one, outcome)
        self.remember(scope, request_id, wanted, outcomes)

    async def carry_out(self, wanted: list[Wanted], request_id: str | None, scope: str) -> list[Envelope | None]:
        if scope == "batch":
            return [*await self.store.batch([one.operation for one in wanted], request_id=request_id)]
        [one] = wanted
        options: Any = {
            "expected_version": one.expected,
            "writer": WRITER,
            "fence": one.fence,
            "request_id": request_id,
        }
        if one.semantics is None:
            return [await self.store.delete(one.key, **options)]
        return [await self.store.put(one.key, one.value, semantics=one.semantics, **options)]

    @rule(key=keys, request_id=requests)
    def restore(self, key: str, request_id: str | None) -> None:
        done = self.remembered(key, request_id)
        old, until = self.restorable.get(key, (None, 0))
        there = self.live(key)
        if (stored := self.entries.get(key)) is not None:
            old, until = stored, self.restorable_until(stored)
        if self.clock.now() >= until:
            old = None
        restoring = self.store.restore(key, writer=WRITER, request_id=request_id)
        if done is not None and done.asked == "restore":
            assert self.run(restoring) == done.outcome
            return
        if done is not None or there is not None:
            with pytest.raises(VersionConflict) as raised:
                self.run(restoring)
            assert (raised.value.current and as_held(raised.value.current)) == there
            self.recorded[key].append(("conflict", self.version(key) or None, None))
            return
        if old is None:
            with pytest.raises(NothingToRestore):
                self.run(restoring)
            return
        outcome = self.run(restoring)
        self.grew(outcome.version)
        self.note_expiry(key)
        self.restorable.pop(key, None)
        self.store_as(key, old.value, old.semantics, outcome)
        self.recorded[key].append(("restore", None, outcome.version))
        self.remember(key, request_id, "restore", outcome)

    # What happens beside

    @rule(seconds=st.sampled_from([0.001, 1, 2, 5]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        due = [key for key in self.entries if self.note_expiry(key)]
        for key in due:
            self.keep_for_restore(key)
        assert self.run(self.store.sweep()) == len(due)

    @rule()
    def another_store_takes_over(self) -> None:
        self.store = self.run(self.made())

    @precondition(lambda self: self.url() is not None)
    @rule()
    def reopen(self) -> None:
        self.run(self.kv.aclose())
        self.run(self.open())

    # What has to hold

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        live = {key: held for key in KEYS if (held := self.live(key))}
        assert {key: as_held(entry) for key in KEYS if (entry := self.run(self.store.get(key)))} == live
        listed = self.run(self.listed())
        assert [entry.key for entry in listed] == sorted(live)
        assert {entry.key: as_held(entry) for entry in listed} == {
            key: replace(held, value=None) for key, held in live.items()
        }

    async def listed(self) -> list[Envelope]:
        return await self.store.list(PROJECT)

    @rule(key=keys)
    def the_trail_is_complete(self, key: str) -> None:
        records = self.run(trail(self.store, key))
        assert [(record.action, record.version_before, record.version_after) for record in records] == self.recorded[
            key
        ]
        everything = self.run(trail(self.store, PROJECT))
        assert [record for record in everything if record.key == key] == records


def as_held(entry: Envelope) -> ExpectedEntry:
    due = None if entry.expires_at is None else round(entry.expires_at.timestamp() * 1000)
    return ExpectedEntry(entry.value, entry.version, entry.semantics, due, entry.fence)


class SemanticSqliteMachine(SemanticMachine):
    def url(self) -> str:
        return str(self.folder / "app.db")


class SemanticServerMachine(SemanticMachine):
    """In a database of all tests; what other machines left there is thrown away."""

    database: ReusedDatabase | EtcdPrefixes

    def url(self) -> str:
        return self.emptied

    async def open(self) -> None:
        if not hasattr(self, "kv"):
            self.emptied = self.database.emptied()
        await super().open()


def test_postgresql_model(postgres_database: ReusedDatabase) -> None:
    class SemanticOnPostgres(SemanticServerMachine):
        database = postgres_database

    run_state_machine_as_test(SemanticOnPostgres, settings=examples(3, stateful_step_count=30))


def test_etcd_model(etcd_prefixes: EtcdPrefixes) -> None:
    class SemanticOnEtcd(SemanticServerMachine):
        database = etcd_prefixes

    run_state_machine_as_test(SemanticOnEtcd, settings=examples(3, stateful_step_count=30))


TestMemoryModel = SemanticMachine.TestCase
TestMemoryModel.settings = examples(12, stateful_step_count=40)
TestSqliteModel = SemanticSqliteMachine.TestCase
TestSqliteModel.settings = examples(6, stateful_step_count=40)
