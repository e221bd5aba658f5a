"""A process is stopped within the commit of a touch, beyond the expiry that the touch puts off."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keyloft.clock import SystemClock
from keyloft.core.records import ChangeKind, Get, Scan, Space
from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.engines.contract.calls import taken
from tests.engines.contract.late_touches import until_put
from tests.support.nats import private_server

from .children import ChildProcess, child

pytestmark = pytest.mark.slow

_KEY = "trivia", "k"
_ALL = Scan(Space.PLUGINS, ("trivia", ""), ("trivia", "z"), 100)
_LONGEST_SECONDS = 30


@asynccontextmanager
async def stopping(path: Path) -> AsyncIterator[ChildProcess]:
    """A process that stops itself within the commit of a touch, which `stop` lets it begin."""
    async with child("stopped_toucher", path, *_KEY) as process:
        assert await process.line() == "ready"
        yield process


async def stop(process: ChildProcess, committed_at: int) -> None:
    """Let it touch the entry at a time before its expiry, however long it takes to begin."""
    process.tell(str(committed_at))
    stat = Path(f"/proc/{process.pid}/stat")
    async with asyncio.timeout(_LONGEST_SECONDS):
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.001)


async def go_on(process: ChildProcess) -> int:
    """Returns the version of its commit."""
    os.kill(process.pid, signal.SIGCONT)
    return int(await process.line())


async def test_followers_learn_that_the_entry_is_there_after_all(tmp_path: Path) -> None:
    """One that has reported the expiry, and one that continues for it while the process is stopped."""
    path = tmp_path / "bot.db"
    async with BotDatabase(path) as db, stopping(path) as process:
        engine = await db.engine()
        woken = asyncio.Event()
        log = engine.follow(_ALL, woken=woken.set)
        await db.kv_set(*_KEY, 1, ttl_seconds=1)
        stored = await until_put(log, woken, _KEY)
        await stop(process, stored.at)
        [gone] = await taken(log, woken, 1)
        assert (gone.kind, await engine.read(Get(Space.PLUGINS, _KEY))) == (ChangeKind.EXPIRED, [None])
        its_woken = asyncio.Event()
        successor = engine.follow(_ALL, woken=its_woken.set, since=gone.version)
        version = await go_on(process)
        assert version == stored.version + 1
        later_woken = asyncio.Event()
        later = engine.follow(_ALL, woken=later_woken.set, since=gone.version)
        for one, its in ((log, woken), (successor, its_woken), (later, later_woken)):
            assert (await until_put(one, its, _KEY)).version == version
        [record] = await engine.read(Get(Space.PLUGINS, _KEY))
        assert record is not None
        assert record.version == stored.version, "a touch keeps the version of the entry"


async def test_a_client_of_a_service_learns_that_the_entry_is_there_after_all(tmp_path: Path) -> None:
    path = tmp_path / "bot.db"
    async with private_server() as server, BotDatabase(path) as db, stopping(path) as process:
        nats = await connect(server.url, name="service")
        client = await DatabaseClient.connect(server.url, plugin_name=_KEY[0], timeout=_LONGEST_SECONDS)
        async with DatabaseService(nats, db), client, client.kv.watch() as watch, asyncio.timeout(_LONGEST_SECONDS):
            before = SystemClock().now()
            await client.kv.set(_KEY[1], 1, ttl=1)
            assert not (await anext(watch)).deleted
            await stop(process, before)
            gone = await anext(watch)
            assert (gone.deleted, await client.kv.get(_KEY[1])) == (True, None)
            version = await go_on(process)
            again = await anext(watch)
            assert (again.key, again.deleted, again.version) == (_KEY[1], False, version)
            assert await client.kv.get(_KEY[1]) == 1
            # A client that has stored the version of the expiry continues from there.
            async with client.kv.watch(since=gone.version) as continued:
                assert await anext(continued) == again
        await nats.close()
