"""Watches of plugins and workflows as server-sent events: they resume where they ended, and end in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from keyloft import limits
from tests.http.api import LONGEST_SECONDS, Events
from tests.http.services import ServedOverHttp, services, until

PLUGIN, PROJECT = "/v1/plugins/trivia/watch", "/v1/semantic/acme/web/watch"


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[ServedOverHttp]:
    async with services(nats_url, tmp_path / "bot.db") as world:
        yield world


class PluginEvents(Events):
    """The events of a service, and the id that a browser would come back with."""

    last_id = 0

    async def change(self) -> tuple[str, bool]:
        """The next event: which key has changed, and whether it is gone."""
        name, version, data = await self.next()
        assert name == "change"
        assert data.keys() == {"key", "version", "deleted"}
        self.last_id = version or self.last_id
        return data["key"], data["deleted"]


@asynccontextmanager
async def watching(http: httpx.AsyncClient, method: str, path: str, **options: Any) -> AsyncIterator[PluginEvents]:
    async with http.stream(method, path, **options) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream"
        events = PluginEvents(response)
        assert (await events.next())[0] == "ready"
        yield events


async def test_changes_of_a_plugin_are_reported_and_a_client_resumes_where_it_ended(world: ServedOverHttp) -> None:
    db = world.db
    async with world.http("trivia-reads") as http:
        async with watching(http, "GET", PLUGIN, params={"prefix": "user:"}) as events:
            await db.kv_set("trivia", "other", 1)
            await db.kv_set("quotes", "user:1", 1)
            await db.kv_set("trivia", "user:1", 1)
            assert await events.change() == ("user:1", False)
            seen = events.last_id
            await db.kv_set_many("trivia", {"user:2": 2, "user:3": 3})
            assert await events.change() == ("user:2", False)
            assert events.last_id == seen, "a client that comes back now gets both again"
            assert await events.change() == ("user:3", False)
            seen = events.last_id
        await db.kv_delete("trivia", "user:2")
        resumed = {"last-event-id": str(seen)}
        async with watching(http, "GET", PLUGIN, params={"prefix": "user:", "since": "0"}, headers=resumed) as events:
            assert await events.change() == ("user:2", True)
        async with watching(http, "POST", PLUGIN, json={"keys": ["user:3"], "since": 0}) as events:
            assert await events.change() == ("user:3", False)
        async with watching(http, "POST", PLUGIN, json={"prefix": "user:"}, headers=resumed) as events:
            assert await events.change() == ("user:2", True)
    await until(lambda: world.context.meters.watches == 0)


async def test_changes_of_a_project_are_reported_by_their_paths(world: ServedOverHttp) -> None:
    flags = world.semantic.store.flags("acme", "web")
    async with (
        world.http("acme-reads") as http,
        watching(http, "GET", PROJECT, params={"key": ["flags/a", "flags/b"]}) as events,
    ):
        await flags.set("c", 1, writer="console:rollout")
        await flags.set("b", 1, writer="console:rollout")
        await flags.unset("b", writer="console:rollout")
        assert await events.change() == ("flags/b", False)
        assert await events.change() == ("flags/b", True)


async def test_a_watch_that_can_not_be_is_refused_before_it_begins(
    world: ServedOverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[str, dict[str, Any], int]] = [
        ("trivia-reads", {"params": {"prefix": "a", "key": "a"}}, 422),
        ("trivia-reads", {"params": {"since": "x"}}, 422),
        ("trivia-reads", {"params": {"since": str(2**50)}}, 410),
        ("trivia-reads", {"params": {"prefx": "a"}}, 422),
        ("trivia-reads", {"headers": {"last-event-id": "-1"}}, 422),
        ("acme-reads", {}, 403),
    ]
    async with world.http() as http:
        for token, options, status in refused:
            options["headers"] = {"authorization": f"Bearer {token}", **options.get("headers", {})}
            answer = await http.get(PLUGIN, **options)
            assert answer.status_code == status, (options, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
        lease = await http.post(PLUGIN, json={"subject": "db.kv.trivia.events.x"})
        assert lease.status_code == 422
        assert (await http.head(PLUGIN)).headers["content-type"] == "text/event-stream"
        monkeypatch.setattr(limits, "OWNER_STREAMS", 0)
        assert (await http.get(PLUGIN)).json()["code"] == "QUOTA_EXCEEDED"
        monkeypatch.setattr(world.context, "most_listeners", 0)
        assert (await http.get(PLUGIN)).json()["code"] == "BUSY"


async def test_a_watch_ends_with_its_service_and_with_its_token(
    world: ServedOverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_HEARTBEAT_SECONDS", 0.02)
    async with world.http() as http:
        async with http.stream("GET", PLUGIN) as response:
            lines = response.aiter_lines()
            async with asyncio.timeout(LONGEST_SECONDS):
                async for line in lines:
                    if line == ":":
                        break
                await world.plugins.aclose()
                assert not [line async for line in lines if line.strip(": ")]
        async with http.stream("GET", PROJECT) as response:
            monkeypatch.setattr(world.context.tokens, "is_valid", lambda token: False)
            async with asyncio.timeout(LONGEST_SECONDS):
                assert [line async for line in response.aiter_lines() if line.startswith("event")] == ["event: ready"]


async def test_a_watch_that_has_events_all_the_time_ends_with_its_token(
    world: ServedOverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.http("trivia-reads") as http, watching(http, "GET", PLUGIN) as events:
        await world.db.kv_set("trivia", "a", 1)
        assert await events.change() == ("a", False)
        monkeypatch.setattr(world.context.tokens, "is_valid", lambda token: False)
        await world.db.kv_set("trivia", "b", 1)
        assert (await events.next())[0] == "end"


@pytest.mark.slow
async def test_a_client_that_does_not_read_holds_up_no_one_and_is_cut_off(
    world: ServedOverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_ANSWER_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", world.api.port, limit=1024)
    writer.write(f"GET {PLUGIN} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer trivia-reads\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    long = "x" * 240
    async with asyncio.timeout(LONGEST_SECONDS):
        for first in range(0, 10**6, 1000):
            await world.db.kv_set_many("trivia", {f"{long}{number}": 1 for number in range(first, first + 1000)})
            if not world.context.meters.watches:
                break
    assert (await world.over_nats("db.kv.trivia.count", {}))["count"] > 0
    writer.transport.abort()
