"""A lock has one holder, whatever is killed, and is free again after its holder died."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import keyloft
from keyloft.semantic import AuditRecord, SemanticStore
from tests.support.etcd import and_etcd
from tests.support.postgres import database_url

from .children import ChildProcess, child
from .children.lock import LOCK, PROJECT, STEPS, TTL_SECONDS

_PROCESSES = 4
_WORKERS = 5
_KILLS = 3


@pytest.fixture(params=and_etcd("sqlite file", "postgresql"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = database_url(request.param, request, tmp_path)
    assert found is not None
    return found


def check_holds(trail: list[AuditRecord]) -> tuple[list[int], int]:
    """Each write was made under the hold of that moment, and no hold began before another's end; returns all fences,
    and how many holds ended by expiry."""
    fences: list[int] = []
    holder: int | None = None
    expired = 0
    for record in trail:
        match record.action, record.key:
            case "put", key if key == LOCK:
                assert holder is None, "two holders"
                assert record.version_after is not None
                assert record.version_after > max(fences, default=0), "a fence was given twice"
                holder = record.version_after
                fences.append(holder)
            case (("delete" | "expire"), key) if key == LOCK:
                assert record.version_before == holder
                holder = None
                expired += record.action == "expire"
            case "put", _:
                assert record.spec_ref == f"fence {holder}", "a write by a process that does not hold the lock"
    return fences, expired


async def fences_of(process: ChildProcess, count: int) -> list[int]:
    """So many holds of a process; fewer, if it ends."""
    fences: list[int] = []
    while len(fences) < count and (line := await process.line()):
        fences.append(int(line.removeprefix("held ")))
    return fences


@pytest.mark.slow
async def test_twenty_workers_and_their_deaths_never_make_two_holders(url: str, rng: random.Random) -> None:
    fences_seen: list[int] = []
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        processes = [
            await stack.enter_async_context(child("lock", url, f"p{number}", str(_WORKERS)))
            for number in range(_PROCESSES)
        ]
        for process in processes:
            fences_seen += await fences_of(process, 1)
        for kill in range(_KILLS):
            victim = processes[kill]
            fences_seen += await fences_of(victim, rng.randrange(1, 4))
            victim.kill()  # the process that printed last holds the lock, or has just released it
            fences_seen += await fences_of(victim, 1000)
            assert await victim.ended() == (-9, "")
            fences_seen += await fences_of(processes[-1], 1)
        for process in processes[_KILLS:]:
            process.kill()
    async with keyloft.open(url) as kv, SemanticStore(kv, audit_key="k", sweep_every=None) as store:
        # The last one was killed as well: its lock expires.
        async with store.lock(LOCK, writer="test", wait=TTL_SECONDS + 2) as lock:
            assert lock.fence > max(fences_seen)
            trail = [record async for record in store.audit(PROJECT)]
            steps = await store.get(STEPS)
        fences, expired = check_holds(trail)
        assert set(fences_seen) <= set(fences)
        assert expired >= 1, "no process was killed while it held the lock"
        assert steps is not None
        assert steps.value == sum(record.key == STEPS and record.action == "put" for record in trail)


async def test_a_holder_that_slept_too_long_is_refused_and_cancelled(url: str) -> None:
    async with (
        child("lock", url, "late", "late") as late,
        keyloft.open(url) as kv,
        SemanticStore(kv, audit_key="k", sweep_every=None) as store,
    ):
        [fence] = await fences_of(late, 1)
        async with store.lock(LOCK, writer="next", wait=TTL_SECONDS + 2) as lock:
            assert lock.fence > fence
            late.tell("go on")
            assert [await late.line(), await late.line()] == ["STALE_FENCE", "lost"]
            steps = await store.get(STEPS)
        assert steps is not None
        assert steps.value == 1
        assert (await late.ended())[0] == 0
