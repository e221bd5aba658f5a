"""Serves the plugins' storage on NATS until it is killed: database, address of NATS, prefix, seconds of a lease."""

import asyncio
import sys

from keyloft.nats.connection import connect
from keyloft.plugins import BotDatabase, DatabaseService


async def main(database: str, nats_url: str, prefix: str, lease_seconds: str) -> None:
    nats = await connect(nats_url, name="service", reconnect_time_wait=0.05)
    async with (
        BotDatabase(database) as db,
        DatabaseService(nats, db, prefixes=[prefix], lease_seconds=float(lease_seconds)),
    ):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
