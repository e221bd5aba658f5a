"""The operations beyond set, get, delete and list, over a real NATS."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from nats.aio.client import Client as Nats

from keyloft import ManualClock, limits
from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.usage import PluginUsage
from tests.support.etcd import and_etcd
from tests.support.postgres import database_url

PREFIX = "operations.kv"
PLAIN = {"success": True}


@pytest.fixture(params=and_etcd("sqlite file", "postgresql"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def client(nats_url: str, url: str | None, clock: ManualClock) -> AsyncIterator[Nats]:
    quotas = Quotas(named={"small": Quota(keys=3), "light": Quota(bytes=100)})
    async with (
        await connect(nats_url, name="operations") as nats,
        BotDatabase(url, clock=clock) as db,
        PluginUsage(db, quotas) as usage,
        DatabaseService(nats, db, prefixes=[PREFIX], usage=usage),
    ):
        yield nats


async def ask(client: Nats, subject: str, /, **fields: Any) -> Any:
    reply = await client.request(f"{PREFIX}.{subject}", json.dumps(fields).encode(), timeout=20)
    return json.loads(reply.data)


async def code_of(client: Nats, subject: str, /, **fields: Any) -> str:
    return str((await ask(client, subject, **fields)).get("error_code", "ok"))


async def publish(client: Nats, subject: str, /, **fields: Any) -> None:
    await client.publish(f"{PREFIX}.{subject}", json.dumps(fields).encode())


async def test_a_set_with_a_condition_is_made_or_says_what_is_stored(client: Nats) -> None:
    first = await ask(client, "p.set", key="k", value=[1], if_absent=True)
    assert first.keys() == {"success", "version"}
    refused = await ask(client, "p.set", key="k", value=2, if_absent=True)
    assert (refused["success"], refused["error_code"]) == (False, "VERSION_CONFLICT")
    assert refused["current"] == {"value": [1], "version": first["version"]}
    second = await ask(client, "p.set", key="k", value=2, expected_version=first["version"])
    assert second["version"] > first["version"]
    refused = await ask(client, "p.set", key="k", value=3, expected_version=first["version"])
    assert refused["current"] == {"value": 2, "version": second["version"]}
    assert "expected version" in refused["message"]
    refused = await ask(client, "p.set", key="other", value=3, expected_version=7)
    assert (refused["error_code"], refused["current"]) == ("VERSION_CONFLICT", None)
    assert (await ask(client, "p.set", key="other", value=3, expected_version=0))["version"] > second["version"]
    # Without a condition, the reply has no version.
    assert await ask(client, "p.set", key="k", value=1, if_absent=False, expected_version=None) == PLAIN


async def test_of_conditional_sets_at_once_one_is_made(client: Nats) -> None:
    for fields in ({"if_absent": True}, {"expected_version": None}):
        if "expected_version" in fields:
            fields["expected_version"] = (await ask(client, "p.get", key="k", meta=True))["version"]
        codes = await asyncio.gather(*[code_of(client, "p.set", key="k", value=n, **fields) for n in range(40)])
        assert sorted(codes) == ["VERSION_CONFLICT"] * 39 + ["ok"]


async def test_a_get_shows_version_ttl_and_times_if_asked(client: Nats, clock: ManualClock) -> None:
    assert await ask(client, "p.get", key="k", meta=True) == {"success": True, "exists": False}
    created = datetime.fromtimestamp(clock.now() / 1000, UTC)
    version = (await ask(client, "p.set", key="k", value={"a": 1}, ttl=60, if_absent=True))["version"]
    clock.advance(0.5)
    found = await ask(client, "p.get", key="k", meta=True)
    assert found.keys() == {"success", "exists", "value", "version", "ttl", "created_at", "updated_at"}
    assert (found["value"], found["version"], found["ttl"]) == ({"a": 1}, version, 60)
    assert datetime.fromisoformat(found["created_at"]) == datetime.fromisoformat(found["updated_at"]) == created
    assert found["created_at"].endswith("Z")
    await ask(client, "p.set", key="k", value=2)
    found = await ask(client, "p.get", key="k", meta=True)
    assert found["ttl"] is None
    assert datetime.fromisoformat(found["created_at"]) == created < datetime.fromisoformat(found["updated_at"])
    assert await ask(client, "p.get", key="k", meta=False) == {"success": True, "exists": True, "value": 2}


async def test_a_set_keeps_the_ttl_if_asked(client: Nats, clock: ManualClock) -> None:
    await ask(client, "p.set", key="k", value=1, ttl=60)
    clock.advance(0.25)
    assert await ask(client, "p.set", key="k", value=2, keep_ttl=True) == PLAIN
    clock.advance(59.749)
    found = await ask(client, "p.get", key="k", meta=True)
    assert (found["value"], found["ttl"]) == (2, 1)
    assert "version" in await ask(client, "p.set", key="k", value=3, keep_ttl=True, expected_version=found["version"])
    clock.advance(0.001)
    assert (await ask(client, "p.get", key="k"))["exists"] is False, "to the millisecond"
    assert await ask(client, "p.set", key="new", value=1, keep_ttl=True) == PLAIN
    assert (await ask(client, "p.get", key="new", meta=True))["ttl"] is None
    assert await code_of(client, "p.set", key="k", value=1, keep_ttl=True, ttl=5) == "VALIDATION_ERROR"


async def test_increments_at_once_are_all_counted(client: Nats, clock: ManualClock) -> None:
    replies = await asyncio.gather(*[ask(client, "p.incr", key="n", by=by) for by in [1, 2, -1] * 30])
    assert (await ask(client, "p.get", key="n"))["value"] == 60
    assert {60} <= {reply["value"] for reply in replies}
    assert await ask(client, "p.incr", key="n") == {"success": True, "value": 61}
    assert await ask(client, "p.incr", key="n", by=None, ttl=None) == {"success": True, "value": 62}
    assert await ask(client, "p.incr", key="soon", by=5, ttl=10) == {"success": True, "value": 5}
    clock.advance(9)
    assert (await ask(client, "p.incr", key="soon", ttl_seconds=100))["value"] == 6, "a stored one keeps its TTL"
    clock.advance(1)
    assert (await ask(client, "p.incr", key="soon"))["value"] == 1
    await ask(client, "p.set", key="large", value=10**30)
    assert (await ask(client, "p.incr", key="large"))["value"] == 10**30 + 1


async def test_to_something_else_nothing_is_added(client: Nats) -> None:
    values: tuple[Any, ...] = ("1", 1.0, True, None, [1], {}, 10**3001)
    for value in values:
        await ask(client, "p.set", key="k", value=value)
        refused = await ask(client, "p.incr", key="k")
        assert refused["error_code"] == "NOT_A_COUNTER"
        assert "the value at 'k' is not an integer" in refused["message"]
        assert (await ask(client, "p.get", key="k"))["value"] == value


async def test_several_values_are_read_together(client: Nats) -> None:
    for key, value in {"a": 1, "b": None, "ü": "é"}.items():
        await ask(client, "p.set", key=key, value=value)
    found = await ask(client, "p.get_many", keys=["a", "x", "b", "ü", "a"])
    assert found == {"success": True, "values": {"a": 1, "b": None, "ü": "é"}, "missing": ["x"]}
    assert await ask(client, "p.get_many", keys=[]) == {"success": True, "values": {}, "missing": []}
    await publish(client, "p.set", key="a", value=2)
    assert (await ask(client, "p.get_many", keys=["a"]))["values"] == {"a": 2}, "it sees what was published before"


async def test_values_that_do_not_fit_into_one_reply_are_the_rest(client: Nats) -> None:
    keys = [f"k{n}" for n in range(30)]
    await asyncio.gather(*[ask(client, "p.set", key=key, value=key + "x" * 65_000) for key in keys[:-1]])
    rest, found = keys, dict[str, Any]()
    while rest:
        reply = await ask(client, "p.get_many", keys=rest)
        found |= reply["values"]
        rest = reply.get("rest", [])
        assert len(json.dumps(reply)) <= 2**20
    assert reply["missing"] == keys[-1:]
    assert [*found] == keys[:-1]
    listed, after = dict[str, Any](), ""
    while True:
        page = await ask(client, "p.list", values=True, after=after)
        listed |= {entry["key"]: entry["value"] for entry in page["entries"]}
        assert page["count"] == len(page["entries"]) > 0
        if not page["truncated"]:
            break
        after = page["entries"][-1]["key"]
    assert listed == found


async def test_entries_are_listed_with_their_values(client: Nats) -> None:
    await ask(client, "p.set_many", entries={"a1": 1, "a2": {"x": []}, "b": "\u0000"})
    entries = [{"key": "a1", "value": 1}, {"key": "a2", "value": {"x": []}}, {"key": "b", "value": "\u0000"}]
    assert await ask(client, "p.list", values=True) == {
        "success": True,
        "entries": entries,
        "count": 3,
        "truncated": False,
    }
    page = await ask(client, "p.list", values=True, prefix="a", limit=1)
    assert (page["entries"], page["truncated"]) == (entries[:1], True)
    page = await ask(client, "p.list", values=True, prefix="a", limit=1, after="a1")
    assert (page["entries"], page["truncated"]) == (entries[1:2], False)
    assert (await ask(client, "p.list", values=False))["keys"] == ["a1", "a2", "b"]


async def test_several_values_are_set_together_or_not_at_all(client: Nats, clock: ManualClock) -> None:
    assert await ask(client, "p.set_many", entries={}) == {"success": True, "count": 0}
    entries = {f"k{n}": {"n": n, "text": 'é\\"{}[]'} for n in range(1000)}
    assert await ask(client, "p.set_many", entries=entries, ttl=60) == {"success": True, "count": 1000}
    assert (await ask(client, "p.get_many", keys=[*entries]))["values"] == entries
    bad = {"a": 1, "b": "x" * 65_535}
    assert await code_of(client, "p.set_many", entries=bad) == "VALUE_TOO_LARGE"
    assert await code_of(client, "p.set_many", entries={"a": 1, "": 2}) == "VALIDATION_ERROR"
    assert await code_of(client, "p.set_many", entries=entries | {"one more": 1}) == "VALIDATION_ERROR"
    assert (await ask(client, "p.get", key="a"))["exists"] is False
    clock.advance(60)
    assert await ask(client, "p.count") == {"success": True, "count": 0}


async def test_several_keys_are_deleted_together_or_by_their_prefix(client: Nats) -> None:
    entries = {f"{group}:{n:04}": n for group in "abc" for n in range(333)}
    await ask(client, "p.set_many", entries=entries)
    assert await ask(client, "p.delete_many", keys=["a:0000", "b:0000", "x"]) == {"success": True, "count": 2}
    assert await ask(client, "p.delete_many", prefix="b:") == {"success": True, "count": 332}
    reply = await ask(client, "p.delete_many", prefix="c:", limit=300)
    assert reply == {"success": True, "count": 300, "truncated": True}
    reply = await ask(client, "p.delete_many", prefix="c:", limit=300)
    assert reply == {"success": True, "count": 33, "truncated": False}
    assert await ask(client, "p.count") == {"success": True, "count": 332}
    assert await ask(client, "p.count", prefix="a:01") == {"success": True, "count": 100}
    assert await ask(client, "p.count", prefix="c") == {"success": True, "count": 0}
    assert await ask(client, "p.delete_many", prefix="") == {"success": True, "count": 332}
    assert (await ask(client, "p.list"))["keys"] == []


async def test_a_reply_says_what_a_locked_row_has_left_of_a_deletion_and_names_no_database(
    nats_url: str, emptied_postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        await connect(nats_url, name="operations") as client,
        BotDatabase(emptied_postgres_url, patience=0.5) as db,
        DatabaseService(client, db, prefixes=[PREFIX]),
    ):
        await ask(client, "p.set_many", entries={f"a:{n:04}": n for n in range(limits.SLICE_ITEMS + 1)})
        rival = await asyncpg.connect(emptied_postgres_url)
        try:
            last = f"a:{limits.SLICE_ITEMS:04}"
            await rival.execute(f"BEGIN; SELECT FROM plugin_kv_storage WHERE key = '{last}' FOR UPDATE")
            partly, not_at_all = await ask(client, "p.delete_many", prefix=""), await ask(client, "p.delete", key=last)
        finally:
            await rival.close()
        assert partly["error_code"] == "DATABASE_ERROR"
        assert f"after {limits.SLICE_ITEMS} entries were removed" in partly["message"]
        assert not_at_all["error_code"] == "BUSY"
        assert "was not carried out" in not_at_all["message"]
        assert "PostgreSQL" not in f"{partly} {not_at_all}"
        assert re.search("delete_many failed: .* were removed.*another client", caplog.text)
        assert (await ask(client, "p.list"))["keys"] == [last]


async def test_what_follows_a_deletion_by_prefix_is_made_after_it(client: Nats) -> None:
    entries = {f"a:{n:04}": n for n in range(1000)}
    await ask(client, "p.set_many", entries=entries)
    await publish(client, "p.set", key="a:new", value=1)
    await publish(client, "p.delete_many", prefix="a:")
    await publish(client, "p.set", key="a:0007", value="after")
    await publish(client, "p.incr", key="a:0008")
    await publish(client, "p.delete_many", prefix="a:0008")
    await publish(client, "p.set_many", entries={"a:0009": 9, "z": 0})
    got = asyncio.gather(
        *[ask(client, "p.get", key=key) for key in ("a:0007", "a:0008", "a:0009", "a:0999", "a:new")],
    )
    assert (await ask(client, "p.list"))["keys"] == ["a:0007", "a:0009", "z"]
    assert [reply.get("value") for reply in await got] == ["after", None, 9, None, None]


async def test_a_touch_changes_the_ttl_alone(client: Nats, clock: ManualClock) -> None:
    version = (await ask(client, "p.set", key="k", value=1, ttl=10, if_absent=True))["version"]
    assert await ask(client, "p.touch", key="k", ttl=100) == {"success": True, "exists": True}
    clock.advance(50)
    found = await ask(client, "p.get", key="k", meta=True)
    assert (found["value"], found["version"], found["ttl"]) == (1, version, 50)
    assert await ask(client, "p.touch", key="k", ttl=None) == {"success": True, "exists": True}
    assert (await ask(client, "p.get", key="k", meta=True))["ttl"] is None
    assert await ask(client, "p.touch", key="absent", ttl=5) == {"success": True, "exists": False}
    assert await code_of(client, "p.touch", key="k") == "MISSING_FIELD"


async def test_usage_counts_keys_and_bytes_and_shows_the_quota(client: Nats) -> None:
    assert await ask(client, "p.usage") == {"success": True, "keys": 0, "bytes": 0}
    await ask(client, "light.set_many", entries={"a": 1, "b": "xyz"})
    quota = {"keys": None, "bytes": 100}
    assert await ask(client, "light.usage") == {"success": True, "keys": 2, "bytes": 6, "quota": quota}
    await ask(client, "light.delete_many", prefix="a")
    await ask(client, "light.incr", key="n", by=1000)
    assert (await ask(client, "light.usage"))["bytes"] == 9, "what passes through is counted at once"


async def test_all_writes_are_held_to_the_quota(client: Nats) -> None:
    assert await code_of(client, "small.set_many", entries=dict.fromkeys("abcd", 1)) == "QUOTA_EXCEEDED"
    assert (await ask(client, "small.count"))["count"] == 0
    assert await code_of(client, "small.set_many", entries=dict.fromkeys("abc", 1)) == "ok"
    for subject, fields in (
        ("incr", {"key": "d"}),
        ("set", {"key": "d", "value": 1, "if_absent": True}),
        ("set", {"key": "d", "value": 1, "keep_ttl": True}),
        ("set_many", {"entries": {"a": 1, "d": 1}}),
    ):
        assert await code_of(client, f"small.{subject}", **fields) == "QUOTA_EXCEEDED"
    assert await ask(client, "small.incr", key="a") == {"success": True, "value": 2}
    assert await code_of(client, "small.set", key="a", value=5, if_absent=True) == "VERSION_CONFLICT"
    assert await code_of(client, "small.touch", key="a", ttl=5) == "ok"
    assert await ask(client, "small.delete_many", keys=["a", "x"]) == {"success": True, "count": 1}
    assert (await ask(client, "small.set", key="d", value=1, expected_version=0))["success"]
    reply = await ask(client, "small.delete_many", prefix="", limit=2)
    assert reply == {"success": True, "count": 2, "truncated": True}
    assert await code_of(client, "small.set_many", entries={"x": 1, "y": 2}) == "ok"
    await ask(client, "light.set", key="n", value=9 * 10**97)
    assert await code_of(client, "light.incr", key="n", by=1) == "ok"
    await ask(client, "light.set", key="n", value=10**100 // 2)
    assert await code_of(client, "light.set", key="n", value="x" * 99) == "QUOTA_EXCEEDED"
    assert await code_of(client, "light.set", key="n", value="x" * 20, keep_ttl=True) == "ok", "it shrinks"
    assert await code_of(client, "light.incr", key="n") == "NOT_A_COUNTER"
    assert (await ask(client, "light.usage"))["bytes"] == 22


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("set", {"key": "k", "value": 1, "if_absent": True, "expected_version": 0}, "VALIDATION_ERROR", "two conditions"),
    ("set", {"key": "k", "value": 1, "if_absent": 1}, "VALIDATION_ERROR", "if_absent must be true or false"),
    ("set", {"key": "k", "value": 1, "expected_version": True}, "VALIDATION_ERROR", "expected_version must be"),
    ("set", {"key": "k", "value": 1, "expected_version": -1}, "VALIDATION_ERROR", "expected_version must be"),
    ("set", {"key": "k", "value": 1, "expected_version": 2**53}, "VALIDATION_ERROR", "expected_version must be"),
    ("set", {"key": "k", "value": 1, "expectedVersion": 1}, "VALIDATION_ERROR", "called expected_version"),
    ("set", {"key": "k", "value": 1, "ifAbsent": True}, "VALIDATION_ERROR", "called if_absent"),
    ("get", {"key": "k", "meta": 1}, "VALIDATION_ERROR", "meta must be true or false"),
    ("get", {"key": "k", "Meta": True}, "VALIDATION_ERROR", "called meta"),
    ("list", {"values": "yes"}, "VALIDATION_ERROR", "values must be true or false"),
    ("incr", {}, "MISSING_FIELD", "key"),
    ("incr", {"key": "k", "by": 1.5}, "VALIDATION_ERROR", "by must be"),
    ("incr", {"key": "k", "by": True}, "VALIDATION_ERROR", "by must be"),
    ("incr", {"key": "k", "by": 2**63}, "VALIDATION_ERROR", "by must be"),
    ("incr", {"key": "k", "ttl": 0}, "VALIDATION_ERROR", "ttl must be"),
    ("incr", {"key": "k", "amount": 2}, "VALIDATION_ERROR", "amount: there is no such field"),
    ("incr", {"key": "k", "By": 2}, "VALIDATION_ERROR", "the fields are key, by"),
    ("incr", {"kye": "k"}, "VALIDATION_ERROR", "did you mean key?"),
    ("get_many", {}, "MISSING_FIELD", "keys"),
    ("get_many", {"keys": "ab"}, "VALIDATION_ERROR", "keys must be an array"),
    ("get_many", {"keys": None}, "VALIDATION_ERROR", "keys must be an array"),
    ("get_many", {"keys": ["a", 7]}, "VALIDATION_ERROR", "keys[1] must be"),
    ("get_many", {"keys": ["a"] * 1001}, "VALIDATION_ERROR", "at most 1,000"),
    ("get_many", {"keys": ["x" * 600_000]}, "VALIDATION_ERROR", "at most 524288"),
    ("set_many", {"entries": []}, "VALIDATION_ERROR", "entries must be an object"),
    ("set_many", {"entries": {"k": 1}, "ttl": "5"}, "VALIDATION_ERROR", "ttl must be"),
    ("set_many", {"values": {}}, "VALIDATION_ERROR", "values: there is no such field"),
    ("delete_many", {}, "MISSING_FIELD", "keys, or prefix"),
    ("delete_many", {"keys": ["a"], "prefix": "a"}, "VALIDATION_ERROR", "either keys"),
    ("delete_many", {"keys": ["a"], "limit": 1}, "VALIDATION_ERROR", "either keys"),
    ("delete_many", {"prefix": "a", "limit": 0}, "VALIDATION_ERROR", "limit"),
    ("count", {"prefix": 7}, "VALIDATION_ERROR", "prefix must be a string"),
    ("count", {"limit": 7}, "VALIDATION_ERROR", "limit: there is no such field"),
    ("touch", {"key": "k", "ttl": 0}, "VALIDATION_ERROR", "ttl must be"),
    ("usage", {"plugin": "p"}, "VALIDATION_ERROR", "plugin: there is no such field"),
]


@pytest.mark.parametrize("url", ["sqlite file"], indirect=True)
async def test_each_mistake_has_its_code_and_a_reason(client: Nats) -> None:
    for operation, fields, code, expected in REFUSED:
        reply = await ask(client, f"p.{operation}", **fields)
        assert (reply.get("error_code"), reply.keys()) == (code, {"success", "error_code", "message"}), (
            operation,
            reply,
        )
        assert expected in reply["message"]
    assert (await ask(client, "p.list"))["count"] == 0
