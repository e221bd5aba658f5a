"""Index versions: a watch reports each change."""

import asyncio
from contextlib import aclosing

import pytest

import keyloft
from keyloft import InvalidArgument, ManualClock
from keyloft.semantic import Semantics, SemanticStore, VersionConflict
from tests.semantic.unreliable_network import PATIENCE_SECONDS, PROJECT

KEY = f"{PROJECT}/search/index/docs/version"


async def test_a_published_version_is_the_current_one(store: SemanticStore) -> None:
    index = store.index_version(KEY, writer="indexer:rebuild")
    assert await index.current() is None
    first = await index.publish("v1", consumer_hints=("search",))
    assert first.semantics == Semantics("index_version", None, ("search",))
    assert await index.current() == "v1"
    with pytest.raises(VersionConflict):
        await index.publish("v2", expected_version=0)
    await index.publish("v2", expected_version=first.version)
    assert await store.index_version(KEY).current() == "v2"


async def test_who_only_reads_does_not_publish(store: SemanticStore) -> None:
    with pytest.raises(InvalidArgument, match="writer="):
        await store.index_version(KEY).publish("v1")


async def test_a_change_wakes_all_its_watchers(store: SemanticStore) -> None:
    async def heard() -> list[str | None]:
        versions: list[str | None] = []
        async with aclosing(store.index_version(KEY).watch()) as watch:  # type: ignore[type-var]
            async for version in watch:
                versions.append(version)
                ready.release()
                if version == "v2":
                    break
        return versions

    ready = asyncio.Semaphore(0)
    index = store.index_version(KEY, writer="indexer")
    async with asyncio.timeout(PATIENCE_SECONDS):
        watchers = [asyncio.create_task(heard()) for _ in range(3)]
        for version in ("v1", "v2"):
            for _ in watchers:
                await ready.acquire()
            await index.publish(version)
        assert await asyncio.gather(*watchers) == [[None, "v1", "v2"]] * 3


async def test_a_version_published_through_another_store_wakes_as_well(
    store: SemanticStore, url: str | None, clock: ManualClock
) -> None:
    if url is None:
        pytest.skip("memory belongs to one store")
    watch = store.index_version(KEY).watch()
    async with asyncio.timeout(PATIENCE_SECONDS), keyloft.open(url, clock=clock) as kv, SemanticStore(kv) as other:
        assert await anext(watch) is None
        await other.index_version(KEY, writer="indexer").publish("another")
        assert await anext(watch) == "another"
    await watch.aclose()  # type: ignore[attr-defined]
