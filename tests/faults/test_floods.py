"""Bursts and floods of requests: what was accepted is not lost, order holds, and what exceeds the bounds is refused."""

import asyncio
import gc
import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped,unused-ignore]
import pytest
from nats.aio.client import Client as Nats
from nats.errors import NoRespondersError

import keyloft
from bench.probes.flood_messages import Message
from bench.probes.fuzz_messages import fuzzed
from keyloft import limits
from keyloft.engines.commit.batcher import QueuedBatch
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.connection import connect
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.plugins import BotDatabase, DatabaseService
from keyloft.plugins.rules import OPERATIONS
from keyloft.semantic import SemanticService, SemanticStore
from tests.server.test_serve import Serving, serving, until
from tests.support.nats import private_server
from tests.support.postgres import database_url

pytestmark = pytest.mark.slow

PLUGINS = [f"plugin{number}" for number in range(30)]
SECONDS = 60


@pytest.fixture(params=["sqlite file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    # Not within the event loop: the first one starts a server.
    return database_url(request.param, request, tmp_path)


ON_SQLITE = pytest.mark.parametrize("url", ["sqlite file"], indirect=True)


@pytest.fixture
async def db(url: str) -> AsyncIterator[BotDatabase]:
    async with BotDatabase(url) as db:
        yield db


@asynccontextmanager
async def plugin_service(address: str, db: BotDatabase, **options: Any) -> AsyncIterator[DatabaseService]:
    async with (
        await connect(address, name="service") as connection,
        DatabaseService(connection, db, **options) as service,
    ):
        yield service


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Nats]:
    # Not nats-py's own client: its flush may return before the server has seen a subscription.
    connection = await connect(nats_url, name="client")
    yield connection
    await connection.close()


def commands(messages: Iterable[Message], reply: str = "") -> bytes:
    return b"".join(
        [b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data) for subject, data in messages]
    )


def sent(address: str, *parts: bytes) -> None:
    """Send as fast as a socket takes it; returns once the server has read it all."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as rogue:
        rogue.sendall(b'CONNECT {"verbose":false}\r\n' + b"".join(parts) + b"PING\r\n")
        read = b""
        while b"PONG\r\n" not in read:
            read = read[-8:] + rogue.recv(65536)


async def ask(client: Nats, subject: str, **fields: Any) -> dict[str, Any]:
    answer = await client.request(f"db.kv.{subject}", json.dumps(fields).encode(), timeout=SECONDS)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


# Bursts of published messages


async def until_handled(service: DatabaseService, messages: int) -> None:
    """Wait for as long as it goes on: a busy machine takes minutes for what another one does in seconds."""

    def handled() -> int:
        return sum(service.meters.histogram(name).count for name in ("set", "delete"))

    while (seen := handled()) != messages:
        async with asyncio.timeout(SECONDS):
            while handled() == seen:
                await asyncio.sleep(0.01)


@ON_SQLITE
@pytest.mark.parametrize("messages", [27_000, 100_000])
async def test_a_burst_of_all_plugins_is_stored_to_the_last_message_and_in_order(
    nats_url: str, db: BotDatabase, messages: int
) -> None:
    keys = 50
    expected = {plugin: dict.fromkeys(map(str, range(keys)), -1) for plugin in PLUGINS}

    def burst() -> Iterable[Message]:
        for number in range(messages):
            plugin, key = PLUGINS[number % len(PLUGINS)], number // len(PLUGINS) % keys
            if number % 7:
                expected[plugin][str(key)] = number
                yield f"db.kv.{plugin}.set", b'{"key":"%d","value":%d}' % (key, number)
            else:
                expected[plugin].pop(str(key), None)
                yield f"db.kv.{plugin}.delete", b'{"key":"%d"}' % key

    async with plugin_service(nats_url, db) as service:
        await asyncio.to_thread(sent, nats_url, commands(burst()))
        await until_handled(service, messages)
        assert sum(service.meters.of(plugin).dropped for plugin in PLUGINS) == 0
    stored = {
        plugin: {key: await db.kv_get(plugin, key) for key in (await db.kv_list(plugin))["keys"]} for plugin in PLUGINS
    }
    assert {plugin: {key: found["value"] for key, found in entries.items()} for plugin, entries in stored.items()} == {
        plugin: {key: value for key, value in entries.items() if value != -1} for plugin, entries in expected.items()
    }


@ON_SQLITE
async def test_the_last_of_3000_sets_of_one_key_wins_and_deletes_after_sets_leave_nothing(
    nats_url: str, client: Nats, db: BotDatabase
) -> None:
    async with plugin_service(nats_url, db):
        for number in range(3000):
            await client.publish("db.kv.trivia.set", b'{"key":"k","value":%d}' % number)
        assert (await ask(client, "trivia.get", key="k"))["value"] == 2999
        for operation, value in ((b"set", b',"value":1'), (b"delete", b"")):
            for number in range(1500):
                await client.publish(f"db.kv.quotes.{operation.decode()}", b'{"key":"%d"%b}' % (number, value))
        assert (await ask(client, "quotes.list"))["keys"] == []


@ON_SQLITE
async def test_a_write_that_is_done_is_freed(nats_url: str, client: Nats, db: BotDatabase) -> None:
    before = _count(QueuedBatch)  # of other tests' engines: each remembers one group
    async with plugin_service(nats_url, db):
        for number in range(3000):
            await client.publish("db.kv.trivia.set", b'{"key":"%d","value":1}' % number)
        assert (await ask(client, "trivia.list", limit=10_000))["count"] == 3000
        await until(lambda: _count(QueuedBatch) <= before + limits.OWNER_REQUESTS_UNDER_WAY)


def _count(kind: type) -> int:
    """How many objects of a class there are."""
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


# The end of a service in a burst


async def _answer(client: Nats, subject: str, data: bytes) -> bool | None:
    """Whether a request was carried out; None if no service was there, or it ended without an answer."""
    try:
        reply = await client.request(subject, data, timeout=SECONDS)
    except NoRespondersError:
        return None
    return bool(json.loads(reply.data)["success"])


async def _burst(client: Nats, served: Serving, number: signal.Signals) -> list[str]:
    """Send a signal amid 30 plugins' sets, published and requested; returns the acknowledged keys."""
    acknowledged: list[str] = []
    unanswered: list[str] = []

    async def write(key: str) -> None:
        done = await _answer(client, f"db.kv.{PLUGINS[0]}.set", b'{"key":"%b","value":1}' % key.encode())
        if done:
            acknowledged.append(key)
        elif done is None:
            unanswered.append(key)

    writing, is_sent = [], False
    for first in range(0, 20_000, 100):
        writing += [asyncio.create_task(write(str(key))) for key in range(first, first + 100)]
        for plugin in PLUGINS[1:]:
            for key in range(30):
                await client.publish(f"db.kv.{plugin}.set", b'{"key":"%d","value":%d}' % (key, first))
        await asyncio.sleep(0)
        if len(acknowledged) > 300 and not is_sent:
            served.process.send_signal(number)
            is_sent = True
        if unanswered or served.process.poll() is not None:
            break
    if number == signal.SIGKILL:
        await served.ends()
        await client.flush()
        for task in writing:
            task.cancel()
        await asyncio.wait(writing)
    else:
        await asyncio.gather(*writing)  # one without an answer would raise TimeoutError
    assert len(acknowledged) > 300
    return acknowledged


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_was_acknowledged_in_a_burst_is_there_after_the_service_has_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with private_server() as server:
        client = await connect(server.url, name="client")
        async with serving(tmp_path, "--nats", server.url, "--database", "burst.db") as served:
            acknowledged = await _burst(client, served, number)
            code = await served.ends()
            if number == signal.SIGTERM:
                assert code == 0
                assert "all accepted requests are answered" in served.log
        await client.close()
    async with BotDatabase(f"sqlite:///{tmp_path}/burst.db") as db:
        stored = {key async for key in db.kv_list(PLUGINS[0])}
        assert [key for key in acknowledged if key not in stored] == []


@ON_SQLITE
async def test_stopping_at_any_time_answers_all_that_was_accepted(
    nats_url: str, db: BotDatabase, rng: random.Random
) -> None:
    client = await connect(nats_url, name="client")
    for _ in range(10):
        pause = rng.choice((0, 0, 0.001, 0.005, 0.02))
        async with plugin_service(nats_url, db) as service:
            asking = [
                asyncio.create_task(
                    _answer(client, f"db.kv.{rng.choice(PLUGINS)}.{operation}", b'{"key":"k","value":1}')
                )
                for operation in rng.choices(OPERATIONS, k=500)
            ]
            await asyncio.sleep(pause)
        assert service.unanswered == 0
        # Without an answer, one would wait until it raises TimeoutError. A list refuses what it does not know.
        await asyncio.gather(*asking)
    await client.close()


async def test_a_call_whose_deadline_comes_before_its_first_step_is_answered_and_ends(
    nats_url: str, client: Nats
) -> None:
    connection = await connect(nats_url, name="service")
    async with keyloft.open() as kv, SemanticStore(kv, sweep_every=None) as store:
        service = SemanticService(connection, store, deadline=100)
        await service.start()
        replies = await client.subscribe("late.reply")
        await client.flush()
        taken = service.intake
        assert taken is not None
        taken.receive(b"db.semantic.acme.web.list", b"late.reply", b"{}")
        await asyncio.sleep(0)  # its turn comes, and its task has not yet begun
        taken.deadlines.give_up_late(time.perf_counter())
        reply = json.loads((await replies.next_msg(timeout=SECONDS)).data)
        assert reply["error_code"] == "DATABASE_ERROR"
        async with asyncio.timeout(SECONDS):
            await service.aclose()
    await connection.close()


# Beyond the bounds


@ON_SQLITE
async def test_beyond_the_bounds_requests_are_refused_and_published_messages_dropped_counted_and_logged(
    nats_url: str, client: Nats, db: BotDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    refused, count = await client.subscribe("bounds.reply"), 2000
    await client.flush()
    async with plugin_service(nats_url, db, bounds=IntakeBounds(owner_bytes=20_000)) as service:
        meter = service.meters.of("trivia")

        def handled() -> int:
            return service.meters.histogram("set").count + meter.errors["BUSY"] + meter.dropped

        asked = commands(
            [("db.kv.trivia.set", b'{"key":"%d","value":1}' % key) for key in range(count)], "bounds.reply"
        )
        await asyncio.to_thread(sent, nats_url, asked)
        await until(lambda: handled() == count)
        codes = Counter(
            [json.loads((await refused.next_msg(timeout=SECONDS)).data).get("error_code") for _ in range(count)]
        )
        assert codes == {None: count - meter.errors["BUSY"], "BUSY": meter.errors["BUSY"]}
        assert meter.errors["BUSY"] > 0
        assert meter.dropped == 0
        stored = (await ask(client, "trivia.list", limit=10_000))["count"]
        assert stored == count - meter.errors["BUSY"]

        published = commands([("db.kv.trivia.set", b'{"key":"p%d","value":1}' % key) for key in range(count)])
        await asyncio.to_thread(sent, nats_url, published)
        await until(lambda: handled() == 2 * count)
        assert meter.dropped > 0
        kept = (await ask(client, "trivia.list", limit=10_000))["count"] - stored
        assert kept == count - meter.dropped
    busy = [line for line in caplog.messages if "refused: plugin=trivia error=BUSY" in line]
    assert sum(int(re.findall(r"requests=(\d+)", line)[0]) for line in busy) == meter.errors["BUSY"]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert all("published messages of plugin=trivia" in line for line in lines)
    assert sum(int(re.findall(r"dropped (\d+)", line)[0]) for line in lines) == meter.dropped
    times = [record.created for record in caplog.records if record.levelno == logging.ERROR]
    # All but the last, which closing writes, are a second apart.
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(times[:-1]))


@ON_SQLITE
async def test_a_rate_that_is_set_is_kept_and_others_have_their_own(
    nats_url: str, client: Nats, db: BotDatabase
) -> None:
    async with plugin_service(nats_url, db, bounds=IntakeBounds(requests_per_second=20)):
        loop = asyncio.get_running_loop()
        began = loop.time()
        replies = await asyncio.gather(*[ask(client, "trivia.get", key="k") for _ in range(200)])
        most = 20 + 20 * (loop.time() - began)
        done = sum(reply["success"] for reply in replies)
        assert 20 <= done <= most
        assert {reply.get("error_code") for reply in replies} == {None, "BUSY"}
        assert (await ask(client, "quotes.get", key="k"))["success"]


async def test_a_flood_of_lists_takes_bounded_memory(tmp_path: Path) -> None:
    async with private_server() as server:
        client = await connect(server.url, name="client")
        async with serving(tmp_path, "--nats", server.url, "--database", "lists.db", new_interpreter=True) as served:
            about = {"expectedVersion": 0, "lastWriter": "harvester:sync", "semantics": {"purpose": "cursor"}}
            for number in range(20):
                put = {"key": f"docs/pages/{number}", "value": "x" * 60_000, **about}
                reply = await client.request("db.semantic.acme.web.put", json.dumps(put).encode(), timeout=SECONDS)
                assert json.loads(reply.data)["success"]
            wanted = 300
            asked = commands([("db.semantic.acme.web.list", b'{"values":true,"limit":10000}')] * wanted, "lists")
            await asyncio.to_thread(_exchanged, server.port, asked, "lists", wanted)
            [most] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{served.process.pid}/status").read_text())
            assert int(most) < 150 * 1024
        await client.close()


def _exchanged(port: int, asked: bytes, inbox: str, replies: int) -> list[bytes]:
    """Send requests at once, and read so many replies to them; returns what they begin with."""
    found: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as rogue:
        rogue.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\n' % inbox.encode())
        rogue.sendall(asked)
        with rogue.makefile("rb") as lines:
            while len(found) < replies:
                line = lines.readline()
                assert line, "nats-server has cut off the sender"
                if line.startswith(b"MSG "):
                    found.append(lines.read(int(line.split()[-1]) + 2)[:300])
                elif line.startswith(b"PING"):
                    rogue.sendall(b"PONG\r\n")
                assert not line.startswith(b"-ERR"), line
    return found


# Order and independence


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_a_row_that_another_client_has_locked_delays_its_own_owner_alone(
    nats_url: str, client: Nats, db: BotDatabase, url: str
) -> None:
    async with plugin_service(nats_url, db, deadline=3600):
        for plugin in PLUGINS:
            assert (await ask(client, f"{plugin}.set", key="k", value=0))["success"]
        rival = await asyncpg.connect(url)
        transaction = rival.transaction()
        await transaction.start()
        await rival.execute("SELECT * FROM plugin_kv_storage WHERE plugin_name = $1 FOR UPDATE", PLUGINS[0])
        locked = asyncio.create_task(ask(client, f"{PLUGINS[0]}.set", key="k", value=1))
        for number in range(200):
            plugin = PLUGINS[1 + number % (len(PLUGINS) - 1)]
            assert (await ask(client, f"{plugin}.set", key="k", value=number))["success"]
        assert not locked.done()
        await transaction.rollback()
        assert (await locked)["success"]
        assert (await ask(client, f"{PLUGINS[0]}.get", key="k"))["value"] == 1
        await rival.close()


async def test_whatever_comes_between_a_get_sees_the_sets_before_it_and_a_list_all_writes(
    nats_url: str, client: Nats, db: BotDatabase, rng: random.Random
) -> None:
    """Requests are sent without waiting for replies. Writes keep their order; reads may see later ones."""
    owners, keys = PLUGINS[:4], "abcdef"
    states: dict[tuple[str, str], list[int | None]] = {(owner, key): [None] for owner in owners for key in keys}
    """What each key has held, in the order of the writes; None where it was absent."""
    asking: list[tuple[asyncio.Task[dict[str, Any]], str, dict[str, int], dict[str, Any]]] = []
    async with plugin_service(nats_url, db):
        await ask(client, "first.list")  # nats-py subscribes at the first request, and others would overtake it
        for number in range(3000):
            owner, key = rng.choice(owners), rng.choice(keys)
            fields: dict[str, Any] = {"key": key}
            expected: dict[str, Any] = {"success": True}
            match operation := rng.choice(("set", "set", "get", "get", "delete", "list")):
                case "set":
                    fields["value"] = number
                    states[owner, key].append(number)
                case "delete":
                    expected["deleted"] = states[owner, key][-1] is not None
                    states[owner, key].append(None)
                case "list":
                    fields = {}
            if operation in ("set", "delete") and rng.random() < 0.5:
                await client.publish(f"db.kv.{owner}.{operation}", json.dumps(fields).encode())
                continue
            seen = {one: len(states[owner, one]) - 1 for one in ([key] if fields else keys)}
            task = asyncio.create_task(ask(client, f"{owner}.{operation}", **fields))
            asking.append((task, owner, seen, expected))
            await asyncio.sleep(0)  # it is sent before the next one
            if rng.random() < 0.01:
                await asyncio.wait([task for task, *_ in asking])
        for task, owner, seen, expected in asking:
            reply = await task
            if "exists" in reply:
                [(key, first)] = seen.items()
                assert reply.get("value") in states[owner, key][first:]
            elif "keys" in reply:
                for key, first in seen.items():
                    assert (key in reply["keys"]) in [state is not None for state in states[owner, key][first:]]
            else:
                assert reply == expected


# Messages that no client would send


async def test_10000_fuzzed_messages_get_a_stable_code_each(tmp_path: Path, rng: random.Random) -> None:
    async with (
        private_server() as server,
        serving(tmp_path, "--nats", server.url, "--database", "fuzzed.db") as served,
    ):
        codes: Counter[str] = Counter()
        messages = fuzzed(rng, "trivia", "acme")
        memory: list[int] = []
        for _ in range(10):
            some = [one for one in itertools.islice(messages, 1000) if not {"*", ">"} & set(one[0].split("."))]
            odd = [
                commands([one], rng.choice(("", "db.kv.victim.set", "db.semantic.acme.web.put", "a..b")))
                for one in some[:50]
            ]
            asked = b"".join(odd) + commands(some, "fuzz")
            for reply in await asyncio.to_thread(_exchanged, server.port, asked, "fuzz", len(some)):
                codes[(re.findall(rb'"error_code":"(\w+)"', reply) or [b"success"])[0].decode()] += 1
            memory.append(_resident(served))
        assert set(codes) - {"success"} <= set(WIRE_ERRORS) - {"INTERNAL_ERROR"}
        assert codes["success"] > 0
        assert "Traceback" not in served.log
        assert memory[-1] - memory[3] < 20 * 1024 * 1024, "it grows"
        assert "the connection is lost" not in served.log


def _resident(served: Serving) -> int:
    pages = int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
