"""The plugin service, over a real NATS, with a stock client."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.errors import NoRespondersError

from keyloft import DiskFull, ManualClock, limits
from keyloft.core.engine import Engine, Submission
from keyloft.core.records import Batch, Committed, Conflict
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import Login, connect
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.nats.requests import Owner
from keyloft.plugins import BotDatabase, DatabaseService, rules
from tests.support.examples import rounds
from tests.support.nats import private_server, settled
from tests.support.postgres import database_url
from tools.postgres import query

Ask: TypeAlias = Callable[..., Any]


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Nats]:
    connection = await nats.connect(nats_url)
    yield connection
    await connection.close()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """What the entries are kept in: a file, or each database of ON_EVERY_DATABASE."""
    return str(getattr(request, "param", "sqlite file"))


ON_EVERY_DATABASE = pytest.mark.parametrize("database", ["sqlite file", "postgresql", "etcd"], indirect=True)
ON_EVERY_TABLE = pytest.mark.parametrize("database", ["sqlite file", "postgresql"], indirect=True)
"""Where another program can change rows by SQL."""


@pytest.fixture
def url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    # Not within the event loop: the first one starts a server.
    return database_url(database, request, tmp_path)


@pytest.fixture
async def db(url: str | None, clock: ManualClock) -> AsyncIterator[BotDatabase]:
    db = BotDatabase(url, clock=clock)
    yield db
    await db.close()


async def by_hand(db: BotDatabase, url: str | None, sql: str) -> list[Any]:
    """The rows of a statement that another program runs."""
    engine: Any = await db.engine()
    if url is not None and url.startswith("postgresql"):
        return await asyncio.to_thread(query, url, sql)
    connection = engine.connection
    return list(connection.execute(sql).fetchall())


@pytest.fixture
async def service(nats_url: str, db: BotDatabase) -> AsyncIterator[DatabaseService]:
    connection = await nats.connect(nats_url)
    service = DatabaseService(connection, db)
    await service.start()
    yield service
    await service.stop()
    await connection.close()


async def ask(client: Nats, subject: str, payload: Any = None, prefix: str = "db.kv") -> dict[str, Any]:
    """Bytes are sent as they are, everything else as JSON."""
    data = payload if isinstance(payload, bytes) else json.dumps({} if payload is None else payload).encode()
    answer = await client.request(f"{prefix}.{subject}", data, timeout=20)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def refused(client: Nats, subject: str, payload: Any) -> tuple[str, str]:
    reply = await ask(client, subject, payload)
    assert reply.keys() == {"success", "error_code", "message"}
    assert reply["success"] is False
    assert reply["error_code"] in WIRE_ERRORS
    assert reply["message"]
    # Whatever it was, the next one is served.
    assert (await ask(client, "alive.list"))["success"] is True
    return reply["error_code"], reply["message"]


@pytest.mark.usefixtures("service")
class TestOperations:
    @ON_EVERY_DATABASE
    async def test_replies_have_these_fields_and_no_others(self, client: Nats) -> None:
        assert await ask(client, "trivia.get", {"key": "k"}) == {"success": True, "exists": False}
        assert await ask(client, "trivia.set", {"key": "k", "value": None}) == {"success": True}
        assert await ask(client, "trivia.get", {"key": "k"}) == {"success": True, "exists": True, "value": None}
        assert await ask(client, "trivia.list") == {"success": True, "keys": ["k"], "count": 1, "truncated": False}
        assert await ask(client, "trivia.delete", {"key": "k"}) == {"success": True, "deleted": True}
        assert await ask(client, "trivia.delete", {"key": "k"}) == {"success": True, "deleted": False}

    @pytest.mark.parametrize(
        "value",
        [
            "dark",
            "",
            42,
            -1.5,
            10**30,
            True,
            None,
            [],
            {},
            ["a", {"b": [1, 2.0, None]}],
            'é\u0000\n"\\ \U0001f600',
            1e300,
        ],
        ids=repr,
    )
    async def test_values_come_back_as_they_were(self, client: Nats, value: Any) -> None:
        for data in (
            json.dumps({"key": "k", "value": value}).encode(),
            json.dumps({"value": value, "ttl": None, "key": "k"}, ensure_ascii=False, indent=2).encode(),
            json.dumps({"key": "k", "value": value, "ttl": 5, "unknown": {"field": "\\"}}).encode(),
        ):
            assert await ask(client, "trivia.set", data) == {"success": True}
            back = (await ask(client, "trivia.get", {"key": "k"}))["value"]
            assert back == value
            assert type(back) is type(value)

    async def test_both_prefixes_lead_to_the_same_entries(self, client: Nats) -> None:
        await ask(client, "trivia.set", {"key": "k", "value": 1}, prefix="rosey.db.kv")
        assert (await ask(client, "trivia.get", {"key": "k"}))["value"] == 1

    @ON_EVERY_DATABASE
    async def test_a_plugin_sees_its_own_entries_only(self, client: Nats) -> None:
        await ask(client, "a.set", {"key": "k", "value": "a", "plugin_name": "b", "plugin": "b"})
        assert await ask(client, "b.get", {"key": "k"}) == {"success": True, "exists": False}
        assert (await ask(client, "b.delete", {"key": "k"}))["deleted"] is False
        assert (await ask(client, "b.list"))["keys"] == []
        assert (await ask(client, "a.get", {"key": "k"}))["value"] == "a"

    @ON_EVERY_DATABASE
    async def test_an_entry_ends_with_its_ttl(self, client: Nats, clock: ManualClock) -> None:
        await ask(client, "trivia.set", {"key": "ttl", "value": 1, "ttl": 10})
        await ask(client, "trivia.set", {"key": "alias", "value": 1, "ttl_seconds": 10})
        await ask(client, "trivia.set", {"key": "longest", "value": 1, "ttl": 2147483647})
        await ask(client, "trivia.set", {"key": "replaced", "value": 1, "ttl": 10})
        await ask(client, "trivia.set", {"key": "replaced", "value": 2})
        clock.advance(9.999)
        assert (await ask(client, "trivia.list"))["count"] == 4
        clock.advance(0.001)
        assert await ask(client, "trivia.get", {"key": "ttl"}) == {"success": True, "exists": False}
        assert (await ask(client, "trivia.list"))["keys"] == ["longest", "replaced"]

    @ON_EVERY_DATABASE
    async def test_a_list_is_literal_ordered_and_continued(self, client: Nats) -> None:
        for key in ("user_2", "user_1", "userX1", "USER_1", "user%", "other", "user_é"):
            await ask(client, "trivia.set", {"key": key, "value": 1})
        assert (await ask(client, "trivia.list", {"prefix": "user_"}))["keys"] == ["user_1", "user_2", "user_é"]
        assert (await ask(client, "trivia.list", {"prefix": "user%"}))["keys"] == ["user%"]
        assert (await ask(client, "trivia.list", {"prefix": None, "limit": None}))["count"] == 7
        first = await ask(client, "trivia.list", {"prefix": "user_", "limit": 2})
        assert (first["keys"], first["count"], first["truncated"]) == (["user_1", "user_2"], 2, True)
        rest = await ask(client, "trivia.list", {"prefix": "user_", "limit": 2, "after": first["keys"][-1]})
        assert (rest["keys"], rest["truncated"]) == (["user_é"], False)
        assert (await ask(client, "trivia.list", {"prefix": "user_", "after": "a"}))["count"] == 3

    @ON_EVERY_DATABASE
    async def test_a_list_that_is_too_large_for_a_message_is_cut_and_marked_as_truncated(
        self, client: Nats, db: BotDatabase
    ) -> None:
        keys = [f"{number:05d}" + "x" * 250 for number in range(6000)]
        await asyncio.gather(*[db.kv_set("trivia", key, 1) for key in keys])
        found: list[str] = []
        pages = 0
        after = None
        while True:
            reply = await ask(client, "trivia.list", {"limit": 10_000, "after": after})
            found += reply["keys"]
            pages += 1
            assert reply["count"] == len(reply["keys"])
            if not reply["truncated"]:
                break
            after = found[-1]
        assert found == keys
        assert pages == 2

    @ON_EVERY_TABLE
    async def test_what_is_no_json_in_the_table_does_not_exist(
        self, client: Nats, db: BotDatabase, database: str, url: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        insert = "INSERT INTO plugin_kv_storage (plugin_name, key, value_json) VALUES ('trivia', '{}', {})"
        deep = "[" * 100_000 + "]" * 100_000
        broken = {"bad": "'no json {'", "nan": "'NaN'", "empty": "''", "deep": f"'{deep}'"}
        if database == "sqlite file":  # PostgreSQL takes no text that is not in UTF-8
            broken["latin"] = "CAST(x'22e922' AS TEXT)"
        for key, value in {**broken, "good": """'{"a": [1, 2]}'"""}.items():
            await by_hand(db, url, insert.format(key, value))
        for key in broken:
            assert await ask(client, "trivia.get", {"key": key}) == {"success": True, "exists": False}
        assert (await ask(client, "trivia.get", {"key": "good"}))["value"] == {"a": [1, 2]}
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == len(broken)
        assert "no json {" not in caplog.text


LIMIT = 65_536

REFUSED: list[tuple[str, Any, str, str]] = [
    ("trivia.get", b"not json", "INVALID_JSON", "Invalid JSON: invalid character"),
    ("trivia.get", b"", "INVALID_JSON", "empty"),
    ("trivia.set", b" \n", "INVALID_JSON", "empty"),
    ("trivia.get", b'{"key": "\xff"}', "INVALID_JSON", "UTF-8"),
    ("trivia.get", b"x" * (1024 * 1024 - 100), "VALIDATION_ERROR", "this operation takes at most 16384"),
    ("trivia.set", b"x" * (1024 * 1024 - 100), "VALUE_TOO_LARGE", "1,048,476 bytes as sent, 65,536 allowed"),
    ("trivia.set", b'{"key": "k", "value": NaN}', "INVALID_JSON", "NaN"),
    ("trivia.set", b'{"key": "k", "value": [Infinity]}', "INVALID_JSON", "Infinity"),
    ("trivia.set", b'{"key": "k", "value": -Infinity}', "INVALID_JSON", "Infinity"),
    ("trivia.get", b'{"key": "k", "key": "l"}', "INVALID_JSON", "twice"),
    ("trivia.set", b'{"key": "k", "value": {"a": 1, "a": 2}}', "INVALID_JSON", "twice"),
    ("trivia.set", b'{"key": "k", "value": 1, "value": 2}', "INVALID_JSON", "twice"),
    ("trivia.set", b'{"key": "k", "value": {"a": "\\n", "\\u0061": 2}}', "INVALID_JSON", "twice"),
    ("trivia.get", b'{"key": "k"} {"key": "l"}', "INVALID_JSON", "Invalid JSON: trailing characters"),
    ("trivia.get", {}, "MISSING_FIELD", "key"),
    ("trivia.delete", {"keys": "k"}, "MISSING_FIELD", "key"),
    ("trivia.delete", {"Key": "k"}, "VALIDATION_ERROR", "Key: this field is called key"),
    ("trivia.get", {"key": "k", "k_ey": "l"}, "VALIDATION_ERROR", "k_ey: this field is called key"),
    ("trivia.set", {"key": "k", "value": 1, "TTL": 5}, "VALIDATION_ERROR", "TTL: this field is called ttl"),
    ("trivia.set", {"key": "k", "value": 1, "ttlSeconds": 5}, "VALIDATION_ERROR", "this field is called ttl_seconds"),
    ("trivia.list", {"Prefix": "user:"}, "VALIDATION_ERROR", "Prefix: this field is called prefix"),
    ("trivia.set", {"value": 1}, "MISSING_FIELD", "key"),
    ("trivia.set", {"key": "k"}, "MISSING_FIELD", "value"),
    ("trivia.get", {"key": None}, "VALIDATION_ERROR", "key must be a non-empty string, not null"),
    ("trivia.get", {"key": ""}, "VALIDATION_ERROR", "key"),
    ("trivia.get", {"key": 7}, "VALIDATION_ERROR", "key"),
    ("trivia.get", {"key": ["k"]}, "VALIDATION_ERROR", "key"),
    ("trivia.get", {"key": "k" * 256}, "VALIDATION_ERROR", "255"),
    ("trivia.set", {"key": "a\u0000b", "value": 1}, "VALIDATION_ERROR", "NUL"),
    ("trivia.set", {"key": "a\ud800", "value": 1}, "VALIDATION_ERROR", "surrogate"),
    ("trivia.set", {"key": "k", "value": "\ud800"}, "VALIDATION_ERROR", "value"),
    ("trivia.set", b'{"key": "k", "value": 1e999}', "VALIDATION_ERROR", "value"),
    ("trivia.get", [1, 2], "VALIDATION_ERROR", "object"),
    ("trivia.get", "key", "VALIDATION_ERROR", "object"),
    ("trivia.list", b"null", "VALIDATION_ERROR", "object"),
    (
        "trivia.set",
        {"key": "k", "value": 1, "ttl": "5"},
        "VALIDATION_ERROR",
        "2147483647, not str; null is for an entry",
    ),
    ("trivia.set", {"key": "k", "value": 1, "ttl": True}, "VALIDATION_ERROR", "ttl"),
    ("trivia.set", {"key": "k", "value": 1, "ttl": 1.0}, "VALIDATION_ERROR", "ttl"),
    ("trivia.set", {"key": "k", "value": 1, "ttl": 0}, "VALIDATION_ERROR", "ttl"),
    ("trivia.set", {"key": "k", "value": 1, "ttl": -1}, "VALIDATION_ERROR", "ttl"),
    ("trivia.set", {"key": "k", "value": 1, "ttl": 2147483648}, "VALIDATION_ERROR", "2147483647"),
    ("trivia.set", {"key": "k", "value": 1, "ttl_seconds": 0}, "VALIDATION_ERROR", "ttl_seconds must be"),
    ("trivia.set", {"key": "k", "value": 1, "ttl": 1, "ttl_seconds": 2}, "VALIDATION_ERROR", "ttl"),
    ("trivia.list", {"limit": 0}, "VALIDATION_ERROR", "limit"),
    ("trivia.list", {"limit": -1}, "VALIDATION_ERROR", "limit"),
    ("trivia.list", {"limit": 10_001}, "VALIDATION_ERROR", "10000"),
    ("trivia.list", {"limit": "10"}, "VALIDATION_ERROR", "limit: expected a whole number from 1 to 10000"),
    ("trivia.list", {"limit": True}, "VALIDATION_ERROR", "limit"),
    ("trivia.list", {"prefix": 5}, "VALIDATION_ERROR", "prefix must be a string, not int"),
    ("trivia.list", {"after": 5}, "VALIDATION_ERROR", "after"),
    ("trivia.set", b'{"key": "k", "value": ' + b"[" * 901 + b"]" * 901 + b"}", "VALIDATION_ERROR", "900"),
    ("trivia.set", b'{"key": "k", "value": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "VALIDATION_ERROR", "900"),
    ("trivia.set", {"key": "k", "value": "x" * (LIMIT - 1)}, "VALUE_TOO_LARGE", "65,537"),
    ("trivia.set", {"key": "k", "value": "x" * (LIMIT - 1)}, "VALUE_TOO_LARGE", "65,536"),
    ("trivia.set", b'{"key": "k", "value": ' + b"9" * 70_000 + b"}", "VALUE_TOO_LARGE", "70,000"),
    ("Trivia.get", {"key": "k"}, "INVALID_PLUGIN_NAME", "lowercase"),
    ("tri$via.get", {"key": "k"}, "INVALID_PLUGIN_NAME", "lowercase"),
    ("x" * 101 + ".get", {"key": "k"}, "INVALID_PLUGIN_NAME", "100"),
    ("trivia", {"key": "k"}, "INVALID_SUBJECT", "operation"),
    ("trivia.get.more", {"key": "k"}, "INVALID_SUBJECT", "operation"),
    ("trivia.drop", {"key": "k"}, "INVALID_SUBJECT", "set, get, delete, list"),
    ("trivia.GET", {"key": "k"}, "INVALID_SUBJECT", "operation"),
]


@pytest.mark.usefixtures("service")
class TestRefusals:
    @pytest.mark.parametrize(("subject", "payload", "code", "expected"), REFUSED, ids=lambda part: str(part)[:40])
    async def test_each_mistake_has_its_code_and_a_reason(
        self, client: Nats, subject: str, payload: Any, code: str, expected: str
    ) -> None:
        found, message = await refused(client, subject, payload)
        assert found == code
        assert expected in message
        assert (await ask(client, "trivia.list"))["count"] == 0

    @ON_EVERY_DATABASE
    async def test_a_value_of_the_very_limit_is_stored(self, client: Nats) -> None:
        value = "x" * (LIMIT - 2)
        assert await ask(client, "trivia.set", {"key": "k", "value": value}) == {"success": True}
        assert (await ask(client, "trivia.get", {"key": "k"}))["value"] == value

    async def test_sizes_are_those_of_utf8_not_of_escapes(self, client: Nats) -> None:
        assert await ask(client, "trivia.set", {"key": "k", "value": "é" * 12_000}) == {"success": True}

    @ON_EVERY_DATABASE
    async def test_the_longest_key_and_name_are_allowed(self, client: Nats) -> None:
        name = "x" * 100
        assert await ask(client, f"{name}.set", {"key": "😀" * 255, "value": 1}) == {"success": True}
        assert (await ask(client, f"{name}.list"))["keys"] == ["😀" * 255]

    async def test_a_refused_publish_is_logged(self, client: Nats, caplog: pytest.LogCaptureFixture) -> None:
        await client.publish("db.kv.trivia.set", json.dumps({"key": "k", "value": "secret" * 20_000}).encode())
        await ask(client, "trivia.get", {"key": "k"})
        [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "VALUE_TOO_LARGE" in record.getMessage()
        assert record.__dict__["plugin"] == "trivia"
        assert "secret" not in caplog.text

    async def test_no_reply_is_sent_to_the_subjects_of_plugins(
        self, client: Nats, db: BotDatabase, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A get whose reply subject is a set would store the reply, in whatever plugin's name."""
        overheard = await client.subscribe("db.kv.victim.set")
        await settled(client)
        for prefix in ("db.kv", "rosey.db.kv"):
            for operation in ("get", "set", "drop"):
                await client.publish(
                    f"{prefix}.rogue.{operation}", b'{"key": "k", "value": 1}', reply="db.kv.victim.set"
                )
        assert (await ask(client, "victim.list"))["count"] == 0
        assert (await ask(client, "rogue.list"))["count"] == 0, "it was not carried out either"
        assert overheard.pending_msgs == 0
        assert "reply subject" in caplog.text


@ON_EVERY_DATABASE
@pytest.mark.usefixtures("service")
class TestOrder:
    @pytest.mark.slow
    async def test_a_get_sees_the_set_that_was_published_before_it(self, nats_url: str) -> None:
        """Each time, with nothing between the two."""

        async def play(plugin: str) -> int:
            seen = 0
            client = await nats.connect(nats_url)
            for number in rounds(50):
                await client.publish(f"db.kv.{plugin}.set", b'{"key":"k%d","value":%d}' % (number % 7, number))
                answer = await client.request(f"db.kv.{plugin}.get", b'{"key":"k%d"}' % (number % 7), timeout=20)
                seen += json.loads(answer.data).get("value") == number
            await client.close()
            return seen

        seen = await asyncio.gather(*[play(f"p{number}") for number in range(10)])
        assert seen == [len(rounds(50))] * 10

    @pytest.mark.slow
    async def test_the_same_with_many_at_once(self, client: Nats) -> None:
        async def play(plugin: str) -> int:
            stale = 0
            for number in rounds(20):
                await client.publish(f"db.kv.{plugin}.set", b'{"key":"k","value":%d}' % number)
                await client.publish(f"db.kv.{plugin}.set", b'{"key":"other%d","value":1}' % number)
                answer = await client.request(f"db.kv.{plugin}.get", b'{"key":"k"}', timeout=20)
                stale += json.loads(answer.data).get("value") != number
                listed = await ask(client, f"{plugin}.list", {"prefix": "other", "limit": 10_000})
                stale += listed["count"] != number + 1
            return stale

        assert sum(await asyncio.gather(*[play(f"p{number}") for number in range(20)])) == 0

    async def test_a_delete_and_a_set_keep_their_order(self, client: Nats) -> None:
        for number in rounds(80):
            await client.publish("db.kv.trivia.set", b'{"key":"k","value":%d}' % number)
            await client.publish("db.kv.trivia.delete", b'{"key":"k"}')
            if number % 2:
                await client.publish("db.kv.trivia.set", b'{"key":"k","value":"again"}')
            reply = await ask(client, "trivia.get", {"key": "k"})
            assert reply["exists"] is bool(number % 2)


class Faulty:
    """An engine whose commits wait, or fail, at a test's command."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.failure: Exception | None = None
        self.commits = 0
        self.held: list[HeldSubmission] = []

    def __getattr__(self, name: str) -> Any:
        if name == "submit_each":
            raise AttributeError(name)  # so that the service submits each batch by itself
        return getattr(self._engine, name)

    async def commit(self, batch: Batch) -> Committed | Conflict:
        await self.may_commit.wait()
        if self.failure is not None:
            raise self.failure
        self.commits += 1
        return await self._engine.commit(batch)

    def submit(self, batch: Batch, done: Callable[[Any], None]) -> Submission:
        held = HeldSubmission(self.held)
        self.held.append(held)

        async def commit() -> None:
            try:
                verdict: Any = await self.commit(batch)
            except Exception as error:
                verdict = error
            self.held.remove(held)
            done(verdict)

        held.task = asyncio.create_task(commit())
        return held


class HeldSubmission:
    """The first of those that wait counts as begun: it can't be withdrawn."""

    task: "asyncio.Task[None]"

    def __init__(self, held: "list[HeldSubmission]") -> None:
        self._held = held

    def withdraw(self) -> bool:
        if self._held[0] is self:
            return False
        self._held.remove(self)
        return self.task.cancel()


@pytest.fixture
async def faulty(db: BotDatabase, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    faulty = Faulty(await db.engine())

    async def engine() -> Faulty:
        return faulty

    monkeypatch.setattr(db, "engine", engine)
    return faulty


async def started(nats_url: str, db: BotDatabase, **options: Any) -> DatabaseService:
    service = DatabaseService(await nats.connect(nats_url), db, **options)
    await service.start()
    return service


async def stopped(service: DatabaseService) -> None:
    await service.stop()
    await service.nats.close()


class TestTrouble:
    @ON_EVERY_DATABASE
    @pytest.mark.slow
    async def test_a_flood_is_answered_busy_and_the_others_are_served(
        self, nats_url: str, client: Nats, db: BotDatabase, faulty: Faulty
    ) -> None:
        service = await started(nats_url, db, bounds=IntakeBounds(owner_bytes=300_000))
        faulty.may_commit.clear()
        flood = [
            asyncio.create_task(ask(client, "flood.set", {"key": f"{number}", "value": 1})) for number in range(3000)
        ]
        async with asyncio.timeout(60):
            while service.unanswered + sum(task.done() for task in flood) < 3000:
                await asyncio.sleep(0.01)
            accepted = service.unanswered
            other = asyncio.create_task(ask(client, "other.set", {"key": "k", "value": 1}))
            assert (await ask(client, "other.get", {"key": "absent"}))["exists"] is False
            faulty.may_commit.set()
            replies = await asyncio.gather(*flood)
            assert await other == {"success": True}
        taken = [reply for reply in replies if reply["success"]]
        busy = [reply for reply in replies if not reply["success"]]
        assert 1000 <= accepted <= 300_000 / limits.REQUEST_BYTES
        assert (len(taken), len(busy)) == (accepted, 3000 - accepted)
        assert {reply["error_code"] for reply in busy} == {"BUSY"}
        assert (await ask(client, "flood.list", {"limit": 10_000}))["count"] == accepted
        await stopped(service)

    @pytest.mark.slow
    async def test_the_bytes_of_all_plugins_together_are_bounded(
        self, nats_url: str, client: Nats, db: BotDatabase, faulty: Faulty
    ) -> None:
        service = await started(nats_url, db, bounds=IntakeBounds(all_bytes=400_000))
        faulty.may_commit.clear()
        asked = [
            asyncio.create_task(ask(client, f"p{number % 11}.set", {"key": f"{number}", "value": 1}))
            for number in range(3000)
        ]
        async with asyncio.timeout(60):
            while service.unanswered + sum(task.done() for task in asked) < 3000:
                await asyncio.sleep(0.01)
            accepted = service.unanswered
            faulty.may_commit.set()
            replies = await asyncio.gather(*asked)
        assert 1000 <= accepted <= 300_000 / limits.REQUEST_BYTES
        assert sum(reply["success"] for reply in replies) == accepted
        assert {reply["error_code"] for reply in replies if not reply["success"]} == {"BUSY"}
        await stopped(service)

    @ON_EVERY_DATABASE
    async def test_a_failing_database_is_reported_and_used_again_when_it_is_back(
        self, nats_url: str, client: Nats, db: BotDatabase, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        service = await started(nats_url, db)
        faulty.failure = DiskFull("no space is left for /secret/place.db")
        parked = client.publish("db.kv.trivia.set", b'{"key":"k","value":1}')
        await parked
        assert (await ask(client, "trivia.get", {"key": "k"}))["exists"] is False
        reply = await ask(client, "trivia.set", {"key": "k", "value": 1})
        assert reply["error_code"] == "DATABASE_ERROR"
        assert "secret" not in reply["message"]
        assert "no space is left" in caplog.text
        faulty.failure = ZeroDivisionError("surprise")
        assert (await ask(client, "trivia.set", {"key": "k", "value": 1}))["error_code"] == "INTERNAL_ERROR"
        faulty.failure = None
        assert await ask(client, "trivia.set", {"key": "k", "value": 1}) == {"success": True}
        await stopped(service)

    @ON_EVERY_DATABASE
    async def test_a_stalled_database_is_waited_for_no_longer_than_the_deadline(
        self, nats_url: str, client: Nats, db: BotDatabase, faulty: Faulty
    ) -> None:
        service = await started(nats_url, db, deadline=0.3)
        faulty.may_commit.clear()
        begun = asyncio.create_task(ask(client, "trivia.set", {"key": "begun", "value": 1}))
        async with asyncio.timeout(60):
            while not service.unanswered:
                await asyncio.sleep(0.001)
            queued = asyncio.create_task(ask(client, "trivia.set", {"key": "queued", "value": 1}))
            parked = asyncio.create_task(ask(client, "trivia.get", {"key": "begun"}))
            replies = await asyncio.gather(begun, queued, parked)
        assert [reply["error_code"] for reply in replies] == ["DATABASE_ERROR"] * 3
        assert "may still be carried out" in replies[0]["message"]
        assert "not carried out" in replies[1]["message"]
        faulty.may_commit.set()
        # The write that had begun was made in the end, the one behind it was not.
        async with asyncio.timeout(60):
            while not (await ask(client, "trivia.list"))["count"]:
                await asyncio.sleep(0.01)
        assert (await ask(client, "trivia.list"))["keys"] == ["begun"]
        await stopped(service)

    @ON_EVERY_DATABASE
    async def test_stopping_answers_the_accepted_requests(
        self, nats_url: str, client: Nats, db: BotDatabase, faulty: Faulty
    ) -> None:
        service = await started(nats_url, db)
        faulty.may_commit.clear()
        asked = [
            asyncio.create_task(ask(client, "trivia.set", {"key": f"{number}", "value": 1})) for number in range(500)
        ]
        async with asyncio.timeout(60):
            while service.unanswered < 500:
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(stopped(service))
            await asyncio.sleep(0)
            faulty.may_commit.set()
            replies = await asyncio.gather(*asked)
            await stopping
        assert all(reply == {"success": True} for reply in replies)
        assert (await db.kv_list("trivia"))["count"] == 500
        with pytest.raises(NoRespondersError):
            await ask(client, "trivia.list")

    async def test_stopping_in_a_flood_of_mistakes_answers_them_and_ends(self, db: BotDatabase) -> None:
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db, bounds=IntakeBounds(owner_bytes=15_000))
            await service.start()
            client = await nats.connect(server.url, pending_size=64 * 1024 * 1024)
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox, pending_msgs_limit=0, pending_bytes_limit=0)
            # Each is accepted by the service, or NATS answers that there is none.
            for number in range(6000):
                data = b"{" if number % 3 else b'{"key":"k","value":1}'
                await client.publish("db.kv.trivia.set", data, reply=inbox)
                if number == 3000:
                    stopping = asyncio.create_task(service.stop())
            async with asyncio.timeout(60):
                await stopping
                while replies.pending_msgs < 6000:
                    await asyncio.sleep(0.01)
            assert replies.pending_msgs == 6000
            await connection.close()
            await client.close()

    @ON_EVERY_DATABASE
    async def test_a_leftover_instance_does_not_double_answers(
        self, nats_url: str, client: Nats, db: BotDatabase
    ) -> None:
        services = [await started(nats_url, db) for _ in range(3)]
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await settled(client)
        for _ in range(50):
            await client.publish("db.kv.trivia.set", b'{"key":"k","value":1}', reply=inbox)
        async with asyncio.timeout(60):
            while replies.delivered + replies.pending_msgs < 50:
                await asyncio.sleep(0.01)
        for service in services:
            await stopped(service)
        await settled(client)
        assert replies.pending_msgs == 50
        served = [
            service.meters.owners["trivia"].durations["set"].count
            for service in services
            if "trivia" in service.meters.owners
        ]
        assert sum(served) == 50

    @pytest.mark.slow
    async def test_a_lost_server_is_reconnected_to(self, db: BotDatabase) -> None:
        async with private_server() as server:
            service = await started(server.url, db)
            client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0)
            assert await ask(client, "trivia.set", {"key": "k", "value": 1}) == {"success": True}
            await server.stop()
            await server.start()
            async with asyncio.timeout(60):
                while True:
                    try:
                        assert (await ask(client, "trivia.get", {"key": "k"}))["value"] == 1
                        break
                    except (TimeoutError, nats.errors.Error):
                        await asyncio.sleep(0.05)
            await stopped(service)
            await client.close()


def flood(port: int, message: bytes, times: int) -> tuple[int, int]:
    """Send as fast as a socket takes it; returns how many answers arrived, and how many of them were BUSY."""
    with socket.create_connection(("127.0.0.1", port)) as rogue:
        rogue.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB inbox 1\r\n')
        sending = threading.Thread(target=rogue.sendall, args=(message * times,))
        sending.start()
        answered, busy, rest = 0, 0, b""
        while answered < times and (read := rogue.recv(1024 * 1024)):
            whole, end, rest = (rest + read).rpartition(b"\r\n")
            answered += (whole + end).count(b"MSG inbox 1 ")
            busy += whole.count(b'"BUSY"')
        sending.join()
        return answered, busy


class TestUntrustedSenders:
    """Messages that no client library would send."""

    @pytest.mark.parametrize(
        "sent",
        [
            b'PUB db.kv.rogue.get \xff 11\r\n{"key":"k"}\r\n',
            b'PUB db.kv.rogue\xff.get 11\r\n{"key":"k"}\r\n',
            b"HPUB db.kv.rogue.get 4 4\r\njunk\r\n",
            b"HPUB db.kv.rogue.get 12 23\r\nNATS/1.0\r\n\r\n" + b'{"key":"k"}\r\n',
            b"HPUB db.kv.rogue.get 20 20\r\nNATS/1.0 \xff\xff\xff \xff\r\n\r\n\r\n",
            b"PUB $SRV.INFO \xff 0\r\n\r\n",
            b'PUB db.kv.rogue.get a\x0cb 11\r\n{"key":"k"}\r\n',
            b'PUB db.kv.rogue\x0c.get a\x0cb 11\r\n{"key":"k"}\r\n',
            b"PUB $SRV.INFO a\x0cb 0\r\n\r\n",
            b"PUB $SRV.PING \x1c 0\r\n\r\n",
            b"HPUB $SRV.PING a\x0bb 4 4\r\njunk\r\n",
            b"PUB $SRV.INFO " + b"x" * 3000 + b" 0\r\n\r\n",
        ],
    )
    async def test_a_message_that_no_client_would_send_does_not_harm_other_senders(
        self, db: BotDatabase, sent: bytes
    ) -> None:
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db)
            await service.start()
            answers, rogue = await asyncio.open_connection("127.0.0.1", server.port)
            client = await nats.connect(server.url)
            rogue.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + sent + b"PING\r\n")
            async with asyncio.timeout(60):
                for _ in range(20):
                    assert await ask(client, "trivia.set", {"key": "k", "value": 1}) == {"success": True}
                with contextlib.suppress(asyncio.IncompleteReadError):  # NATS itself refuses some of them
                    await answers.readuntil(b"PONG")
                assert (await ask(client, "trivia.get", {"key": "k"}))["value"] == 1
            assert connection.stats["reconnects"] == 0
            rogue.close()
            await client.close()
            await stopped(service)

    @pytest.mark.slow
    async def test_a_flood_over_a_raw_socket_is_answered_to_the_last_request(self, db: BotDatabase) -> None:
        sent = 40_000
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db)
            await service.start()
            reader, rogue = await asyncio.open_connection("127.0.0.1", server.port)
            rogue.write(b'CONNECT {"verbose":false}\r\nSUB inbox 1\r\n')
            rogue.write(b'PUB db.kv.rogue.get inbox 11\r\n{"key":"k"}\r\n' * sent)
            client = await nats.connect(server.url)
            answered, busy, rest = 0, 0, b""
            async with asyncio.timeout(60):
                other = asyncio.create_task(ask(client, "other.get", {"key": "k"}))
                while answered < sent:
                    lines = (rest + await reader.read(1024 * 1024)).split(b"\r\n")
                    rest = lines.pop()
                    answered += sum(line.startswith(b"MSG inbox ") for line in lines)
                    busy += sum(b'"BUSY"' in line for line in lines)
                assert (await other)["exists"] is False
            assert answered == sent
            meter = service.meters.owners["rogue"]
            assert busy == meter.errors["BUSY"]
            # On a busy machine, some may have waited until their deadline.
            assert meter.errors.total() + meter.durations["get"].count == sent
            assert meter.errors.keys() <= {"BUSY", "DATABASE_ERROR"}
            assert connection.stats["reconnects"] == 0
            rogue.close()
            await client.close()
            await stopped(service)

    @pytest.mark.parametrize("size", [1, 7, 50, 4096])
    async def test_requests_are_read_whole_wherever_the_reading_cuts_them(self, db: BotDatabase, size: int) -> None:
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db)
            await service.start()
            client = await nats.connect(server.url)
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox)
            await settled(client)
            sid = 1  # the first subscription of the connection
            stream = b""
            for number in range(30):
                data = b'{"key":"%d","value":"\r\nMSG db.kv.x.set 1 5\r\n"}' % number
                stream += b"MSG db.kv.trivia.set %d %b %d\r\n%b\r\n" % (sid, inbox.encode(), len(data), data)
                stream += (b"PING\r\n", b"+OK\r\n", b"MSG nowhere 999 1\r\n.\r\n")[number % 3]
                head = b"NATS/1.0\r\n\r\n"
                data = b'{"key":"%d"}' % number
                sizes = (len(head), len(head) + len(data))
                stream += b"HMSG db.kv.trivia.get %d %b %d %d\r\n" % (sid, inbox.encode(), *sizes)
                stream += head + data + b"\r\n"
            for at in range(0, len(stream), size):
                await connection.parser.parse(stream[at : at + size])
            async with asyncio.timeout(60):
                got = [json.loads((await replies.next_msg(timeout=10)).data) for _ in range(60)]
            # A raw line break is not JSON: these sets are refused, each of them once and as one message.
            assert sum(reply.get("error_code") == "INVALID_JSON" for reply in got) == 30
            assert sum(reply.get("exists") is False for reply in got) == 30
            await client.close()
            await stopped(service)

    @pytest.mark.parametrize(
        "message",
        [
            pytest.param(b'PUB db.kv.rogue.get inbox 11\r\n{"key":"k"}\r\n', id="gets"),
            pytest.param(b'PUB db.kv.rogue.set inbox 21\r\n{"key":"k","value":1}\r\n', id="sets"),
            pytest.param(b"HPUB db.kv.rogue.list inbox 12 14\r\nNATS/1.0\r\n\r\n{}\r\n", id="headers"),
            pytest.param(b"PUB db.kv.rogue.set inbox 1\r\n{\r\n", id="no JSON"),
            pytest.param(b"PUB db.kv.rogue.drop inbox 2\r\n{}\r\n", id="no operation"),
        ],
    )
    @pytest.mark.slow
    async def test_a_flood_at_full_speed_is_answered_and_so_are_the_others(
        self, db: BotDatabase, message: bytes
    ) -> None:
        sent = 40_000
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db, bounds=IntakeBounds(owner_bytes=limits.OWNER_BYTES // 8))
            await service.start()
            client = await nats.connect(server.url)
            others = 0
            async with asyncio.timeout(60):
                flooding = asyncio.create_task(asyncio.to_thread(flood, server.port, message, sent))
                while not flooding.done():
                    asked = {"key": "k", "value": others}
                    assert await ask(client, f"other{others % 4}.set", asked) == {"success": True}
                    assert (await ask(client, f"other{others % 4}.get", {"key": "k"}))["value"] == others
                    others += 1
                answered, busy = await flooding
            assert answered == sent
            assert others
            counted = [meter.errors["BUSY"] for meter in service.meters.owners.values()]
            assert 0 < busy == sum(counted)
            assert connection.stats["reconnects"] == 0
            await client.close()
            await stopped(service)
            assert service.unanswered == 0

    @pytest.mark.parametrize("size", [1, 7, 50, 4096, 1_000_000])
    async def test_each_of_a_flood_is_refused_once_wherever_the_reading_cuts_it(
        self, db: BotDatabase, faulty: Faulty, size: int
    ) -> None:
        """A refused message is skipped by its length: nothing in it is read as a message."""
        async with private_server() as server:
            connection = await connect(server.url, name="service")
            # Ten requests of the first form fit, and no further one.
            bounds = IntakeBounds(owner_bytes=10 * (21 + len("inbox.one-0") + limits.REQUEST_BYTES))
            service = DatabaseService(connection, db, bounds=bounds)
            await service.start()
            client = await nats.connect(server.url)
            replies = await client.subscribe("inbox.*")
            victim = await client.subscribe("db.kv.victim.>")
            await settled(client)
            sid = 1  # the first subscription of the connection
            stream = b""
            for number in range(10):
                for plugin in (b"one", b"two"):
                    stream += b"MSG db.kv.%b.set %d inbox.%b-%d 21\r\n" % (plugin, sid, plugin, number)
                    stream += b'{"key":"k","value":1}\r\n'
            head = b"NATS/1.0\r\na: b\r\n\r\n"
            for number in range(10, 110):
                data = b"x" * (number % 13) + b"\r\nMSG db.kv.victim.set %d inbox.victim 2\r\n{}" % sid
                for reply in (b"inbox.one-%d " % number, b"", b"db.kv.victim.set "):
                    stream += b"MSG db.kv.one.set %d %b%d\r\n%b\r\n" % (sid, reply, len(data), data)
                sizes = (len(head), len(head) + len(data))
                stream += b"HMSG db.kv.two.set %d inbox.two-%d %d %d\r\n" % (sid, number, *sizes)
                stream += head + data + b"\r\n"
            faulty.may_commit.clear()
            for at in range(0, len(stream), size):
                await connection.parser.parse(stream[at : at + size])
            faulty.may_commit.set()
            got = {}
            for _ in range(220):
                message = await replies.next_msg(timeout=10)
                got[message.subject] = json.loads(message.data)
            await settled(client)
            assert replies.pending_msgs == victim.pending_msgs == 0
            for number in range(110):
                for name in ("one", "two"):
                    assert got[f"inbox.{name}-{number}"].get("error_code") == (None if number < 10 else "BUSY")
            counted = [service.meters.owners[name].errors for name in ("one", "two")]
            assert counted == [{"BUSY": 200}, {"BUSY": 100}]
            assert [service.meters.owners[name].dropped for name in ("one", "two")] == [100, 0]
            await client.close()
            await stopped(service)

    async def test_permission_errors_do_not_fill_the_log(
        self, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        (tmp_path / "nats.conf").write_text(
            'authorization { users: [{ user: a, password: b, permissions: { publish: ["x"] } }] }'
        )
        async with private_server(tmp_path / "nats.conf") as server:
            connection = await connect(server.url, name="service", login=Login(user="a", password="b"))
            for number in range(500):
                await connection.publish(f"nope.{number}", b"")
            await connection.flush()
            await connection.close()
        assert 0 < len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 30


class TestOperation:
    async def test_it_is_a_context_manager_that_shows_where_it_serves(self, nats_url: str, db: BotDatabase) -> None:
        async with await connect(nats_url, name="service") as connection:
            service = DatabaseService(connection, db)
            assert repr(service) == f"<DatabaseService of db.kv, rosey.db.kv at {nats_url}, not started>"
            async with service:
                assert repr(service).endswith(", serving>")
                assert await ask(connection, "trivia.set", {"key": "k", "value": 1}) == {"success": True}
            assert repr(service).endswith(", closed>")
            await service.stop()  # the older name; a second call does nothing

    @ON_EVERY_TABLE
    async def test_expired_entries_are_cleaned_up_again_and_again(
        self,
        nats_url: str,
        client: Nats,
        db: BotDatabase,
        url: str | None,
        clock: ManualClock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        service = await started(nats_url, db, cleanup_every=0.02)
        for round_ in range(2):
            for number in range(5):
                await ask(client, "trivia.set", {"key": f"{round_}.{number}", "value": 1, "ttl": 1})
            clock.advance(1)
            async with asyncio.timeout(60):
                while service.meters.cleaned != 5 * (round_ + 1):
                    await asyncio.sleep(0.01)
            assert await by_hand(db, url, "SELECT count(*) FROM plugin_kv_storage") == [(0,)]
        await stopped(service)
        assert "[KV] Cleanup: removed 5 expired keys in 0." in caplog.text

    @ON_EVERY_DATABASE
    async def test_a_failed_clean_up_waits_and_goes_on(
        self, nats_url: str, db: BotDatabase, clock: ManualClock, faulty: Faulty, caplog: pytest.LogCaptureFixture
    ) -> None:
        await db.kv_set("trivia", "k", 1, ttl_seconds=1)
        clock.advance(1)
        faulty.failure = DiskFull("no space is left")
        service = await started(nats_url, db, cleanup_every=0.02)
        async with asyncio.timeout(60):
            while "Cleanup error" not in caplog.text:
                await asyncio.sleep(0.01)
            faulty.failure = None
            while not service.meters.cleaned:
                await asyncio.sleep(0.01)
        await stopped(service)

    async def test_operations_are_logged_without_values(
        self, service: DatabaseService, client: Nats, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "keyloft.plugins")
        await ask(client, "trivia.set", {"key": "k", "value": "confidential", "ttl": 5})
        await ask(client, "trivia.get", {"key": "k"})
        await ask(client, "trivia.get", {"key": "none"})
        lines = [record for record in caplog.records if record.name == "keyloft.plugins.service"]
        assert [record.__dict__["operation"] for record in lines] == ["kv_set", "kv_get", "kv_get"]
        assert [record.__dict__.get("hit") for record in lines] == [None, True, False]
        assert all(record.__dict__["plugin"] == "trivia" and record.__dict__["latency_ms"] >= 0 for record in lines)
        assert "confidential" not in caplog.text

    async def test_the_services_api_lists_it(self, service: DatabaseService, client: Nats) -> None:
        await ask(client, "trivia.set", {"key": "k", "value": 1})
        await ask(client, "trivia.set", {"key": "k"})
        ping = json.loads((await client.request("$SRV.PING.keyloft-plugins", b"")).data)
        assert ping["type"] == "io.nats.micro.v1.ping_response"
        info = json.loads((await client.request(f"$SRV.INFO.keyloft-plugins.{ping['id']}", b"")).data)
        subjects = [endpoint["subject"] for endpoint in info["endpoints"]]
        assert subjects == [f"db.kv.*.{operation}" for operation in rules.OPERATIONS]
        assert {"db.kv.*.set", "db.kv.*.incr", "db.kv.*.usage"} <= {*subjects}
        stats = json.loads((await client.request("$SRV.STATS.keyloft-plugins", b"")).data)
        assert stats["endpoints"][0]["num_requests"] == 2
        assert stats["endpoints"][0]["num_errors"] == 1
        assert stats["endpoints"][0]["last_error"] == "MISSING_FIELD"
        assert stats["endpoints"][0]["processing_time"] > 0

    async def test_many_names_of_plugins_take_bounded_memory(self, service: DatabaseService, client: Nats) -> None:
        def known() -> int:
            gc.collect()
            return sum(isinstance(found, Owner) for found in gc.get_objects())

        before = known()  # of other tests
        # Plugins with unanswered requests are kept, so the first ones are answered before the limit is reached.
        for numbers in (range(9000), range(9000, 12_000)):
            for number in numbers:
                await client.publish(f"db.kv.p{number}.get", b'{"key":"k"}')
            await ask(client, "last.get", {"key": "k"})
            async with asyncio.timeout(60):
                while service.unanswered:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):  # a reply that is still to be sent keeps its owner
            while known() - before > limits.OWNERS + 1:
                await asyncio.sleep(0.05)
        assert len(service.meters.owners) <= 1001
        assert "other" in service.meters.owners
