"""Order within an owner, per key: a read shows every earlier write, and no later one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as Nats

import keyloft
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic import SemanticService, SemanticStore
from tests.support import plugin_files
from tests.support.plugin_files import until_idle
from tests.support.postgres import database_url

PREFIX = "order.kv"
SECONDS = 60

READS: list[tuple[str, dict[str, Any], str]] = [
    ("get", {"key": "k"}, "value"),
    ("get", {"key": "k", "meta": True}, "value"),
    ("get_many", {"keys": ["other", "k"]}, "values"),
    ("list", {"values": True}, "entries"),
    ("list", {}, "keys"),
    ("count", {}, "count"),
]


@pytest.fixture(params=["memory", "sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    # Not within the event loop: the first one starts a server.
    return ":memory:" if request.param == "memory" else str(database_url(request.param, request, tmp_path))


@asynccontextmanager
async def serving(client: Nats, url: str, quotas: Quotas | None = None) -> AsyncIterator[DatabaseService]:
    async with BotDatabase(url) as db:
        usage = None if quotas is None else PluginUsage(db, quotas)
        async with DatabaseService(client, db, prefixes=[PREFIX], usage=usage, deadline=SECONDS) as service:
            yield service
            await until_idle(service)
            assert service.intake is not None
            for owner in service.intake.owners:
                assert (owner.unordered, owner.writes, owner.reads, owner.reading) == (0, {}, {}, {})
        if usage is not None:
            await usage.aclose()


def rounds() -> list[tuple[str, dict[str, Any]]]:
    """Writes of `k`, of new keys, and reads between them."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(6):
        asked.append(("set", {"key": "k", "value": number}))
        asked += [(name, fields) for name, fields, _ in READS]
        asked.append(("set", {"key": f"new{number:02}", "value": number}))
        asked.append(("incr", {"key": "k", "by": 100}))
        asked += [(name, fields) for name, fields, _ in READS[number % 6 :]]
        asked.append(("delete_many", {"keys": ["k", "absent"]}))
        asked.append(("get", {"key": "k"}))
        asked.append(("set_many", {"entries": {"k": -number, "other": number}}))
        asked.append(("get", {"key": "other"}))
        if number == 3:
            asked.append(("delete_many", {"prefix": "new"}))
            asked.append(("list", {}))
    return asked


def modelled(asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What a plain dictionary would answer, one request after the other."""
    stored: dict[str, Any] = {}
    shown: list[Any] = []
    for name, fields in asked:
        match name:
            case "set":
                stored[fields["key"]] = fields["value"]
            case "incr":
                stored[fields["key"]] += fields["by"]
            case "set_many":
                stored |= fields["entries"]
            case "delete_many":
                gone = [
                    key for key in stored if key in fields.get("keys", ()) or key.startswith(fields.get("prefix", "\0"))
                ]
                for key in gone:
                    del stored[key]
            case "get":
                shown.append(stored.get("k") if fields["key"] == "k" else stored.get(fields["key"]))
            case "get_many":
                shown.append({key: stored[key] for key in fields["keys"] if key in stored})
            case "count":
                shown.append(len(stored))
            case "list":
                listed = sorted(stored)
                shown.append([{"key": key, "value": stored[key]} for key in listed] if "values" in fields else listed)
    return shown


def read_from(asked: list[tuple[str, dict[str, Any]]], replies: list[Any]) -> list[Any]:
    """What the replies to reads have shown."""
    shown: list[Any] = []
    for (name, fields), reply in zip(asked, replies, strict=True):
        assert reply["success"], reply
        match name:
            case "get":
                shown.append(reply.get("value"))
            case "get_many":
                shown.append(reply["values"])
            case "count":
                shown.append(reply["count"])
            case "list":
                shown.append(reply["entries" if "values" in fields else "keys"])
    return shown


async def alone(client: Nats, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Send each request in a message of its own, and wait for none before the next."""
    asking = [
        client.request(f"{PREFIX}.trivia.{name}", json.dumps(fields).encode(), timeout=SECONDS)
        for name, fields in asked
    ]
    return [json.loads(reply.data) for reply in await asyncio.gather(*asking)]


async def together(client: Nats, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    data = json.dumps({"requests": [{"op": name, **fields} for name, fields in asked]}).encode()
    reply = await client.request(f"{PREFIX}.trivia.many", data, timeout=SECONDS)
    replies: list[Any] = json.loads(reply.data)["replies"]
    return replies


async def test_no_read_shows_a_later_write_of_what_it_reads(client: Nats, url: str) -> None:
    asked = rounds()
    for sent in (alone, together):
        async with serving(client, url):
            assert read_from(asked, await sent(client, asked)) == modelled(asked), sent.__name__
            await together(client, [("delete_many", {"prefix": ""})])


async def test_writes_of_one_key_keep_their_order_under_a_quota(client: Nats, tmp_path: Path) -> None:
    quotas = Quotas(Quota(keys=100, bytes=100_000))
    async with serving(client, str(tmp_path / "bot.db"), quotas):
        asked = [(name, fields) for name, fields in rounds() if fields != {"prefix": "new"}]
        assert read_from(asked, await alone(client, asked)) == modelled(asked)
        for number in range(10):
            put, touched = await alone(
                client, [("set", {"key": f"t{number}", "value": 1}), ("touch", {"key": f"t{number}", "ttl": 60})]
            )
            assert (put, touched["exists"]) == ({"success": True}, True), "a touch behind the set of its key finds it"


async def test_a_get_waits_for_the_earlier_write_although_those_between_were_not_carried_out(
    client: Nats, tmp_path: Path
) -> None:
    async with (
        BotDatabase(tmp_path / "bot.db") as db,
        plugin_files.serving(client, db, PREFIX, deadline=0.3) as service,
    ):
        async with plugin_files.locked(db):
            await client.publish(f"{PREFIX}.trivia.set", b'{"key":"k","value":"published"}')
            other = await client.request(f"{PREFIX}.quotes.get", b'{"key":"k"}', timeout=SECONDS)
            assert json.loads(other.data)["success"], "the database has the published set by now"
            asked = [
                client.request(f"{PREFIX}.trivia.set", b'{"key":"k","value":1}', timeout=SECONDS) for _ in range(3)
            ]
            late = [json.loads(reply.data) for reply in await asyncio.gather(*asked)]
            assert all(["it was not carried out" in one["message"] for one in late])
            replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            service.hand_in(["trivia"], "get", b'{"key":"k"}', replied.set_result)
            await asyncio.sleep(0.05)
        assert json.loads(await replied) == {"success": True, "exists": True, "value": "published"}


async def test_a_semantic_read_shows_no_later_write(client: Nats) -> None:
    async def ask(operation: str, **fields: Any) -> Any:
        reply = await client.request(
            f"order.semantic.acme.web.{operation}", json.dumps(fields).encode(), timeout=SECONDS
        )
        return json.loads(reply.data)

    def put(value: int) -> Any:
        semantics = {"purpose": "cursor", "producer": "order"}
        return ask("put", key="k", value=value, expectedVersion="*", lastWriter="bot:order", semantics=semantics)

    async with (
        keyloft.open() as kv,
        SemanticStore(kv, sweep_every=None) as store,
        SemanticService(client, store, prefix="order.semantic", deadline=SECONDS),
    ):
        asking: list[Any] = []
        for number in range(10):
            asking += [put(number), ask("get", key="k"), ask("list", prefix="", values=True)]
        replies = await asyncio.gather(*asking)
        assert all(reply["success"] for reply in replies), replies
        assert [reply["entry"]["value"] for reply in replies[1::3]] == list(range(10))
        assert [reply["entries"][0]["value"] for reply in replies[2::3]] == list(range(10))
