"""Two services on one database are killed, stopped and cut off: watchers get every change, in order."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from keyloft import limits
from keyloft.core.records import Changes, LogPosition, Space
from keyloft.errors import DatabaseError, Unanswered
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import BotDatabase, DatabaseClient, Event
from keyloft.server.nats_process import NatsServer
from tests.support.etcd import and_etcd
from tests.support.nats import private_server
from tests.support.postgres import database_url

from .children import ChildProcess, child

pytestmark = pytest.mark.slow

_WRITERS = 4
_PREFIX = "faults.kv"
_LEASE_SECONDS = 6.0
_LONGEST_SECONDS = 60


@pytest.fixture(params=and_etcd("sqlite file", "postgresql"))
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = database_url(request.param, request, tmp_path)
    assert url is not None
    return url


class Services:
    """Two of them, one of which can be killed at any time."""

    def __init__(self, database: str, server: NatsServer, stack: AsyncExitStack) -> None:
        self._arguments = (database, server.url, _PREFIX, str(_LEASE_SECONDS))
        self._stack = stack
        self.running: list[ChildProcess] = []

    async def start(self) -> None:
        process = await self._stack.enter_async_context(child("plugin_service", *self._arguments))
        assert await process.line() == "ready"
        self.running.append(process)

    async def replace(self, number: int) -> None:
        """Kill one, and start another."""
        process = self.running.pop(number)
        process.kill()
        await process.ended()
        await self.start()


async def client_of(server: NatsServer) -> DatabaseClient:
    return await DatabaseClient.connect(
        server.url, plugin_name="trivia", prefix=_PREFIX, timeout=2, reconnect_time_wait=0.05
    )


@asynccontextmanager
async def writing(server: NatsServer, number: int) -> AsyncIterator[None]:
    """Set, delete and expire keys until the end of the block; what becomes of a failed request stays open."""

    async def write() -> None:
        rng = random.Random(number)
        async with await client_of(server) as client:
            while True:
                key = f"{number}:{rng.randrange(20)}"
                try:
                    if rng.random() < 0.2:
                        await client.kv.delete(key)
                    else:
                        await client.kv.set(key, rng.random(), ttl=1 if rng.random() < 0.05 else None)
                except (Unanswered, DatabaseError):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.002)

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def collect(watch: RemoteWatch, into: list[Event]) -> None:
    async for event in watch:
        into.append(event)


async def logged(database: str, since: int) -> list[Event]:
    """The puts and deletes that the change log has after a version."""
    found: list[Event] = []
    async with BotDatabase(database) as db:
        engine, position = await db.engine(), LogPosition(since)
        while True:
            [piece] = await engine.read(Changes(position))
            for change in piece.changes:
                if change.space is Space.PLUGINS and change.kind.name in ("PUT", "DELETE"):
                    found.append(Event(change.key[1], change.version, change.kind.name == "DELETE"))
            if piece.is_last:
                return found
            position = piece.end


async def test_every_change_arrives_at_least_once_and_in_order(database: str) -> None:
    async with private_server() as server, AsyncExitStack() as stack:
        services = Services(database, server, stack)
        for _ in range(2):
            await services.start()
        watcher = await stack.enter_async_context(await client_of(server))
        everything = await stack.enter_async_context(watcher.kv.watch())
        some = await stack.enter_async_context(watcher.kv.watch("0:1", "1:1", "2:1"))
        begin = min(everything.reported_to or 0, some.reported_to or 0)
        seen: dict[RemoteWatch, list[Event]] = {everything: [], some: []}
        collecting = [asyncio.create_task(collect(watch, events)) for watch, events in seen.items()]
        async with AsyncExitStack() as writers:
            for number in range(_WRITERS):
                await writers.enter_async_context(writing(server, number))
            for number in (0, 1):
                await asyncio.sleep(0.5)
                await services.replace(number)
            # For longer than the other believes it to be alive; then it wakes up, with events to publish.
            await asyncio.sleep(0.5)
            stopped = services.running[0].pid
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.sleep(limits.HEARTBEAT_SECONDS + 1.5)
            os.kill(stopped, signal.SIGCONT)
            await asyncio.sleep(0.5)
            await server.stop()
            await asyncio.sleep(0.2)
            await server.start()
            await asyncio.sleep(1)
            await services.replace(0)
            await asyncio.sleep(0.5)
        expected = await logged(database, begin)
        last = expected[-1].version
        async with asyncio.timeout(_LONGEST_SECONDS):
            while (everything.reported_to or 0) < last or (some.reported_to or 0) < last:
                await asyncio.sleep(0.05)
        for task in collecting:
            task.cancel()
        await asyncio.wait(collecting)
    assert len(expected) > 100
    for watch, keys in ((everything, None), (some, {"0:1", "1:1", "2:1"})):
        events = seen[watch]
        wanted = [event for event in expected if keys is None or event.key in keys]
        missed = set(wanted) - set(events)
        # A delete of what had expired is reported once.
        gone = {(event.key) for event in missed if not event.deleted}
        assert not gone, sorted(missed, key=lambda event: event.version)[:5]
        versions = [event.version for event in events]
        assert versions == sorted(versions)
        assert len(events) == len(set(events)), "what arrived twice is left out"
        assert any([event.deleted for event in events])
