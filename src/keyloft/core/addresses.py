"""Addresses to listen on: read from HOST:PORT, and shown as URLs."""

import ipaddress
import re
from typing import Final

from keyloft.errors import InvalidArgument

_ADDRESS: Final = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})", re.ASCII)


def read_address(text: str, example: str, argument: str = "") -> tuple[str, int]:
    """The host and port of an address like 127.0.0.1:80 or [::1]:80.

    Raises:
        InvalidArgument: It is not an address; the message has the example, and names the argument if there is one.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65_535:
        raise InvalidArgument(f"{f'{argument}: ' if argument else ''}expected HOST:PORT, as in {example}")
    return found[1] or found[2], int(found[3])


def shown(host: str, port: int, scheme: str = "http") -> str:
    """An address as a URL."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether other machines can't reach this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
