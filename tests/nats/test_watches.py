"""Watches over NATS: every change arrives at least once and in order, whoever publishes it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import keyloft
from keyloft.errors import HistoryGone
from keyloft.nats.connection import connect
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService, Event
from keyloft.semantic import SemanticClient, Semantics, SemanticService, SemanticStore

_SECONDS = 30


async def next_of(watch: RemoteWatch) -> Event:
    async with asyncio.timeout(_SECONDS):
        return await anext(watch)


async def some_of(watch: RemoteWatch, number: int) -> list[Event]:
    return [await next_of(watch) for _ in range(number)]


class World:
    """A NATS server, a database, and services on both."""

    def __init__(self, url: str, database: Path) -> None:
        self.url = url
        self.database = database
        self.prefix = f"w{uuid4().hex[:12]}"

    @asynccontextmanager
    async def service(self, **options: Any) -> AsyncIterator[DatabaseService]:
        nats = await connect(self.url, name="service")
        try:
            async with (
                BotDatabase(self.database, durability="relaxed") as db,
                DatabaseService(nats, db, prefixes=[self.prefix], **options) as service,
            ):
                yield service
        finally:
            await nats.close()

    async def client(self, plugin: str = "trivia") -> DatabaseClient:
        return await DatabaseClient.connect(self.url, plugin_name=plugin, prefix=self.prefix, timeout=_SECONDS)


@pytest.fixture
def world(nats_url: str, tmp_path: Path) -> World:
    return World(nats_url, tmp_path / "bot.db")


@pytest.fixture
async def client(world: World) -> AsyncIterator[DatabaseClient]:
    async with world.service(), await world.client() as client:
        yield client


async def test_a_watch_reports_puts_deletes_and_expiries_of_a_prefix_in_order(client: DatabaseClient) -> None:
    kv = client.kv
    await kv.set("user:before", 1)
    async with kv.watch(prefix="user:") as watch:
        await kv.set("user:a", 1)
        await kv.set("other", 1)
        await kv.set("user:a", 2)
        await kv.delete("user:a")
        await kv.set("user:b", 1, ttl=1)
        events = await some_of(watch, 5)
    assert [(event.key, event.deleted) for event in events] == [
        ("user:a", False),
        ("user:a", False),
        ("user:a", True),
        ("user:b", False),
        ("user:b", True),
    ]
    versions = [event.version for event in events]
    assert versions == sorted(versions)
    assert len(set(versions[:4])) == 4, "nothing is joined"


async def test_a_watch_of_keys_reports_no_others(client: DatabaseClient) -> None:
    async with client.kv.watch("a", "c") as watch:
        for key in "abcab":
            await client.kv.set(key, 1)
        assert [event.key for event in await some_of(watch, 3)] == ["a", "c", "a"]


async def test_a_watch_goes_on_where_an_earlier_one_ended(client: DatabaseClient) -> None:
    async with client.kv.watch() as watch:
        await client.kv.set("a", 1)
        await next_of(watch)
    for key in "bc":
        await client.kv.set(key, 1)
    async with client.kv.watch(since=watch.reported_to) as later:
        await client.kv.set("d", 1)
        assert [event.key for event in await some_of(later, 3)] == ["b", "c", "d"]


async def test_a_version_that_was_never_given_is_refused(client: DatabaseClient) -> None:
    with pytest.raises(HistoryGone, match="list the entries, then watch again"):
        await next_of(client.kv.watch(since=10**9))


async def test_plugins_see_nothing_of_each_other(world: World, client: DatabaseClient) -> None:
    async with await world.client("quotes") as other, client.kv.watch() as mine, other.kv.watch() as theirs:
        await other.kv.set("a", 1)
        await client.kv.set("b", 1)
        assert (await next_of(theirs)).key == "a"
        assert (await next_of(mine)).key == "b"


async def test_the_semantic_store_is_watched_by_paths_within_the_project(nats_url: str) -> None:
    nats, prefix = await connect(nats_url, name="service"), f"w{uuid4().hex[:12]}"
    flag = Semantics("feature_flag", ttl_seconds=1)
    async with (
        keyloft.open() as kv,
        SemanticStore(kv) as store,
        SemanticService(nats, store, prefix=prefix),
        await SemanticClient.connect(nats_url, tenant="acme", project="web", prefix=prefix) as client,
        client.events(prefix="flags/") as below,
        client.events("docs/delta") as one,
    ):
        await client.put("docs/delta", 1, expected_version=0, writer="a:b", semantics=Semantics("cursor"))
        entry = await client.put("flags/new-ui", True, expected_version=0, writer="a:b", semantics=flag)
        assert await next_of(below) == Event("flags/new-ui", entry.version, False)
        expired = await next_of(below)
        assert (expired.key, expired.deleted) == ("flags/new-ui", True)
        assert (await next_of(one)).key == "docs/delta"
    await nats.close()
