"""Floods by hostile owners against a real `keyloft serve`: what a well-behaved plugin notices.

nats-server has the permissions of `nats-config`. Threads send a flood over raw sockets as fast as the server takes it,
pause, and send it again; the plugin that is measured is a stock nats-py client. nats-server cuts off a service that has
more than `max_pending` to read: that is counted, too.
"""

import asyncio
import json
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
from msgspec import Struct
from nats.aio.client import Client

from bench.harness.contest import IN_FLIGHT
from bench.harness.figures import Figure, Row, percentile, within
from bench.probes.flood_messages import LISTED_ENTRIES, VALUE_BYTES, Flood, Message
from bench.probes.fuzz_messages import fuzzed
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.server.isolation import Isolation, NatsUser, isolate
from keyloft.server.nats_process import NatsServer

LONGEST_MILLISECONDS: Final = 500
MOST_MEGABYTES: Final = 150
_GOOD: Final = "good"
_OWNERS: Final = ("flood0", "flood1", "flood2")
_GOOD_KEYS: Final = 500
_REQUEST_SECONDS: Final = 10.0
_ENDING_SECONDS: Final = 60.0
_CHUNK_BYTES: Final = 256 * 1024
_FUZZ_WINDOW: Final = 200
"""How many fuzzed messages wait for their reply at a time."""


# The server and the service


class FloodedService:
    """A `keyloft serve` under the permissions of `nats-config`, and what is known of it."""

    def __init__(self, server: NatsServer, isolation: Isolation, pid: int, log: Path) -> None:
        self.server = server
        self.isolation = isolation
        self._status = Path(f"/proc/{pid}/status")
        self._log = log

    def megabytes(self, field: str = "VmRSS") -> float:
        """Its memory now; with `VmHWM`, the most since it started."""
        [kilobytes] = re.findall(rf"{field}:\s+(\d+) kB", self._status.read_text())
        return int(kilobytes) / 1024

    def cut_off(self) -> int:
        """How often nats-server ended its connection."""
        return self._log.read_text().count("the connection is lost")

    def user(self, flood: Flood, owner: str) -> NatsUser:
        if flood.by_operator:
            return self.isolation.admin
        return (self.isolation.tenants if flood.is_semantic else self.isolation.plugins)[owner]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[FloodedService]:
    """A server and a service for this block alone."""
    own = Path(tempfile.mkdtemp(dir=folder))
    isolation = isolate([_GOOD, *_OWNERS], [_GOOD, *_OWNERS])
    isolation.write(own / "nats.conf")
    async with NatsServer(config=own / "nats.conf") as server:
        with (own / "serve.log").open("wb") as log:
            login = ("--nats-user", isolation.service.name, "--nats-password", isolation.service.password)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "keyloft", "serve", "--nats", server.url, *login),
                *("--database", str(own / "flooded.db"), "--http", "off"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
            )
        try:
            async with asyncio.timeout(60):
                while "serving db.semantic" not in (own / "serve.log").read_text():
                    if process.returncode is not None:
                        raise RuntimeError((own / "serve.log").read_text())
                    await asyncio.sleep(0.02)
            yield FloodedService(server, isolation, process.pid, own / "serve.log")
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await _ended(process)
    shutil.rmtree(own)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait until a service that is ending has answered what it accepted; kill it if that takes too long."""
    try:
        async with asyncio.timeout(_ENDING_SECONDS):
            await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# The floods


class Sender:
    """A raw connection to nats-server: it sends without waiting, and its replies are only counted."""

    def __init__(self, server: NatsServer, user: NatsUser) -> None:
        self.inbox = f"{user.inbox_prefix}.flood".encode()
        self.replies = 0
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        options = {"verbose": False, "pedantic": False, "user": user.name, "pass": user.password}
        self._socket.sendall(b"CONNECT %b\r\nSUB %b 1\r\n" % (json.dumps(options).encode(), self.inbox))
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def send_until(self, over: threading.Event, commands: bytes, pause: float) -> int:
        """Send all commands again and again, with a pause; returns how many times they were sent."""
        view, times = memoryview(commands), 0
        with suppress(OSError):  # nats-server ends a connection that does not read its replies fast enough
            while not over.is_set():
                for first in range(0, len(view), _CHUNK_BYTES):
                    self._socket.sendall(view[first : first + _CHUNK_BYTES])
                times += 1
                over.wait(pause)
        return times

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reading.join()

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._socket.recv(1024 * 1024):
                self.replies += data.count(b"MSG ")


def commands_of(messages: Sequence[Message], inbox: bytes) -> bytes:
    pub = b"PUB %b %b %d\r\n%b\r\n"
    return b"".join([pub % (subject.encode(), inbox, len(data), data) for subject, data in messages])


class _Flooding:
    """A flood under way."""

    def __init__(self, service: FloodedService, flood: Flood, owners: Sequence[str]) -> None:
        self._over = threading.Event()
        self._senders = [Sender(service.server, service.user(flood, owner)) for owner in owners]
        self.times = [0] * len(owners)
        """How often each sender sent all its messages."""
        self._threads = [threading.Thread(target=self._send, args=(flood, *one)) for one in enumerate(owners)]
        for thread in self._threads:
            thread.start()

    def _send(self, flood: Flood, number: int, owner: str) -> None:
        sender = self._senders[number]
        commands = commands_of(flood.messages(owner), b"" if flood.is_published else sender.inbox)
        self.times[number] = sender.send_until(self._over, commands, flood.pause)

    @property
    def replies(self) -> int:
        return sum(sender.replies for sender in self._senders)

    def end(self) -> None:
        self._over.set()
        for sender in self._senders:
            sender.close()  # also wakes one that waits for the socket
        for thread in self._threads:
            thread.join()


async def flooded(folder: Path, flood: Flood, owners: int, seconds: float) -> Row:
    """Measure one flood by some owners, while a well-behaved plugin has one request under way, then 64."""
    names = _OWNERS[:owners]
    async with serving(folder) as service:
        if flood.has_entries:
            for name in names:
                await _fill(service, name)
        client = await nats.connect(service.server.url, **service.isolation.plugins[_GOOD].options())
        flooding = _Flooding(service, flood, names)
        try:
            one = await _behaving(client, 1, seconds)
            many = await _behaving(client, IN_FLIGHT, seconds)
        finally:
            await asyncio.to_thread(flooding.end)
        peak, cut_off = service.megabytes("VmHWM"), service.cut_off()
        await client.close()
    figures = (
        Figure("longest wait, one at a time", "ms", (max(one.waits),)),
        Figure("p99, one at a time", "ms", (percentile(one.waits, 99),)),
        Figure(f"longest wait, {IN_FLIGHT} at a time", "ms", (max(many.waits),)),
        Figure(f"p99, {IN_FLIGHT} at a time", "ms", (percentile(many.waits, 99),)),
        Figure("requests of the plugin", "", (float(len(one.waits) + len(many.waits)),)),
        Figure("lost, refused or wrong", "", (float(one.wrong + many.wrong),)),
        Figure("memory of the service, at most", "MB", (peak,)),
        Figure("cut off by nats-server", "times", (float(cut_off),)),
        Figure("rounds of the flood", "", (float(sum(flooding.times)),)),
        Figure("replies to the flood", "", (float(flooding.replies),)),
    )
    bars = {0: LONGEST_MILLISECONDS, 2: LONGEST_MILLISECONDS, 5: 0, 6: MOST_MEGABYTES, 7: 0}
    by = "one owner" if owners == 1 else f"{owners} owners"
    return Row(
        f"{flood.title}, again after {flood.pause:g} s, by {by}",
        figures=figures,
        verdicts=tuple(within(figures[number], bar) for number, bar in bars.items()),
    )


async def _fill(service: FloodedService, tenant: str) -> None:
    client = await nats.connect(service.server.url, **service.isolation.tenants[tenant].options())
    about = {"expectedVersion": 0, "lastWriter": "harvester:sync", "semantics": {"purpose": "cursor"}}
    for number in range(LISTED_ENTRIES):
        put = {"key": f"docs/pages/{number}", "value": "x" * VALUE_BYTES, **about}
        reply = await client.request(f"db.semantic.{tenant}.web.put", json.dumps(put).encode(), timeout=30)
        assert json.loads(reply.data)["success"], reply.data
    await client.close()


class _Behaviour(Struct):
    """What a well-behaved plugin met with."""

    waits: list[float]
    """Milliseconds."""
    wrong: int = 0
    """Requests that were not answered, refused, or answered with something else than was stored."""


async def _behaving(client: Client, workers: int, seconds: float) -> _Behaviour:
    """Set a key and get it again, for a while, by so many workers; each has keys of its own."""
    found, ends = _Behaviour([]), time.perf_counter() + seconds

    async def asked(operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            reply = await client.request(
                f"db.kv.{_GOOD}.{operation}", msgspec.json.encode(fields), timeout=_REQUEST_SECONDS
            )
            answer: dict[str, Any] = msgspec.json.decode(reply.data)
        except nats.errors.Error:
            answer = {}
        found.waits.append((time.perf_counter() - began) * 1000)
        return answer

    async def work(worker: int) -> None:
        number = 0
        while time.perf_counter() < ends:
            key, number = f"{workers}/{worker}/{number % _GOOD_KEYS}", number + 1
            stored = await asked("set", {"key": key, "value": number})
            got = await asked("get", {"key": key})
            found.wrong += (stored.get("success") is not True) + (got.get("value") != number)

    await asyncio.gather(*map(work, range(workers)))
    return found


# Fuzz


class _FloodOutcome(Struct):
    """What a reply says of its request; whatever else is in it may be more than Python reads."""

    success: bool
    error_code: str = "success"


async def fuzz(folder: Path, messages: int) -> Row:
    """Send random messages: each gets a reply with a stable code, and the service's memory does not grow."""
    chances = random.Random(messages)
    codes: dict[str, int] = {}
    unanswered = 0
    async with serving(folder) as service:
        client = await nats.connect(service.server.url, **service.isolation.admin.options())
        todo = islice(_sendable(chances), messages)

        async def work() -> None:
            nonlocal unanswered
            for subject, payload in todo:
                try:
                    reply = await client.request(subject, payload, timeout=_REQUEST_SECONDS)
                except nats.errors.Error:
                    unanswered += 1
                    continue
                code = msgspec.json.decode(reply.data, type=_FloodOutcome).error_code
                if b'"INTERNAL_ERROR"' in reply.data:  # perhaps of one of the requests of a many
                    code = "INTERNAL_ERROR"
                codes[code] = codes.get(code, 0) + 1
                if sum(codes.values()) == messages // 2:  # by then, there are as many watches as there may be
                    early.append(service.megabytes())

        early: list[float] = []
        await asyncio.gather(*[work() for _ in range(_FUZZ_WINDOW)])
        late, cut_off = service.megabytes(), service.cut_off()
        await client.close()
    unknown = sum(times for code, times in codes.items() if code != "success" and code not in WIRE_ERRORS)
    figures = (
        Figure("unanswered", "", (float(unanswered),)),
        Figure("INTERNAL_ERROR, or an unknown code", "", (float(codes.get("INTERNAL_ERROR", 0) + unknown),)),
        Figure("cut off by nats-server", "times", (float(cut_off),)),
        Figure("growth of memory by the second half of them", "MB", (late - early[0],)),
    )
    answered = tuple(Figure(code, "replies", (float(times),)) for code, times in sorted(codes.items()))
    return Row(
        f"{messages:,} fuzzed messages",
        figures=(*figures, *answered),
        verdicts=tuple(within(figure, bar) for figure, bar in zip(figures, (0, 0, 0, 5), strict=True)),
    )


def _sendable(chances: random.Random) -> Iterator[Message]:
    """Fuzzed messages whose subject nats-server takes from a client."""
    for subject, payload in fuzzed(chances, _OWNERS[0], _OWNERS[0]):
        if not set(subject) & set("*> ") and "" not in subject.split("."):
            yield subject, payload
