"""The HTTP API of a real `keyloft serve`: gets and durable puts over some connections, a change to many listeners."""

import asyncio
import hashlib
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from msgspec import Struct

from bench.harness import processes
from bench.harness.children import Child, child
from bench.harness.contest import same
from bench.harness.figures import CPU, PERCENTS, RATE, Figure, Reached, Row, compare, percentile, within
from bench.probes.http_load import HttpLoad, loaded

CONNECTIONS = 32
ECHO, GET, PUT = "bare Starlette echo", "Keyloft, get", "Keyloft, durable put"

TOKEN = "kl_benchmark-token"
_KEYS = 1000
_VALUE = b'{"name":"Alice","score":42}'
_READY_SECONDS = 120.0
_PAUSE_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_HEAD = f"Host: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


class _HttpArm(Struct, frozen=True):
    """One server at one operation."""

    name: str
    server: Child
    port: int
    request: Callable[[int, int], bytes]
    kept: str = ""


def _get(path: bytes) -> Callable[[int, int], bytes]:
    return lambda connection, number: (
        b"GET %b%d HTTP/1.1\r\n%bAccept: */*\r\n\r\n"
        % (
            path,
            (connection * 31 + number) % _KEYS,
            _HEAD,
        )
    )


def put_request(connection: int, number: int) -> bytes:
    return b"PUT /v1/kv/bench/=%d HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        (connection * 31 + number) % _KEYS,
        _HEAD,
        len(_VALUE),
        _VALUE,
    )


async def requests(folder: Path, rounds: int, seconds: float) -> Row:
    """Gets and puts beside an echo, in turns, so that what slows one round down slows all arms down."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        echo_port = _free_port()
        async with (
            child("bench.arms.http.echo_service", echo_port) as echo,
            serving(Path(own)) as (service, port),
        ):
            await _filled(port)
            arms = (
                _HttpArm(ECHO, echo, echo_port, _get(b"/echo/bench/=")),
                _HttpArm(GET, service, port, _get(b"/v1/kv/bench/=")),
                _HttpArm(PUT, service, port, put_request, "on disk"),
            )
            for arm in arms:
                await _measured(arm, min(seconds, 0.5))
            reached: dict[str, list[tuple[HttpLoad, float]]] = {arm.name: [] for arm in arms}
            for _ in range(rounds):
                for arm in arms:
                    reached[arm.name].append(await _measured(arm, seconds))
    found = {arm.name: _reached(arm, reached[arm.name]) for arm in arms}
    return Row(
        f"gets and durable puts over HTTP, {CONNECTIONS} connections",
        arms=tuple(found.values()),
        base=ECHO,
        verdicts=(compare(found[GET].rate, found[ECHO].rate, 0.6), compare(found[PUT].rate, found[GET].rate, 0.5)),
    )


async def listeners(folder: Path, number: int, rounds: int) -> Row:
    """From sending a put until the last of many listeners has its event."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with serving(Path(own)) as (service, port):
            before = service.resident_megabytes()
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
            for _, writer in streams:
                writer.write(b"GET /v1/watch?prefix=bench HTTP/1.1\r\n%b\r\n" % _HEAD)
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.gather(*[reader.readuntil(b"data: {}\n\n\r\n") for reader, _ in streams])
                times = [await _until_last(port, [reader for reader, _ in streams], one) for one in range(rounds)]
            grown = service.resident_megabytes() - before
            for _, writer in streams:
                writer.transport.abort()
    figure = Figure(f"from sending a put to the event of the last of {number:,} listeners", "ms", tuple(times))
    memory = Figure("memory of the service for the listeners", "MB", (grown,))
    return Row(f"a change to {number:,} listeners over HTTP", figures=(figure, memory), verdicts=(within(figure, 250),))


@asynccontextmanager
async def serving(folder: Path, scope: str = "write:kv/bench") -> AsyncIterator[tuple[Child, int]]:
    """A service with a token that may read and write what is measured; yields it and its port."""
    port, tokens = _free_port(), folder / "tokens.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(f'[[token]]\nname = "bench"\nsha256 = "{digest}"\nscopes = ["{scope}"]\n')
    options = ["--database", str(folder / "http.db"), "--nats-port", "0", "--http", f"127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:  # the audit log has a line for each put: a file, as in earnest
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "keyloft", "serve", *options, "--http-tokens", str(tokens)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_READY_SECONDS):
            while "is running." not in (folder / "log").read_text():  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(_PAUSE_SECONDS)
        yield Child(process), port
    finally:
        async with processes.ending(process):
            process.terminate()


async def _filled(port: int) -> None:
    numbers = iter(range(_KEYS))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        writer.write(put_request(0, number))
        head = await reader.readuntil(b"\r\n\r\n")
        same(head[9:12], b"201")
        await reader.readuntil(b"}")
    writer.close()


async def _measured(arm: _HttpArm, seconds: float) -> tuple[HttpLoad, float]:
    before = arm.server.cpu_seconds()
    load = await loaded(arm.port, arm.request, connections=CONNECTIONS, seconds=seconds)
    return load, (arm.server.cpu_seconds() - before) / len(load.times)


def _reached(arm: _HttpArm, rounds: list[tuple[HttpLoad, float]]) -> Reached:
    figures = {RATE: Figure(arm.name, "/s", tuple([len(load.times) / load.seconds for load, _ in rounds]))}
    for percent in PERCENTS:
        times = tuple([1000 * percentile(load.times, percent) for load, _ in rounds])
        figures[f"p{percent}"] = Figure(f"{arm.name}, p{percent}", "ms", times)
    figures[CPU] = Figure(f"{arm.name}, CPU", "µs", tuple([1e6 * cpu for _, cpu in rounds]))
    return Reached(arm.name, figures, arm.kept)


async def _until_last(port: int, readers: list[asyncio.StreamReader], number: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = perf_counter()
    writer.write(put_request(0, number))
    await asyncio.gather(*[each.readuntil(b"}]}\n\n\r\n") for each in readers])
    took = 1000 * (perf_counter() - began)
    await reader.readuntil(b"}")
    writer.close()
    return took


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
