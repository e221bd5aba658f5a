"""Feature flags over OFREP: as the real OpenFeature provider evaluates them, and as the protocol describes answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from openfeature import api
from openfeature.client import OpenFeatureClient
from openfeature.contrib.provider.ofrep import OFREPProvider
from openfeature.evaluation_context import EvaluationContext
from openfeature.exception import ErrorCode

from keyloft import limits
from tests.http.conformance import check_answers
from tests.http.ofrep_protocol import DOCUMENT
from tests.http.services import ServedOverHttp, services

T = TypeVar("T")
BASE = "/v1/semantic/acme/web"
FLAGS = {
    "new-ui": True,
    "dark.mode": False,
    "title": "Hello",
    "retries": 3,
    "ratio": 0.25,
    "theme": {"colours": ["red", "green"], "depth": 2},
    "undecided": None,
}


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[ServedOverHttp]:
    async with services(nats_url, tmp_path / "bot.db") as world:
        flags = world.semantic.store.flags("acme", "web")
        for name, value in FLAGS.items():
            await flags.set(name, value, writer="console:rollout")
        yield world


@pytest.fixture
def providers() -> Iterator[list[OFREPProvider]]:
    made: list[OFREPProvider] = []
    yield made
    for provider in made:
        provider.session.close()
    api.clear_providers()


class TestTheRealProvider:
    @staticmethod
    async def client(world: ServedOverHttp, providers: list[OFREPProvider], token: str) -> OpenFeatureClient:
        provider = OFREPProvider(
            f"{world.url}{BASE}", headers_factory=lambda: {"Authorization": f"Bearer {token}"}, timeout=30.0
        )
        providers.append(provider)
        await asyncio.to_thread(api.set_provider, provider, token)
        return api.get_client(token)

    @staticmethod
    async def call(function: Callable[..., T], *arguments: Any) -> T:
        """The provider waits for its answers: not in the event loop of the service."""
        return await asyncio.to_thread(function, *arguments)

    async def test_evaluates_flags_of_every_type(self, world: ServedOverHttp, providers: list[OFREPProvider]) -> None:
        client, call = await self.client(world, providers, "acme-reads"), self.call
        shown = await call(client.get_boolean_details, "new-ui", False, EvaluationContext("user-1", {"plan": "pro"}))
        assert (shown.value, shown.variant, shown.reason, shown.error_code) == (True, "on", "STATIC", None)
        assert isinstance(shown.flag_metadata["version"], int)
        assert await call(client.get_boolean_value, "dark.mode", True) is False
        assert await call(client.get_string_value, "title", "") == "Hello"
        assert await call(client.get_integer_value, "retries", 0) == 3
        assert await call(client.get_float_value, "ratio", 0.0) == 0.25
        assert await call(client.get_object_value, "theme", {}) == FLAGS["theme"]
        assert await call(client.get_string_value, "undecided", "by the code") == "by the code"
        for name in ("absent", "Not A Name"):
            absent = await call(client.get_boolean_details, name, True)
            assert (absent.value, absent.error_code) == (True, ErrorCode.FLAG_NOT_FOUND)
        wrong = await call(client.get_string_details, "retries", "x")
        assert (wrong.value, wrong.error_code) == ("x", ErrorCode.TYPE_MISMATCH)
        flags = world.semantic.store.flags("acme", "web")
        await flags.set("new-ui", False, writer="console:rollout")
        assert await call(client.get_boolean_value, "new-ui", True) is False
        odd = await call(client.get_boolean_details, "new-ui", True, EvaluationContext(None, {"targetingKey": 5}))
        assert odd.error_code is ErrorCode.INVALID_CONTEXT

    async def test_is_refused_with_another_tenants_token(
        self, world: ServedOverHttp, providers: list[OFREPProvider]
    ) -> None:
        client = await self.client(world, providers, "trivia-reads")
        refused = await self.call(client.get_boolean_details, "new-ui", False)
        assert (refused.value, refused.error_message) == (False, "forbidden")


async def test_all_flags_are_sent_again_only_after_a_change(world: ServedOverHttp) -> None:
    flags = world.semantic.store.flags("acme", "web")
    path = f"{BASE}/ofrep/v1/evaluate/flags"
    async with world.http("acme-reads") as http:
        first = await http.post(path, json={"context": {"targetingKey": "user-1"}})
        assert first.status_code == 200
        found = {one["key"]: one for one in first.json()["flags"]}
        assert {key: one.get("value") for key, one in found.items()} == FLAGS
        assert "value" not in found["undecided"]
        assert [one["reason"] for one in found.values()].count("STATIC") == len(FLAGS) - 1
        tag = first.headers["etag"]
        for known in (tag, f'"x", W/{tag}', "*"):
            again = await http.post(path, headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        await flags.unset("title", writer="console:rollout")
        changed = await http.post(path, headers={"if-none-match": tag})
        assert changed.status_code == 200
        assert "title" not in [one["key"] for one in changed.json()["flags"]]
        assert changed.headers["etag"] != tag
        other = await http.post("/v1/semantic/acme/other/ofrep/v1/evaluate/flags")
        assert other.json() == {"flags": []}
        offered = await http.get(f"{BASE}/ofrep/v1/configuration")
        assert offered.json()["capabilities"]["cacheInvalidation"]["polling"]["enabled"] is True
        assert (
            await http.get(f"{BASE}/ofrep/v1/configuration", headers={"if-none-match": offered.headers["etag"]})
        ).status_code == 304


async def test_more_flags_than_fit_a_reply_are_evaluated_together(
    world: ServedOverHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = world.semantic.store.flags("acme", "web")
    for number in range(30):
        await flags.set(f"large-{number:02}", "x" * 60_000, writer="console:rollout")
    async with world.http("acme-reads") as http:
        answer = await http.post(f"{BASE}/ofrep/v1/evaluate/flags")
        assert len(answer.content) > world.client.max_payload
        assert len(answer.json()["flags"]) == 30 + len(FLAGS)
        monkeypatch.setattr(limits, "OFREP_FLAGS_BYTES", 1_000_000)
        answer = await http.post(f"{BASE}/ofrep/v1/evaluate/flags")
        assert (answer.status_code, answer.json()["errorCode"]) == (500, "GENERAL")


async def test_what_can_not_be_evaluated_is_answered_as_ofrep_has_it(world: ServedOverHttp) -> None:
    refused: list[tuple[str, bytes, int, str]] = [
        ("/new-ui", b"{", 400, "PARSE_ERROR"),
        ("/new-ui", b'{"context":{"a":1,"a":2}}', 400, "PARSE_ERROR"),
        ("/new-ui", b"[]", 400, "INVALID_CONTEXT"),
        ("/new-ui", b'{"context":[]}', 400, "INVALID_CONTEXT"),
        ("/new-ui", b'{"context":{"targetingKey":1}}', 400, "INVALID_CONTEXT"),
        ("/absent", b"{}", 404, "FLAG_NOT_FOUND"),
        ("/%00", b"{}", 404, "FLAG_NOT_FOUND"),
        ("/..%2Fdocs%2Fdelta", b"{}", 404, "FLAG_NOT_FOUND"),
        ("", b"{", 400, "PARSE_ERROR"),
        ("", b'{"context":1}', 400, "INVALID_CONTEXT"),
    ]
    async with world.http("acme-reads") as http:
        for key, body, status, code in refused:
            answer = await http.post(f"{BASE}/ofrep/v1/evaluate/flags{key}", content=body)
            found = answer.json()
            assert (answer.status_code, found["errorCode"]) == (status, code), (key, body)
            assert isinstance(found["errorDetails"], str)
            assert ("key" in found) is bool(key)
        running, world.context.semantic.current = world.context.semantic.current, None
        answer = await http.post(f"{BASE}/ofrep/v1/evaluate/flags/new-ui")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["errorCode"] == "GENERAL"
        world.context.semantic.current = running


@pytest.mark.slow
async def test_answers_are_those_of_the_protocol(world: ServedOverHttp) -> None:
    checked = await check_answers(DOCUMENT, f"{world.url}{BASE}", "acme-reads", 5)
    assert len(checked) == len(DOCUMENT["paths"])
