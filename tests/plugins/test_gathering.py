"""A client that gathers: calls made together travel together, and no caller notices another."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import nats
import pytest
from nats.aio.msg import Msg

import keyloft
from keyloft.nats.connection import Login, connect
from keyloft.nats.errors import refusal
from keyloft.plugins import BotDatabase, DatabaseClient, DatabaseService
from keyloft.server.isolation import isolate
from tests.support.nats import private_server, settled
from tests.support.processes import stop

PREFIX = "gathering.kv"
SECONDS = 30


@asynccontextmanager
async def serving(url: str, path: Path, **options: Any) -> AsyncIterator[DatabaseService]:
    connection = await connect(url, name="service")
    try:
        async with BotDatabase(path) as db, DatabaseService(connection, db, prefixes=[PREFIX], **options) as service:
            yield service
    finally:
        await connection.close()


@pytest.fixture
async def service(nats_url: str, tmp_path: Path) -> AsyncIterator[DatabaseService]:
    async with serving(nats_url, tmp_path / "bot.db") as service:
        yield service


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[DatabaseClient]:
    """A client that knows that the service has `many`: it asks once calls are made together."""
    async with await DatabaseClient.connect(url, plugin_name="trivia", **{"prefix": PREFIX, **options}) as client:
        await asyncio.gather(client.kv.get("k"), client.kv.get("k"))
        async with asyncio.timeout(SECONDS):
            while client.sender is None or not client.sender.has_many:
                await asyncio.sleep(0.001)
        yield client


@pytest.fixture
async def client(nats_url: str, service: DatabaseService) -> AsyncIterator[DatabaseClient]:
    async with connected(nats_url) as client:
        yield client


def counted(service: DatabaseService) -> dict[str, int]:
    durations = service.meters.of("trivia").durations
    return {name: durations[name].count for name in ("get", "set", "many")}


def since(before: dict[str, int], service: DatabaseService) -> dict[str, int]:
    return {name: count - before[name] for name, count in counted(service).items()}


async def test_calls_made_together_travel_in_one_message(client: DatabaseClient, service: DatabaseService) -> None:
    before = counted(service)
    await asyncio.gather(*[client.kv.set(f"k{number}", number) for number in range(100)])
    assert since(before, service) == {"get": 0, "set": 100, "many": 1}
    assert await asyncio.gather(*[client.kv.get(f"k{number}") for number in range(101)]) == [*range(100), None]
    assert since(before, service) == {"get": 101, "set": 100, "many": 2}


async def test_gets_that_travel_together_return_whatever_is_stored(client: DatabaseClient) -> None:
    values: list[Any] = [1, None, "\u00e9", [], {"a": [1.5, True]}, 10**30, -(10**5000), "x" * 60_000, [[[]]] * 500]
    for some in (values[:6], values):  # msgspec can't decode the longest of the ints
        await asyncio.gather(*[client.kv.set(f"k{at}", value) for at, value in enumerate(some)])
        assert await asyncio.gather(*[client.kv.get(f"k{at}", "default") for at in range(len(some))]) == some
        assert await asyncio.gather(*[client.kv.get(f"k{at}", "default") for at in range(len(some) + 1)]) == [
            *(*some, "default")
        ]


async def test_replies_to_requests_are_dicts_of_their_callers(client: DatabaseClient) -> None:
    first, second = await asyncio.gather(*[client.request("set", {"key": "k", "value": 1}) for _ in range(2)])
    first["changed"] = True
    assert second == {"success": True}
    found = await asyncio.gather(*[client.request("get", {"key": "k"}) for _ in range(2)])
    assert found == [{"success": True, "exists": True, "value": 1}] * 2


async def test_a_lone_call_is_sent_alone(client: DatabaseClient, service: DatabaseService) -> None:
    before = counted(service)
    await client.kv.set("k", 1)
    assert await client.kv.get("k") == 1
    assert since(before, service) == {"get": 1, "set": 1, "many": 0}


async def test_a_get_never_overtakes_a_set_that_was_begun_before_it(client: DatabaseClient) -> None:
    async def sets(number: int) -> None:
        await client.kv.set("k", number)

    for number in range(50):
        setting = asyncio.ensure_future(sets(number))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        lists = asyncio.ensure_future(client.kv.list("fresh"))
        others = [asyncio.ensure_future(client.kv.set(f"fresh{number}-{other}", 1)) for other in range(number % 3)]
        got, listed = await asyncio.gather(client.kv.get("k"), client.kv.list(f"fresh{number}-"))
        assert got == number
        assert len(listed) == len(others)
        await asyncio.gather(setting, lists, *others)


async def test_a_bad_request_fails_its_caller_alone(client: DatabaseClient, service: DatabaseService) -> None:
    before = counted(service)
    bad: list[tuple[Any, type[Exception]]] = [
        (client.request("get", {"key": ""}), keyloft.InvalidArgument),
        (client.request("get", {}), keyloft.MissingField),
        (client.request("set", {"key": "k", "value": 1, "ttl": 0}), keyloft.InvalidArgument),
        (client.request("set", {"key": "k", "value": "x" * 70_000}), keyloft.ValueTooLarge),
        (client.request("set", {"key": "k", "value": "x" * 2_000_000}), Exception),
        (client.request("nothing", {"key": "k"}), keyloft.InvalidSubject),
    ]
    done = await asyncio.gather(
        *[call for call, _ in bad], client.kv.set("k", 1), client.kv.get("k"), return_exceptions=True
    )
    for outcome, (_, kind) in zip(done, bad, strict=False):
        assert isinstance(outcome, kind)
    assert done[-2:] == [None, 1]
    assert since(before, service)["many"] >= 1


async def test_a_cancelled_caller_harms_no_other(client: DatabaseClient) -> None:
    for turns in range(6):
        calls = [asyncio.ensure_future(client.kv.set(f"k{number}", turns)) for number in range(20)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert done[1::2] == [None] * 10
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in done[::2])
        assert await client.kv.get("k1") == turns
    assert client.sender is not None
    assert client.sender.unanswered == []


class OddError(Exception):
    """An error that can't be copied."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


@pytest.mark.parametrize(
    ("error", "expected"), [(OSError(5, "odd"), OSError), (OddError(reason="odd"), keyloft.Unanswered)]
)
async def test_each_caller_of_a_message_that_was_not_sent_gets_an_error_of_its_own(
    error: Exception, expected: type[Exception], client: DatabaseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("keyloft.nats.gathering.publish_requests", fail)
    async with asyncio.timeout(SECONDS):
        done = await asyncio.gather(*[client.kv.get("k") for _ in range(3)], return_exceptions=True)
    assert [type(outcome) for outcome in done] == [expected] * 3
    assert all("odd" in str(outcome) for outcome in done)
    assert len({id(outcome) for outcome in done}) == 3
    assert all(isinstance(outcome, Exception) and outcome.__cause__ is error for outcome in done)


async def test_each_caller_waits_for_its_own_reply_and_times_out_alone(nats_url: str, tmp_path: Path) -> None:
    async with serving(nats_url, tmp_path / "bot.db") as service, connected(nats_url, timeout=1.0) as client:
        await client.kv.set("k", 0)
        other = apsw.Connection((await service.db.engine()).location)
        other.execute("BEGIN IMMEDIATE")
        setting = [asyncio.ensure_future(client.kv.set(f"s{number}", 1)) for number in range(3)]
        assert await asyncio.gather(*[client.kv.get("k") for _ in range(3)]) == [0, 0, 0]
        assert not any(call.done() for call in setting), "the gets did not wait for the sets of their message"
        done = await asyncio.gather(*setting, return_exceptions=True)
        assert [type(outcome) for outcome in done] == [keyloft.TimedOut] * 3
        assert f"{PREFIX}.trivia.set within 1 s" in str(done[0])
        other.execute("ROLLBACK")
        other.close()
        assert client.sender is not None
        assert client.sender.sent == []
        assert await client.kv.get("k") == 0


@pytest.mark.blocks_the_loop  # so that two calls of one message end at different times
async def test_a_message_whose_callers_have_given_up_is_let_go(nats_url: str, tmp_path: Path) -> None:
    async def get_later(client: DatabaseClient) -> object:
        time.sleep(0.1)  # noqa: ASYNC251  # it must block the event loop
        return await client.kv.get("k")

    async with serving(nats_url, tmp_path / "bot.db") as service, connected(nats_url, timeout=0.5) as client:
        with closing(apsw.Connection((await service.db.engine()).location)) as other:
            other.execute("BEGIN IMMEDIATE")
            setting, got = await asyncio.gather(client.kv.set("s", 1), get_later(client), return_exceptions=True)
        assert isinstance(setting, keyloft.TimedOut)
        assert got is None
        assert client.sender is not None
        assert client.sender.sent == []


async def test_calls_behind_one_that_can_not_be_sent_time_out_as_well() -> None:
    async with (
        private_server() as server,
        await DatabaseClient.connect(server.url, plugin_name="trivia", timeout=0.5) as client,
        asyncio.timeout(SECONDS),
    ):
        stop(server.pid)
        try:
            for _ in range(3):  # the first are more than the socket takes
                calls = [client.kv.set(f"k{number}", "x" * 60_000) for number in range(500)]
                done = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(outcome) for outcome in done} == {keyloft.TimedOut}
                assert client.sender is not None
                assert client.sender.queued == [], "calls that no one waits for any more take no memory"
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_large_requests_go_into_several_messages(client: DatabaseClient, service: DatabaseService) -> None:
    before = counted(service)
    await asyncio.gather(*[client.kv.set(f"k{number}", "x" * 60_000) for number in range(40)])
    values = await asyncio.gather(*[client.kv.get(f"k{number}") for number in range(40)])
    assert values == ["x" * 60_000] * 40
    assert since(before, service)["many"] == 11, "ten for the sets, four to each, and one for the gets"


async def test_it_works_on_a_connection_of_the_callers(nats_url: str, service: DatabaseService) -> None:
    connection = await nats.connect(nats_url)
    clients = [DatabaseClient(connection, "trivia", prefix=PREFIX) for _ in range(2)]
    for _ in range(3):
        await asyncio.gather(*[client.kv.set("k", 1) for client in clients for _ in range(3)])
    assert await asyncio.gather(*[client.kv.get("k") for client in clients for _ in range(3)]) == [1] * 6
    assert counted(service)["many"] > 0
    for client in clients:
        await client.aclose()
    assert connection.is_connected
    await connection.close()


async def test_without_a_service_each_caller_gets_an_error_of_its_own(nats_url: str) -> None:
    async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="absent.kv") as client:
        calls = [client.kv.get(f"key-{number}") for number in range(3)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(failure) for failure in failures] == [keyloft.NoService] * 3
        assert len({id(failure) for failure in failures}) == 3, "a shared one would collect all tracebacks"


async def test_closing_lets_no_caller_wait(nats_url: str) -> None:
    silent = await nats.connect(nats_url)
    await silent.subscribe("silent-many.>")
    await settled(silent)
    for asked in (0, 3):
        client = await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="silent-many")
        calls = [asyncio.ensure_future(client.kv.get("k")) for _ in range(3)]
        for _ in range(asked * 5):
            await asyncio.sleep(0.001)
        await client.aclose()
        async with asyncio.timeout(SECONDS):
            done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, keyloft.Unanswered | keyloft.Closed) for outcome in done), done
    await silent.close()


class TestOlderServices:
    """Without `many`, or where it is not permitted, each call is sent alone."""

    async def test_a_service_without_many_gets_single_requests(self, nats_url: str) -> None:
        asked: list[str] = []
        knows_many = True

        async def answer(message: Msg) -> None:
            operation = message.subject.rpartition(".")[2]
            asked.append(operation)
            if operation != "many":
                await message.respond(b'{"success":true,"exists":true,"value":1}')
            elif not knows_many:
                await message.respond(refusal(keyloft.InvalidSubject("the operation is one of set, get, delete, list")))
            else:
                requests = json.loads(message.data)["requests"]
                reply = {"success": True, "exists": True, "value": 2}
                parts = [[position, reply] for position in range(len(requests))]
                await message.respond(json.dumps({"success": True, "replies": parts, "left": 0}).encode())

        other = await nats.connect(nats_url)
        await other.subscribe("older.>", cb=answer)
        await settled(other)
        async with connected(nats_url, prefix="older") as client:
            assert await asyncio.gather(*[client.kv.get("k") for _ in range(3)]) == [2, 2, 2]
            knows_many = False  # an instance of an older version answers now
            asked.clear()
            assert await asyncio.gather(*[client.kv.get("k") for _ in range(3)]) == [1, 1, 1]
            assert asked == ["many", "get", "get", "get"]
            assert await asyncio.gather(*[client.kv.get("k") for _ in range(3)]) == [1, 1, 1]
            assert asked == ["many", *["get"] * 6], "it does not ask again for a while"
        async with await DatabaseClient.connect(nats_url, plugin_name="trivia", prefix="older") as client:
            asked.clear()
            for _ in range(3):
                assert await asyncio.gather(*[client.kv.get("k") for _ in range(2)]) == [1, 1]
            assert sorted(asked) == [*["get"] * 6, "many"]
        await other.close()

    async def test_no_call_overtakes_an_earlier_one_of_its_key_when_a_service_loses_many(self, nats_url: str) -> None:
        stored: dict[str, Any] = {"k": 0}
        held: list[Msg] | None = None

        async def answer(message: Msg) -> None:
            operation, fields = message.subject.rpartition(".")[2], json.loads(message.data)
            if held is not None:
                held.append(message)
            elif operation == "many" and fields["requests"]:
                await message.respond(refusal(keyloft.InvalidSubject("the operation is one of set, get, delete, list")))
            elif operation == "many":
                await message.respond(b'{"success":true,"replies":[],"left":0}')
            elif operation == "set":
                stored[fields["key"]] = fields["value"]
                await message.respond(b'{"success":true}')
            else:
                found = stored.get(fields["key"])
                await message.respond(json.dumps({"success": True, "exists": True, "value": found}).encode())

        other = await nats.connect(nats_url)
        await other.subscribe("downgraded.>", cb=answer)
        await settled(other)
        async with connected(nats_url, prefix="downgraded") as client, asyncio.timeout(SECONDS):
            kv, held = client.kv, []
            together = [asyncio.ensure_future(kv.set(key, 1)) for key in ("k", "j", "l")]
            while len(held) < 1:
                await asyncio.sleep(0.001)
            more = [asyncio.ensure_future(kv.set("l", number)) for number in (2, 3)]
            while len(held) < 2:
                await asyncio.sleep(0.001)
            lone = asyncio.ensure_future(kv.get("k"))
            while len(held) < 3:
                await asyncio.sleep(0.001)
            arrived, held = held, None
            for message in arrived:
                await answer(message)
            refused, *done = await asyncio.gather(*together, *more, lone, return_exceptions=True)
            assert isinstance(refused, keyloft.Unanswered)
            assert "not carried out" in str(refused)
            assert done == [None, None, None, None, 0]
            assert stored == {"k": 0, "j": 1, "l": 3}, "what was sent again kept its order"
        await other.close()

    async def test_calls_that_are_sent_again_do_not_fail_later_ones_of_their_key(self, nats_url: str) -> None:
        stored: list[int] = []
        held: asyncio.Queue[Msg] = asyncio.Queue()

        async def answer(message: Msg) -> None:
            if message.data == b'{"parts":true,"short":true,"requests":[]}':
                await message.respond(b'{"success":true,"replies":[],"left":0}')
            elif not message.subject.endswith(".get"):
                held.put_nowait(message)
            else:
                await message.respond(b'{"success":true,"exists":false}')

        async def carry_out(message: Msg) -> None:
            if message.subject.endswith(".many"):
                await message.respond(refusal(keyloft.InvalidSubject("the operation is one of set, get, delete, list")))
            else:
                stored.append(json.loads(message.data)["value"])
                await message.respond(b'{"success":true}')

        other = await nats.connect(nats_url)
        await other.subscribe("slow-downgrade.>", cb=answer)
        await settled(other)
        async with connected(nats_url, prefix="slow-downgrade") as client, asyncio.timeout(SECONDS):
            calls, waiting = list[asyncio.Future[None]](), list[Msg]()
            for first in (1, 3):
                calls += [asyncio.ensure_future(client.kv.set("k", number)) for number in (first, first + 1)]
                waiting.append(await held.get())
            await carry_out(waiting[0])
            waiting += [await held.get(), await held.get()]  # the calls of the first message, each alone
            await carry_out(waiting[1])
            for message in waiting[2:]:
                await carry_out(message)
            for _ in range(2):
                await carry_out(await held.get())
            assert await asyncio.gather(*calls) == [None] * 4
            assert stored == [1, 2, 3, 4]
        await other.close()

    @pytest.mark.parametrize("by", ["connect", "a plain connection"])
    async def test_without_the_permission_calls_are_sent_alone(self, by: str, tmp_path: Path) -> None:
        isolation = isolate(["trivia"], prefixes=[PREFIX])
        text = re.sub(rf'(, )?"{re.escape(PREFIX)}\.trivia\.many"', "", isolation.text)
        assert text != isolation.text
        (tmp_path / "nats.conf").write_text(text)
        trivia = isolation.plugins["trivia"]
        async with private_server(tmp_path / "nats.conf") as server:
            connection = await nats.connect(server.url, **isolation.service.options())
            async with BotDatabase(tmp_path / "bot.db") as db, DatabaseService(connection, db, prefixes=[PREFIX]):
                plain = await nats.connect(server.url, **trivia.options())
                client = DatabaseClient(plain, "trivia", prefix=PREFIX)
                if by == "connect":
                    login = Login(user=trivia.name, password=trivia.password)
                    client = await DatabaseClient.connect(server.url, plugin_name="trivia", login=login, prefix=PREFIX)
                async with client, asyncio.timeout(SECONDS):
                    for number in range(3):
                        await asyncio.gather(*[client.kv.set(f"k{each}", number) for each in range(5)])
                        assert await client.kv.get("k4") == number
                await plain.close()
            await connection.close()
