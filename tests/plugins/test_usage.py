"""What plugins store, counted in slices, and their quotas."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from keyloft import ManualClock, QuotaExceeded, limits
from keyloft.core.engine import write
from keyloft.core.records import Delete, Get, PluginKey, Set, Space, Usage, Used
from keyloft.core.values import Encoding
from keyloft.errors import DatabaseError
from keyloft.plugins import BotDatabase
from keyloft.plugins.counting import KeyGrowth, growth
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage
from tests.support.etcd import and_etcd
from tests.support.examples import examples
from tests.support.postgres import database_url


@pytest.fixture(params=and_etcd("memory", "sqlite file", "postgresql"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def db(url: str | None, clock: ManualClock) -> AsyncIterator[BotDatabase]:
    async with BotDatabase(url, clock=clock) as db:
        yield db


@pytest.fixture
async def memory(clock: ManualClock) -> AsyncIterator[BotDatabase]:
    async with BotDatabase(None, clock=clock) as db:
        yield db


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "USAGE_ROWS", 2)
    monkeypatch.setattr(limits, "USAGE_FEWEST_ROWS", 2)


async def store(db: BotDatabase, usage: PluginUsage, plugin: str, key: str, size: int | None) -> None:
    """Write as the service does, with a value of so many bytes, or None to delete."""
    engine = await db.engine()
    [old] = await engine.read(Get(Space.PLUGINS, (plugin, key)))
    reservation = await usage.reserve(plugin, [growth(key, old, size)])
    reservation.committed((await write(engine, mutation((plugin, key), size))).version)


def mutation(at: PluginKey, size: int | None) -> Delete | Set:
    """Stores a value of so many bytes, or deletes."""
    return Delete(Space.PLUGINS, at) if size is None else Set(Space.PLUGINS, at, b"1" * size, Encoding.JSON)


async def shown(usage: PluginUsage) -> dict[str, tuple[int, int]]:
    found = await usage.all(patience=30)
    assert found is not None
    return {one.plugin: (one.entries, one.value_bytes) for one in found}


class TestCounting:
    async def test_all_plugins_are_counted_in_slices(
        self, db: BotDatabase, clock: ManualClock, small_slices: None
    ) -> None:
        for plugin, keys in (("a", 1), ("b", 5), ("c", 2), ("d", 4)):
            for number in range(keys):
                await db.kv_set(plugin, f"k{number}", 10)
        await db.kv_set("b", "gone", 1, ttl_seconds=10)
        clock.advance(11)
        async with PluginUsage(db) as usage:
            assert await shown(usage) == {"a": (1, 2), "b": (5, 10), "c": (2, 4), "d": (4, 8)}
            assert await usage.of("b") == Used("b", 5, 10)
            assert await usage.of("unknown") == Used("unknown", 0, 0)
            await db.kv_delete("a", "k0")
            await db.kv_set("d", "k9", 100)
            await usage.count_all()
            assert await shown(usage) == {"b": (5, 10), "c": (2, 4), "d": (5, 11)}

    async def test_no_read_has_more_rows_than_a_slice(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(3 * limits.USAGE_ROWS):
            await memory.kv_set("a", str(number), 1)
        engine = await memory.engine()
        read, asked = engine.read, list[int]()

        async def noted(*asks: Any) -> Any:
            asked.extend([ask.limit for ask in asks if isinstance(ask, Usage)])
            return await read(*asks)

        monkeypatch.setattr(engine, "read", noted)
        async with PluginUsage(memory) as usage:
            assert await usage.of("a") == Used("a", 3 * limits.USAGE_ROWS, 3 * limits.USAGE_ROWS)
        assert len(asked) > 3
        assert max(asked) <= limits.USAGE_ROWS

    async def test_a_name_that_was_written_by_hand_is_counted(self, tmp_path: Path, small_slices: None) -> None:
        async with BotDatabase(tmp_path / "bot.db") as db, PluginUsage(db) as usage:
            await db.kv_set("a", "k", 1)
            engine: Any = await db.engine()
            for name, key in ((b"raw", b"1"), (b"raw", b"2"), (b"raw", b"3"), ("b", b"k"), ("b", "k")):
                engine.connection.execute(
                    "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES (?, ?, '1')", (name, key)
                )
            await usage.count_all()
            usage.apply("a", [KeyGrowth("j", 1, 1)], 10)
            usage.apply("b", [KeyGrowth("j", 1, 1)], 10)
            assert await shown(usage) == {"a": (2, 2), "b": (3, 3), str(b"raw"): (3, 3)}

    async def test_plugins_beyond_a_limit_are_added_up(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "USAGE_PLUGINS", 2)
        for plugin in "abcd":
            await memory.kv_set(plugin, "k", 10)
        async with PluginUsage(memory) as usage:
            assert await shown(usage) == {"a": (1, 2), "b": (1, 2), "other": (2, 4)}
            assert await usage.of("d") == Used("d", 1, 2)

    async def test_a_database_that_fails_is_counted_again_later(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        await memory.kv_set("a", "k", 1)
        monkeypatch.setattr(limits, "USAGE_RETRY_SECONDS", 0.001)
        engine = await memory.engine()
        read, failures = engine.read, iter([DatabaseError("no"), DatabaseError("no")])

        async def failing(*asks: Any) -> Any:
            for failure in failures:
                raise failure
            return await read(*asks)

        monkeypatch.setattr(engine, "read", failing)
        async with PluginUsage(memory) as usage:
            with pytest.raises(DatabaseError):
                await usage.of("a")
            assert await shown(usage) == {"a": (1, 1)}
        assert "could not be counted: no" in caplog.text

    async def test_counting_ends_when_it_is_no_longer_asked_for(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "USAGE_WANTED_SECONDS", 0.05)
        async with PluginUsage(memory) as usage:
            usage.every = 0
            for key in ("k", "j"):
                await memory.kv_set("a", key, 1)
                counted = await shown(usage)
                [rounds] = [task for task in asyncio.all_tasks() if task.get_name() == "keyloft usage"]
                await rounds
            assert counted == {"a": (2, 2)}

    async def test_an_end_while_counting_leaves_no_task(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def stalled(*asks: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(await memory.engine(), "read", stalled)
        async with PluginUsage(memory) as usage:
            assert await usage.all(patience=0.001) is None
            counting = asyncio.create_task(usage.of("a"))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await counting
        assert [task for task in asyncio.all_tasks() if task.get_name() == "keyloft usage"] == []


class TestWritesWhileCounting:
    @given(st.data())
    @examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    def test_no_write_is_counted_twice_or_missed(self, small_slices: None, data: st.DataObject) -> None:
        asyncio.run(count_among_writes(data))


async def count_among_writes(data: st.DataObject) -> None:
    """Write before, during and after each slice, and report each write before or after the slice: counts are exact."""
    sizes = st.one_of(st.none(), st.integers(1, 9))
    some = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("klmnop"), sizes), max_size=4)
    unreported: list[tuple[str, list[KeyGrowth], int]] = []
    async with BotDatabase() as db, PluginUsage(db) as usage:
        engine = await db.engine()
        read = engine.read

        def report() -> None:
            for plugin, growths, version in unreported:
                usage.apply(plugin, growths, version)
            unreported.clear()

        async def change() -> None:
            for plugin, key, size in data.draw(some):
                at = plugin, key
                [old] = await read(Get(Space.PLUGINS, at))
                version = (await write(engine, mutation(at, size))).version
                unreported.append((plugin, [growth(key, old, size)], version))
                if data.draw(st.booleans()):
                    report()

        async def interrupted(*asks: Any) -> Any:
            await change()
            [answer] = await read(*asks)
            await change()
            return [answer]

        await change()
        engine.read = interrupted  # type: ignore[method-assign]
        await usage.count_all()
        await change()
        report()
        engine.read = read  # type: ignore[method-assign]
        counted = usage.known("abc")
        # A plugin without a key when its turn came is unknown, which is not the same as none.
        assert counted == {plugin: await stored_by(db, plugin) for plugin in counted}


async def stored_by(db: BotDatabase, plugin: str) -> Used:
    async with PluginUsage(db) as usage:
        return await usage.of(plugin)


class TestQuotas:
    async def test_a_write_over_the_quota_is_refused_and_what_shrinks_passes(self, db: BotDatabase) -> None:
        async with PluginUsage(db, Quotas(Quota(keys=2, bytes=10))) as usage:
            await store(db, usage, "a", "k1", 4)
            await store(db, usage, "a", "k2", 4)
            with pytest.raises(QuotaExceeded, match="expected at most 2 keys in all, got 3 with this write") as refused:
                await store(db, usage, "a", "k3", 1)
            assert (refused.value.code, refused.value.actual, refused.value.limit) == ("QUOTA_EXCEEDED", 3, 2)
            with pytest.raises(QuotaExceeded, match="expected at most 10 bytes in all, got 11"):
                await store(db, usage, "a", "k2", 7)
            await store(db, usage, "a", "k2", 6)
            await store(db, usage, "a", "k2", 6)
            await store(db, usage, "a", "k2", 1)
            await store(db, usage, "a", "k1", None)
            await store(db, usage, "a", "k3", 9)
            assert await usage.of("a") == Used("a", 2, 10)
            await store(db, usage, "b", "k", 10)

    async def test_what_is_over_a_lowered_quota_can_shrink(self, memory: BotDatabase) -> None:
        for number in range(5):
            await memory.kv_set("a", str(number), 12345)
        async with PluginUsage(memory, Quotas(Quota(keys=2, bytes=3))) as usage:
            await store(memory, usage, "a", "0", 4)
            await store(memory, usage, "a", "1", None)
            with pytest.raises(QuotaExceeded):
                await store(memory, usage, "a", "1", 1)
            assert await usage.of("a") == Used("a", 4, 19)

    async def test_quotas_by_name_replace_the_default(self) -> None:
        quotas = Quotas(Quota(keys=1), {"big": Quota(keys=5, bytes=9), "free": Quota()})
        assert quotas.of("a") == Quota(keys=1)
        assert quotas.of("big") == Quota(keys=5, bytes=9)
        assert quotas.of("free") is None
        assert Quotas().of("a") is None

    async def test_what_has_expired_makes_room(
        self, db: BotDatabase, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "USAGE_RECOUNT_PAUSE", 0)
        async with PluginUsage(db, Quotas(Quota(keys=2))) as usage:
            usage.fresh = 0
            for _ in range(3):
                for key in ("k1", "k2"):
                    [old] = await (await db.engine()).read(Get(Space.PLUGINS, ("a", key)))
                    reservation = await usage.reserve("a", [growth(key, old, 1)])
                    await db.kv_set("a", key, 1, ttl_seconds=5)
                    [version] = await (await db.engine()).read(Usage(("", ""), 1))
                    reservation.committed(version.version)
                clock.advance(6)

    async def test_a_refusal_by_a_fresh_count_reads_nothing(
        self, memory: BotDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with PluginUsage(memory, Quotas(Quota(keys=1))) as usage:
            usage.fresh = 1e9
            await store(memory, usage, "a", "k", 1)
            monkeypatch.setattr(await memory.engine(), "read", None)
            with pytest.raises(QuotaExceeded):
                await usage.reserve("a", [KeyGrowth("j", 1, 1)])

    async def test_writes_under_way_take_room(self, memory: BotDatabase) -> None:
        """The third write waits: it fits only if one of the others fails."""
        async with PluginUsage(memory, Quotas(Quota(keys=2))) as usage:
            first = await usage.reserve("a", [KeyGrowth("1", 1, 1)])
            second = await usage.reserve("a", [KeyGrowth("2", 1, 1)])
            third = asyncio.create_task(usage.reserve("a", [KeyGrowth("3", 1, 1)]))
            fourth = asyncio.create_task(usage.reserve("a", [KeyGrowth("4", 1, 1)]))
            deleting = await usage.reserve("a", [KeyGrowth("0", -1, -1)])
            await asyncio.sleep(0)
            await memory.kv_set("a", "1", 1)
            first.committed(2)
            second.release()
            (await third).release()
            (await fourth).release()
            deleting.release()
            assert await usage.of("a") == Used("a", 1, 1)
            async with asyncio.timeout(30):  # nothing is reserved any more: there is room for one
                (await usage.reserve("a", [KeyGrowth("5", 1, 1)])).release()

    async def test_writes_at_the_same_time_never_exceed_the_quota(self, db: BotDatabase) -> None:
        async with PluginUsage(db, Quotas(Quota(keys=20))) as usage:
            writes = [store(db, usage, "a", f"k{number}", 1) for number in range(40)]
            done = await asyncio.gather(*writes, usage.count_all(), return_exceptions=True)
            refused = [one for one in done if isinstance(one, QuotaExceeded)]
            assert len(refused) == 20
            assert await usage.of("a") == Used("a", 20, 20)
            await usage.count_all()
            assert await usage.of("a") == Used("a", 20, 20)
