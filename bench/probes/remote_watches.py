"""How long a change takes to a watcher over NATS, beside others that it does not concern, and what those cost."""

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter

from bench.harness.children import child
from bench.harness.contest import same
from bench.harness.figures import Figure, Row, within
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.plugins import DatabaseClient
from keyloft.server.nats_process import NatsServer

_PATIENCE_SECONDS = 60.0
_AT_ONCE = 50


async def watching(folder: Path, others: int, rounds: int, changes: int) -> Row:
    """A watcher of one prefix, beside others of as many prefixes.

    Args:
        folder: Where the database is made.
        others: How many other watches there are.
        rounds: How many times all is measured.
        changes: How many changes a round has.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "watched.db"
        async with (
            NatsServer() as server,
            child("bench.arms.nats.keyloft_service", server.url, path) as service,
            await DatabaseClient.connect(server.url, plugin_name="trivia", timeout=_PATIENCE_SECONDS) as client,
        ):
            before = service.resident_megabytes()
            for first in range(0, others, _AT_ONCE):
                some = [client.kv.watch(prefix=f"other{first + one}:") for one in range(min(_AT_ONCE, others - first))]
                await asyncio.gather(*[watch.__aenter__() for watch in some])
            async with client.kv.watch(prefix="k:") as watch:
                times = [await _median(client, watch, changes) for _ in range(rounds)]
            grown = service.resident_megabytes() - before
    figure = Figure("from sending a set to its event, median", "ms", tuple(times))
    memory = Figure(f"memory of the service for {others:,} other watches", "MB", (grown,))
    return Row(
        f"a change to its watcher over NATS, beside {others:,} watches that it does not concern",
        figures=(figure, memory),
        verdicts=(within(figure, 5),),
    )


async def _median(client: DatabaseClient, watch: RemoteWatch, changes: int) -> float:
    """The median, in milliseconds, of the time from before a set is sent until its event is there, one by one."""
    times: list[float] = []
    for number in range(changes):
        began = perf_counter()
        await client.kv.set(f"k:{number}", number)
        event = await anext(watch)
        times.append(1000 * (perf_counter() - began))
        same(event.key, f"k:{number}")
    return sorted(times)[len(times) // 2]
