"""Serves a few pages over HTTP, for monitoring: only as much of the protocol as a scraper and a health check need."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.errors import InvalidArgument

logger = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})", re.ASCII)
_METHODS: Final = ("GET", "HEAD")


class Response(Struct, frozen=True):
    """The response to a request."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


class HttpServer(AsyncClosing):
    """Serves pages by their paths. Each connection carries one request and then ends.

    A request of over 8 KB, a slow client, and the 65th connection at a time are cut off.
    """

    request_seconds = limits.HTTP_REQUEST_SECONDS
    """How long a client may take to send its request."""
    answer_seconds = limits.HTTP_ANSWER_SECONDS
    """How long making a response, and sending it, may each take."""

    def __init__(self, pages: Mapping[str, Callable[[], Awaitable[Response]]]) -> None:
        self._pages = pages
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address; port 0 takes a free one.

        Raises:
            OSError: The address can't be listened on.
        """
        self._server = await asyncio.start_server(self._accept, host, port, limit=limits.HTTP_REQUEST_BYTES)
        return host, self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Listen no more, and end the open connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= limits.HTTP_CONNECTIONS:
            writer.transport.abort()
            return
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="keyloft http")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, answer = await self._answer(reader)
            writer.write(_head(answer))
            if method != "HEAD":
                writer.write(answer.body)
            async with asyncio.timeout(self.answer_seconds):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError):
            pass  # the client is gone, or too slow
        except Exception:
            logger.exception("an HTTP request failed unexpectedly")
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Response]:
        try:
            async with asyncio.timeout(self.request_seconds):
                request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return "", _refusal(HTTPStatus.BAD_REQUEST)
        method, target, _ = line
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return method, _refusal(HTTPStatus.NOT_FOUND)
        if method not in _METHODS:
            return method, _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            async with asyncio.timeout(self.answer_seconds):
                return method, await page()
        except TimeoutError:
            return method, _refusal(HTTPStatus.GATEWAY_TIMEOUT)
        except Exception:
            logger.exception("the page %s failed", target.partition("?")[0])
            return method, _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def unavailable(reason: str) -> Response:
    """The response to a request that can't be answered now."""
    return Response(f"{reason}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)


def _refusal(status: HTTPStatus) -> Response:
    return Response(f"{status.value} {status.phrase}\n".encode(), status)


def _head(answer: Response) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append(f"Allow: {', '.join(_METHODS)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def read_address(text: str, example: str, argument: str = "") -> tuple[str, int]:
    """The host and port of an address like 127.0.0.1:80 or [::1]:80.

    Raises:
        InvalidArgument: It is none; the message has the example, and names the argument if there is one.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65_535:
        raise InvalidArgument(f"{f'{argument}: ' if argument else ''}expected HOST:PORT, as in {example}")
    return found[1] or found[2], int(found[3])


def shown(host: str, port: int) -> str:
    """An address as a URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
