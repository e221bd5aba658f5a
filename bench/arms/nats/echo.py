"""An echo service on NATS as a child process: `python -m bench.arms.nats.echo ADDRESS PREFIX BYTES`.

The least that a service written with nats-py can do: it reads nothing and sends a constant reply.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
from nats.aio.msg import Msg

from bench.harness.child_main import run


def echo_of(size: int) -> bytes:
    return b"x" * size


@asynccontextmanager
async def echoing(address: str, prefix: str, size: int) -> AsyncIterator[None]:
    reply = echo_of(size)

    async def answer(message: Msg) -> None:
        await message.respond(reply)

    client = await nats.connect(address)
    await client.subscribe(f"{prefix}.>", cb=answer)
    # Twice: nats-py's first ping may overtake the subscriptions that are still in its buffer.
    await client.flush()
    await client.flush()
    yield
    await client.close()


if __name__ == "__main__":
    run(echoing(sys.argv[1], sys.argv[2], int(sys.argv[3])))
