"""Scrapes of a real `keyloft serve`: how long they take with many keys stored, and how much memory it has then."""

import asyncio
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from bench.arms.nats.keyloft_service import filled
from bench.arms.nats.requests import clients, exchange, getting
from bench.harness import processes
from bench.harness.children import Child
from bench.harness.contest import IN_FLIGHT, same
from bench.harness.data import key_of
from bench.harness.figures import Figure, Row, within

_PAUSE_SECONDS = 0.1
_READY_SECONDS = 120.0
_READ = 100_000
"""So many keys are read over NATS first."""


async def scraping(folder: Path, stored: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "scraped.db"
        await filled(path, stored)
        async with _serving(path) as (service, nats, port):
            async with clients(nats, 1) as [client]:
                await exchange(client, [getting(key_of(index)) for index in range(min(stored, _READ))], IN_FLIGHT)
            began = perf_counter()
            while not (counted := _counted(await _page(port, "/metrics"))):  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(_PAUSE_SECONDS)
            first = perf_counter() - began
            same(counted, stored)
            times = [await _timed(port) for _ in range(rounds)]
            resident = service.resident_megabytes()
    memory = Figure("resident memory of `keyloft serve` after it", "MB", (resident,))
    scrape = Figure("a scrape with what each plugin stores", "s", tuple(times))
    return Row(
        f"a scrape of `keyloft serve`, {stored:,} keys",
        figures=(scrape, Figure("until all keys are counted for the first time", "s", (first,)), memory),
        verdicts=(within(scrape, 0.2), within(memory, 50)),
    )


@asynccontextmanager
async def _serving(path: Path) -> AsyncIterator[tuple[Child, str, int]]:
    """The service with a nats-server of its own; yields it, the address of NATS and the port of its pages."""
    nats, port = _free_port(), _free_port()
    options = ["--database", str(path), "--nats-port", str(nats), "--http", f"127.0.0.1:{port}"]
    quiet = ["--log-level", "warning", "--log-format", "json"]
    process = await processes.started(sys.executable, "-m", "keyloft", "serve", *options, *quiet)
    try:
        async with asyncio.timeout(_READY_SECONDS):
            while b" 200 " not in (await _page(port, "/healthz"))[:16]:  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(_PAUSE_SECONDS)
        yield Child(process), f"nats://127.0.0.1:{nats}", port
    finally:
        async with processes.ending(process):
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def _timed(port: int) -> float:
    began = perf_counter()
    await _page(port, "/metrics")
    return perf_counter() - began


async def _page(port: int, path: str) -> bytes:
    """A page with its headers; nothing if it can't be had yet."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return await reader.read(-1)
    finally:
        writer.close()


def _counted(page: bytes) -> int:
    return sum([int(count) for count in re.findall(rb"^rosey_kv_keys_total\S* (\d+)$", page, re.MULTILINE)])
