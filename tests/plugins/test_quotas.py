"""A plugin that has a quota stores no more than it may, over a real NATS."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as Nats

from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage

PREFIX = "quotas.kv"


@pytest.fixture
async def client(nats_url: str, tmp_path: Path) -> AsyncIterator[Nats]:
    quotas = Quotas(named={"small": Quota(keys=3), "light": Quota(bytes=100)})
    async with (
        await connect(nats_url, name="quotas") as nats,
        BotDatabase(tmp_path / "bot.db") as db,
        PluginUsage(db, quotas) as usage,
        DatabaseService(nats, db, prefixes=[PREFIX], usage=usage),
    ):
        yield nats


async def ask(client: Nats, subject: str, **fields: Any) -> Any:
    reply = await client.request(f"{PREFIX}.{subject}", json.dumps(fields).encode(), timeout=20)
    return json.loads(reply.data)


async def code_of(client: Nats, subject: str, **fields: Any) -> str:
    return str((await ask(client, subject, **fields)).get("error_code", "ok"))


async def test_a_key_too_many_is_refused_until_one_is_deleted(client: Nats) -> None:
    for number in range(3):
        assert await code_of(client, "small.set", key=f"k{number}", value=1) == "ok"
    reply = await ask(client, "small.set", key="k3", value=1)
    assert reply["error_code"] == "QUOTA_EXCEEDED"
    assert "3" in reply["message"]
    assert await code_of(client, "small.set", key="k0", value=2) == "ok", "it replaces a key"
    assert await ask(client, "small.delete", key="k1") == {"success": True, "deleted": True}
    assert await code_of(client, "small.set", key="k3", value=1) == "ok"
    assert (await ask(client, "small.list"))["keys"] == ["k0", "k2", "k3"]


async def test_bytes_too_many_are_refused_and_what_shrinks_passes(client: Nats) -> None:
    assert await code_of(client, "light.set", key="a", value="x" * 80) == "ok"
    assert await code_of(client, "light.set", key="b", value="x" * 80) == "QUOTA_EXCEEDED"
    assert await code_of(client, "light.set", key="a", value="x" * 10) == "ok"
    assert await code_of(client, "light.set", key="b", value="x" * 80) == "ok"


async def test_writes_at_once_do_not_exceed_it_together(client: Nats) -> None:
    codes = await asyncio.gather(*[code_of(client, "small.set", key=f"k{number}", value=1) for number in range(50)])
    assert sorted(codes) == ["QUOTA_EXCEEDED"] * 47 + ["ok"] * 3


async def test_other_plugins_store_as_much_as_they_like(client: Nats) -> None:
    codes = await asyncio.gather(*[code_of(client, "free.set", key=f"k{number}", value=1) for number in range(50)])
    assert set(codes) == {"ok"}


async def test_a_get_sees_the_set_that_was_published_before_it(client: Nats) -> None:
    for number in range(20):
        await client.publish(f"{PREFIX}.small.set", json.dumps({"key": "k", "value": number}).encode())
    assert (await ask(client, "small.get", key="k"))["value"] == 19


async def test_a_delete_that_was_sent_before_makes_room(client: Nats) -> None:
    for number in range(3):
        assert await code_of(client, "small.set", key=f"old{number}", value=1) == "ok"
    for number in range(3):
        await client.publish(f"{PREFIX}.small.delete", json.dumps({"key": f"old{number}"}).encode())
        await client.publish(f"{PREFIX}.small.set", json.dumps({"key": f"new{number}", "value": 1}).encode())
    assert (await ask(client, "small.list"))["keys"] == ["new0", "new1", "new2"]
