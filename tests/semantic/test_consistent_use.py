"""What all classes of the semantic store share: how lists are read, how they close, and what `repr` shows."""

from typing import Any

import nats
import pytest

import keyloft
from keyloft import Closed, Store
from keyloft.semantic import Escalated, SemanticClient, SemanticService, SemanticStore

from .entries import KEY, LOCK, OTHER, PROJECT, put


async def test_every_list_is_awaited_or_iterated_as_often_as_wanted(store: SemanticStore) -> None:
    await put(store)
    await put(store, OTHER)
    with pytest.raises(Escalated):
        await store.retrying(conflict_pauses=[])(put)(store, expected=0)
    for wanted, items in (
        (2, store.list(PROJECT)),
        (3, store.audit(PROJECT)),
        (2, store.audit(KEY)),
        (1, store.dead_letters.list(PROJECT)),
    ):
        for _ in range(2):
            assert [item async for item in items] == await items
        assert len(await items) == wanted
        assert "await it, or iterate it" in repr(items)


async def test_a_store_says_where_it_is_and_whether_it_is_closed() -> None:
    async with keyloft.open() as kv:
        async with SemanticStore(kv, sweep_every=None) as store:
            assert repr(store) == f"<SemanticStore on {kv!r}, open>"
        assert repr(store) == f"<SemanticStore on {kv!r}, closed>"


async def test_a_lock_says_whose_it_is_and_whether_it_is_held(store: SemanticStore, kv: Store) -> None:
    lock = store.lock(LOCK, writer="w:sync")
    where = f"{kv.engine.location}, open"
    assert repr(lock) == f"<Lock {LOCK} of w:sync in {where}, not held>"
    async with lock:
        assert repr(lock) == f"<Lock {LOCK} of w:sync in {where}, held under fence {lock.fence}>"
    assert repr(lock) == f"<Lock {LOCK} of w:sync in {where}, not held>"
    await lock.acquire()
    await store.delete(LOCK, expected_version="*", writer="operator")
    await lock.lost.wait()
    assert repr(lock) == f"<Lock {LOCK} of w:sync in {where}, lost>"


async def test_a_lock_and_a_list_know_that_their_store_was_closed() -> None:
    async with keyloft.open() as kv:
        async with SemanticStore(kv, sweep_every=None) as store:
            lock = store.lock(LOCK, writer="w:sync")
            lists: list[Any] = [
                store.list(PROJECT),
                store.audit(PROJECT),
                store.audit(KEY),
                store.dead_letters.list(PROJECT),
            ]
            assert all(f"{kv.engine.location}, open" in repr(made) for made in (lock, *lists))
        assert all(f"{kv.engine.location}, closed" in repr(made) for made in (lock, *lists))
        for made in lists:
            with pytest.raises(Closed):
                await made


async def test_a_watch_and_live_flags_close_with_aclose(store: SemanticStore) -> None:
    await put(store)
    watch = store.watch(KEY)
    assert await anext(watch) is not None
    await watch.aclose()
    assert [entry async for entry in watch] == []
    live = store.flags("acme", "web", {"on": True}).live()
    async with live as now:
        assert now["on"] is True
    await live.aclose()


async def test_service_and_client_are_context_managers_that_close_with_aclose(nats_url: str, kv: Store) -> None:
    connection = await nats.connect(nats_url)
    address = nats_url.rpartition("/")[2]
    async with SemanticStore(kv, sweep_every=None) as store:
        service = SemanticService(connection, store, prefix="use.semantic")
        assert "not started" in repr(service)
        async with service:
            assert repr(service).startswith("<SemanticService of use.semantic at ")
            assert repr(service).endswith(", serving>")
            options: dict[str, Any] = {"tenant": "acme", "project": "web", "prefix": "use.semantic"}
            async with await SemanticClient.connect(nats_url, **options) as client:
                assert await client.list() == []
                assert "acme/web" in repr(client)
                assert address in repr(client)
            assert repr(client).endswith(", closed>")
            await client.close()
        assert repr(service).endswith(", closed>")
        await service.stop()
    await connection.close()
