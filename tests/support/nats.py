"""NATS servers for tests: `nats_url` is shared by all tests, `private_server` starts one for a test alone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client

from keyloft.server.nats_process import NatsServer

_LONGEST_SECONDS = 30


@asynccontextmanager
async def private_server(config: Path | None = None) -> AsyncIterator[NatsServer]:
    """A server that this test may stop, restart and reload as it likes."""
    async with NatsServer(config=config) as server:
        yield server


async def settled(client: Client) -> None:
    """Wait until the server has carried out all that this client sent, and its errors about it have arrived."""
    # nats-py's ping overtakes the commands in its buffer: the first flush makes sure that the buffer is sent.
    for _ in range(2):
        await client.flush(timeout=_LONGEST_SECONDS)


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """The address of a server without permissions; tests share its subjects, so each uses names of its own."""
    with _server_in_a_thread() as server:
        yield server.url


@contextmanager
def _server_in_a_thread() -> Iterator[NatsServer]:
    # A test's event loop ends with the test. The server's has to last, and to run while no test awaits anything.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="nats-server of the tests", daemon=True)
    thread.start()
    server = NatsServer()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(_LONGEST_SECONDS)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(_LONGEST_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_LONGEST_SECONDS)
        loop.close()
