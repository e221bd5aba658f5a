"""Checkpoints: they move forward only, and each step is done once."""

import asyncio
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from keyloft import InvalidArgument, ManualClock
from keyloft.semantic import Intent, NotForward, Semantics, SemanticStore, StaleFence, VersionConflict
from tests.semantic.conftest import ON_DATABASES
from tests.semantic.unreliable_network import PROJECT

KEY = f"{PROJECT}/docs/onedrive/delta"
WORKERS = 50
STEPS = 60


@ON_DATABASES
async def test_fifty_workers_lose_no_step_and_do_none_twice(store: SemanticStore) -> None:
    done: list[int] = []
    trying: set[int] = set()

    async def work(number: int) -> None:
        checkpoint = store.checkpoint(KEY, writer=f"worker-{number}:advance")
        while (position := await checkpoint.resume(0)) < STEPS:
            trying.add(number)
            await asyncio.sleep(0)  # a store in memory may answer without letting other workers run
            with suppress(VersionConflict):
                await checkpoint.advance(position + 1)
                done.append(position + 1)

    async with asyncio.timeout(60):
        await asyncio.gather(*[work(number) for number in range(WORKERS)])
    assert done == [*range(1, STEPS + 1)]
    assert len(trying) > 1
    puts = [record async for record in store.audit(KEY) if record.action == "put"]
    assert len(puts) == STEPS
    assert all(after.version_before == before.version_after for before, after in pairwise(puts))


async def test_any_worker_resumes_the_position(store: SemanticStore) -> None:
    first = store.checkpoint(KEY, writer="first:sync")
    assert await first.resume("nothing yet") == "nothing yet"
    entry = await first.advance("2026-01-01", spec_ref="adr-7")
    assert (entry.semantics, entry.last_writer, entry.spec_ref) == (Semantics("checkpoint"), "first:sync", "adr-7")
    second = store.checkpoint(KEY, writer="second:sync")
    assert await second.resume() == "2026-01-01"
    assert (await second.advance("2026-01-02")).version > entry.version


async def test_it_advances_again_and_again_from_where_it_is(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w")
    for position in (1, 2, 10):
        await checkpoint.advance(position)
    assert await checkpoint.resume() == 10


@pytest.mark.parametrize("position", [5, 4, -1, 4.9])
async def test_it_moves_neither_back_nor_on_the_spot(store: SemanticStore, position: float) -> None:
    checkpoint = store.checkpoint(KEY, writer="w")
    entry = await checkpoint.advance(5)
    with pytest.raises(NotForward, match=r"only moves forward.*version"):
        await checkpoint.advance(position)
    with pytest.raises(NotForward):
        await store.checkpoint(KEY, writer="another").advance(position)
    assert await store.get(KEY) == entry


async def test_a_worker_that_is_behind_gets_a_conflict_and_continues_after_resuming(store: SemanticStore) -> None:
    slow, fast = store.checkpoint(KEY, writer="slow"), store.checkpoint(KEY, writer="fast")
    await slow.advance(1)
    await fast.resume()
    await fast.advance(2)
    with pytest.raises(VersionConflict) as caught:
        await slow.advance(2)
    assert caught.value.current.value == 2
    with pytest.raises(VersionConflict):
        await slow.advance(3)
    assert await slow.resume() == 2
    await slow.advance(3)


async def test_order_says_what_of_a_position_to_compare(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w", order=lambda position: position["sequence"])
    await checkpoint.advance({"token": "z", "sequence": 1})
    await checkpoint.advance({"token": "a", "sequence": 2})
    with pytest.raises(NotForward):
        await checkpoint.advance({"token": "b", "sequence": 2})


@pytest.mark.parametrize("position", [{"sequence": 2}, "2", None, [2]])
async def test_positions_that_can_not_be_compared_are_refused(store: SemanticStore, position: Any) -> None:
    checkpoint = store.checkpoint(KEY, writer="w")
    await checkpoint.advance(1)
    with pytest.raises(InvalidArgument, match="order="):
        await checkpoint.advance(position)
    assert await checkpoint.resume() == 1


async def test_an_order_that_fails_is_the_caller_s_mistake(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w", order=lambda position: position["sequence"])
    await checkpoint.advance({"sequence": 1})
    with pytest.raises(InvalidArgument, match="KeyError"):
        await checkpoint.advance({"token": "secret-token"})


async def test_a_repeated_request_advances_once(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w")
    await checkpoint.resume()
    first = await checkpoint.advance(1, request_id="run-1")
    again = store.checkpoint(KEY, writer="w")
    again_entry = await store.put(
        KEY, 1, expected_version=0, writer="w", semantics=Semantics("checkpoint"), request_id="run-1"
    )
    assert again_entry == first
    with pytest.raises(NotForward):
        await again.advance(1, request_id="run-1")


async def test_an_expired_checkpoint_starts_from_the_beginning(store: SemanticStore, clock: ManualClock) -> None:
    semantics = Semantics("checkpoint", ttl_seconds=60)
    checkpoint = store.checkpoint(KEY, writer="w", semantics=semantics)
    await checkpoint.advance(7)
    clock.advance(60)
    with pytest.raises(VersionConflict):
        await checkpoint.advance(8)
    assert await checkpoint.resume(0) == 0
    assert (await checkpoint.advance(1)).semantics == semantics


async def test_a_fence_guards_it(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w")
    async with store.lock(f"{PROJECT}/locks/sync", writer="w") as lock:
        fence = lock.fence
        await checkpoint.advance(1, fence=fence)
    with pytest.raises(StaleFence):
        await checkpoint.advance(2, fence=fence)
    assert await checkpoint.resume() == 1


async def test_a_result_and_the_step_past_it_are_made_together(store: SemanticStore) -> None:
    checkpoint = store.checkpoint(KEY, writer="w:sync")
    result = f"{PROJECT}/results/1"
    await store.batch(
        [
            Intent.put(result, "done", expected_version=0, writer="w:sync", semantics=Semantics("config")),
            await checkpoint.step(1),
        ]
    )
    assert await checkpoint.resume() == 1
    late = store.checkpoint(KEY, writer="late:sync")
    await late.resume()
    await checkpoint.advance(2)
    with pytest.raises(VersionConflict):
        await store.batch(
            [
                Intent.put(result, "twice", expected_version="*", writer="late:sync", semantics=Semantics("config")),
                await late.step(2),
            ]
        )
    entry = await store.get(result)
    assert entry is not None
    assert entry.value == "done"
    with pytest.raises(NotForward):
        await checkpoint.step(2)
