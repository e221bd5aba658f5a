"""Messages that are read and published with private parts of nats-py, and the check that these are still there."""

import ast
import asyncio
import inspect
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import MaxPayloadError
from nats.protocol.parser import Parser

import keyloft
from keyloft.nats import compatibility, messages, subscribing, transport
from keyloft.nats.compatibility import check_nats_py
from keyloft.nats.connection import connect
from keyloft.nats.handlers import Handled
from keyloft.nats.messages import NatsConnection, publish_all, publish_to_all
from keyloft.nats.subscribing import subscribe_at_once
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from tests.support.nats import private_server

ROOT = Path(__file__).parents[2]


def _assigned_to_self(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [
        target.attr for target in targets if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    ]


def _removed(owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    """Take a part out of a class of nats-py."""
    if hasattr(owner, name):
        patch.delattr(owner, name)
        if hasattr(owner, name):  # its base has it as an abstract method, and Python looks for these once
            patch.setattr(owner, "__abstractmethods__", frozenset({name}))
    else:
        _attribute(owner, name, patch)


def _changed(owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    """Give a method of nats-py a further parameter, or an attribute another type."""
    original: Any = getattr(owner, name, None)

    def changed(self: object, *args: object, other: object = None) -> Any:
        return original(self, *args)

    if inspect.isfunction(original):
        patch.setattr(owner, name, changed)
    elif hasattr(owner, name):
        patch.setattr(owner, name, None)
    else:
        _attribute(owner, name, patch, ...)


def _attribute(owner: type, name: str, patch: pytest.MonkeyPatch, *value: object) -> None:
    """Let the objects of a class have an attribute with this value, or without a value lack it."""
    make: Any = owner.__init__  # type: ignore[misc]

    def make_changed(self: object, *args: Any) -> None:
        make(self, *args)
        vars(self).pop(name, None)
        if value:
            setattr(self, name, value[0])

    patch.setattr(owner, "__init__", make_changed)


class TestCheck:
    async def test_the_installed_version_passes(self) -> None:
        check_nats_py()

    def test_the_bounds_are_those_of_the_package(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert extras["nats"] == [f"nats-py[nkeys]{compatibility.NATS_PY}"]

    def test_every_part_that_is_used_is_checked_and_no_other(self) -> None:
        tree = ast.parse("".join(map(inspect.getsource, (messages, subscribing, transport))))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        defined = {
            name
            for made in classes
            for node in ast.walk(made)
            for name in (
                [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else _assigned_to_self(node)
            )
        }
        client = Client()
        socket = TcpTransport()  # type: ignore[no-untyped-call]
        owners = client, Parser(client), Subscription(client), socket
        of_nats_py = {name for owner in owners for name in dir(owner)}
        checked = {name for _, parts in compatibility.PARTS for name in parts}
        documented = {"publish", "close"}  # the parts that nats-py's documents promise
        assert (used & of_nats_py | defined) - set(dir(object)) - documented == checked

    @pytest.mark.parametrize(
        ("owner", "name", "expected"),
        [(owner, name, expected) for owner, parts in compatibility.PARTS for name, expected in parts.items()],
    )
    async def test_a_part_that_is_gone_or_changed_is_named(
        self, owner: type, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for change in (_removed, _changed):
            with monkeypatch.context() as patch:
                if expected != "absent":
                    change(owner, name, patch)
                else:
                    _attribute(owner, name, patch, {})
                with pytest.raises(keyloft.IncompatibleLibrary, match=rf"\b{name}\b") as refused:
                    check_nats_py()
            assert refused.value.code == "INCOMPATIBLE_LIBRARY"
            assert compatibility.NATS_PY in str(refused.value)
        check_nats_py()

    @pytest.mark.parametrize(
        ("name", "found", "expected"),
        [
            ("_flush_pending", "async (how)", "async (force_flush=False)"),
            ("_send_command", "(cmd, priority=False)", "async (cmd, priority=False)"),
        ],
    )
    async def test_both_shapes_of_a_changed_method_are_shown(
        self, name: str, found: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def flush_pending(self: object, how: object) -> None: ...
        def send_command(self: object, cmd: bytes, priority: bool = False) -> None: ...

        monkeypatch.setattr(Client, name, {"_flush_pending": flush_pending, "_send_command": send_command}[name])
        with pytest.raises(keyloft.IncompatibleLibrary) as refused:
            check_nats_py()
        assert f"Client.{name} is {found}, expected {expected}. Keyloft works with" in str(refused.value)

    async def test_a_class_that_is_made_in_another_way_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make: Any = Parser.__init__

        def init(self: Parser, *, nc: Client) -> None:
            make(self, nc)

        init.__qualname__ = "Parser.__init__"
        monkeypatch.setattr(Parser, "__init__", init)
        with pytest.raises(keyloft.IncompatibleLibrary, match=r"Parser\.__init__\(\) takes 1 positional argument"):
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

            def take(subject: bytes, reply: bytes, data: bytes, heard: list[bytes] = heard) -> None:
                heard.append(data)

            subscription = await listener.subscribe(f"flush.{number}.>")
            listener.handle(subscription, take)
            await listener.flush()
            # Published and drained without a pause: all that was sent before the drain is read.
            for _ in range(20):
                await sender.publish(f"flush.{number}.x", b"x")
            await sender.flush()
            await subscription.drain()  # type: ignore[no-untyped-call]
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
    async def test_a_large_message_takes_few_reads(self, nats_url: str) -> None:
        connection, sizes = NatsConnection(), []
        await connection.connect(nats_url)
        arrived, subject = asyncio.Event(), connection.new_inbox()
        take = connection.parser.take

        def note(data: bytes) -> bool:
            sizes.append(len(data))
            return take(data)

        connection.parser.take = note  # type: ignore[method-assign]
        subscription = await connection.subscribe(subject)
        connection.handle(subscription, lambda subject, reply, data: arrived.set())
        for _ in range(8):  # how much there is to read at once is up to the machine: once will do
            await connection.publish(subject, bytes(1_000_000))
            await asyncio.wait_for(arrived.wait(), 60)
            arrived.clear()
        assert max(sizes) > 64 * 1024
        await connection.close()

    async def test_a_large_message_that_is_refused_by_its_first_bytes_is_left_out(self, nats_url: str) -> None:
        connection, taken, refused = NatsConnection(), 0, []
        await connection.connect(nats_url)
        handled: list[bytes] = []
        arrived, subject = asyncio.Event(), connection.new_inbox()
        take = connection.parser.take

        def note(data: bytes) -> bool:
            nonlocal taken
            taken += len(data)
            return take(data)

        def handle(subject: bytes, reply: bytes, data: bytes) -> None:
            handled.append(data)
            if data == b"last":
                arrived.set()

        def refuse(subject: bytes, reply: bytes, size: int) -> bool:
            refused.append(size)
            return True

        connection.parser.take = note  # type: ignore[method-assign]
        connection.handle(await connection.subscribe(subject), handle, refuse)
        for number in range(10):
            await connection.publish(subject, bytes(1_000_000))
            await connection.publish(subject, b"%d" % number)
        await connection.publish(subject, b"last")
        await asyncio.wait_for(arrived.wait(), 60)
        assert [data for data in handled if len(data) < 100] == [*[b"%d" % number for number in range(10)], b"last"]
        assert len(refused) + len([data for data in handled if len(data) == 1_000_000]) == 10
        assert set(refused) == {1_000_000}
        # A part of each was read with what came before it; Linux drops the rest.
        assert taken < 10 * 512 * 1024 or sys.platform != "linux"
        await connection.close()

    async def test_most_of_a_large_message_is_received_where_it_stays(self, nats_url: str) -> None:
        connection, taken = NatsConnection(), 0
        await connection.connect(nats_url)
        handled: list[bytes] = []
        arrived, subject = asyncio.Event(), connection.new_inbox()
        take = connection.parser.take

        def note(data: bytes) -> bool:
            nonlocal taken
            taken += len(data)
            return take(data)

        def handle(subject: bytes, reply: bytes, data: bytes) -> None:
            handled.append(data)
            if data == b"last":
                arrived.set()

        connection.parser.take = note  # type: ignore[method-assign]
        connection.handle(await connection.subscribe(subject), handle)
        large = [random.Random(number).randbytes(1_000_000 + number) for number in range(10)]
        small = [b"%d" % number for number in range(10)]
        for one, other in zip(large, small, strict=True):
            await connection.publish(subject, one)
            await connection.publish(subject, other)
        await connection.publish(subject, b"last")
        await asyncio.wait_for(arrived.wait(), 60)
        assert handled == [*[data for both in zip(large, small, strict=True) for data in both], b"last"]
        assert taken < 10 * 512 * 1024
        await connection.close()

    @pytest.mark.parametrize("size", [97, 4096, 100_000, 100_001, 2_000_000])
    async def test_messages_are_whole_however_they_arrive(self, size: int) -> None:
        connection = NatsConnection()
        taken: list[tuple[bytes, bytes, bytes]] = []
        others: list[bytes] = []

        async def other(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
            others.append(data)

        def take(subject: bytes, reply: bytes, data: bytes) -> Handled:
            taken.append((subject, reply, data))
            if subject == b"unreadable":
                b"\xff".decode()
            return asyncio.sleep(0) if subject == b"waits" else None

        connection.handle(Subscription(connection, 1), take)
        connection._process_msg = other  # type: ignore[method-assign]
        messages = [
            (subject, b"reply-%d" % number, random.Random(number).randbytes(length))
            for number, length in enumerate((100_000, 0, 40_000, 300_000))
            for subject in (b"a", b"waits", b"unreadable", b"others")
        ]
        stream = b"".join(
            [
                b"MSG %b %d %b %d\r\n%b\r\n" % (subject, 2 if subject == b"others" else 1, reply, len(data), data)
                for subject, reply, data in messages
            ]
        )
        for first in range(0, len(stream), size):
            await connection.parser.parse(stream[first : first + size])
        await connection.parser.parse(b"MSG last 1 2\r\nhi\r\n")
        assert taken == [*[one for one in messages if one[0] != b"others"], (b"last", b"", b"hi")]
        assert others == [data for subject, _, data in messages if subject == b"others"]

    @pytest.mark.parametrize("data", [b"x 12", b"x 2", b" 1 2", b"1 2"])
    async def test_data_is_no_part_of_the_line_before_it(self, data: bytes) -> None:
        connection = NatsConnection()
        taken: list[tuple[bytes, bytes, bytes]] = []
        connection.handle(Subscription(connection, 1), lambda *message: taken.append(message))
        await connection.parser.parse(b"MSG a 1 %d\r\n%b\r\nMSG b 1 r 2\r\nhi\r\n" % (len(data), data))
        assert taken == [(b"a", b"", data), (b"b", b"r", b"hi")]

    async def test_a_large_message_of_a_lost_connection_is_forgotten(self) -> None:
        connection = NatsConnection()
        taken: list[bytes] = []
        connection.handle(Subscription(connection, 1), lambda subject, reply, data: taken.append(subject))
        await connection.parser.parse(b"MSG a 1 500000\r\nabc")
        connection.parser.reset()
        await connection.parser.parse(b"MSG b 1 2\r\nhi\r\n")
        assert taken == [b"b"]

    async def test_all_refusals_are_sent_also_when_reading_pauses_between_them(self) -> None:
        connection = NatsConnection()
        refused: list[bytes] = []
        sent: list[bytes] = []

        def take(subject: bytes, reply: bytes, data: bytes) -> list[bytes]:
            refused.append(reply)
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
            await connection.parser.parse(flood + between + flood)
            iterate()
            assert len(sent) == 20

    @pytest.mark.parametrize("size", [5000, 500_000])
    async def test_half_a_message_of_an_ended_subscription_does_not_delay_the_next(self, size: int) -> None:
        connection = NatsConnection()
        taken: list[bytes] = []
        first, second = Subscription(connection, 1), Subscription(connection, 2)
        connection.handle(first, lambda subject, reply, data: taken.append(subject))
        await connection.parser.parse(b"MSG a 1 %d\r\nabc" % size)
        connection.handle(first, None)
        await connection.parser.parse(b"x" * (size - 3) + b"\r\nMS")
        connection.handle(second, lambda subject, reply, data: taken.append(subject))
        await connection.parser.parse(b"G b 2 2\r\nhi\r\n")
        await connection.parser.parse(b"MSG c 2 2\r\nhi\r\nPI")
        assert taken == [b"b", b"c"]


class TestPublishing:
    async def test_what_can_not_be_sent_keeps_nothing_else_from_being_sent(self) -> None:
        async with private_server() as server:
            connection = await connect(server.url, name="test")
            subscription = await connection.subscribe("here")
            small, large = (b"here", b"small"), (b"here", b"x" * (connection.max_payload + 1))

            async def heard(times: int) -> None:
                for _ in range(times):
                    assert (await subscription.next_msg(timeout=20)).data == b"small"

            with pytest.raises(MaxPayloadError):
                await publish_all(connection, [small, large, small])
            await heard(2)
            await server.stop()
            async with asyncio.timeout(60):
                while connection.is_connected:
                    await asyncio.sleep(0.01)
            with pytest.raises(MaxPayloadError):
                await publish_all(connection, [small, large, small])
            await publish_to_all(connection, [b"here", b"\xff", b"here"], b"small")
            await server.start()
            await heard(4)
            await connection.close()


async def test_a_flush_that_was_cancelled_does_not_end_the_reading(nats_url: str) -> None:
    nats = await connect(nats_url, name="test")
    try:
        for _ in range(10):
            flushing = asyncio.ensure_future(nats.flush())
            await asyncio.sleep(0)
            flushing.cancel()
            await asyncio.wait([flushing])
            await nats.flush()
        assert nats.stats["reconnects"] == 0
        assert nats.is_connected
    finally:
        await nats.close()


async def test_a_message_that_fails_its_function_ends_no_reading(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    arrived: list[bytes] = []
    all_arrived = asyncio.Event()

    def deliver(message: Msg) -> None:
        arrived.append(message.data)
        if len(arrived) == 3:
            all_arrived.set()
        if message.data == b"2":
            raise ValueError

    connection = await nats.connect(nats_url)
    try:
        subscription = await subscribe_at_once(connection, "test.at_once.*", deliver)
        for data in (b"1", b"2", b"3"):
            await connection.publish("test.at_once.x", data)
        async with asyncio.timeout(60):
            await all_arrived.wait()
        assert arrived == [b"1", b"2", b"3"]
        assert "could not be handled" in caplog.text
        await subscription.unsubscribe()
    finally:
        await connection.close()
