"""What is read and published with the help of nats-py's private parts, and the check that they are still there."""

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import MaxPayloadError
from nats.protocol.parser import Parser

import keyloft
from keyloft.nats import internals
from keyloft.nats.connection import connect, drain, subscribe
from keyloft.nats.internals import NatsConnection, check_nats_py, publish_all, publish_to_all
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.support.nats import private_server

ROOT = Path(__file__).parents[2]


class TestCheck:
    async def test_the_installed_version_passes(self) -> None:
        check_nats_py()

    def test_the_bounds_are_those_of_the_package(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert extras["nats"] == [f"nats-py[nkeys]{internals.NATS_PY}"]

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Client, "_process_msg"),
            (Client, "_read_loop"),
            (Client, "_send_ping"),
            (Client, "_send_command"),
            (Client, "_flush_pending"),
            (Parser, "parse"),
            (Parser, "reset"),
        ],
    )
    async def test_a_method_that_is_gone_or_changed_is_named(
        self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def changed(self: object, other: object) -> None: ...

        monkeypatch.setattr(owner, name, changed)
        if name not in ("_read_loop", "_flush_pending", "reset"):  # of these, no argument is passed
            with pytest.raises(keyloft.IncompatibleLibrary, match=rf"{owner.__name__}\.{name}\(\) takes \(other\), "):
                check_nats_py()
        monkeypatch.delattr(owner, name)
        with pytest.raises(keyloft.IncompatibleLibrary, match=rf"{owner.__name__}\.{name}\(\) is missing") as refused:
            check_nats_py()
        assert refused.value.code == "INCOMPATIBLE_LIBRARY"
        assert internals.NATS_PY in str(refused.value)

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Client, "_ps"),
            (Client, "_subs"),
            (Client, "_pongs"),
            (Parser, "buf"),
            (Parser, "state"),
            (Subscription, "_id"),
        ],
    )
    async def test_an_attribute_that_is_gone_is_named(
        self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make: Any = owner.__init__  # type: ignore[misc]

        def make_without(self: object, *args: Any) -> None:
            make(self, *args)
            delattr(self, name)

        monkeypatch.setattr(owner, "__init__", make_without)
        with pytest.raises(keyloft.IncompatibleLibrary, match=rf"{owner.__name__}\.{name} "):
            check_nats_py()

    async def test_clients_and_services_are_refused_before_they_connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with private_server() as server:
            client = Client()
            await client.connect(server.url)
            monkeypatch.delattr(Client, "_send_command")
            with pytest.raises(keyloft.IncompatibleLibrary, match="_send_command"):
                await DatabaseClient.connect(server.url, plugin_name="trivia")
            db = BotDatabase()
            with pytest.raises(keyloft.IncompatibleLibrary, match="_send_command"):
                await DatabaseService(client, db).start()
            monkeypatch.undo()
            await client.close()
            await db.close()

    def test_a_module_that_lost_a_name_is_named_at_import(self) -> None:
        program = "import nats.protocol.parser as p; del p.AWAITING_CONTROL_LINE; import keyloft.nats.connection"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "IncompatibleLibrary: nats-py 2." in ended.stderr
        assert "cannot import name 'AWAITING_CONTROL_LINE'" in ended.stderr


class TestFlush:
    async def test_a_flush_returns_after_the_server_has_seen_what_was_sent_before(self, nats_url: str) -> None:
        listener, sender = await connect(nats_url, name="listener"), await connect(nats_url, name="sender")
        for number in range(50):
            heard: list[bytes] = []

            def take(subject: str, reply: str, data: bytes, heard: list[bytes] = heard) -> None:
                heard.append(data)

            subscriptions = await subscribe(listener, [f"flush.{number}."], "", take)
            await listener.flush()
            # Published and drained without a pause: all that was sent before the drain is read.
            for _ in range(20):
                await sender.publish(f"flush.{number}.x", b"x")
            await sender.flush()
            await drain(listener, subscriptions, 10)
            assert len(heard) == 20
        await listener.close()
        await sender.close()

    async def test_it_takes_one_round_trip(self, nats_url: str) -> None:
        connection = await connect(nats_url, name="test")
        pings = 0
        process_pong = connection._process_pong

        async def count() -> None:
            nonlocal pings
            pings += 1
            await process_pong()

        connection._process_pong = count  # type: ignore[method-assign]
        await connection.flush()
        assert pings == 1
        await connection.close()


class TestReading:
    async def test_all_refusals_are_sent_also_when_reading_pauses_between_them(self) -> None:
        connection = NatsConnection()
        refused: list[bytes] = []
        sent: list[bytes] = []

        def take(subject: str, reply: str, data: bytes) -> list[bytes]:
            refused.append(reply.encode())
            return refused

        def iterate() -> None:
            nonlocal refused
            sent.extend(refused)
            refused = []

        async def pause(*_: object) -> None:
            iterate()

        connection.handle(Subscription(connection, 1), take)
        connection._process_ping = connection._process_msg = pause  # type: ignore[method-assign, assignment]
        for between in (b"PING\r\n", b"MSG other 2 0\r\n\r\n"):
            sent.clear()
            flood = b"".join([b"MSG db.kv.rogue.get 1 r%d 0\r\n\r\n" % number for number in range(10)])
            await connection.feed(flood + between + flood)
            iterate()
            assert len(sent) == 20

    async def test_half_a_message_of_an_ended_subscription_does_not_delay_the_next(self) -> None:
        connection = NatsConnection()
        taken: list[str] = []
        first, second = Subscription(connection, 1), Subscription(connection, 2)
        connection.handle(first, lambda subject, reply, data: taken.append(subject))
        await connection.feed(b"MSG a 1 5000\r\nabc")
        connection.handle(first, None)
        await connection.feed(b"x" * 4997 + b"\r\nMS")
        connection.handle(second, lambda subject, reply, data: taken.append(subject))
        await connection.feed(b"G b 2 2\r\nhi\r\n")
        await connection.feed(b"MSG c 2 2\r\nhi\r\nPI")
        assert taken == ["b", "c"]


class TestPublishing:
    async def test_what_can_not_be_sent_keeps_nothing_else_from_being_sent(self) -> None:
        async with private_server() as server:
            connection = await connect(server.url, name="test")
            subscription = await connection.subscribe("here")
            small, large = ("here", b"small"), ("here", b"x" * (connection.max_payload + 1))

            async def heard(times: int) -> None:
                for _ in range(times):
                    assert (await subscription.next_msg(timeout=20)).data == b"small"

            with pytest.raises(MaxPayloadError):
                await publish_all(connection, [small, large, small])
            await heard(2)
            await server.stop()
            async with asyncio.timeout(10):
                while connection.is_connected:
                    await asyncio.sleep(0.01)
            with pytest.raises(MaxPayloadError):
                await publish_all(connection, [small, large, small])
            await publish_to_all(connection, [b"here", b"\xff", b"here"], b"small")
            await server.start()
            await heard(4)
            await connection.close()
