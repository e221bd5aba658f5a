"""Every list of every interface: read from its beginning each time; `repr` shows where it reads, and whether it can."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pytest

import keyloft
from keyloft import Store
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.semantic import Escalated, SemanticClient, Semantics, SemanticService, SemanticStore

PROJECT = "tenant/acme/project/web"


class ListWorld:
    """Stores, services and clients, with five items in each list."""

    kv: Store
    semantic: SemanticStore
    plugins: BotDatabase
    plugin: DatabaseClient
    workflow: SemanticClient


LISTS: dict[str, Callable[[ListWorld], Any]] = {
    "Listing of entries": lambda world: world.kv.list(),
    "Listing of keys": lambda world: world.kv.keys(),
    "EnvelopeList of entries": lambda world: world.semantic.list(PROJECT),
    "AuditTrail of audit records": lambda world: world.semantic.audit(PROJECT, limit=5),
    "DeadLetterList of dead letters": lambda world: world.semantic.dead_letters.list(PROJECT),
    "PluginKeys of keys": lambda world: world.plugins.kv_list("trivia"),
    "Keys of keys": lambda world: world.plugin.kv.list(),
    "RemoteEnvelopes of entries": lambda world: world.workflow.list(),
}


@pytest.fixture
async def world(tmp_path: Path, nats_url: str) -> AsyncIterator[ListWorld]:
    made = ListWorld()
    connection = await nats.connect(nats_url)
    async with (
        keyloft.open(tmp_path / "app.db") as made.kv,
        SemanticStore(made.kv, sweep_every=None) as made.semantic,
        BotDatabase(tmp_path / "app.db") as made.plugins,
        DatabaseService(connection, made.plugins, prefixes=["lists.kv"]),
        SemanticService(connection, made.semantic, prefix="lists.semantic"),
        DatabaseClient(connection, "trivia", prefix="lists.kv") as made.plugin,
        SemanticClient(connection, "acme", "web", prefix="lists.semantic") as made.workflow,
    ):
        for n in range(5):
            await made.kv.set(("k", n), n)
            await made.plugins.kv_set("trivia", f"k{n}", n)
            written: dict[str, Any] = {"writer": "w:sync", "semantics": Semantics("config"), "expected_version": 0}
            await made.semantic.put(f"{PROJECT}/k{n}", n, **written)
            with pytest.raises(Escalated):
                await made.semantic.retrying(conflict_pauses=[])(made.semantic.put)(f"{PROJECT}/k{n}", n, **written)
        yield made
    await connection.close()


@pytest.mark.parametrize("name", LISTS)
async def test_each_await_and_each_loop_reads_a_list_from_its_beginning(world: ListWorld, name: str) -> None:
    items = LISTS[name](world)
    read = [item async for item in items]
    assert len(read) == 5
    async for item in items:
        assert item == read[0]
        break
    assert [item async for item in items] == read
    first, second = await items, await items
    assert first == second
    assert (first["keys"] if name.startswith("PluginKeys") else first) == read


@pytest.mark.parametrize("name", LISTS)
async def test_a_list_says_what_it_lists_where_and_whether_that_is_closed(
    world: ListWorld, name: str, tmp_path: Path, nats_url: str
) -> None:
    items = LISTS[name](world)
    is_remote = items.__class__.__name__ in ("Keys", "RemoteEnvelopes")
    where = nats_url.rpartition("/")[2] if is_remote else str(tmp_path / "app.db")
    assert repr(items).startswith(f"<{name} in ")
    assert where in repr(items)
    assert ("connected" if is_remote else "open") in repr(items)
    assert "closed" not in repr(items)
    for one in (world.plugin, world.workflow, world.semantic, world.plugins, world.kv):
        await one.aclose()
    assert "closed" in repr(items)
    with pytest.raises(keyloft.Closed):
        await items


async def test_a_client_on_a_borrowed_connection_closes_without_it(world: ListWorld) -> None:
    for client in (world.plugin, world.workflow):
        await client.aclose()
        assert repr(client).endswith(", closed>")
        assert client.nats.is_connected
    with pytest.raises(keyloft.Closed, match="this client is closed"):
        await world.plugin.kv.get("k1")
    with pytest.raises(keyloft.Closed, match="this client is closed"):
        await world.workflow.get("k1")


async def test_all_that_is_used_over_time_says_where_it_points(tmp_path: Path) -> None:
    place = tmp_path / "app.db"
    opening = keyloft.open(place)
    assert repr(opening) == f"<Opening of {place}, not open yet>"
    assert "secret" not in repr(keyloft.open("postgresql://ada:secret@localhost/app"))
    assert (
        repr(keyloft.open("postgresql//ada:secret@localhost")) == "<Opening of a URL that can't be read, not open yet>"
    )
    async with opening as kv, SemanticStore(kv, sweep_every=None) as store:
        assert repr(opening) == f"<Opening of {place}, entered>"
        watch, key = kv.watch(("a",)), f"{PROJECT}/k"
        assert repr(watch) == f"<Watching of keys in {place}, open>"
        assert repr(kv.watch(prefix=())) == f"<Watching of a prefix in {place}, open>"
        await watch.aclose()
        assert repr(watch) == f"<Watching of keys in {place}, open, ended>"
        assert repr(store.checkpoint(key, writer="w:sync")) == f"<Checkpoint {key} of w:sync in {store!r}>"
        assert repr(store.index_version(key)) == f"<IndexVersion {key} in {store!r}>"
        flags = store.flags("acme", "web")
        assert repr(flags) == f"<Flags of {PROJECT} in {store!r}>"
        assert repr(flags.live()) == f"<LiveFlags of {flags!r}, not entered>"
        async with flags.live() as live:
            assert repr(live) == f"<LiveFlags of {flags!r}, up to date>"
        assert repr(live) == f"<LiveFlags of {flags!r}, ended>"
        lock = store.lock(f"{PROJECT}/lock", writer="w:sync")
        assert repr(lock) == f"<Lock {PROJECT}/lock of w:sync in {place}, open, not held>"
    assert repr(lock) == f"<Lock {PROJECT}/lock of w:sync in {place}, closed, not held>"
