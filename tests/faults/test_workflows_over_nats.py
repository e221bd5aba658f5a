"""Dead letters, updates and live flags over NATS, while the services of one database are killed and started again."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

import pytest

import keyloft
from keyloft.errors import DatabaseError, InvalidArgument, Unanswered
from keyloft.semantic import Escalated, SemanticClient, Semantics, SemanticStore
from tests.support.examples import TIMES
from tests.support.nats import private_server

from .children import ChildProcess, child

pytestmark = pytest.mark.slow

T = TypeVar("T")
_PROJECT = "tenant/acme/project/web"
_GIVEN_UP = 10 * TIMES
_CLIENTS = 3
_KILLS = 2 * TIMES


async def until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again until a service answers."""
    while True:
        try:
            return await ask()
        except (Unanswered, DatabaseError):
            await asyncio.sleep(0.02)


async def test_killed_services_lose_and_double_nothing_of_a_workflow(emptied_postgres_url: str) -> None:
    url = emptied_postgres_url
    async with AsyncExitStack() as stack, asyncio.timeout(240 * TIMES):
        server = await stack.enter_async_context(private_server())

        async def serve() -> ChildProcess:
            service = await stack.enter_async_context(child("semantic_service", url, server.url))
            assert await service.line() == "serving"
            return service

        async def connected() -> SemanticClient:
            connecting = SemanticClient.connect(server.url, tenant="acme", project="web", timeout=1)
            return await stack.enter_async_context(await connecting)

        running = list(await asyncio.gather(serve(), serve()))
        clients = [await connected() for _ in range(_CLIENTS)]
        for number in range(_GIVEN_UP):
            put = partial(
                clients[0].put, f"kept/{number}", number, expected_version=7, writer="w", semantics=Semantics("config")
            )
            with pytest.raises(Escalated):
                await clients[0].retrying(conflict_pauses=[]).run(put)
        given_up = await clients[0].dead_letters.list()
        assert len(given_up) == _GIVEN_UP
        is_over = asyncio.Event()

        async def retry(client: SemanticClient) -> None:
            """Retry all dead letters, which the other clients do as well; one that is gone was retried."""
            for one in given_up:
                ask = partial(client.dead_letters.retry, one, expected_version="*")
                with suppress(InvalidArgument):
                    await until_answered(ask)

        async def count(client: SemanticClient) -> int:
            """Count until the end; each step is sent again until a service answers."""
            options = {"conflict_pauses": [0.01] * 10_000, "transient_attempts": 10_000, "transient_pause": 0.02}
            steps = 0
            while not is_over.is_set():
                await client.update(
                    "n",
                    lambda n: (n or 0) + 1,
                    writer="w:n",
                    semantics=Semantics("cursor"),
                    retry=client.retrying(**options),
                )
                steps += 1
            return steps

        async def switch(client: SemanticClient) -> int:
            """Set a flag to ever larger numbers; returns the last one."""
            number = 0
            while not is_over.is_set():
                number += 1
                await until_answered(partial(client.flags().set, "step", number, writer="console:x"))
            return number

        seen: list[int] = []

        async def follow(client: SemanticClient) -> None:
            async with client.flags(defaults={"step": 0}).live() as now:
                while True:
                    seen.append(now["step"])
                    await now.changed()

        following = asyncio.create_task(follow(clients[0]))
        while not seen:
            await asyncio.sleep(0.01)
        retrying = [asyncio.create_task(retry(client)) for client in clients]
        counting = [asyncio.create_task(count(client)) for client in clients]
        switching = asyncio.create_task(switch(clients[1]))
        for number in range(_KILLS):
            before = len(seen)
            while len(seen) < before + 5:  # the flags go on, whichever service is left
                await asyncio.sleep(0.01)
            running.pop(0).kill()
            if number % 2:  # both at once
                running.pop(0).kill()
                running.append(await serve())
            running.append(await serve())
        await asyncio.gather(*retrying)
        is_over.set()
        steps, last = sum(await asyncio.gather(*counting)), await switching
        while seen[-1] != last:
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait([following])
        assert seen == sorted(seen), "a live flag never goes back"
        assert await until_answered(clients[0].dead_letters.list) == []
        for service in running:
            service.kill()
    async with keyloft.open(url) as kv, SemanticStore(kv, audit_key="k", sweep_every=None) as store:
        trail = [record async for record in store.audit(_PROJECT)]
        puts = Counter(record.key for record in trail if record.action == "put")
        assert {key: times for key, times in puts.items() if "/kept/" in key} == {
            f"{_PROJECT}/kept/{number}": 1 for number in range(_GIVEN_UP)
        }
        counted = await store.get(f"{_PROJECT}/n")
        assert counted is not None
        assert counted.value == steps, "each update was made once"
