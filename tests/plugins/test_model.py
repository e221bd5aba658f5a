"""All operations of `BotDatabase` against a plain dict, under random calls."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from keyloft import ManualClock, NotACounter, VersionConflict
from keyloft.core.values import encode_json
from keyloft.plugins import BotDatabase
from tests.support.examples import examples
from tests.support.postgres import ReusedDatabase

pytestmark = pytest.mark.slow

T = TypeVar("T")
keys = st.sampled_from(["a", "aa", "ab", "b", "é", "\U0010ffff"])
several = st.lists(keys, max_size=4)
prefixes = st.sampled_from(["", "a", "aa", "é", "z"])
stored = st.sampled_from([None, 0, 7, -(10**30), 1.0, True, "text", [1, {"a": None}]])
ttls = st.none() | st.sampled_from([1, 2, 3])


class ModelPluginEntry(NamedTuple):
    value: Any
    version: int
    due: int | None


class PluginMachine(RuleBasedStateMachine):
    """Subclasses say which database to open."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.db = BotDatabase(self.url(), clock=self.clock, durability="relaxed")
        self.held: dict[str, ModelPluginEntry] = {}
        self.latest = 0

    def url(self) -> str | None:
        return None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.db.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def live(self, prefix: str = "") -> dict[str, ModelPluginEntry]:
        now = self.clock.now()
        found = {key: one for key, one in self.held.items() if one.due is None or now < one.due}
        return {key: one for key, one in sorted(found.items()) if key.startswith(prefix)}

    def due(self, ttl: int | None) -> int | None:
        return None if ttl is None else self.clock.now() + 1000 * ttl

    def note(self, key: str, value: Any, due: int | None) -> None:
        """The version is known from a read."""
        found = self.run(self.db.kv_get("p", key, meta=True))
        assert found["version"] > self.latest
        self.held[key] = ModelPluginEntry(value, found["version"], due)

    def noted(self) -> None:
        self.latest = max([self.latest, *[one.version for one in self.held.values()]])

    @rule(seconds=st.sampled_from([0.001, 0.999, 1, 2]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=keys, value=stored, ttl=ttls, keep=st.booleans())
    def set(self, key: str, value: Any, ttl: int | None, keep: bool) -> None:
        if keep:
            before = self.live().get(key)
            assert self.run(self.db.kv_set("p", key, value, keep_ttl=True)) is None
            self.note(key, value, None if before is None else before.due)
        else:
            self.run(self.db.kv_set("p", key, value, ttl=ttl))
            self.note(key, value, self.due(ttl))
        self.noted()

    @rule(key=keys, value=stored, ttl=ttls, expected=st.sampled_from(["absent", "right", "wrong"]))
    def set_with_a_condition(self, key: str, value: Any, ttl: int | None, expected: str) -> None:
        before = self.live().get(key)
        version = 0 if before is None else before.version
        condition: dict[str, Any] = {"expected_version": version if expected == "right" else version + 1}
        if expected == "absent":
            condition = {"if_absent": True}
        if expected == "right" or (expected == "absent" and before is None):
            made = self.run(self.db.kv_set("p", key, value, ttl=ttl, **condition))
            self.note(key, value, self.due(ttl))
            assert made == self.held[key].version
            self.noted()
            return
        with pytest.raises(VersionConflict) as raised:
            self.run(self.db.kv_set("p", key, value, ttl=ttl, **condition))
        current = raised.value.current
        assert (current and (current.value, current.version)) == (before and (before.value, before.version))

    @rule(key=keys, by=st.integers(-3, 3), ttl=ttls)
    def incr(self, key: str, by: int, ttl: int | None) -> None:
        before = self.live().get(key)
        if before is not None and type(before.value) is not int:
            with pytest.raises(NotACounter):
                self.run(self.db.kv_incr("p", key, by, ttl=ttl))
            return
        value, due = (by, self.due(ttl)) if before is None else (before.value + by, before.due)
        assert self.run(self.db.kv_incr("p", key, by, ttl=ttl)) == value
        self.note(key, value, due)
        self.noted()

    @rule(entries=st.dictionaries(keys, stored, max_size=4), ttl=ttls)
    def set_many(self, entries: dict[str, Any], ttl: int | None) -> None:
        assert self.run(self.db.kv_set_many("p", entries, ttl=ttl)) == len(entries)
        for key, value in entries.items():
            self.note(key, value, self.due(ttl))
        assert len({self.held[key].version for key in entries}) <= 1, "they are one commit"
        self.noted()

    @rule(key=keys)
    def delete(self, key: str) -> None:
        assert self.run(self.db.kv_delete("p", key)) is (key in self.live())
        self.held.pop(key, None)

    @rule(wanted=several)
    def delete_many(self, wanted: list[str]) -> None:
        live = self.live()
        assert self.run(self.db.kv_delete_many("p", wanted)) == len({*wanted} & {*live})
        for key in wanted:
            self.held.pop(key, None)

    @rule(prefix=prefixes)
    def delete_by_prefix(self, prefix: str) -> None:
        live = self.live(prefix)
        assert self.run(self.db.kv_delete_many("p", prefix=prefix)) == len(live)
        for key in live:
            del self.held[key]

    @rule(key=keys, ttl=ttls)
    def touch(self, key: str, ttl: int | None) -> None:
        before = self.live().get(key)
        assert self.run(self.db.kv_touch("p", key, ttl)) is (before is not None)
        if before is not None:
            self.held[key] = before._replace(due=self.due(ttl))

    @rule(wanted=several)
    def get_many(self, wanted: list[str]) -> None:
        live = self.live()
        expected = {key: live[key].value for key in wanted if key in live}
        found = self.run(self.db.kv_get_many("p", wanted))
        assert {key: (type(value), value) for key, value in found.items()} == {
            key: (type(value), value) for key, value in expected.items()
        }

    @rule(key=keys)
    def get_with_meta(self, key: str) -> None:
        one, found = self.live().get(key), self.run(self.db.kv_get("p", key, meta=True))
        assert found["exists"] is (one is not None)
        if one is not None:
            left = None if one.due is None else -(-(one.due - self.clock.now()) // 1000)
            assert (found["value"], found["version"], found["ttl"]) == (one.value, one.version, left)
            assert found["created_at"] <= found["updated_at"]

    @rule(prefix=prefixes, limit=st.integers(1, 4))
    def list_a_page(self, prefix: str, limit: int) -> None:
        live = [(key, one.value) for key, one in self.live(prefix).items()]
        page = self.run(self._page(prefix, limit))
        assert page == {"entries": live[:limit], "count": min(limit, len(live)), "truncated": len(live) > limit}

    async def _page(self, prefix: str, limit: int) -> Any:
        return await self.db.kv_list("p", prefix, limit, values=True)

    @invariant()
    def what_is_stored_is_what_should_be(self) -> None:
        live = self.live()
        values = {key: one.value for key, one in live.items()}

        async def read() -> tuple[dict[str, Any], int, dict[str, int]]:
            entries = {key: value async for key, value in self.db.kv_list("p", values=True)}
            return entries, await self.db.kv_count("p"), await self.db.kv_usage("p")

        size = sum([len(encode_json(value, 1000)) for value in values.values()])
        assert self.run(read()) == (values, len(live), {"keys": len(live), "bytes": size})


class SqlitePluginMachine(PluginMachine):
    def url(self) -> str | None:
        return f"sqlite:///{self.folder}/bot.db"


def test_in_memory() -> None:
    run_state_machine_as_test(PluginMachine, settings=examples(15, stateful_step_count=30))


def test_on_sqlite() -> None:
    run_state_machine_as_test(SqlitePluginMachine, settings=examples(10, stateful_step_count=30))


def test_on_postgresql(postgres_database: ReusedDatabase) -> None:
    class PostgresPluginMachine(PluginMachine):
        def url(self) -> str:
            return postgres_database.emptied()

    run_state_machine_as_test(PostgresPluginMachine, settings=examples(5, stateful_step_count=20))
