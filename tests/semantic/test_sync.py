"""The semantic store and the operators' functions without an event loop of the caller's."""

import asyncio
import threading
from pathlib import Path

import pytest

import keyloft
from keyloft.admin import sync as admin
from keyloft.errors import Closed, InvalidArgument, LockHeld, LockLost, ReentrantCall, VersionConflict
from keyloft.semantic import Semantics, SemanticStore, SyncSemanticStore
from tests.support.postgres import database_url

PROJECT = "tenant/acme/project/web"
KEY = f"{PROJECT}/docs/cursor"
CURSOR = Semantics("cursor")
LONGEST_SECONDS = 60


@pytest.fixture(params=["memory", "sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


def test_entries_locks_checkpoints_and_flags(url: str | None) -> None:
    with keyloft.open_sync(url) as kv, SyncSemanticStore(kv) as store:
        first = store.put(KEY, {"token": "a"}, expected_version=0, writer="harvester:sync", semantics=CURSOR)
        with pytest.raises(VersionConflict):
            store.put(KEY, 2, expected_version=0, writer="harvester:sync", semantics=CURSOR)
        assert [entry.key for entry in store.list(f"{PROJECT}/docs/")] == [KEY]
        assert store.audit(KEY).all()[0].action == "put"
        with store.lock(f"{PROJECT}/locks/sync", writer="harvester:sync") as lock:
            assert lock.is_held
            with pytest.raises(LockHeld):
                store.lock(f"{PROJECT}/locks/sync", writer="other:sync", wait=0).acquire()
            store.put(KEY, 1, expected_version=first.version, writer="h:s", semantics=CURSOR, fence=lock.fence)
        assert store.locks(PROJECT).all() == []
        with store.watch(KEY) as watching:
            assert next(watching).value == 1  # type: ignore[union-attr]
            # A plain function, which may use the store, too.
            changed = store.retrying().run(lambda: store.update(KEY, lambda value: value + 1, writer="h:s"))
            assert changed.value == 2
            assert next(watching).value == 2  # type: ignore[union-attr]
        with pytest.raises(ReentrantCall, match="waits for it"):
            store.update(KEY, lambda value: store.get(KEY), writer="h:s")
        checkpoint = store.checkpoint(f"{PROJECT}/position", writer="h:s")
        assert checkpoint.resume(0) == 0
        checkpoint.advance(5)
        assert store.checkpoint(f"{PROJECT}/position", writer="h:s").resume() == 5
        flags = store.flags("acme", "web", defaults={"new-ui": False})
        with flags.live() as now:
            assert now["new-ui"] is False
            flags.set("new-ui", True, writer="console:rollout")
            while not now["new-ui"]:
                now.changed()
        assert next(flags.watch()) == {"new-ui": True}
        assert store.dead_letters.list(PROJECT).all() == []
    with pytest.raises(Closed):
        store.get(KEY)
    store.close()


@pytest.mark.parametrize("name", [None, "shop"])
def test_a_semantic_store_on_a_named_store_is_that_of_the_database(url: str | None, name: str | None) -> None:
    with keyloft.open_sync(url, name=name) as kv, SyncSemanticStore(kv) as store:
        put = store.put(KEY, 1, expected_version=0, writer="h:s", semantics=CURSOR)
        assert store.get(KEY) == put
        assert [record.action for record in store.audit(KEY)] == ["put"]
        with pytest.raises(InvalidArgument, match="kv: a semantic store has no prefix"):
            SyncSemanticStore(kv.scoped(("a",)))
    if url is not None:
        with keyloft.open_sync(url) as kv, SyncSemanticStore(kv) as store:
            assert store.get(KEY) == put


def test_the_tuples_and_the_semantic_store_are_one_database(url: str | None) -> None:
    """Also in memory: versions grow over both of them, and a clock for tests is that of both."""
    with keyloft.open_sync(url, sweep_every=None) as kv, SyncSemanticStore(kv) as store:
        first = kv.set(("k",), 1)
        put = store.put(KEY, 1, expected_version=0, writer="h:s", semantics=CURSOR)
        assert first < put.version < kv.set(("k",), 2)
        with store.watch(KEY) as watching, SyncSemanticStore(kv) as other:
            assert next(watching) == put
            changed = other.put(KEY, 2, expected_version=put.version, writer="h:s", semantics=CURSOR)
            assert next(watching) == changed
    with pytest.raises(Closed):
        store.get(KEY)


def test_a_watch_in_memory_ends_with_its_store_and_leaves_no_thread() -> None:
    before = {*threading.enumerate()}
    with keyloft.open_sync(sweep_every=None) as kv, SyncSemanticStore(kv, sweep_every=None) as store:
        store.put(KEY, 1, expected_version=0, writer="h:s", semantics=CURSOR)
        watching = store.watch(KEY)
        assert next(watching).value == 1  # type: ignore[union-attr]
        ended = threading.Thread(target=lambda: list(watching))
        ended.start()
        with store.flags("acme", "web", defaults={"new-ui": False}).live() as now:
            assert now["new-ui"] is False
    ended.join(LONGEST_SECONDS)
    assert not ended.is_alive()
    for thread in {*threading.enumerate()} - before:
        thread.join(LONGEST_SECONDS)
        assert not thread.is_alive(), thread.name


async def test_and_so_it_is_with_an_event_loop(url: str | None) -> None:
    async with keyloft.open(url, name="shop") as kv, SemanticStore(kv) as store:
        put = await store.put(KEY, 1, expected_version=0, writer="h:s", semantics=CURSOR)
        async with store.watch(KEY) as watching:
            assert await anext(watching) == put
        async with store.lock(f"{PROJECT}/locks/sync", writer="h:s") as lock:
            await store.put(KEY, 2, expected_version=put.version, writer="h:s", semantics=CURSOR, fence=lock.fence)
        with pytest.raises(InvalidArgument, match="pass the store that it was made of"):
            SemanticStore(kv.scoped(("a",)))


def test_a_lost_lock_is_raised_at_the_end_of_its_block(tmp_path: Path) -> None:
    with keyloft.open_sync(tmp_path / "app.db") as kv, SyncSemanticStore(kv) as store:

        def lose() -> None:
            with store.lock(f"{PROJECT}/locks/l", writer="a:b") as lock:
                store.delete(f"{PROJECT}/locks/l", expected_version="*", writer="operator:cut")
                waiting = threading.Event()
                for _ in range(100 * LONGEST_SECONDS):
                    if not lock.is_held:
                        break
                    waiting.wait(0.01)

        with pytest.raises(LockLost):
            lose()
        with pytest.raises(ZeroDivisionError), store.lock(f"{PROJECT}/locks/l", writer="a:b"):
            raise ZeroDivisionError


def test_operators_call_the_same_functions_without_await(tmp_path: Path) -> None:
    with keyloft.open_sync(tmp_path / "app.db") as kv:
        kv.set(("k",), 1)
        assert admin.backup(tmp_path / "app.db", tmp_path / "nightly.db").rows == 1
    assert not admin.check(tmp_path / "nightly.db").findings
    assert [change.key for change in admin.changes(tmp_path / "app.db")] == ["k"]


def test_an_update_by_a_thread_that_the_function_of_another_one_awaits_is_refused() -> None:
    with keyloft.open_sync() as kv, SyncSemanticStore(kv) as store:

        async def nested(value: int) -> int:
            entry = await asyncio.to_thread(store.update, KEY, lambda inner: inner + 1, writer="w")
            return int(entry.value)

        store.put(KEY, 0, expected_version=0, writer="w", semantics=CURSOR)
        with pytest.raises(InvalidArgument, match=r"^change: .*already updates .*return the new value"):
            store.update(KEY, nested, writer="w")
        assert store.update(KEY, lambda value: value + 5, writer="w").value == 5
