"""The semantic service, asked over a real NATS by a stock client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats

import keyloft
from keyloft import DiskFull, ManualClock, Store, Unreachable, limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Committed, Conflict
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.semantic import SemanticService, SemanticStore
from keyloft.semantic.keys import OPERATIONS
from tests.support.etcd import and_etcd
from tests.support.nats import settled
from tests.support.postgres import database_url

PUT = {
    "key": "docs/onedrive/delta",
    "value": {"token": "abc"},
    "expectedVersion": 0,
    "lastWriter": "harvester:sync",
    "semantics": {"purpose": "cursor", "producer": "harvester", "consumerHints": ["search"], "ttlSeconds": 3600},
    "requestId": "2026-11-16T05:00:00Z/sync",
    "specRef": "specs/kv.md",
}
DELETE = {"key": "docs/onedrive/delta", "expectedVersion": "*", "lastWriter": "harvester:sync"}
WHOLE = "tenant/acme/project/web/docs/onedrive/delta"


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Nats]:
    connection = await nats.connect(nats_url)
    yield connection
    await connection.close()


@pytest.fixture(params=and_etcd("memory", "sqlite file", "postgresql"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    # Not within the event loop: the first one starts a server.
    return database_url(request.param, request, tmp_path)


@pytest.fixture
async def kv(url: str | None, clock: ManualClock) -> AsyncIterator[Store]:
    async with keyloft.open(url, clock=clock) as kv:
        yield kv


@pytest.fixture
async def service(nats_url: str, kv: Store) -> AsyncIterator[SemanticService]:
    connection = await nats.connect(nats_url)
    async with SemanticStore(kv, sweep_every=None) as store:
        service = SemanticService(connection, store)
        await service.start()
        yield service
        await service.stop()
    await connection.close()


ON_MEMORY = pytest.mark.parametrize("url", ["memory"], indirect=True)


async def ask(client: Nats, operation: str, payload: Any = None, spot: str = "acme.web") -> dict[str, Any]:
    """Bytes are sent as they are, everything else as JSON."""
    data = payload if isinstance(payload, bytes) else json.dumps({} if payload is None else payload).encode()
    answer = await client.request(f"db.semantic.{spot}.{operation}", data, timeout=20)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def refused(client: Nats, operation: str, payload: Any, spot: str = "acme.web") -> tuple[str, str]:
    reply = await ask(client, operation, payload, spot)
    assert reply.keys() == {"success", "error_code", "message"}
    assert reply["error_code"] in WIRE_ERRORS
    # Whatever it was, the next one is served.
    assert (await ask(client, "get", {"key": "alive"}))["success"] is True
    return reply["error_code"], reply["message"]


@pytest.mark.usefixtures("service")
class TestSemanticOperations:
    async def test_an_entry_travels_whole(self, client: Nats) -> None:
        reply = await ask(client, "put", PUT)
        entry = reply["entry"]
        assert reply == {
            "success": True,
            "entry": {
                **{name: PUT[name] for name in ("value", "lastWriter", "semantics", "requestId", "specRef")},
                "key": WHOLE,
                "version": entry["version"],
                "updatedAt": "2023-11-14T22:13:20Z",
                "expiresAt": "2023-11-14T23:13:20Z",
            },
        }
        assert await ask(client, "get", {"key": PUT["key"]}) == reply
        assert await ask(client, "put", PUT) == reply, "the same request gets the first outcome"
        assert await ask(client, "delete", DELETE) == reply, "what was removed"
        assert await ask(client, "get", {"key": PUT["key"]}) == {"success": True, "entry": None}
        assert await ask(client, "delete", DELETE) == {"success": True, "entry": None}

    async def test_a_conflict_shows_the_stored_entry(self, client: Nats) -> None:
        entry = (await ask(client, "put", PUT))["entry"]
        reply = await ask(client, "put", {**PUT, "value": 2, "requestId": "another"})
        assert (reply["success"], reply["error_code"], reply["current"]) == (False, "VERSION_CONFLICT", entry)
        assert reply["correlationId"] == "another"
        stale = await ask(client, "put", {**PUT, "value": 2, "expectedVersion": entry["version"]})
        assert (stale["error_code"], stale["current"]) == ("VERSION_CONFLICT", entry), "the requestId was used before"

    async def test_a_list_shows_values_only_if_asked(self, client: Nats) -> None:
        for number in range(5):
            await ask(client, "put", {**PUT, "key": f"docs/{number}", "requestId": None})
        await ask(client, "put", {**PUT, "key": "other"})
        await ask(client, "put", {**PUT, "key": "docs/9"}, "acme.another")
        reply = await ask(client, "list", {"prefix": "docs/"})
        keys = [f"tenant/acme/project/web/docs/{number}" for number in range(5)]
        assert [entry["key"] for entry in reply["entries"]] == keys
        assert not reply["truncated"]
        assert all("value" not in entry for entry in reply["entries"])
        shown = await ask(client, "list", {"prefix": "docs/", "values": True, "limit": 2, "after": "docs/0"})
        assert [(entry["key"], entry["value"]) for entry in shown["entries"]] == [
            (key, PUT["value"]) for key in keys[1:3]
        ]
        assert shown["truncated"]

    async def test_a_batch_is_made_whole_or_not_at_all(self, client: Nats) -> None:
        put = {"operation": "put", **PUT, "requestId": None}
        delete = {"operation": "delete", **DELETE, "key": "docs/gone"}
        made = await ask(client, "batch", {"operations": [put, delete], "requestId": "b"})
        assert [entry and entry["key"] for entry in made["entries"]] == [WHOLE, None]
        assert await ask(client, "batch", {"operations": [put, delete], "requestId": "b"}) == made
        refused = await ask(
            client, "batch", {"operations": [{**put, "key": "docs/new"}, put, {**delete, "expectedVersion": 7}]}
        )
        assert [(one["key"], one["expectedVersion"]) for one in refused["conflicts"]] == [
            (WHOLE, 0),
            ("tenant/acme/project/web/docs/gone", 7),
        ]
        assert refused["current"] == refused["conflicts"][0]["current"] == made["entries"][0]
        assert (await ask(client, "get", {"key": "docs/new"}))["entry"] is None

    async def test_a_fence_is_checked_by_the_put_itself(self, client: Nats, clock: ManualClock) -> None:
        lock = {**PUT, "key": "lock", "semantics": {"purpose": "lock", "ttlSeconds": 5}, "requestId": None}
        held = (await ask(client, "put", lock))["entry"]
        assert held["fence"] == held["version"]
        assert (await ask(client, "put", {**PUT, "fence": held["fence"]}))["success"]
        renewed = await ask(client, "put", {**lock, "expectedVersion": held["version"], "fence": held["fence"]})
        assert renewed["entry"]["fence"] == held["fence"]
        clock.advance(5)
        late = await ask(client, "put", {**PUT, "expectedVersion": "*", "requestId": None, "fence": held["fence"]})
        assert late["error_code"] == "STALE_FENCE"
        again = (await ask(client, "put", lock))["entry"]
        assert again["fence"] > held["fence"]

    async def test_a_put_by_publish_is_seen_by_the_get_behind_it(self, client: Nats) -> None:
        for number in range(200):
            put = {**PUT, "value": number, "expectedVersion": "*", "requestId": None}
            await client.publish("db.semantic.acme.web.put", json.dumps(put).encode())
            assert (await ask(client, "get", {"key": PUT["key"]}))["entry"]["value"] == number

    async def test_lists_and_batches_see_the_writes_before_them(self, client: Nats) -> None:
        for number in range(50):
            put = {**PUT, "key": f"docs/{number:02}", "requestId": None}
            await client.publish("db.semantic.acme.web.put", json.dumps(put).encode())
        assert len((await ask(client, "list"))["entries"]) == 50


@ON_MEMORY
@pytest.mark.usefixtures("service")
class TestSemanticRefusals:
    @pytest.mark.parametrize(
        ("operation", "payload", "code", "part"),
        [
            ("put", b"", "INVALID_JSON", "empty"),
            ("put", b"rubbish", "INVALID_JSON", "Invalid JSON: invalid character"),
            ("put", b'{"value": NaN}', "INVALID_JSON", "NaN"),
            ("put", b"\xff" * 1000, "INVALID_JSON", "UTF-8"),
            ("put", b"[1]", "VALIDATION_ERROR", "object"),
            ("put", b'{"key": "a", "key": "b"}', "INVALID_JSON", "twice"),
            ("put", b'{"value":' + b"[" * 5000 + b"]" * 5000 + b"}", "VALIDATION_ERROR", "deep"),
            ("put", b"x" * 900_000, "VALUE_TOO_LARGE", "got 900,000 bytes"),
            ("put", b'"' + b"x" * 900_000 + b'"', "VALUE_TOO_LARGE", "65,536"),
            *[("put", {k: v for k, v in PUT.items() if k != name}, "MISSING_FIELD", name) for name in list(PUT)[:5]],
            ("put", {**PUT, "semantics": {}}, "MISSING_FIELD", "semantics.purpose"),
            ("put", {**PUT, "key": "Docs"}, "VALIDATION_ERROR", "lowercase"),
            ("put", {**PUT, "key": "a//b"}, "VALIDATION_ERROR", "got ''"),
            ("put", {**PUT, "key": ""}, "VALIDATION_ERROR", "got ''"),
            ("put", {**PUT, "key": "x" * 128}, "VALIDATION_ERROR", "128"),
            ("put", {**PUT, "key": 5}, "VALIDATION_ERROR", "key"),
            ("put", {**PUT, "key": WHOLE}, "VALIDATION_ERROR", "leave tenant"),
            ("put", {**PUT, "value": "x" * 65_535}, "VALUE_TOO_LARGE", "65,537"),
            ("put", {**PUT, "expectedVersion": None}, "VALIDATION_ERROR", "expectedVersion"),
            ("put", {**PUT, "expectedVersion": "3"}, "VALIDATION_ERROR", "expectedVersion"),
            ("put", {**PUT, "expectedVersion": -1}, "VALIDATION_ERROR", "expectedVersion"),
            ("put", {**PUT, "expectedVersion": True}, "VALIDATION_ERROR", "expectedVersion"),
            ("put", {**PUT, "lastWriter": ""}, "VALIDATION_ERROR", "lastWriter"),
            ("put", {**PUT, "lastWriter": "a\nb"}, "VALIDATION_ERROR", "lastWriter"),
            ("put", {**PUT, "semantics": "lock"}, "VALIDATION_ERROR", "semantics"),
            ("put", {**PUT, "semantics": {"purpose": "lock"}}, "VALIDATION_ERROR", "ttlSeconds"),
            ("put", {**PUT, "semantics": {"purpose": "other"}}, "VALIDATION_ERROR", "purpose"),
            (
                "put",
                {**PUT, "semantics": {"purpose": "cursor", "ttl": 5}},
                "VALIDATION_ERROR",
                "semantics.ttl: there is no such field",
            ),
            ("put", {**PUT, "semantics": {"purpose": "cursor", "ttlSeconds": "5"}}, "VALIDATION_ERROR", "ttlSeconds"),
            ("put", {**PUT, "semantics": {"purpose": "cursor", "ttlSeconds": True}}, "VALIDATION_ERROR", "ttlSeconds"),
            (
                "put",
                {**PUT, "semantics": {"purpose": "cursor", "consumerHints": "x"}},
                "VALIDATION_ERROR",
                "consumerHints",
            ),
            ("put", {**PUT, "requestId": 5}, "VALIDATION_ERROR", "requestId"),
            ("put", {**PUT, "fence": "x"}, "VALIDATION_ERROR", "fence"),
            ("get", {}, "MISSING_FIELD", "key"),
            ("delete", {"key": "a"}, "MISSING_FIELD", "expectedVersion"),
            ("list", {"prefix": 5}, "VALIDATION_ERROR", "prefix"),
            ("list", {"prefix": "A"}, "VALIDATION_ERROR", "prefix"),
            ("list", {"limit": 0}, "VALIDATION_ERROR", "limit"),
            ("list", {"values": "yes"}, "VALIDATION_ERROR", "values"),
            ("batch", {}, "MISSING_FIELD", "operations"),
            ("batch", {"operations": []}, "VALIDATION_ERROR", "operations"),
            ("batch", {"operations": [5]}, "VALIDATION_ERROR", r"operations[0]"),
            ("batch", {"operations": [{**PUT, "operation": "get"}]}, "VALIDATION_ERROR", r"operations[0]"),
            (
                "batch",
                {"operations": [{**PUT, "operation": "put", "requestId": None}] * 2},
                "VALIDATION_ERROR",
                "twice",
            ),
            ("batch", {"operations": [{**PUT, "operation": "put"}]}, "VALIDATION_ERROR", "whole batch"),
            ("put", {**PUT, "Fence": 5}, "VALIDATION_ERROR", "did you mean fence?"),
            ("put", {**PUT, "request_id": "x"}, "VALIDATION_ERROR", "did you mean requestId?"),
            ("put", {**PUT, "ttlSeconds": 5}, "VALIDATION_ERROR", "it belongs into semantics"),
            ("list", {"prefx": "docs/"}, "VALIDATION_ERROR", "did you mean prefix?"),
            ("list", {"prefix": "tenant/acme/project/web/docs"}, "VALIDATION_ERROR", "leave tenant"),
            ("batch", {"operations": [{"operation": "put", "key": "x"}]}, "MISSING_FIELD", "operations[0]"),
            ("other", {}, "INVALID_SUBJECT", "put, get"),
        ],
    )
    async def test_each_gets_its_code(self, client: Nats, operation: str, payload: Any, code: str, part: str) -> None:
        found, message = await refused(client, operation, payload)
        assert found == code
        assert part in message

    @pytest.mark.parametrize("spot", ["acme", "acme.web.x", "Acme.web", "acme.wéb"])
    async def test_a_wrong_subject_is_refused(self, client: Nats, spot: str) -> None:
        code, _ = await refused(client, "get", {"key": "k"}, spot)
        assert code in ("INVALID_SUBJECT", "VALIDATION_ERROR")

    async def test_a_reply_subject_of_a_service_gets_no_answer(self, client: Nats, service: SemanticService) -> None:
        heard = await client.subscribe("db.semantic.other.web.put")
        await client.publish("db.semantic.acme.web.get", b'{"key": "k"}', reply="db.semantic.other.web.put")
        await ask(client, "get", {"key": "k"})
        await settled(client)
        assert heard.pending_msgs == 0


@ON_MEMORY
async def test_a_sender_of_too_many_requests_is_refused_and_others_are_served(
    kv: Store, nats_url: str, client: Nats
) -> None:
    connection = await nats.connect(nats_url)
    async with SemanticStore(kv) as store:
        service = SemanticService(connection, store, bounds=IntakeBounds(owner_bytes=5 * 700))
        await service.start()
        flood = [ask(client, "put", {**PUT, "key": f"k{number}"}) for number in range(50)]
        replies, other = await asyncio.gather(asyncio.gather(*flood), ask(client, "put", PUT, "quiet.web"))
        codes = [reply.get("error_code", "ok") for reply in replies]
        assert set(codes) == {"ok", "BUSY"}
        assert codes.count("ok") >= 5
        assert other["success"]
        await service.stop()
    await connection.close()


@ON_MEMORY
async def test_what_was_taken_is_answered_before_it_stops(kv: Store, nats_url: str, client: Nats) -> None:
    connection = await nats.connect(nats_url)
    async with SemanticStore(kv) as store:
        service = SemanticService(connection, store)
        await service.start()
        asking = [asyncio.ensure_future(ask(client, "put", {**PUT, "key": f"k{number}"})) for number in range(50)]
        await asyncio.sleep(0)
        await settled(client)
        await service.stop()
        await service.stop()
        assert all([reply["success"] for reply in await asyncio.gather(*asking)])
    await connection.close()


@ON_MEMORY
async def test_lines_left_out_of_the_log_are_called_what_they_may_be(
    client: Nats, service: SemanticService, caplog: pytest.LogCaptureFixture
) -> None:
    # Slow requests take from the same lines as failed ones.
    await asyncio.gather(*[ask(client, "get", b"{") for _ in range(limits.LOG_LINES_PER_SECOND + 5)])
    await service.stop()
    assert "5 more semantic requests failed or were slow within a second" in caplog.text


class Failing:
    """An engine whose disk is full, while `fails` is set."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.fails = False
        self.stalls = asyncio.Event()
        self.stalls.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        if self.fails:
            raise DiskFull("no space is left in /secret/place")
        await self.stalls.wait()
        return await self._engine.commit(batch)


@ON_MEMORY
async def test_a_failing_database_is_reported_and_used_again(kv: Store, nats_url: str, client: Nats) -> None:
    connection = await nats.connect(nats_url)
    engine: Any = Failing(kv.engine)
    async with SemanticStore(Store(engine)) as store:
        service = SemanticService(connection, store, deadline=0.3)
        await service.start()
        engine.fails = True
        code, message = await refused(client, "put", PUT)
        assert code == "DATABASE_ERROR"
        assert "secret" not in message
        engine.fails = False
        assert (await ask(client, "put", PUT))["success"]
        engine.stalls.clear()
        more = {**PUT, "expectedVersion": "*", "requestId": None}
        slow, behind = await asyncio.gather(ask(client, "put", more), ask(client, "put", {**more, "value": 3}))
        assert "may still be carried out" in slow["message"]
        assert "was not carried out" in behind["message"]
        late = asyncio.ensure_future(ask(client, "put", {**more, "value": "last"}))
        await settled(client)
        engine.stalls.set()
        assert (await late)["success"], "it waited for those that were given up before it"
        assert (await ask(client, "get", {"key": PUT["key"]}))["entry"]["value"] == "last"
        await service.stop()
    await connection.close()


class Unreadable:
    """An engine that can't be read; it counts how often that was tried."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tries = 0
        self.tried_often = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def read(self, *asks: Any) -> Any:
        self.tries += 1
        if self.tries == 5:
            self.tried_often.set()
        raise Unreachable("no host is the primary")


@ON_MEMORY
async def test_a_database_that_stays_away_is_not_logged_again_and_again(
    kv: Store, nats_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE_CHECK_SECONDS", 0.001)
    connection = await nats.connect(nats_url)
    engine: Any = Unreadable(kv.engine)
    async with SemanticService(connection, SemanticStore(Store(engine))):
        await engine.tried_often.wait()
    await connection.close()
    lines = [record for record in caplog.records if "no events of watches" in record.message]
    assert [record.levelname for record in lines if record.levelno > logging.DEBUG] == ["WARNING"]


@ON_MEMORY
@pytest.mark.usefixtures("service")
async def test_the_services_api_lists_it(client: Nats) -> None:
    await ask(client, "put", PUT)
    await ask(client, "put", {**PUT, "requestId": "other"})
    reply = await client.request("$SRV.STATS.keyloft-semantic", b"", timeout=20)
    stats = {endpoint["name"]: endpoint for endpoint in json.loads(reply.data)["endpoints"]}
    assert set(stats) == set(OPERATIONS)
    assert (stats["put"]["num_requests"], stats["put"]["num_errors"]) == (2, 1)
    assert stats["put"]["last_error"] == "VERSION_CONFLICT"
