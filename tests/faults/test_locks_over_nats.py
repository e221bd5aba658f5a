"""Locks and updates over NATS, with two services on one database: holders and services are killed, holders stopped."""

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

import keyloft
from keyloft.semantic import SemanticClient, Semantics, SemanticStore
from tests.support.nats import private_server

from .children import ChildProcess, child
from .children.lock import LOCK, PROJECT, STEPS, TTL_SECONDS
from .test_locks import check_holds, fences_of

_WORKERS = "2"
_CLIENTS = 4
_UPDATES = 20


async def fence_above(process: ChildProcess, fence: int) -> int:
    """The token of the next hold of a process after another one's."""
    while True:
        [found] = await fences_of(process, 1)
        if found > fence:
            return found


async def count(url: str) -> None:
    """Increments that are sent again until a service answers."""
    async with await SemanticClient.connect(url, tenant="acme", project="web", timeout=3) as client:
        retry = client.retrying(conflict_pauses=[0.01] * 10_000, transient_attempts=1000, transient_pause=0.05)
        for _ in range(_UPDATES):
            await client.update("n", lambda n: (n or 0) + 1, writer="w:n", semantics=Semantics("cursor"), retry=retry)


@pytest.mark.slow
async def test_holders_stopped_or_killed_beside_killed_services_are_never_two(
    emptied_postgres_url: str,
) -> None:
    url = emptied_postgres_url
    async with AsyncExitStack() as stack, asyncio.timeout(120):
        server = await stack.enter_async_context(private_server())

        async def serve() -> ChildProcess:
            service = await stack.enter_async_context(child("semantic_service", url, server.url))
            assert await service.line() == "serving"
            return service

        def start(name: str, what: str) -> AbstractAsyncContextManager[ChildProcess]:
            return child("lock", server.url, name, what)

        first, second = await asyncio.gather(serve(), serve())
        stopped = await stack.enter_async_context(start("stopped", "hold"))
        killed = await stack.enter_async_context(start("killed", _WORKERS))
        last = await stack.enter_async_context(start("last", _WORKERS))
        counting = [asyncio.create_task(count(server.url)) for _ in range(_CLIENTS)]
        [late] = await fences_of(stopped, 1)
        os.kill(stopped.pid, signal.SIGSTOP)  # beyond its TTL: the others have to wait for that
        first.kill()
        later = await fence_above(killed, late)
        killed.kill()  # while it holds the lock, or has just released it
        third = await serve()
        later = await fence_above(last, later)
        os.kill(stopped.pid, signal.SIGCONT)
        assert [await stopped.line(), await stopped.line()] == ["lost", "STALE_FENCE"]
        second.kill()
        await fence_above(last, later)
        await asyncio.gather(*counting)
        last.kill()
        third.kill()
    async with keyloft.open(url) as kv, SemanticStore(kv, audit_key="k", sweep_every=None) as store:
        async with store.lock(LOCK, writer="test", wait=TTL_SECONDS + 2):
            trail = [record async for record in store.audit(PROJECT)]
            steps, counted = await store.get(STEPS), await store.get(f"{PROJECT}/n")
        fences, expired = check_holds([record for record in trail if record.key != f"{PROJECT}/n"])
        assert len(fences) >= 4
        assert expired >= 1
        assert counted is not None
        assert counted.value == _CLIENTS * _UPDATES
        assert steps is not None
        assert steps.value == sum(record.key == STEPS and record.action == "put" for record in trail)
