"""Network addresses: to listen on, of NATS servers, and the hosts and origins of web requests."""

import ipaddress
import re
from typing import Final

from keyloft.errors import InvalidArgument

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?/*", re.ASCII)
_USUAL_PORTS: Final = ("http", ":80"), ("https", ":443")
_ADDRESS: Final = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})", re.ASCII)
_NATS_ADDRESS: Final = re.compile(
    r"(?:(?:nats|tls|ws|wss)://)?(?:[^\s/?#]*@)?(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(?::([0-9]{0,5}))?/?", re.ASCII
)


def read_address(text: str, example: str, argument: str = "") -> tuple[str, int]:
    """The host and port of an address like 127.0.0.1:80 or [::1]:80.

    Raises:
        InvalidArgument: It is not an address; the message has the example, and names the argument if there is one.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65_535:
        raise InvalidArgument(f"{f'{argument}: ' if argument else ''}expected HOST:PORT, as in {example}")
    return found[1] or found[2], int(found[3])


def address_url(host: str, port: int, scheme: str = "http") -> str:
    """The URL of an address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_host(text: str) -> None:
    """Refuse a text that is not the host of a Host header, without its port.

    Raises:
        InvalidArgument: The text is not just a name or an address.
    """
    if not _NAME.fullmatch(text) and not _is_ip_address(text.strip("[]")):
        raise InvalidArgument(
            f"expected a name or address without scheme, port and path, as in kv.example, got {text!a}"
        )


def check_origin(text: str) -> None:
    """Refuse a text that no browser sends as the Origin of a page; * stands for all, null for pages without one.

    Raises:
        InvalidArgument: The text is not a scheme and a host, perhaps with a port that is not the scheme's default.
    """
    origin = text.lower()
    if origin in ("*", "null"):
        return
    has_usual_port = any(
        [origin.startswith(f"{scheme}://") and origin.rstrip("/").endswith(port) for scheme, port in _USUAL_PORTS]
    )
    if not _ORIGIN.fullmatch(origin) or has_usual_port:
        raise InvalidArgument(
            "expected scheme and host, without path and usual port, as in https://app.example or "
            f"http://localhost:5173, got {text!a}"
        )


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether other machines can't reach this host."""
    return host == "localhost" or (_is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def check_nats_address(address: str, argument: str = "") -> None:
    """Refuse a text that is not the address of a NATS server.

    Raises:
        InvalidArgument: The message names the argument, if there is one, but not the text, which may hold a password.
    """
    found = _NATS_ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[1] or 0) > 65_535:
        raise InvalidArgument(f"{f'{argument}: ' if argument else ''}expected an address like nats://127.0.0.1:4222")


def without_login(address: str) -> str:
    """An address of NATS as it may be printed: without user, password and token."""
    scheme, slashes, rest = address.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"
