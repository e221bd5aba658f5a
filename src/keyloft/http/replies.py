"""Answers to HTTP requests: a status, a body and headers, and how they are sent."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from msgspec import Struct

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiMessage: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
AsgiSend: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

JSON_TYPE: Final = b"application/json"
BYTES_TYPE: Final = b"application/octet-stream"
EVENTS_TYPE: Final = b"text/event-stream"
TEXT_TYPE: Final = b"text/plain; charset=utf-8"

_NO_STORE: Final = (b"cache-control", b"no-store")
_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")


class HttpReply(Struct, frozen=True):
    """The answer to a request."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON_TYPE
    headers: Headers = ()

    async def send(self, send: AsgiSend, more: Headers = ()) -> None:
        """Send the answer; `more` are headers that the connection or the request's origin needs."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            _NO_STORE,
            _NO_SNIFFING,
            *self.headers,
            *more,
        ]
        if self.status in (204, 304):  # they have no body, so nothing describes one (RFC 9110)
            del headers[:2]
        elif self.content_type == EVENTS_TYPE:  # the answer to HEAD: a stream has no length
            del headers[1]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})
