"""The client of the plugin service: values in and out, and an error for whatever stands between."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

import keyloft
from keyloft import limits
from keyloft.nats.connection import Login, connect
from keyloft.nats.errors import WIRE_ERRORS, refusal
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.server.isolation import Isolation, isolate
from tests.support.nats import private_server, settled


@pytest.fixture
async def client(nats_url: str, tmp_path: Path) -> AsyncIterator[DatabaseClient]:
    db = BotDatabase(tmp_path / "bot.db")
    connection = await nats.connect(nats_url)
    service = DatabaseService(connection, db)
    await service.start()
    async with await DatabaseClient.connect(nats_url, plugin_name="trivia") as client:
        yield client
    await service.stop()
    await connection.close()
    await db.close()


class TestCalls:
    async def test_values_are_set_got_and_deleted(self, client: DatabaseClient) -> None:
        kv = client.kv
        assert await kv.get("score") is None
        assert await kv.get("score", default=7) == 7
        await kv.set("score", {"points": [1, 2.5, None, "é"]}, ttl=60)
        assert await kv.get("score", default=7) == {"points": [1, 2.5, None, "é"]}
        await kv.set("score", None)
        assert await kv.get("score", default=7) is None, "a stored null is no absent key"
        assert await kv.delete("score") is True
        assert await kv.delete("score") is False

    async def test_a_call_without_kv_names_it(self, client: DatabaseClient) -> None:
        untyped: Any = client
        with pytest.raises(AttributeError, match=r"^a DatabaseClient has no set: write client\.kv\.set$"):
            await untyped.set("score", 1)
        assert not hasattr(client, "get")
        assert not hasattr(client, "__missing__")

    async def test_a_ttl_has_two_names(self, nats_url: str) -> None:
        other, received = await nats.connect(nats_url), list[Any]()

        async def record(message: Msg) -> None:
            received.append(json.loads(message.data))
            await message.respond(b'{"success": true}')

        await other.subscribe("recording.>", cb=record)
        await settled(other)
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="recording") as client:
            await client.kv.set("a", 1, ttl=60)
            await client.kv.set("a", 1, ttl_seconds=60)
            await client.kv.set("a", 1, ttl=60, ttl_seconds=60)
            await client.kv.set("a", 1)
            with pytest.raises(keyloft.InvalidArgument, match=r"^ttl and ttl_seconds: expected one of them"):
                await client.kv.set("a", 1, ttl=60, ttl_seconds=61)
            with pytest.raises(keyloft.InvalidArgument, match=r"^ttl_seconds must be"):
                await client.kv.set("a", 1, ttl_seconds=0)
        assert [request.get("ttl") for request in received] == [60, 60, 60, None]
        await other.close()

    async def test_lists_of_any_length_are_iterated_or_awaited(self, client: DatabaseClient) -> None:
        keys = [f"user:{number:05d}" for number in range(2500)]
        await asyncio.gather(*[client.kv.set(key, 1) for key in keys[:900]])
        await asyncio.gather(*[client.kv.set(key, 1) for key in keys[900:1800]])
        await asyncio.gather(*[client.kv.set(key, 1) for key in [*keys[1800:], "other"]])
        assert await client.kv.list("user:") == keys
        assert [key async for key in client.kv.list("user:", limit=1700)] == keys[:1700]
        assert await client.kv.list("user:", limit=1000) == keys[:1000]
        assert await client.kv.list("none") == []
        assert len(await client.kv.list()) == 2501

    async def test_keys_that_were_not_awaited_can_not_be_used_as_a_bool(self, client: DatabaseClient) -> None:
        keys = client.kv.list("user:")
        assert "await" in repr(keys)
        with pytest.raises(TypeError, match="has not been read yet"):
            bool(keys)
        with pytest.raises(keyloft.InvalidArgument, match=r"use connect\("):
            DatabaseClient("nats://127.0.0.1:4222", "trivia")  # type: ignore[arg-type]

    async def test_integers_of_any_length_come_back(self, client: DatabaseClient) -> None:
        await client.kv.set("long", 10**5000)
        assert await client.kv.get("long") == 10**5000

    async def test_it_works_on_a_connection_of_the_callers(self, client: DatabaseClient, nats_url: str) -> None:
        connection = await nats.connect(nats_url)
        other = DatabaseClient(connection, "trivia", prefix="rosey.db.kv")
        await client.kv.set("k", 1)
        assert await other.kv.get("k") == 1
        await other.aclose()
        assert connection.is_connected
        await connection.close()

    async def test_its_repr_names_the_plugin_the_server_and_the_state_but_no_password(self, nats_url: str) -> None:
        url = nats_url.replace("nats://", "nats://me:secret@")
        async with await DatabaseClient.connect(url, plugin_name="trivia") as client:
            assert repr(client) == f"<DatabaseClient of the plugin trivia at {nats_url}, connected>"
            assert "the plugin trivia" in repr(client.kv)
        assert repr(client) == f"<DatabaseClient of the plugin trivia at {nats_url}, closed>"
        await client.close()  # the older name; a second call does nothing

    async def test_bad_input_is_refused_before_it_is_sent(self, client: DatabaseClient) -> None:
        calls: list[tuple[Any, type[Exception]]] = [
            (client.kv.set("k", "x" * 70_000), keyloft.ValueTooLarge),
            (client.kv.set("k", object()), TypeError),
            (client.kv.set("k", float("nan")), ValueError),
            (client.kv.set("k", 1, ttl=0), keyloft.InvalidArgument),
            (client.kv.set("", 1), keyloft.InvalidKey),
            (client.kv.get(7), keyloft.InvalidKey),  # type: ignore[call-overload]
        ]
        for call, kind in calls:
            with pytest.raises(kind):
                await call
        with pytest.raises(keyloft.InvalidArgument):
            client.kv.list(limit=0)
        with pytest.raises(keyloft.InvalidPluginName):
            await DatabaseClient.connect("nats://127.0.0.1:1", plugin_name="Trivia")

    @pytest.mark.parametrize("code", WIRE_ERRORS)
    async def test_each_code_is_an_error_of_its_own(self, nats_url: str, code: str) -> None:
        other = await nats.connect(nats_url)

        async def refuse(message: Msg) -> None:
            made = {"VALUE_TOO_LARGE": keyloft.ValueTooLarge(7, 5), "HISTORY_GONE": keyloft.HistoryGone(3, 7, 9)}
            await message.respond(refusal(made.get(code) or WIRE_ERRORS[code]("because")))

        await other.subscribe("refusing.>", cb=refuse)
        await settled(other)
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="refusing") as client:
            with pytest.raises(WIRE_ERRORS[code]) as raised:
                await client.kv.get("k")
        assert raised.value.code == code
        assert str(raised.value)
        await other.close()


class TestNoAnswer:
    async def test_a_missing_service_is_reported_at_once(self, nats_url: str) -> None:
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="no.service") as client:
            began = time.monotonic()
            with pytest.raises(keyloft.NoService, match="keyloft serve"):
                await client.kv.get("k")
            assert time.monotonic() - began < limits.PATIENCE_SECONDS / 2

    async def test_a_service_that_does_not_answer_times_out(self, nats_url: str) -> None:
        other = await nats.connect(nats_url)
        await other.subscribe("silent.>")
        await settled(other)
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="silent", timeout=0.5) as client:
            with pytest.raises(keyloft.TimedOut, match="may have been carried out"):
                await client.kv.set("k", 1)
            with pytest.raises(TimeoutError):
                await client.kv.get("k")
        await other.close()

    @pytest.mark.parametrize("data", [b"", b"rubbish", b"[]", b'{"exists": true}'])
    async def test_another_programs_answer_is_refused(self, nats_url: str, data: bytes) -> None:
        other = await nats.connect(nats_url)

        async def answer(message: Msg) -> None:
            await message.respond(data)

        await other.subscribe("other-program.>", cb=answer)
        await settled(other)
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="other-program") as client:
            with pytest.raises(keyloft.Unanswered, match="another program answers"):
                await client.kv.get("k")
        await other.close()

    async def test_a_server_that_is_not_running_is_reported(self) -> None:
        with pytest.raises(keyloft.Unanswered, match="is it running"):
            await DatabaseClient.connect("nats://127.0.0.1:1", plugin_name="trivia", timeout=0.5)

    @pytest.mark.slow
    async def test_a_stopped_server_is_reported_and_reconnected_to(self, tmp_path: Path) -> None:
        async with private_server() as server:
            db = BotDatabase(tmp_path / "bot.db")
            connection = await connect(server.url, name="service")
            service = DatabaseService(connection, db)
            await service.start()
            async with await DatabaseClient.connect(server.url, plugin_name="trivia", timeout=1) as client:
                await client.kv.set("k", 1)
                await server.stop()
                with pytest.raises(keyloft.Unanswered):
                    await client.kv.get("k")
                await server.start()
                async with asyncio.timeout(60):
                    while True:
                        try:
                            assert await client.kv.get("k") == 1
                            break
                        except keyloft.Unanswered:
                            await asyncio.sleep(0.05)
            with pytest.raises(keyloft.Closed, match="this client is closed"):
                await client.kv.get("k")
            await service.stop()
            await connection.close()
            await db.close()


class TestPermissions:
    """With the configuration that `keyloft nats-config` writes, on a real server, with the real service."""

    @pytest.fixture
    def isolation(self) -> Isolation:
        return isolate(["trivia", "quote-db"])

    async def test_plugins_reach_their_own_keys_and_get_errors_for_others(
        self, isolation: Isolation, tmp_path: Path
    ) -> None:
        isolation.write(tmp_path / "nats.conf")
        async with private_server(tmp_path / "nats.conf") as server:
            db = BotDatabase(tmp_path / "bot.db")
            connection = await nats.connect(server.url, **isolation.service.options())
            service = DatabaseService(connection, db)
            await service.start()
            trivia = isolation.plugins["trivia"]
            login = Login(user=trivia.name, password=trivia.password)
            async with await DatabaseClient.connect(server.url, plugin_name="trivia", login=login) as client:
                await client.kv.set("score", 100)
                assert await client.kv.get("score") == 100
                assert await client.kv.list() == ["score"]
            await db.kv_set("quote-db", "secret", "of the other")
            async with await DatabaseClient.connect(
                server.url, plugin_name="quote-db", login=login, inbox_prefix=trivia.inbox_prefix
            ) as rogue:
                began = time.monotonic()
                for call in (rogue.kv.get("secret"), rogue.kv.set("secret", 1), rogue.kv.delete("secret")):
                    with pytest.raises(
                        keyloft.NotPermitted, match=r"user trivia may not publish to db\.kv\.quote-db\."
                    ):
                        await call
                with pytest.raises(keyloft.NotPermitted):
                    await rogue.kv.list()
                assert time.monotonic() - began < limits.PATIENCE_SECONDS / 2
            async with await DatabaseClient.connect(
                server.url, plugin_name="trivia", login=login, inbox_prefix="_INBOX_quote-db"
            ) as eavesdropper:
                with pytest.raises(keyloft.NotPermitted, match=r"user trivia may not subscribe to _INBOX_quote-db\.>"):
                    await eavesdropper.kv.get("score")
            # No reply reaches another plugin's subjects: the service refuses such reply subjects.
            raw = await nats.connect(server.url, **trivia.options())
            await raw.publish("db.kv.trivia.get", b'{"key": "score"}', reply="db.kv.quote-db.set")
            await settled(raw)
            assert await db.kv_list("quote-db") == {"keys": ["secret"], "count": 1, "truncated": False}
            await raw.close()
            await service.stop()
            await connection.close()
            await db.close()

    async def test_a_refusal_names_subjects_as_they_were_written(
        self, isolation: Isolation, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        isolation.write(tmp_path / "nats.conf")
        trivia = isolation.plugins["trivia"]
        login = Login(user=trivia.name, password=trivia.password)
        async with private_server(tmp_path / "nats.conf") as server:
            for inbox in ("_INBOX_Quote-DB", b"_INBOX_Quote-DB"):
                async with await DatabaseClient.connect(
                    server.url, plugin_name="trivia", login=login, inbox_prefix=inbox
                ) as client:
                    with pytest.raises(keyloft.NotPermitted, match=r"may not subscribe to _INBOX_Quote-DB\.>, where"):
                        await client.kv.get("score")
            async with await DatabaseClient.connect(
                server.url, plugin_name="trivia", login=login, prefix="Rosey.DB.KV"
            ) as client:
                with pytest.raises(
                    keyloft.NotPermitted, match=r"may not publish to Rosey\.DB\.KV\.trivia\.get\. Log in"
                ):
                    await client.kv.get("score")
        logged = [message for message in caplog.messages if "permissions violation" in message]
        assert [re.sub(r"DB\.\w+\.\*", "DB.….*", message.partition(" to ")[2]) for message in logged] == [
            '"_INBOX_Quote-DB.….*"',
            '"_INBOX_Quote-DB.….*"',
            '"Rosey.DB.KV.trivia.get"',
        ]
