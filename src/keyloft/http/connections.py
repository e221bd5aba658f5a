"""Connections of HTTP clients, with bounds: of a request's head, of idle and slow clients, of their number.

The only module that builds on uvicorn's protocol classes, which are not a public interface: pyproject.toml bounds
uvicorn's versions, and tests/http/test_hostile.py fails if one of these bounds no longer holds.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from keyloft import limits
from keyloft.errors import IncompatibleLibrary
from keyloft.http.meters import UNKNOWN, HttpMeters
from keyloft.http.problems import Problem
from keyloft.nats.errors import overloaded

_VERSIONS: Final = ("1.1", "1.0")
_EXTENDED: Final = (
    *("connection_made", "connection_lost", "data_received", "on_message_begin", "on_header", "on_headers_complete"),
    *("on_body", "on_message_complete", "on_response_complete", "shutdown"),
)
_NOT_HTTP: Final = Problem(400, "BAD_REQUEST", "this is not an HTTP/1.1 request")
_HEAD_TOO_LARGE: Final = Problem(
    431,
    "HEADERS_TOO_LARGE",
    f"the path and the headers may have {limits.HTTP_HEAD_BYTES:,} bytes, and {limits.HTTP_HEADERS} headers",
)


def check_uvicorn() -> None:
    """Refuse a uvicorn without the methods that this module extends.

    Raises:
        IncompatibleLibrary: Some of them are missing.
    """
    missing = [name for name in _EXTENDED if not hasattr(HttpToolsProtocol, name)]
    if missing:
        raise IncompatibleLibrary(f"uvicorn lacks {', '.join(missing)}: install a version from 0.35 on, below 0.55")


class _Unread:
    """How much a client has not yet read of complete responses."""

    __slots__ = ("checks", "since", "size")

    def __init__(self, now: float) -> None:
        self.since = now
        self.size = 0
        self.checks = 0
        """How many checks in a row found that the client had read nothing."""


class ConnectionTable(ServerState):
    """All connections of a server, by what they do: idle, receiving, answering. Slow and idle ones are ended."""

    def __init__(self, most: int, now: Callable[[], float], meters: HttpMeters) -> None:
        """Bound the connections.

        Args:
            most: How many there may be. For a further one, the connection that has been idle the longest is ended.
            now: The time, in seconds.
            meters: Count the connections.
        """
        super().__init__()
        self._most = most
        self._now = now
        # Both in the order in which that state began, so that the oldest connection is found without a search.
        self._idle: dict[HttpConnection, float] = {}
        self._receiving: dict[HttpConnection, float] = {}
        self._unsent: dict[HttpConnection, _Unread] = {}
        self._unsent_bytes, self._summed_at = 0, 0.0
        self._arriving_bytes = 0
        self.meters = meters

    def has_room(self) -> bool:
        """Whether one more connection may be served; if need be, an idle one is ended for it."""
        if len(self.connections) < self._most:
            return True
        self.meters.refused_connections += 1
        for waiting in (self._idle, self._receiving):
            if waiting:
                next(iter(waiting)).abort()
                return True
        return False

    def idle(self, connection: "HttpConnection") -> None:
        """Note that a connection waits for a request."""
        self._receiving.pop(connection, None)
        self._idle.pop(connection, None)
        self._idle[connection] = self._now()

    def receiving(self, connection: "HttpConnection") -> None:
        """Note that a request has begun to arrive."""
        self._idle.pop(connection, None)
        self._receiving.setdefault(connection, self._now())

    def received(self, connection: "HttpConnection") -> None:
        """Note that the request is complete, and is being answered."""
        self._receiving.pop(connection, None)
        self._idle.pop(connection, None)

    @contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """Count a body while it arrives, by the most bytes that it may have.

        Raises:
            Busy: Too much arrives at a time.
        """
        if self._arriving_bytes + size > limits.HTTP_ARRIVING_BYTES:
            raise overloaded("body: too much arrives at a time; try again later")
        self._arriving_bytes += size
        try:
            yield
        finally:
            self._arriving_bytes -= size

    def unsent(self, connection: "HttpConnection") -> None:
        """Note that a response, or events of a watch, were sent, and that the client has not read all of it yet."""
        # A connection that is noted already starts over: it has read its last response before this one was sent.
        if (earlier := self._unsent.pop(connection, None)) is not None:
            self._unsent_bytes -= earlier.size
        unread = self._unsent[connection] = _Unread(self._now())
        unread.size = _unsent_bytes(connection)
        self._unsent_bytes += unread.size
        self._end_unsent()

    def is_full(self) -> bool:
        """Whether clients have left so much unread that no further large response may be made."""
        if not self._unsent:
            return False
        now = self._now()
        if now - self._summed_at >= limits.HTTP_FULL_PAUSE_SECONDS:  # not for each request: it is a long sum
            self._summed_at = now
            for connection, unread in self._unsent.items():
                size = _unsent_bytes(connection)
                unread.checks = 0 if size < unread.size else unread.checks + 1
                unread.size = size
            self._unsent_bytes = sum([unread.size for unread in self._unsent.values()])
        return self._unsent_bytes > limits.HTTP_FULL_BYTES

    async def room(self) -> None:
        """Wait until a further large response may be made; clients that don't read are cut off within seconds."""
        while self.is_full():  # transports have no event for what they have sent
            most = limits.HTTP_STILL_CHECKS
            for connection in [each for each, unread in self._unsent.items() if unread.size and unread.checks > most]:
                connection.abort()
            await asyncio.sleep(limits.HTTP_FULL_PAUSE_SECONDS)

    def gone(self, connection: "HttpConnection") -> None:
        """Forget a connection that has ended."""
        for table in (self._idle, self._receiving):
            table.pop(connection, None)
        self._unsent.pop(connection, None)

    def end_slow_ones(self) -> None:
        """End connections that have been idle, or sending or reading, for too long. To be called every second."""
        now = self._now()
        for connection in [each for each in self._unsent if not _unsent_bytes(each)]:
            del self._unsent[connection]
        for table, seconds in (
            (self._idle, limits.HTTP_IDLE_SECONDS),
            (self._receiving, limits.HTTP_REQUEST_SECONDS),
        ):
            while table and now - next(iter(table.values())) > seconds:
                next(iter(table)).abort()
        while self._unsent and now - next(iter(self._unsent.values())).since > limits.HTTP_ANSWER_SECONDS:
            next(iter(self._unsent)).abort()
        self._end_unsent()

    def _end_unsent(self) -> None:
        """If the unread responses together are too large, end the connections that have not read for the longest."""
        latest = self._now() - limits.HTTP_UNSENT_SECONDS
        while len(self._unsent) > 1 and next(iter(self._unsent.values())).since < latest:
            if sum(map(_unsent_bytes, self._unsent)) <= limits.HTTP_UNSENT_BYTES:
                break
            next(iter(self._unsent)).abort()


def _unsent_bytes(connection: "HttpConnection") -> int:
    return 0 if connection.transport.is_closing() else connection.transport.get_write_buffer_size()


class HttpConnection(HttpToolsProtocol):
    """One connection, as uvicorn serves it, within bounds."""

    server_state: ConnectionTable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expects_head = True
        """Whether the next bytes belong to the path and the headers of a request."""
        self._head_bytes = 0
        self._bytes_since_body = 0
        """How many bytes arrived after the head or the last part of the body: sizes of chunks, and trailers."""
        self._discarded_bytes = 0
        self._is_refused = False

    @property
    def is_unread(self) -> bool:
        """Whether the client has yet to read most of the response before this one."""
        return self.flow.write_paused

    async def has_read(self) -> None:
        """Wait until the client has read most of it."""
        await self.flow.drain()

    def abort(self) -> None:
        """End the connection at once."""
        self.server_state.gone(self)
        self.transport.abort()

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server_state.meters.connections += 1
        has_room = self.server_state.has_room()
        super().connection_made(transport)
        if has_room:
            self.server_state.idle(self)
        else:
            self._is_refused = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.meters.connections -= 1
        self.server_state.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.parser is None:
            return
        if self._expects_head:
            self._head_bytes += len(data)
            if self.cycle is None or self.cycle.response_complete:
                self.server_state.receiving(self)
        else:
            self._bytes_since_body += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The client asks for another protocol: its request is answered over HTTP, and is the last one.
            if self.cycle is not None:
                self.cycle.keep_alive = False
                self.cycle.more_body = False
                self.cycle.message_event.set()
        except httptools.HttpParserError:
            self._refuse(_NOT_HTTP)
        else:
            if self._expects_head and self._head_bytes > limits.HTTP_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)
            elif self._bytes_since_body > limits.HTTP_HEAD_BYTES:
                self.abort()

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers, after a chunked body, are dropped: taken as headers, they would bypass a proxy's checks.
        if self._expects_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = self._head_bytes
        if len(self.headers) > limits.HTTP_HEADERS or (
            size > limits.HTTP_HEAD_BYTES and self._head_size() > limits.HTTP_HEAD_BYTES
        ):
            self._refuse(_HEAD_TOO_LARGE)
        elif self.parser.get_http_version() not in _VERSIONS:
            self._refuse(_NOT_HTTP)
        if self._is_refused or len(self.pipeline) >= limits.HTTP_PIPELINED:
            raise httptools.HttpParserError("refused")
        self._expects_head = False
        self._head_bytes = self._bytes_since_body = self._discarded_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_since_body = 0
        if self.cycle.response_complete:
            # The rest of a refused body is dropped, so that the client gets to read the answer; up to a limit.
            self._discarded_bytes += len(body)
            if self._discarded_bytes > limits.HTTP_DISCARDED_BYTES:
                self.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expects_head = True
        self._bytes_since_body = 0
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self.server_state.idle(self)
            return
        self.server_state.received(self)
        super().on_message_complete()

    # What uvicorn calls

    def on_response_complete(self) -> None:
        """Continue with the next request. Unlike uvicorn's method, this one needs no timer for each response."""
        state, transport = self.server_state, self.transport
        state.total_requests += 1
        if transport.get_write_buffer_size():
            state.unsent(self)
        if transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            task = self.loop.create_task(cycle.run_asgi(app))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        elif self.cycle.more_body:
            state.receiving(self)
        else:
            state.idle(self)

    def _head_size(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _refuse(self, problem: Problem) -> None:
        """Answer a request that can't be served, and end the connection."""
        if self._is_refused:
            return None
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            return self.abort()  # amid another response, an answer would be taken for a part of it
        reply = problem.reply()
        self.server_state.meters.of(UNKNOWN).answered(reply.status, 0.0)
        lines = [
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}".encode(),
            b"content-type: " + reply.content_type,
            b"content-length: %d" % len(reply.body),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join([*lines, b"", reply.body]))
        self.transport.close()
        return None
