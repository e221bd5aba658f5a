"""The HTTP API against its bars, row by row: `scripts/bench http`.

A real `keyloft serve` on SQLite, with the audit log in a file, and a bare Starlette application beside it, each in a
process of its own on uvloop. The client speaks just enough HTTP to be fast, in this process.
"""

from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import uvloop

from bench.harness.benchmark import Benchmark
from bench.probes import admin_page, http_client, http_service


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    stored = (20_000, 2_000) if quick else (1_000_000, 100_000)
    rounds, seconds, listening = (1, 0.5, 50) if quick else (7, 3.0, 1000)
    return Benchmark(
        rows={
            "requests": lambda: uvloop.run(http_service.requests(folder, rounds, seconds)),
            "client": lambda: uvloop.run(http_client.gets(folder, rounds, seconds)),
            "client, many": lambda: uvloop.run(http_client.gets(folder, rounds, seconds, at_once=http_client.AT_ONCE)),
            "watch": lambda: uvloop.run(http_service.listeners(folder, listening, 3 if quick else 15)),
            "page": lambda: uvloop.run(admin_page.views(folder, *stored, 3 if quick else 15)),
            "open pages": lambda: uvloop.run(admin_page.open_pages(folder, 2.0 if quick else 15.0, rounds)),
        },
        notes=[
            f"{http_service.CONNECTIONS} connections, each sends its next request when the last is answered; "
            f"{rounds} rounds of {seconds:g} s for each arm in turn",
            "an entry is a small JSON object; puts are durable, each with its line in the audit log",
            "CPU is that of the serving process per request, all threads; in the client's rows, of the client per get",
        ],
        about={name: f"{name} {version(name)}" for name in ("starlette", "uvicorn", "httptools", "aiohttp")},
    )
