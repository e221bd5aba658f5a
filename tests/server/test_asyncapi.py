"""The AsyncAPI document describes what the services take and answer, as the running services show."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator  # type: ignore[import-untyped,unused-ignore]
from nats.aio.client import Client as Nats

import keyloft
from keyloft.nats.connection import connect
from keyloft.nats.service import NatsService
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.semantic import SemanticService, SemanticStore
from keyloft.server.asyncapi import document
from tests.support.node import ROOT, installed

DOCUMENT = document("asyncapi.kv", "asyncapi.semantic")
NAMES = {"plugin": "trivia", "tenant": "acme", "project": "web"}
SECONDS = 30


def resolved(reference: dict[str, str]) -> Any:
    found: Any = DOCUMENT
    for part in reference["$ref"].split("/")[1:]:
        found = found[part]
    return found


def requested() -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Each operation: its name, its subject, the message that asks for it, its reply and its refusal."""
    for name, operation in DOCUMENT["operations"].items():
        if operation["action"] == "receive":
            channel, replies = resolved(operation["channel"]), resolved(operation["reply"]["channel"])
            kinds = [replies["messages"][kind] for kind in ("reply", "refusal")]
            subject = channel["address"].format(**NAMES)
            yield name, subject, resolved(channel["messages"]["request"]), *map(resolved, kinds)


@pytest.fixture
async def services(nats_url: str, tmp_path: Path) -> AsyncIterator[list[NatsService]]:
    async with AsyncExitStack() as closing:
        connection = await connect(nats_url, name="services")
        closing.push_async_callback(connection.close)
        db = await closing.enter_async_context(BotDatabase(tmp_path / "bot.db"))
        kv = await closing.enter_async_context(keyloft.open(tmp_path / "state.db"))
        store = await closing.enter_async_context(SemanticStore(kv))
        yield [
            await closing.enter_async_context(DatabaseService(connection, db, prefixes=["asyncapi.kv"])),
            await closing.enter_async_context(SemanticService(connection, store, prefix="asyncapi.semantic")),
        ]


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Nats]:
    connection = await connect(nats_url, name="asyncapi")
    yield connection
    await connection.close()


async def ask(client: Nats, subject: str, payload: Any) -> Any:
    return json.loads((await client.request(subject, json.dumps(payload).encode(), timeout=SECONDS)).data)


def test_every_schema_is_one() -> None:
    for message in DOCUMENT["components"]["messages"].values():
        Draft7Validator.check_schema(message["payload"])


async def test_every_operation_is_described(services: list[NatsService]) -> None:
    for service in services:
        assert sorted(service.messages) == sorted([endpoint.name for endpoint in service.counted()])


@pytest.mark.usefixtures("services")
async def test_examples_are_carried_out_and_all_messages_fit_their_schemas(client: Nats) -> None:
    for name, subject, request, reply, refusal in requested():
        for example in request["examples"]:
            Draft7Validator(request["payload"]).validate(example["payload"])
            answered = await ask(client, subject, example["payload"])
            assert answered["success"], (name, example, answered)
            Draft7Validator(reply["payload"]).validate(answered)
        Draft7Validator(refusal["payload"]).validate(await ask(client, subject, []))


@pytest.mark.usefixtures("services")
async def test_what_a_schema_refuses_the_service_refuses(client: Nats) -> None:
    for name, subject, request, _, refusal in requested():
        schema, example = request["payload"], request["examples"][0]["payload"]
        wrong = [{**example, field: 0.5} for field in schema["properties"] if field != "value"]
        wrong += [{other: example[other] for other in example if other != field} for field in schema["required"]]
        if not schema["additionalProperties"]:
            wrong.append({**example, "nonsense": 1})
        for payload in wrong:
            assert not Draft7Validator(schema).is_valid(payload), (name, payload)
            answered = await ask(client, subject, payload)
            assert not answered["success"], (name, payload)
            Draft7Validator(refusal["payload"]).validate(answered)
        if schema["additionalProperties"]:
            assert (await ask(client, subject, {**example, "nonsense": 1}))["success"], name


@pytest.mark.usefixtures("services")
async def test_a_conflict_fits_its_schema(client: Nats) -> None:
    found = {name: (subject, request, refusal) for name, subject, request, _, refusal in requested()}
    subject, request, refusal = found["semantic.put"]
    stored = request["examples"][0]["payload"]
    await ask(client, subject, stored)
    answered = await ask(client, subject, {**stored, "requestId": "another"})
    assert answered["error_code"] == "VERSION_CONFLICT"
    assert answered["current"]["value"] == stored["value"]
    Draft7Validator(refusal["payload"]).validate(answered)


@pytest.mark.slow
@pytest.mark.usefixtures("services")
async def test_a_javascript_client_uses_the_document(nats_url: str, tmp_path: Path) -> None:
    folder = await asyncio.to_thread(installed, ROOT / "tests" / "server" / "javascript")
    written = tmp_path / "asyncapi.json"
    written.write_text(json.dumps(DOCUMENT))
    command = ["node", "client.js", str(written), nats_url]
    ended = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    examples = [len(request["examples"]) for _, _, request, _, _ in requested()]
    assert json.loads(ended.stdout) == {"operations": len(DOCUMENT["operations"]), "sent": sum(examples)}
