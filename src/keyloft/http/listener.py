"""Listens for HTTP clients in the event loop of the service, and ends in order."""

import asyncio
import logging
import resource
import ssl
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

from uvicorn.config import Config as UvicornConfig

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.http.connections import ConnectionTable, HttpConnection, check_uvicorn
from keyloft.http.meters import HttpMeters

logger = logging.getLogger(__name__)


class HttpListener(AsyncClosing):
    """An HTTP server for one ASGI application. It handles no signals: its owner ends it."""

    def __init__(
        self,
        app: Any,
        *,
        tls: ssl.SSLContext | None = None,
        connections: int = limits.HTTP_CONNECTIONS,
        meters: HttpMeters | None = None,
    ) -> None:
        """Prepare a server; `start` listens.

        Args:
            app: The ASGI application.
            tls: The certificate and key, for HTTPS.
            connections: How many there may be at a time.
            meters: Count them.
        """
        self._app = app
        self._tls = tls
        self._most = connections
        self._meters = meters or HttpMeters()
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address; with port 0, on a free port.

        Raises:
            OSError: The address can't be listened on.
            IncompatibleLibrary: This version of uvicorn is not supported.
        """
        check_uvicorn()
        loop = asyncio.get_running_loop()
        self.table = ConnectionTable(_within_open_files(self._most), loop.time, self._meters)
        config = UvicornConfig(
            self._app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        config.load()

        def connected() -> HttpConnection:
            return HttpConnection(config=config, server_state=self.table, app_state={})

        self._server = await loop.create_server(
            connected,
            host,
            port,
            ssl=self._tls,
            backlog=limits.HTTP_BACKLOG,
            # Until its handshake ends, a connection is not in `ConnectionTable`, which bounds all others.
            ssl_handshake_timeout=limits.HTTP_HANDSHAKE_SECONDS if self._tls else None,
        )
        self._tick()
        self._ticking = asyncio.create_task(self._tick_on(), name="keyloft http")
        return host, self._server.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self.table.connections) if self._server else 0

    @property
    def served(self) -> int:
        """How many requests it has answered."""
        return self.table.total_requests if self._server else 0

    def stop_accepting(self) -> None:
        """Stop listening; end idle connections now, and others after their current request."""
        if self._server is not None:
            self._server.close()
            for connection in list(self.table.connections):
                connection.shutdown()

    async def aclose(self) -> None:
        """Stop listening, finish the running requests, then end all connections."""
        self.stop_accepting()
        if self._server is None:
            return
        table = self.table
        if table.tasks:
            await asyncio.wait(table.tasks, timeout=limits.HTTP_SHUTDOWN_SECONDS)
        for task in list(table.tasks):
            task.cancel()
        await asyncio.gather(*table.tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.HTTP_FLUSH_SECONDS):
                while table.connections:  # noqa: ASYNC110 (transports flush without an event of their own)
                    await asyncio.sleep(0.005)
        for connection in list(table.connections):
            connection.transport.abort()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._tick()

    def _tick(self) -> None:
        self.table.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self.table.end_slow_ones()


def _within_open_files(wanted: int) -> int:
    """How many connections fit under the limit on open files, which is raised as far as this process may."""
    needed = wanted + limits.HTTP_SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft >= needed:
        return wanted
    most = max(limits.HTTP_FEWEST_CONNECTIONS, soft - limits.HTTP_SPARE_FILES)
    logger.warning("HTTP takes %d connections at a time: this process may open %d files", most, soft)
    return most


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """The TLS settings for HTTPS.

    Raises:
        OSError: The files can't be read, or are not a certificate and its key (`ssl.SSLError`).
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def lacks_key(certificate: str, key: str | None) -> bool:
    """Whether the private key is missing: no file is named for it, and the certificate's file does not hold it."""
    try:
        return key is None and b"PRIVATE KEY-----" not in Path(certificate).read_bytes()
    except OSError:
        return False
