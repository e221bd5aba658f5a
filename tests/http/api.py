"""A real HTTP server for tests: in the test's own event loop, on a free port of loopback, with an engine and tokens."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.engines import open_engine
from keyloft.http.app import HttpApp
from keyloft.http.context import HttpContext
from keyloft.http.listener import HttpListener
from keyloft.http.origins import Origins
from keyloft.http.replies import TEXT_TYPE, HttpReply
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import AccessToken, TokenScope, admin_token, digest_of
from tests.support.http import http_client

LONGEST_SECONDS = 30.0
ADMIN_TOKEN = "kl_test-admin-token"


def scoped_token(text: str, *scopes: str) -> AccessToken:
    return AccessToken(text, digest_of(text), is_admin=False, scopes=tuple(map(TokenScope.read, scopes)))


class StillPages:
    """Pages of a service that is well."""

    async def metrics(self) -> HttpReply:
        return HttpReply(b"metrics\n", content_type=TEXT_TYPE)

    async def health(self) -> HttpReply:
        return HttpReply(b"ok\n", content_type=TEXT_TYPE)

    async def readiness(self) -> HttpReply:
        return HttpReply(b"ready\n", content_type=TEXT_TYPE)


class RunningApi:
    """A server that runs, and a client for it."""

    def __init__(self, context: HttpContext, listener: HttpListener, port: int, client: httpx.AsyncClient) -> None:
        self.context = context
        self.listener = listener
        self.port = port
        self.client = client

    async def send(self, method: str, path: str, /, token: str | None = None, **options: Any) -> httpx.Response:
        headers = {**options.pop("headers", {})}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return await self.client.request(method, path, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.send("GET", path, **options)

    async def put(self, path: str, value: object, **options: Any) -> httpx.Response:
        return await self.send("PUT", path, json=value, **options)

    async def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return await self.send("POST", path, json=body, **options)

    async def raw(self, request: bytes, *, until_end: bool = True) -> bytes:
        """What is answered to bytes on a connection of their own, until the server ends it or is silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            async with asyncio.timeout(LONGEST_SECONDS):
                return await (reader.read() if until_end else reader.readuntil(b"\r\n\r\n"))
        except ConnectionResetError:
            return b""
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def watch(self, query: str, base: str = "/v1", **headers: str) -> AsyncIterator["Events"]:
        async with self.client.stream("GET", f"{base}/watch?{query}", headers=headers, timeout=LONGEST_SECONDS) as got:
            assert got.status_code == 200, await got.aread()
            yield Events(got)


class Events:
    """The events of a stream, one at a time."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, int | None, Any]:
        """The name, the id and the data of the next event."""
        name, version, data = "", None, ""
        async with asyncio.timeout(LONGEST_SECONDS):
            async for line in self._lines:
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "id":
                    version = int(value)
                elif field == "data":
                    data += value
                elif not line and name:
                    return name, version, json.loads(data)
        return "end", None, None


@asynccontextmanager
async def running_api(
    *tokens: AccessToken,
    engine: Engine | None = None,
    valid: ValidTokens | None = None,
    origins: Origins | None = None,
    connections: int = limits.HTTP_CONNECTIONS,
    is_open: bool = True,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[RunningApi]:
    """Run a server; its client sends an admin token unless a request has another one."""
    opened = await open_engine(":memory:") if engine is None else engine
    valid = valid or ValidTokens((admin_token(ADMIN_TOKEN), *tokens))
    context = HttpContext(StillPages(), valid, origins or Origins(), connections=connections)
    if is_open:
        context.engine = opened
    listener = HttpListener(HttpApp(context), tls=tls, connections=connections, meters=context.meters)
    _, port = await listener.start("127.0.0.1", port)
    url, authorization = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {ADMIN_TOKEN}"}
    try:
        async with http_client(url, headers=authorization, timeout=LONGEST_SECONDS) as client:
            yield RunningApi(context, listener, port, client)
    finally:
        listener.stop_accepting()
        context.end_streams()
        await listener.aclose()
        if engine is None:
            await opened.aclose()
