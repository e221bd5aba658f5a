"""Which names this server answers to, and which web pages may call it.

Another site can let its own name resolve to 127.0.0.1 (DNS rebinding). To the browser, a service there would then have
the same origin as the site's page. So the Host of a request must be a name that this server was given.
"""

import re
from collections.abc import Iterable
from typing import Final

from keyloft import limits
from keyloft.core.addresses import is_loopback
from keyloft.http.problems import Problem
from keyloft.http.replies import AsgiScope, Headers
from keyloft.http.requests import header_of

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_ALLOWED_HEADERS: Final = b"authorization, content-type, if-match, if-none-match, last-event-id, accept"
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:@/\[\]]+))(?::[0-9]{1,5})?")


class Origins:
    """The hosts and the web origins that are allowed."""

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """Allow loopback names, and these.

        Args:
            hosts: Names that requests may be sent to.
            origins: Of web pages that may call from browsers, as in https://app.example; * for all.
        """
        self._hosts = _LOOPBACK | {host.lower().strip("[]") for host in hosts}
        self._origins = frozenset([origin.rstrip("/").lower() for origin in origins])
        self._known: dict[tuple[bytes, str], bool] = {}

    def check(self, scope: AsgiScope) -> Headers:
        """Refuse a request to another host name, or from a page that may not call; returns headers for one that may.

        Raises:
            Problem: The request is refused.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host = origin = None
        for name, value in headers:
            if name == b"host":
                if host is not None:
                    raise Problem(400, "BAD_REQUEST", "Host: expected once, got several times")
                host = value
            elif name == b"origin":
                if origin is not None:
                    raise Problem(400, "BAD_REQUEST", "Origin: expected once, got several times")
                origin = value
        if host is None:
            raise Problem(400, "BAD_REQUEST", "Host: this header is missing")
        server = scope["server"][0] if scope["server"] else ""
        is_allowed = self._known.get((host, server))
        if is_allowed is None:
            is_allowed = self._remember(host, server)
        if not is_allowed:
            raise Problem(
                421,
                "MISDIRECTED_REQUEST",
                "Host: this service does not answer to that name; the setting http_hosts names further ones",
            )
        return () if origin is None else self._of_page(origin, host, scope)

    def preflight(self, scope: AsgiScope) -> Headers | None:
        """The answer to a browser that asks whether a page may call; None for any other request."""
        if scope["method"] != "OPTIONS" or header_of(scope["headers"], b"access-control-request-method") is None:
            return None
        allowed = self.check(scope)
        return (
            *allowed,
            (b"access-control-allow-methods", b"GET, HEAD, PUT, POST, PATCH, DELETE"),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", b"600"),
        )

    def _remember(self, host: bytes, server: str) -> bool:
        name = _name_of(host.decode("latin-1"))
        # An address is safe as a Host: unlike a name, it can't be made to resolve to another address.
        is_allowed = name in self._hosts or name == server or is_loopback(name)
        if len(self._known) >= limits.HTTP_KNOWN_HOSTS:
            self._known.clear()
        self._known[host, server] = is_allowed
        return is_allowed

    def _of_page(self, origin: bytes, host: bytes, scope: AsgiScope) -> Headers:
        text = origin.decode("latin-1").rstrip("/").lower()
        name = host.decode("latin-1").lower()
        # Behind a proxy that ends TLS, the page's origin is https, but its requests arrive over http.
        if text in (f"{scope['scheme']}://{name}", f"https://{name}"):
            return ()
        if text not in self._origins and "*" not in self._origins:
            raise Problem(
                403,
                "NOT_PERMITTED",
                "Origin: pages of that site may not call this API; the setting http_origins lists those that may",
            )
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"etag, retry-after, www-authenticate"),
            (b"vary", b"origin"),
        )


def _name_of(host: str) -> str:
    """The name or address in a Host header, without the port; empty if the header can't be read."""
    found = _HOST.fullmatch(host.strip().lower())
    return "" if found is None else found[1] or found[2]
