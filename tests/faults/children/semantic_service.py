"""A semantic service until it is killed.

    python -m tests.faults.children.semantic_service DATABASE NATS

Says «serving» once it serves.
"""

import asyncio
import logging
import os
import sys

import keyloft
from keyloft.nats.connection import connect
from keyloft.semantic import SemanticService, SemanticStore


async def main(database: str, address: str) -> None:
    connection = await connect(address, name="service of a test")
    async with (
        keyloft.open(database) as kv,
        SemanticStore(kv, audit_key="k") as store,
        SemanticService(connection, store),
    ):
        os.write(1, b"serving\n")
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # conflicts are part of contending
    asyncio.run(main(*sys.argv[1:]))
