"""Memory of the plugin service after a get of every key, and the packages it imported."""

import tempfile
from pathlib import Path

from bench.arms.nats.keyloft_service import filled
from bench.arms.nats.requests import clients, exchange, getting, matches
from bench.harness.children import child
from bench.harness.contest import IN_FLIGHT, same
from bench.harness.data import key_of, value_of
from bench.harness.figures import Figure, Row, within
from keyloft.server.nats_process import NatsServer

_MIGRATIONS_ONLY = ("sqlalchemy", "alembic")
"""Packages that only migrations need: SQLAlchemy takes 19 MB."""


async def remembering(folder: Path, stored: int, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "resident.db"
        await filled(path, stored)
        measured = [await _measured(path, stored) for _ in range(rounds)]
    fresh = Figure("the service, before the first request", "MB", tuple(before for before, _, _ in measured))
    full = Figure("after a get of every key over NATS", "MB", tuple(after for _, after, _ in measured))
    packages = measured[0][2]
    imported = Figure(
        f"imported of {', '.join(_MIGRATIONS_ONLY)}", "", (float(len(set(_MIGRATIONS_ONLY) & set(packages))),)
    )
    return Row(
        f"resident memory of the serving process, {stored:,} keys; imported: {', '.join(packages)}",
        figures=(fresh, full),
        verdicts=(within(full, 50), within(imported, 0)),
    )


async def _measured(path: Path, stored: int) -> tuple[float, float, list[str]]:
    async with NatsServer() as server, child("bench.arms.nats.keyloft_service", server.url, path) as service:
        before = service.resident_megabytes()
        async with clients(server.url, 1) as [client]:
            done = await exchange(client, [getting(key_of(index)) for index in range(stored)], IN_FLIGHT)
        after = service.resident_megabytes()
    wrong = [
        index for index, reply in enumerate(done.replies) if not matches(reply, exists=True, value=value_of(index))
    ]
    same(wrong, [])
    return before, after, service.packages
