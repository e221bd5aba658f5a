"""The admin page of a real `keyloft serve`: how long views take over a large database, and what open pages cost."""

import asyncio
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

from bench.harness.children import Child
from bench.harness.contest import same
from bench.harness.figures import Figure, Row, within
from bench.probes.http_service import TOKEN, put_request, serving
from keyloft.core import keys
from keyloft.core.records import Batch, Set, Space
from keyloft.core.values import Encoding
from keyloft.engines import open_engine

_OPEN_PAGES = 50
_CHANGES_PER_SECOND = 100
_ROWS = 100
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_VIEWS = {
    "first view, the overview": "/page",
    f"a page of {_ROWS} keys": "/page/tuples?q=bench/",
    f"a page of {_ROWS} plugins": "/page/plugins?after=plugin-5",
    f"a page of {_ROWS} keys of one plugin": "/page/plugin?name=plugin-0",
}


async def views(folder: Path, entries: int, plugins: int, rounds: int) -> Row:
    """The time of each view, from the request to its last byte, and the CPU that the service took for it."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        await _fill(Path(own) / "http.db", entries, plugins)
        async with serving(Path(own), "admin") as (service, port):
            cookie = await _log_in(port)
            figures: list[Figure] = []
            for name, path in _VIEWS.items():
                times, cpu = await _viewed(service, port, path, cookie, rounds)
                figures += [Figure(name, "ms", times), Figure(f"{name}, CPU of the service", "ms", cpu)]
    # The first figure of each view has the compiling of its template in it: all rounds count for the first view.
    verdicts = [within(figure, 100 if "first" in figure.name else 50) for figure in figures if "CPU" not in figure.name]
    title = f"views of the admin page, {entries:,} keys and {plugins:,} plugins"
    return Row(title, figures=tuple(figures), verdicts=tuple(verdicts))


async def open_pages(folder: Path, seconds: float, rounds: int) -> Row:
    """What open pages add to the CPU of a service that makes a hundred changes a second."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with serving(Path(own), "admin") as (service, port):
            cookie, numbers = await _log_in(port), iter(range(10**9))
            shares: dict[int, list[float]] = {0: [], _OPEN_PAGES: []}
            for _ in range(rounds):
                for number, reached in shares.items():
                    reached.append(await _share(service, port, cookie, number, seconds, numbers))
    added = [with_pages - without for without, with_pages in zip(*shares.values(), strict=True)]
    figure = Figure(f"CPU that {_OPEN_PAGES} open pages add", "% of a core", tuple(added))
    without = Figure("CPU of the service without open pages", "% of a core", tuple(shares[0]))
    title = f"{_OPEN_PAGES} open pages, {_CHANGES_PER_SECOND} changes a second"
    return Row(title, figures=(figure, without), verdicts=(within(figure, 10),))


async def _fill(database: Path, entries: int, plugins: int) -> None:
    engine = await open_engine(str(database), durability="relaxed")
    tuples = [Set(Space.TUPLES, keys.encode(("bench", number)), b"1", Encoding.JSON) for number in range(entries)]
    stored = [Set(Space.PLUGINS, (f"plugin-{number}", "a"), b"1", Encoding.JSON) for number in range(plugins)]
    stored += [Set(Space.PLUGINS, ("plugin-0", f"key-{number}"), b"1", Encoding.JSON) for number in range(1000)]
    for some in (tuples, stored):
        for at in range(0, len(some), 5000):
            await engine.commit(Batch(tuple(some[at : at + 5000])))
    await engine.aclose()


async def _viewed(
    service: Child, port: int, path: str, cookie: bytes, rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    times, cpu = [], []
    for _ in range(rounds):
        before, began = service.cpu_seconds(), perf_counter()
        same((await _get(port, path, cookie))[9:12], b"200")
        times.append(1000 * (perf_counter() - began))
        cpu.append(1000 * (service.cpu_seconds() - before))
    return tuple(times), tuple(cpu)


async def _share(service: Child, port: int, cookie: bytes, pages: int, seconds: float, numbers: Iterator[int]) -> float:
    """The CPU of the service, in percent of a core, with so many open pages on some views."""
    views: Sequence[str] = ("/page", "/page/tuples?q=bench/", "/page/plugins", "/page/projects", "/page/tuples")
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(pages)]
    for at, (_, writer) in enumerate(streams):
        view = views[at % len(views)].replace("?", "%3F").replace("=", "%3D")
        writer.write(b"GET /page/events?view=%b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n" % (view.encode(), cookie))
    reading = [asyncio.create_task(_drain(reader)) for reader, _ in streams]
    changing = asyncio.create_task(_change(port, numbers))
    await asyncio.sleep(2)
    before, began = service.cpu_seconds(), perf_counter()
    await asyncio.sleep(seconds)
    share = 100 * (service.cpu_seconds() - before) / (perf_counter() - began)
    for task in (changing, *reading):
        task.cancel()
    received = await asyncio.gather(*reading, return_exceptions=True)
    assert all([isinstance(one, asyncio.CancelledError) for one in received]), "a stream has ended"
    for _, writer in streams:
        writer.transport.abort()
    return share


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


async def _change(port: int, numbers: Iterator[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for number in numbers:
        due += 1 / _CHANGES_PER_SECOND
        writer.write(put_request(0, number))
        await reader.readuntil(b"}")
        await asyncio.sleep(max(0.0, due - loop.time()))


async def _log_in(port: int) -> bytes:
    answer = await _get(port, f"/?token={TOKEN}", b"")
    found = re.search(rb"set-cookie: (keyloft-session-[^;]+)", answer)
    assert found is not None
    return b"cookie: %b\r\n" % found[1]


async def _get(port: int, path: str, cookie: bytes) -> bytes:
    """The head of an answer; its body is read, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n" % (path.encode(), cookie))
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    writer.transport.abort()
    return head
