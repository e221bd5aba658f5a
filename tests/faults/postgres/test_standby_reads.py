"""Reads from standbys that are behind the primary: no client goes back in time, and no one is kept from the store."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

import keyloft
from keyloft import ReadOnly, admin, limits
from keyloft.core.health import HostHealth
from keyloft.core.records import Ask, Get, Latest, Record, Space
from keyloft.engines.postgres.reads import PointReads, PostgresReads
from keyloft.plugins import BotDatabase
from keyloft.semantic import Semantics, SemanticStore
from tests.support.postgres_cluster import ReplicatedServers, cluster
from tools.postgres import TIMEOUT_SECONDS, query
from tools.process_family import until

# Servers are started and waited for in the event loop.
pytestmark = [pytest.mark.slow, pytest.mark.blocks_the_loop]


@pytest.fixture(scope="module")
def servers() -> Iterator[ReplicatedServers]:
    with cluster() as found:
        yield found


@pytest.fixture
def lagging(servers: ReplicatedServers) -> Iterator[ReplicatedServers]:
    """A primary with a store, and a standby that shows nothing of what is written from now on."""
    primary, standby = servers.nodes
    asyncio.run(_empty(servers.url(primary)))
    until(lambda: standby.caught_up_with(primary))
    query(standby.url, "SELECT pg_wal_replay_pause()")
    until(lambda: query(standby.url, "SELECT pg_get_wal_replay_pause_state() = 'paused'")[0][0])
    yield servers
    query(standby.url, "SELECT pg_wal_replay_resume()")


async def _empty(url: str) -> None:
    async with keyloft.open(url) as kv:
        await kv.delete_range(prefix=())


@pytest.fixture
async def stores(lagging: ReplicatedServers) -> AsyncIterator[tuple[keyloft.Store, keyloft.Store]]:
    """A store that reads from the standby, and one that does not."""
    url = lagging.url()
    async with keyloft.open(url, reads="standby", max_lag=3600) as kv, keyloft.open(url) as other:
        assert not (await kv.get(("k",))).exists
        yield kv, other


async def test_an_entry_that_was_counted_is_listed(stores: tuple[keyloft.Store, keyloft.Store]) -> None:
    kv, other = stores
    await other.set(("k",), 1)
    assert not (await kv.get(("k",))).exists, "the standby is not behind"
    assert await kv.count(prefix=()) == 1
    assert [entry.value for entry in await kv.list(prefix=())] == [1]


@pytest.mark.parametrize("watched", ["key", "prefix"])
async def test_a_change_that_a_watch_has_reported_is_read(
    stores: tuple[keyloft.Store, keyloft.Store], watched: str
) -> None:
    kv, other = stores
    async with asyncio.timeout(TIMEOUT_SECONDS):
        watch = kv.watch(("k",)) if watched == "key" else kv.watch(prefix=())
        if watched == "key":
            assert [entry.exists for entry in await anext(watch)] == [False]
        assert not (await kv.get(("k",))).exists
        await other.set(("k",), 1)
        assert [entry.value for entry in await anext(watch)] == [1]
        assert (await kv.get(("k",))).value == 1
        await other.delete(("k",))
        assert [entry.exists for entry in await anext(watch)] == [False]
        assert not (await kv.get(("k",))).exists


async def test_a_semantic_write_is_not_refused_because_a_standby_is_behind(
    stores: tuple[keyloft.Store, keyloft.Store],
) -> None:
    kv, other = stores
    key, config = "tenant/acme/project/web/a", Semantics("config")
    # With a given key for the audit trail, the store that is behind needs no commit to make one.
    async with SemanticStore(kv, audit_key="k") as behind, SemanticStore(other, audit_key="k") as semantic:
        stored = await semantic.put(key, 1, expected_version=0, writer="w", semantics=config)
        assert await behind.get(key) is None, "the standby is not behind"
        put = await behind.put(key, 2, expected_version=stored.version, writer="w", semantics=config)
        assert put.value == 2


@pytest.mark.parametrize("what", ["renew", "release"])
async def test_a_lock_that_a_standby_does_not_show_is_renewed_and_released(
    stores: tuple[keyloft.Store, keyloft.Store], what: str
) -> None:
    """A holder's requests may go to another instance of a service each time."""
    kv, other = stores
    key = "tenant/acme/project/web/locks/a"
    async with SemanticStore(kv) as behind, SemanticStore(other) as semantic:
        held = await semantic.lock(key, writer="w").acquire()
        assert held.fence is not None
        assert await behind.get(key) is None, "the standby is not behind"
        locks = behind.lock_keeper
        if what == "renew":
            await locks.renew(key, held.fence, 60)
        await locks.release(key, held.fence, writer="w", request_id=None)
        assert await semantic.get(key) is None


async def test_entries_that_a_standby_does_not_show_are_removed_with_their_prefix(
    stores: tuple[keyloft.Store, keyloft.Store],
) -> None:
    kv, other = stores
    await other.set(("t", 1), 1)
    assert not (await kv.get(("t", 1))).exists, "the standby is not behind"
    assert await kv.delete_range(prefix=("t",)) == 1


async def test_a_plugins_entries_that_a_standby_does_not_show_are_removed_with_their_prefix(
    lagging: ReplicatedServers,
) -> None:
    url = lagging.url()
    async with BotDatabase(url) as db, BotDatabase(f"{url}&reads=standby&max_lag=3600") as behind:
        await behind.kv_get("trivia", "a")
        await db.kv_set("trivia", "a", 1)
        assert await behind.kv_delete_many("trivia", prefix="a") == 1


async def test_what_the_latest_version_has_is_read(stores: tuple[keyloft.Store, keyloft.Store]) -> None:
    kv, other = stores
    version = await other.set(("k",), 1)
    assert await kv.engine.read(Latest()) == [version]
    assert (await kv.get(("k",))).value == 1


async def test_the_only_host_of_a_url_answers_reads_though_it_is_a_standby(lagging: ReplicatedServers) -> None:
    _, standby = lagging.nodes
    async with keyloft.open(lagging.url(standby), reads="standby", patience=2) as kv:
        assert not (await kv.get(("k",))).exists
        assert [entry async for entry in kv.list(prefix=())] == []
        with pytest.raises(ReadOnly):
            await kv.set(("k",), 1)


async def test_a_get_asks_a_standby_that_is_behind_once(
    stores: tuple[keyloft.Store, keyloft.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, _ = stores
    await kv.set(("k",), 1)
    asked: list[str] = []
    read = PointReads.read

    def reading(self: PointReads, space: Space, gets: Sequence[Get]) -> "asyncio.Future[list[Record | None]]":
        asked.append("standby" if self is not kv.engine.reads.points else "primary")  # type: ignore[attr-defined]
        return read(self, space, gets)

    monkeypatch.setattr(PointReads, "read", reading)
    assert (await kv.get(("k",))).value == 1
    assert asked == ["standby", "primary"]


async def test_a_standby_that_lacks_a_restore_keeps_no_one_from_the_store(
    lagging: ReplicatedServers, tmp_path: Path
) -> None:
    """A restore gives the store another id, which that standby does not show yet."""
    url, backup = lagging.url(), str(tmp_path / "backup.db")
    async with keyloft.open(url) as kv:
        await kv.set(("k",), 1)
    await admin.backup(url, backup)
    await admin.restore(backup, url, replace=True)
    for reads in ("primary", "standby"):
        async with keyloft.open(url, reads=reads, max_lag=3600) as kv:
            assert (await kv.get(("k",))).value == 1
            await kv.set(("k",), 1)
            if reads == "standby":
                assert [host.role for host in hosts_of(kv)] == ["primary", "other store"]
                assert [host.reads for host in hosts_of(kv)] == [1, 0]


async def test_a_long_read_is_given_the_time_that_it_takes_while_there_is_no_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "POSTGRES_STANDBY_SECONDS", 0.05)  # so that some thousands of keys take longer
    begun: list[int] = []
    read = PostgresReads.read

    async def reading(self: PostgresReads, *asks: Ask) -> list[object]:
        begun.append(len(asks))
        return await read(self, *asks)

    with cluster() as servers:
        primary, standby = servers.nodes
        async with keyloft.open(servers.url(), reads="standby", max_lag=3600) as kv:
            await kv.set(("k", 7), 7)
            until(lambda: standby.caught_up_with(primary))
            primary.kill()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while hosts_of(kv)[0].role != "unreachable":
                    await asyncio.sleep(0.05)
            monkeypatch.setattr(PostgresReads, "read", reading)
            entries = await kv.get_many([("k", number) for number in range(50_000)])
            assert [entry.value for entry in entries if entry.exists] == [7]
            assert begun.count(50_000) <= 2, "it was begun again and again"


async def test_a_standby_that_follows_a_former_primary_is_not_read_from() -> None:
    with cluster(3) as servers:
        old, new, *followers = servers.nodes
        async with keyloft.open(servers.url(), reads="standby", max_lag=3600) as kv:
            await kv.set(("k",), "both have this")
            until(lambda: all([node.caught_up_with(old) for node in (new, *followers)]))
            new.promote()
            followers[1].follow(new)
            async with asyncio.timeout(TIMEOUT_SECONDS), keyloft.open(servers.url(old)) as lost:
                while [host.timeline for host in hosts_of(kv)] != [1, 2, 1, 2]:
                    await asyncio.sleep(0.05)
                await lost.set(("k",), "will be lost")
                until(lambda: followers[0].caught_up_with(old))
                before = [host.reads for host in hosts_of(kv)]
                assert {(await kv.get(("k",))).value for _ in range(10)} == {"both have this"}
                after = [host.reads for host in hosts_of(kv)]
                assert [now - then for now, then in zip(after, before, strict=True)] == [0, 0, 0, 10]


def hosts_of(kv: keyloft.Store) -> tuple[HostHealth, ...]:
    health = kv.engine.health()
    assert health is not None
    return health.hosts
