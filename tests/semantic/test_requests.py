"""A repeated request gets the first outcome and changes nothing, for as long as it is remembered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keyloft import ManualClock, Store
from keyloft.semantic import Intent, Semantics, SemanticStore, StaleFence, VersionConflict
from keyloft.semantic.intents import WriteRequest

from .entries import (
    KEY,
    LOCK,
    OTHER,
    PROJECT,
    WRITER,
    actions,
    delete,
    deleting,
    living,
    locked,
    put,
    putting,
    restore,
    trail,
)

Ask = Callable[[SemanticStore], Awaitable[Any]]


async def _put(store: SemanticStore) -> Any:
    return await put(store, value={"token": "a"}, semantics=living(60), request_id="r", spec_ref="adr/7")


async def _delete(store: SemanticStore) -> Any:
    return await delete(store, OTHER, request_id="r")


async def _restore(store: SemanticStore) -> Any:
    return await restore(store, f"{PROJECT}/gone", request_id="r")


async def _batch(store: SemanticStore) -> Any:
    lock = putting(f"{PROJECT}/lock", semantics=locked())
    return await store.batch([putting(KEY, [1, 2]), deleting(OTHER), deleting(f"{PROJECT}/none"), lock], request_id="r")


@pytest.fixture(params=[_put, _delete, _restore, _batch], ids=["put", "delete", "restore", "batch"])
async def ask(request: pytest.FixtureRequest, store: SemanticStore) -> Ask:
    await put(store, OTHER, value={"token": "other"}, semantics=living(600))
    await put(store, f"{PROJECT}/gone", value="gone", semantics=living(600), spec_ref="adr/8")
    await delete(store, f"{PROJECT}/gone")
    asking: Ask = request.param
    return asking


async def test_a_retry_gets_the_first_outcome_and_writes_nothing(
    store: SemanticStore, clock: ManualClock, ask: Ask
) -> None:
    first = await ask(store)
    before = await trail(store, PROJECT), await store.list(PROJECT, values=True)
    clock.advance(3)
    assert await ask(store) == first
    assert (await trail(store, PROJECT), await store.list(PROJECT, values=True)) == before


async def test_a_retry_of_another_process_gets_it_too_though_all_has_changed_since(
    kv: Store, store: SemanticStore, ask: Ask
) -> None:
    first = await ask(store)
    for key in (KEY, OTHER, f"{PROJECT}/gone"):
        await put(store, key, value="changed since")
        await delete(store, key)
    before = await trail(store, PROJECT)
    async with SemanticStore(kv, sweep_every=None) as other:
        assert await ask(other) == first
    assert await trail(store, PROJECT) == before
    assert await store.get(KEY) is None


async def test_of_the_same_request_many_times_at_once_one_is_made(store: SemanticStore, ask: Ask) -> None:
    before = len(await trail(store, PROJECT))
    outcomes = await asyncio.gather(*[ask(store) for _ in range(8)])
    assert all(outcome == outcomes[0] for outcome in outcomes)
    after = await trail(store, PROJECT)
    assert len({record.sequence for record in after[before:]}) == 1


async def test_a_retry_after_a_lost_answer_changes_nothing(store: SemanticStore, ask: Ask) -> None:
    """A cancelled caller never learns whether its request was made; in either case the retry makes it once."""
    before = len(await trail(store, PROJECT))
    for turns in range(6):
        asking = asyncio.ensure_future(ask(store))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
    outcome = await ask(store)
    assert await ask(store) == outcome
    assert len({record.sequence for record in (await trail(store, PROJECT))[before:]}) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"value": 2},
        {"value": True},
        {"expected": 0},
        {"writer": "another:writer"},
        {"semantics": Semantics("config")},
        {"semantics": living(61)},
        {"spec_ref": "adr/8"},
    ],
)
async def test_the_same_id_with_another_payload_is_a_conflict(store: SemanticStore, changed: dict[str, Any]) -> None:
    first = await put(store, semantics=living(60), request_id="r")
    changes: dict[str, Any] = {"semantics": living(60), "request_id": "r"} | changed
    with pytest.raises(VersionConflict, match="this request id was used for another request") as refused:
        await put(store, **changes)
    assert refused.value.current == first == await store.get(KEY)
    assert [failed.reason for failed in refused.value.conflicts] == ["request_id"]
    assert [record.reason for record in await trail(store)] == [None, "request_id"]


async def test_the_same_id_for_another_kind_of_write_is_a_conflict(store: SemanticStore) -> None:
    await put(store, request_id="r")
    with pytest.raises(VersionConflict, match="request id"):
        await delete(store, request_id="r")
    with pytest.raises(VersionConflict, match="request id"):
        await restore(store, request_id="r")
    await delete(store)
    with pytest.raises(VersionConflict, match="request id"):
        await restore(store, request_id="r")
    assert await store.get(KEY) is None


async def test_a_batch_with_the_id_of_another_batch_is_a_conflict(store: SemanticStore) -> None:
    await store.batch([putting(KEY, 1), putting(OTHER, 1)], request_id="r")
    for other in ([putting(KEY, 2), putting(OTHER, 1)], [putting(OTHER, 1), putting(KEY, 1)], [putting(KEY, 1)]):
        with pytest.raises(VersionConflict, match="request id") as refused:
            await store.batch(other, request_id="r")
        assert [failed.key for failed in refused.value.conflicts] == [operation.key for operation in other]
    assert [entry.value for entry in await store.list(PROJECT, values=True)] == [1, 1]


async def test_an_id_counts_for_its_own_key_or_batch_alone(store: SemanticStore) -> None:
    await put(store, value=1, request_id="r")
    await put(store, OTHER, value=2, request_id="r")
    await put(store, "tenant/acme/project/shop/docs/onedrive/delta", value=3, request_id="r")
    await store.batch([putting(KEY, 4)], request_id="r")
    entry = await store.get(KEY)
    assert entry is not None
    assert entry.value == 4


async def test_after_a_conflict_the_same_id_may_be_used_again(store: SemanticStore) -> None:
    there = await put(store)
    with pytest.raises(VersionConflict):
        await put(store, value=2, expected=0, request_id="r")
    done = await put(store, value=2, expected=there.version, request_id="r")
    assert await put(store, value=2, expected=there.version, request_id="r") == done
    with pytest.raises(VersionConflict):
        await store.batch([putting(KEY, 3, 0)], request_id="r")
    await store.batch([putting(KEY, 3, done.version)], request_id="r")
    assert await actions(store) == ["put", "conflict", "put", "conflict", "put"]


async def test_after_a_stale_fence_the_same_id_may_be_used_again(store: SemanticStore) -> None:
    lock = await put(store, LOCK, semantics=locked())
    await delete(store, LOCK)
    with pytest.raises(StaleFence):
        await put(store, request_id="r", fence=lock.fence)
    again = await put(store, LOCK, semantics=locked())
    done = await put(store, request_id="r", fence=again.fence)
    await delete(store, LOCK)
    assert await put(store, request_id="r", fence=again.fence) == done, "it was made while the lock was held"


async def test_it_is_remembered_for_the_documented_time(kv: Store, clock: ManualClock) -> None:
    async with SemanticStore(kv, sweep_every=None, request_memory=100) as store:
        first = await put(store, expected=0, request_id="r")
        clock.advance(99.999)
        await store.sweep()
        assert await put(store, expected=0, request_id="r") == first
        clock.advance(0.001)
        with pytest.raises(VersionConflict) as refused:
            await put(store, expected=0, request_id="r")
        assert [failed.reason for failed in refused.value.conflicts] == ["version"]
        second = await put(store, value=2, request_id="r")
        assert second.version > first.version


async def test_a_day_is_the_documented_time(store: SemanticStore, clock: ManualClock) -> None:
    first = await put(store, request_id="r")
    clock.advance(86_399)
    assert await put(store, request_id="r") == first
    clock.advance(1)
    assert (await put(store, request_id="r")).version > first.version


async def test_a_request_is_remembered_beyond_the_life_of_what_it_wrote(
    store: SemanticStore, clock: ManualClock
) -> None:
    first = await put(store, expected=0, semantics=living(1), request_id="r")
    clock.advance(2)
    await store.sweep()
    assert await put(store, expected=0, semantics=living(1), request_id="r") == first
    assert await store.get(KEY) is None


async def test_a_retried_renewal_shows_the_fence_that_it_kept(store: SemanticStore) -> None:
    lock = await put(store, LOCK, expected=0, semantics=locked(), request_id="a")
    renewed = await put(store, LOCK, expected=lock.version, semantics=locked(), fence=lock.fence, request_id="b")
    again = await put(store, LOCK, expected=lock.version, semantics=locked(), fence=lock.fence, request_id="b")
    assert again == renewed
    assert again.fence == lock.fence == lock.version
    assert await put(store, LOCK, expected=0, semantics=locked(), request_id="a") == lock


async def test_ids_of_any_characters_stay_different(store: SemanticStore) -> None:
    ids = ["r", "R", "r ", "r/", "é", "e\u0301", "x" * 128, "\U0001f600" * 128, "%", "_", "'"]
    for number, name in enumerate(ids):
        await put(store, value=number, request_id=name)
    assert len(await trail(store)) == len(ids)
    assert {record.writer for record in await trail(store)} == {WRITER}


async def test_a_retry_may_name_the_fields_of_its_value_in_another_order(store: SemanticStore) -> None:
    first = await put(store, value={"a": {"x": 1, "y": 10**30}, "b": 2}, request_id="r")
    again = await put(store, value={"b": 2, "a": {"y": 10**30, "x": 1}}, request_id="r")
    assert again == first
    with pytest.raises(VersionConflict):
        await put(store, value={"a": 2, "b": {"x": 1, "y": 10**30}}, request_id="r")


def test_the_digest_of_a_request_is_that_of_earlier_versions() -> None:
    """Databases remember it: with another one, a repeated request would be refused after an upgrade."""
    semantics = Semantics("cursor", producer="h", ttl_seconds=9999)
    key = "tenant/acme/project/web/a"
    value = {"z": 1, "b": [1, 2]}
    put = Intent.put(key, value, expected_version=0, writer="h:s", semantics=semantics, spec_ref="spec://x")
    delete = Intent.delete("tenant/acme/project/web/b", expected_version=2, writer="h:s")
    assert WriteRequest(intents=(put, delete), request_id="r").digest == "28b40e81dfecbc1c97627ce11a1fad92"
