"""Sends HTTP requests over some connections, each the next one when the last is answered, and times them.

It speaks just enough HTTP to keep the client's own time low: what is measured is the server.
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from time import perf_counter

from msgspec import Struct

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


class HttpLoad(Struct, frozen=True):
    """What was reached."""

    times: list[float]
    """Seconds that each request took."""
    seconds: float


class LoadingConnection(asyncio.Protocol):
    """One connection that sends requests until it is stopped."""

    def __init__(self, request: Callable[[int], bytes], statuses: tuple[bytes, ...]) -> None:
        self._request = request
        self._statuses = statuses
        self._received = b""
        self._sent = 0
        self._began = 0.0
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def begin(self) -> None:
        self._began = perf_counter()
        self._transport.write(self._request(self._sent))
        self._sent += 1

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        found = _LENGTH.search(self._received, 0, head + 2)
        if found is None or len(self._received) < head + 4 + int(found[1]):
            return
        if self._received[9:12] not in self._statuses and not self.ended.done():
            self.ended.set_exception(RuntimeError(self._received[:200].decode("latin-1")))
            return
        self.times.append(perf_counter() - self._began)
        self._received = b""
        if self.is_stopping:
            if not self.ended.done():
                self.ended.set_result(None)
        else:
            self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the server has ended the connection"))

    def close(self) -> None:
        self._transport.abort()


async def loaded(
    port: int,
    request: Callable[[int, int], bytes],
    *,
    connections: int,
    seconds: float,
    statuses: tuple[bytes, ...] = (b"200", b"201"),
) -> HttpLoad:
    """Send requests for some seconds.

    Args:
        port: Of the server on loopback.
        request: The bytes of a request, by the number of its connection and its own number there.
        connections: How many requests are under way at a time.
        seconds: How long.
        statuses: What an answer must have.
    """
    loop = asyncio.get_running_loop()
    made = []
    for number in range(connections):
        connection = LoadingConnection(partial(request, number), statuses)
        await loop.create_connection(partial(_itself, connection), "127.0.0.1", port)
        made.append(connection)
    began = perf_counter()
    for protocol in made:
        protocol.begin()
    await asyncio.wait([protocol.ended for protocol in made], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for protocol in made:
        protocol.is_stopping = True
    await asyncio.gather(*[protocol.ended for protocol in made])
    took = perf_counter() - began
    for protocol in made:
        protocol.close()
    return HttpLoad([time for protocol in made for time in protocol.times], took)


def _itself(connection: LoadingConnection) -> LoadingConnection:
    return connection
