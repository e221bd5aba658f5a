"""Crowds of clients that do nothing, against a real service: its memory is bounded, and others are served."""

import asyncio
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from keyloft.plugins import DatabaseClient
from tests.http.api import Events
from tests.server.test_serve import LONGEST_SECONDS, Serving, serving
from tests.support.http import http_client

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests-only"
IDLE, DEAF = 10_000, 1_000


def memory_mb(served: Serving) -> float:
    """What the service has in memory now."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


class IdleClients:
    """Sockets that connect, send something, and read nothing."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._sockets = ExitStack()

    def __enter__(self) -> "IdleClients":
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()

    async def grow(self, number: int, sent: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        for _ in range(number):
            one = self._sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(one, self._address)
            if sent:
                await loop.sock_sendall(one, sent)


@asynccontextmanager
async def service(folder: Path, *flags: str) -> AsyncIterator[tuple[Serving, httpx.AsyncClient, DatabaseClient]]:
    async with serving(folder, "--nats-port", "0", "--http-token", TOKEN, *flags) as served:
        url = str(re.findall(r"http://[\d.]+:\d+", served.log)[0])
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            http_client(url, headers=headers, timeout=LONGEST_SECONDS) as client,
            await DatabaseClient.connect(served.nats, plugin_name="trivia") as plugin,
        ):
            yield served, client, plugin


async def works(client: httpx.AsyncClient, plugin: DatabaseClient) -> None:
    assert (await client.put("/v1/kv/a", json=1)).status_code in (200, 201)
    assert (await client.get("/v1/kv/a")).json()["value"] == 1
    await plugin.kv.set("k", 1)
    assert await plugin.kv.get("k") == 1


async def shown(client: httpx.AsyncClient, metric: str) -> float:
    return float(re.findall(rf"^rosey_{metric} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)[0])


async def test_ten_thousand_idle_connections_take_little_memory(tmp_path: Path) -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < IDLE + 500:
        pytest.skip(f"needs {IDLE + 500} open files; `ulimit -n` allows {most}")
    async with service(tmp_path, "--http-connections", str(IDLE + 200)) as (served, client, plugin):
        await works(client, plugin)
        before = memory_mb(served)
        with IdleClients((client.base_url.host, client.base_url.port or 0)) as crowd:
            await crowd.grow(IDLE)
            async with asyncio.timeout(LONGEST_SECONDS):
                while await shown(client, "http_connections") < IDLE:
                    await asyncio.sleep(0.05)
            await works(client, plugin)
            grown = memory_mb(served) - before
            assert await shown(client, "http_refused_connections_total") == 0
        assert grown < 100, f"{grown:.0f} MB for {IDLE:,} connections"


async def test_a_thousand_listeners_that_do_not_read_are_cut_off_and_others_go_on(tmp_path: Path) -> None:
    async with service(tmp_path) as (served, client, plugin):
        await works(client, plugin)
        watch = f"GET /v1/watch?prefix=w HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        with IdleClients((client.base_url.host, client.base_url.port or 0)) as crowd:
            async with client.stream("GET", "/v1/watch?prefix=w") as stream:
                events = Events(stream)
                assert (await events.next())[0] == "ready"
                before = memory_mb(served)
                await crowd.grow(DEAF, watch)
                async with asyncio.timeout(LONGEST_SECONDS):
                    while await shown(client, "http_watches") < DEAF + 1:
                        await asyncio.sleep(0.05)
                most, number = 0.0, 0
                async with asyncio.timeout(LONGEST_SECONDS):
                    while await shown(client, "http_watches") > 1:
                        number += 1
                        assert (await client.put(f"/v1/kv/w/={number}", json="x" * 100_000)).status_code == 201
                        [entry] = (await events.next())[2]["entries"]
                        assert entry["key"] == f"w/={number}", "the listener that reads has every change"
                        most = max(most, memory_mb(served) - before)
                        if number % 4 == 0:
                            await works(client, plugin)
                    await works(client, plugin)
        assert most < 100, f"{most:.0f} MB for {DEAF:,} listeners"
