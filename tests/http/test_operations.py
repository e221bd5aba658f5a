"""Operations of plugins and workflows over HTTP: the same as over NATS, under the same bounds, within scopes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from keyloft.http.app import whole_document
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.service import NatsService
from tests.http.api import ADMIN_TOKEN, LONGEST_SECONDS
from tests.http.conformance import check_answers
from tests.http.services import ServedOverHttp, services, until

PLUGIN, PROJECT = "/v1/plugins/trivia", "/v1/semantic/acme/web"
TIMES = {"at", "created_at", "updated_at", "updatedAt", "expiresAt"}
VERSIONS = {"version", "versionBefore", "versionAfter", "sequence", "fence", "id", "cursor"}
CHANGING = TIMES | VERSIONS | {"beforeHash", "afterHash"}
"""Fields that differ between two stores to which the same was done."""


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[ServedOverHttp]:
    async with services(nats_url, tmp_path / "bot.db") as world:
        yield world


def comparable(reply: Any) -> Any:
    """A reply without what differs between two stores."""
    if isinstance(reply, dict):
        return {name: None if name in CHANGING else comparable(value) for name, value in reply.items()}
    return [comparable(one) for one in reply] if isinstance(reply, list) else reply


def examples(service: NatsService) -> list[tuple[str, Any]]:
    """Requests of every operation that can be carried out in this order."""
    found = [(name, body) for name, messages in service.messages.items() for body in messages.examples]
    return [(name, body) for name, body in found if name != "watch"]


async def test_every_operation_is_answered_as_over_nats(nats_url: str, tmp_path: Path) -> None:
    async def replies(over_http: bool) -> list[tuple[str, Any]]:
        async with services(nats_url, tmp_path / f"{over_http}.db") as world, world.http() as http:
            found = []
            for service, path, subject in [
                (world.plugins, PLUGIN, "db.kv.trivia"),
                (world.semantic, PROJECT, "db.semantic.acme.web"),
            ]:
                for name, body in examples(service):
                    if over_http:
                        answer = await http.post(f"{path}/{name}", json=body)
                        assert answer.status_code == 200, (name, answer.text)
                        found.append((name, comparable(answer.json())))
                    else:
                        found.append((name, comparable(await world.over_nats(f"{subject}.{name}", body))))
            return found

    sent = await replies(over_http=True)
    assert sent == await replies(over_http=False)
    assert {name for name, _ in sent} >= {"set", "get", "many", "usage", "put", "batch", "locks", "dead_letters"}


async def test_a_refusal_has_the_code_and_the_message_of_nats(world: ServedOverHttp) -> None:
    await world.db.kv_set("trivia", "text", "x")
    refused: list[tuple[str, Any, int, str]] = [
        ("plugins/trivia/get", b"{", 400, "INVALID_JSON"),
        ("plugins/trivia/get", {}, 422, "MISSING_FIELD"),
        ("plugins/trivia/get", {"key": None}, 422, "VALIDATION_ERROR"),
        ("plugins/trivia/count", {"prefx": "a"}, 422, "VALIDATION_ERROR"),
        ("plugins/trivia/set", {"key": "k", "value": "x" * 65_536}, 413, "VALUE_TOO_LARGE"),
        ("plugins/trivia/set", {"key": "text", "value": 1, "if_absent": True}, 412, "VERSION_CONFLICT"),
        ("plugins/trivia/incr", {"key": "text"}, 422, "NOT_A_COUNTER"),
        ("plugins/trivia/drop", {}, 404, "INVALID_SUBJECT"),
        ("plugins/Trivia/get", {"key": "k"}, 422, "INVALID_PLUGIN_NAME"),
        ("semantic/acme/web/get", {"key": "A"}, 422, "VALIDATION_ERROR"),
        ("semantic/acme/web/restore", {"key": "a", "lastWriter": "a:b"}, 404, "NOTHING_TO_RESTORE"),
        ("semantic/acme/web/dead_letters", {"action": "drop"}, 422, "MISSING_FIELD"),
    ]
    async with world.http() as http:
        for path, body, status, code in refused:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.post(f"/v1/{path}", content=data)
            assert answer.headers["content-type"] == "application/problem+json"
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (status, code), path
            subject = path.replace("plugins/", "db.kv.").replace("semantic/", "db.semantic.").replace("/", ".")
            over_nats = await world.over_nats(subject, data)
            message = over_nats["message"].removeprefix("a subject is http.kv.<plugin>.<operation>: ")
            assert (problem["code"], problem["detail"]) == (over_nats["error_code"], message)
            assert problem.get("current") == over_nats.get("current")
        too_large = await http.post(f"{PLUGIN}/set", content=b"x" * (world.client.max_payload + 1))
        assert (too_large.status_code, too_large.json()["code"]) == (413, "VALUE_TOO_LARGE")
        form = await http.post(f"{PLUGIN}/get", data={"key": "k"})
        assert (form.status_code, form.json()["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")
        for path in ("trivia.events/get", "trivia%2Fx/get", "%2e%2e/get", "*/get", "trivia/get.get", "trivia/%00"):
            odd = await http.post(f"/v1/plugins/{path}", json={"key": "k"})
            assert odd.status_code in (404, 422), path
        assert (await http.get(f"{PLUGIN}/get")).status_code == 405
        spelt = await http.post("/v1/plugins/tri%76ia/get", json={"key": "text"})
        assert spelt.json()["value"] == "x"


async def test_an_operation_that_is_spelt_with_percent_signs_is_none(world: ServedOverHttp) -> None:
    async with world.http("trivia-writes") as writer, world.http("trivia-reads") as reader, world.http() as admin:
        before = (await admin.get("/v1/info")).json()["versionstamp"]
        lease = {"subject": "http.kv.trivia.events.x"}
        for spelt in ("%77atch", "watc%68", "%67et", "%73et"):
            refused = await writer.post(f"{PLUGIN}/{spelt}", json=lease)
            assert (refused.status_code, refused.json()["code"]) == (404, "INVALID_SUBJECT"), spelt
            assert (await reader.post(f"{PLUGIN}/{spelt}", json=lease)).status_code == 403
        assert (await admin.get("/v1/info")).json()["versionstamp"] == before


class TestScopes:
    ALLOWED: tuple[tuple[str, str, Any], ...] = (
        ("trivia-writes", "plugins/trivia/set", {"key": "k", "value": 1}),
        ("trivia-reads", "plugins/trivia/get", {"key": "k"}),
        ("acme-writes", "semantic/acme/web/locks", {"action": "release", "key": "a", "fence": 1, "lastWriter": "a:b"}),
        ("acme-reads", "semantic/acme/other/locks", {"action": "list"}),
        ("acme-reads", "semantic/acme/web/dead_letters", {}),
        ("acme-reads", "semantic/acme/web/list", {}),
    )
    REFUSED: tuple[tuple[str, str, Any], ...] = (
        ("trivia-writes", "plugins/quotes/get", {"key": "k"}),
        ("trivia-writes", "semantic/trivia/web/get", {"key": "k"}),
        ("trivia-reads", "plugins/trivia/set", {"key": "k", "value": 1}),
        ("trivia-reads", "plugins/trivia/many", {"requests": []}),
        ("trivia-reads", "plugins/trivia/new", {}),
        ("acme-reads", "semantic/acme/web/put", {}),
        ("acme-reads", "semantic/acme/web/locks", {"action": "release"}),
        ("acme-reads", "semantic/acme/web/locks", ["list"]),
        ("acme-reads", "semantic/acme/web/dead_letters", {"action": "drop", "id": "a"}),
        ("acme-writes", "semantic/acm/web/get", {"key": "k"}),
        ("acme-writes", "plugins/acme/get", {"key": "k"}),
        ("tuples", "plugins/trivia/get", {"key": "k"}),
    )

    async def test_a_token_reaches_its_own_owner_alone(self, world: ServedOverHttp) -> None:
        async with world.http() as http:
            for token, path, body in self.ALLOWED:
                answer = await http.post(f"/v1/{path}", json=body, headers={"authorization": f"Bearer {token}"})
                assert answer.status_code in (200, 412), (token, path, answer.text)
            for token, path, body in self.REFUSED:
                answer = await http.post(f"/v1/{path}", json=body, headers={"authorization": f"Bearer {token}"})
                assert (answer.status_code, answer.json()["code"]) == (403, "NOT_PERMITTED"), (token, path)
            for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
                assert (await http.post(f"{PLUGIN}/get", json={"key": "k"}, headers=headers)).status_code == 401


async def test_writes_and_reads_by_an_admin_are_in_the_audit_log_without_values(
    world: ServedOverHttp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyloft.audit")
    async with world.http() as admin, world.http("trivia-writes") as plugin:
        await plugin.post(f"{PLUGIN}/set_many", json={"entries": {"a": "secret", "b\n": "secret"}})
        await plugin.post(f"{PLUGIN}/get", json={"key": "quiet"})
        await admin.post(f"{PLUGIN}/get", json={"key": "shown"})
        await admin.post(f"{PLUGIN}/set", json={"key": "refused"})
        await admin.post(f"{PLUGIN}/set", json={"key": "a", "value": "secret", "if_absent": True})
        await admin.post(f"{PLUGIN}/set", json={"key": "absent", "value": 1, "expected_version": 1})
    lines = [record.getMessage() for record in caplog.records if record.name == "keyloft.audit"]
    assert len(lines) == 3, lines
    assert "trivia-writes" in lines[0]
    assert "set_many of plugin trivia a b\\n" in lines[0]
    assert "get of plugin trivia shown" in lines[1]
    assert lines[2] == "token admin: read of plugin trivia a", "the refusal shows the entry"
    assert "secret" not in str(lines)


async def test_a_write_that_the_database_does_not_finish_in_time_leaves_a_line(
    nats_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyloft.audit")
    async with (
        services(nats_url, tmp_path / "bot.db", deadline=0.3) as world,
        world.http("trivia-writes") as http,
        world.locked(),
    ):
        late = await http.post(f"{PLUGIN}/set", json={"key": "k", "value": 1})
    assert (late.status_code, late.json()["code"]) == (503, "DATABASE_ERROR")
    [line] = [record.getMessage() for record in caplog.records if record.name == "keyloft.audit"]
    assert line == "token trivia-writes: set of plugin trivia k, the database failed: carried out or not"


class TestOneOwnersRequests:
    async def test_make_no_other_owner_wait(self, nats_url: str, tmp_path: Path) -> None:
        bounds = IntakeBounds(owner_bytes=20_000)
        async with services(nats_url, tmp_path / "bot.db", bounds=bounds) as world, world.http() as http:
            async with world.locked():
                body = {"key": "k", "value": "x" * 1000}
                flood = [asyncio.create_task(http.post("/v1/plugins/flood/set", json=body)) for _ in range(40)]
                await until(lambda: world.plugins.meters.of("flood").errors["BUSY"] > 0)
                assert (await http.post(f"{PLUGIN}/get", json={"key": "k"})).json() == {
                    "success": True,
                    "exists": False,
                }
                assert await world.over_nats("db.kv.trivia.get", {"key": "k"}) == {"success": True, "exists": False}
                busy = await world.over_nats("db.kv.flood.set", body)
                assert busy["error_code"] == "BUSY", "HTTP and NATS count together"
            answers = await asyncio.gather(*flood)
        found = {(answer.status_code, answer.headers.get("retry-after")) for answer in answers}
        assert found == {(200, None), (429, "1")}
        assert {answer.json()["code"] for answer in answers if answer.status_code == 429} == {"BUSY"}

    async def test_take_turns_with_those_of_others(self, world: ServedOverHttp) -> None:
        await world.db.kv_set_many("flood", {f"{number:04}": "x" * 500 for number in range(1000)})
        done = 0

        async def flood(http: httpx.AsyncClient) -> None:
            nonlocal done
            answer = await http.post("/v1/plugins/flood/list", json={"values": True})
            assert answer.status_code == 200
            done += 1

        async with world.http() as http:
            flooding = [asyncio.create_task(flood(http)) for _ in range(40)]
            await until(lambda: done > 0)
            assert (await http.post(f"{PLUGIN}/get", json={"key": "k"})).status_code == 200
            assert (await world.over_nats("db.kv.trivia.get", {"key": "k"}))["success"]
            assert done < 40, "two requests of another plugin were answered meanwhile"
            await asyncio.gather(*flooding)


async def test_the_request_of_a_client_that_goes_away_is_not_carried_out(
    world: ServedOverHttp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyloft.audit")
    body = b'{"key":"late","value":1}'
    head = f"POST {PLUGIN}/set HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer trivia-writes\r\n"
    async with world.locked():
        await world.client.publish("http.kv.trivia.set", b'{"key":"first","value":1}')
        await until(lambda: world.plugins.unanswered == 1)
        _, writer = await asyncio.open_connection("127.0.0.1", world.api.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: world.plugins.unanswered == 2)
        writer.close()
        await until(lambda: world.plugins.unanswered == 1)
    await until(lambda: world.plugins.unanswered == 0)
    assert (await world.db.kv_list("trivia"))["keys"] == ["first"]
    [line] = [record.getMessage() for record in caplog.records if record.name == "keyloft.audit"]
    assert line == "token trivia-writes: set of plugin trivia late, its client hung up: carried out or not"


async def test_while_the_service_is_not_up_a_client_learns_when_to_come_back(world: ServedOverHttp) -> None:
    async with world.http() as http:
        running, world.context.plugins.current = world.context.plugins.current, None
        for path in (f"{PLUGIN}/get", f"{PLUGIN}/watch"):
            answer = await http.post(path, json={"key": "k"} if path.endswith("get") else {})
            assert (answer.status_code, answer.json()["code"]) == (503, "NO_SERVICE")
            assert answer.headers["retry-after"] == "1"
        world.context.plugins.current = running
        await world.plugins.aclose()
        answer = await http.post(f"{PLUGIN}/get", json={"key": "k"})
        assert (answer.status_code, answer.json()["code"]) == (503, "NO_SERVICE")


@pytest.mark.slow
@pytest.mark.blocks_the_loop
async def test_answers_are_as_the_openapi_document_describes_them(world: ServedOverHttp) -> None:
    document = whole_document()
    served = ("/v1/plugins/", "/v1/semantic/")
    document["paths"] = {
        path: operations
        for path, operations in document["paths"].items()
        if path.startswith(served) and not path.endswith("/watch")
    }
    checked = await check_answers(document, world.url, ADMIN_TOKEN, 2)
    assert {"POST /v1/plugins/{plugin}/set", "POST /v1/semantic/{tenant}/{project}/put"} <= {*checked}


async def test_bodies_that_arrive_count_towards_the_bounds_of_their_owner(nats_url: str, tmp_path: Path) -> None:
    head = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\nContent-Length: 900000\r\n\r\n"
    bounds = IntakeBounds(owner_bytes=2_000_000)
    async with services(nats_url, tmp_path / "bot.db", bounds=bounds) as world, world.http() as http:
        unfinished = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", world.api.port)
            writer.write(head.format(f"{PLUGIN}/set", ADMIN_TOKEN).encode() + b'{"key":"')
            unfinished.append(writer)

        async def large_set() -> httpx.Response:
            return await http.post(f"{PLUGIN}/set", json={"key": "large", "value": "x" * 300_000})

        async with asyncio.timeout(LONGEST_SECONDS):
            while (busy := await large_set()).status_code != 429:
                assert busy.status_code == 413, busy.text  # it was read: the other bodies don't count yet
            assert busy.headers["retry-after"] == "1"
        assert (await http.post(f"{PLUGIN}/set", json={"key": "k", "value": 1})).status_code == 200
        for writer in unfinished:
            writer.transport.abort()
        async with asyncio.timeout(LONGEST_SECONDS):
            while (await large_set()).status_code != 413:
                await asyncio.sleep(0.01)
