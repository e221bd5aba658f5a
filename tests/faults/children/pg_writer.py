"""Writes to a PostgreSQL database at full speed until it is killed.

python -m tests.faults.children.pg_writer URL WAY

WAY is "function", or "locking" for commits that take their locks before they read. Prints a line once it writes.
"""

import asyncio
import sys

import keyloft
from keyloft.engines.postgres.engine import PostgresEngine


async def main(url: str, way: str) -> None:
    async with keyloft.open(url, sweep_every=None) as kv:
        assert isinstance(kv.engine, PostgresEngine)
        kv.engine.server.has_function = way == "function"
        await kv.set(("child",), 0)
        sys.stdout.write("writing\n")
        sys.stdout.flush()

        async def write(caller: int) -> None:
            while True:
                await kv.atomic().sum(("child", caller), 1).sum(("shared",), 1).commit()

        await asyncio.gather(*[write(caller) for caller in range(8)])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
