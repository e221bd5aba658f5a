"""Fencing tokens: a write with one is committed only while its lock is held."""

import asyncio

import pytest

from keyloft import InvalidArgument, ManualClock, Store
from keyloft.core.records import Count, Space
from keyloft.semantic import Envelope, Semantics, SemanticStore, StaleFence, VersionConflict

from .entries import (
    KEY,
    LOCK,
    ON_EVERY_ENGINE,
    OTHER,
    PROJECT,
    actions,
    delete,
    deleting,
    locked,
    put,
    putting,
    restore,
    trail,
)

pytestmark = ON_EVERY_ENGINE

SECOND = f"{PROJECT}/locks/second"


@pytest.fixture
async def lock(store: SemanticStore) -> Envelope:
    return await put(store, LOCK, expected=0, semantics=locked())


async def test_the_token_is_the_version_of_the_acquisition(store: SemanticStore, lock: Envelope) -> None:
    assert lock.fence == lock.version
    assert await store.get(LOCK) == lock
    assert (await put(store)).fence is None, "only a lock has one"


async def test_a_write_with_a_token_is_made_while_the_lock_is_held(store: SemanticStore, lock: Envelope) -> None:
    await put(store, value=1, fence=lock.fence)
    await store.batch([putting(KEY, 2, fence=lock.fence), putting(OTHER, 2, fence=lock.fence)])
    await delete(store, fence=lock.fence)
    assert await actions(store) == ["put", "put", "delete"]


@pytest.mark.parametrize("how", ["deleted", "expired", "swept", "taken", "replaced", "deleted in a batch"])
async def test_once_the_lock_is_gone_its_token_is_refused_everywhere(
    kv: Store, store: SemanticStore, clock: ManualClock, lock: Envelope, how: str
) -> None:
    before = await put(store, value="before", fence=lock.fence)
    match how:
        case "deleted":
            await delete(store, LOCK)
        case "deleted in a batch":
            await store.batch([deleting(LOCK, fence=lock.fence)])
        case "expired":
            clock.advance(30)
        case "swept":
            clock.advance(30)
            await store.sweep()
        case "taken":
            await put(store, LOCK, semantics=locked(), writer="thief:steal")
        case "replaced":
            await put(store, LOCK, semantics=Semantics("config"))
    async with SemanticStore(kv, sweep_every=None) as fresh:
        for each in (store, fresh):
            for write in (
                put(each, value="late", fence=lock.fence),
                delete(each, fence=lock.fence),
                put(each, LOCK, semantics=locked(), fence=lock.fence),
                each.batch([putting(OTHER, "late"), putting(KEY, "late", fence=lock.fence)]),
            ):
                with pytest.raises(StaleFence, match="no lock of this project is held"):
                    await write
    assert await store.get(KEY) == before
    assert await store.get(OTHER) is None
    [conflict, *_] = [record for record in await trail(store) if record.action == "conflict"]
    assert (conflict.reason, conflict.version_before) == ("fence", before.version)


async def test_a_lock_that_expired_and_was_taken_again_never_shows_an_old_version_or_fence(
    store: SemanticStore, clock: ManualClock
) -> None:
    last = 0
    for turn in range(6):
        lock = await put(store, LOCK, expected=0, semantics=locked())
        assert lock.fence == lock.version
        assert lock.version > last
        renewed = await put(store, LOCK, expected=lock.version, semantics=locked(), fence=lock.fence)
        last = renewed.version
        clock.advance(30)
        if turn % 3 == 1:
            await store.sweep()
        if turn % 3 == 2:
            back = await restore(store, LOCK)
            assert back.fence == back.version
            assert back.version > last
            last = back.version
            await delete(store, LOCK)


async def test_renewing_with_the_token_keeps_it(store: SemanticStore, clock: ManualClock, lock: Envelope) -> None:
    version = lock.version
    for _ in range(3):
        clock.advance(20)
        renewed = await put(store, LOCK, expected=version, semantics=locked(), fence=lock.fence)
        assert renewed.fence == lock.fence
        assert renewed.version > version
        version = renewed.version
        assert await store.get(LOCK) == renewed
        await put(store, fence=lock.fence)
    with pytest.raises(StaleFence):
        await put(store, fence=version)
    clock.advance(30)
    with pytest.raises(StaleFence):
        await put(store, fence=lock.fence)


async def test_a_put_without_the_token_takes_the_lock_over(store: SemanticStore, lock: Envelope) -> None:
    taken = await put(store, LOCK, expected=lock.version, semantics=locked())
    assert taken.fence == taken.version
    await put(store, fence=taken.fence)
    with pytest.raises(StaleFence):
        await put(store, fence=lock.fence)


async def test_the_token_of_another_lock_renews_nothing(store: SemanticStore, lock: Envelope) -> None:
    second = await put(store, SECOND, semantics=locked(), fence=lock.fence)
    assert second.fence == second.version
    taken = await put(store, SECOND, semantics=locked(), fence=lock.fence)
    assert taken.fence == taken.version
    with pytest.raises(StaleFence):
        await put(store, fence=second.fence)


async def test_a_token_of_another_project_is_refused(store: SemanticStore, lock: Envelope) -> None:
    for elsewhere in ("tenant/acme/project/shop/x", "tenant/other/project/web/x"):
        with pytest.raises(StaleFence):
            await put(store, elsewhere, fence=lock.fence)
        with pytest.raises(StaleFence):
            await store.batch([putting(KEY, fence=lock.fence), putting(elsewhere, fence=lock.fence)])
    assert await store.get(KEY) is None


@pytest.mark.parametrize("token", [0, 1, 2**63 - 1])
async def test_a_token_that_was_never_given_is_refused(store: SemanticStore, token: int) -> None:
    with pytest.raises(StaleFence):
        await put(store, fence=token)


async def test_the_version_of_an_ordinary_entry_is_no_token(store: SemanticStore) -> None:
    entry = await put(store)
    with pytest.raises(StaleFence):
        await put(store, fence=entry.version)


@pytest.mark.parametrize("writes_first", [True, False])
async def test_the_token_is_checked_in_the_commit_of_the_put(store: SemanticStore, writes_first: bool) -> None:
    """However late a lock is lost: what was written with its token was written before."""
    for turns in range(10):
        lock = await put(store, LOCK, expected=0, semantics=locked())
        await put(store, fence=lock.fence)
        write, release = put(store, value=turns, fence=lock.fence), delete(store, LOCK)
        first = asyncio.ensure_future(write if writes_first else release)
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.ensure_future(release if writes_first else write)
        writing = first if writes_first else second
        await asyncio.wait([first, second])
        [released] = await trail(store, LOCK, limit=1, reverse=True)
        error = writing.exception()
        assert error is None or isinstance(error, StaleFence)
        [last] = [record async for record in store.audit(KEY, limit=1, reverse=True)]
        if last.action == "put":
            assert last.sequence < released.sequence
        else:
            assert last.reason == "fence"


async def test_a_lock_leaves_no_token_behind(kv: Store, store: SemanticStore, clock: ManualClock) -> None:
    async def tokens() -> int:
        [count] = await kv.engine.read(Count(Space.SEMANTIC, b"f/", b"f0"))
        assert isinstance(count, int)
        return count

    for turn in range(4):
        lock = await put(store, LOCK, semantics=locked())
        await put(store, LOCK, semantics=locked(), fence=lock.fence)
        assert await tokens() == 1
        if turn == 1:
            await delete(store, LOCK)
            assert await tokens() == 0
        elif turn == 2:
            clock.advance(30)
            await store.sweep()
            assert await tokens() == 0
    await put(store, LOCK, semantics=Semantics("config"))
    assert await tokens() == 0


async def test_a_write_and_the_release_of_its_lock_can_be_one(store: SemanticStore, lock: Envelope) -> None:
    await store.batch([putting(KEY, fence=lock.fence), deleting(LOCK, lock.version)])
    assert await store.get(KEY) is not None
    with pytest.raises(StaleFence):
        await put(store, fence=lock.fence)


async def test_a_stale_token_counts_more_than_a_wrong_version(store: SemanticStore, lock: Envelope) -> None:
    await delete(store, LOCK)
    with pytest.raises(StaleFence):
        await put(store, expected=7, fence=lock.fence)
    with pytest.raises(VersionConflict):
        await put(store, expected=7)


async def test_a_batch_acquires_one_lock_of_a_project_since_it_has_one_token_to_give(store: SemanticStore) -> None:
    both = [putting(LOCK, semantics=locked()), putting(SECOND, semantics=locked())]
    with pytest.raises(InvalidArgument, match=r"^operations: "):
        await store.batch(both)
    assert await store.list(PROJECT) == []
    elsewhere = "tenant/acme/project/shop/locks/sync"
    await store.batch([both[0], putting(elsewhere, semantics=locked())])
    first, other = await store.get(LOCK), await store.get(elsewhere)
    assert first is not None
    assert other is not None
    second = await put(store, SECOND, semantics=locked())
    renewals = [putting(each.key, semantics=locked(), fence=each.fence) for each in (first, second)]
    outcomes = await store.batch(renewals)
    assert [entry and entry.fence for entry in outcomes] == [first.fence, second.fence]
    await put(store, "tenant/acme/project/shop/x", fence=other.fence)


async def test_a_stale_fence_tells_what_is_there_and_all_else_that_failed(store: SemanticStore) -> None:
    there = await put(store, KEY)
    with pytest.raises(StaleFence) as caught:
        await store.batch([putting(KEY, fence=7), putting(OTHER, expected=9), putting(f"{PROJECT}/fine")])
    failed = [(one.key, one.reason, one.current) for one in caught.value.conflicts]
    assert failed == [(KEY, "fence", there), (OTHER, "version", None)]
    assert caught.value.current == there
    assert caught.value.correlation_id
