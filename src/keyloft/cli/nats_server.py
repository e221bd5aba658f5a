"""The NATS server that a command reaches a service by: whether it listens, and how to connect to it."""

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from keyloft.core.urls import without_login
from keyloft.errors import InvalidArgument, Unanswered
from keyloft.server.config import DEFAULT_NATS_PORT, Config

if TYPE_CHECKING:
    from keyloft.nats.connection import Login


def addresses_of(settings: Config) -> list[str]:
    """Where NATS is, by its settings."""
    return list(settings.nats) or [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]


def check_timeout(seconds: float) -> None:
    """Refuse a --timeout that is none."""
    if not 0 < seconds <= 3600:
        raise InvalidArgument("--timeout: a number of seconds above 0, and 3600 at most")


def inbox_options(login: "Login", addresses: list[str]) -> dict[str, Any]:
    """ADMIN receives replies in another inbox than a plugin or a tenant does."""
    from keyloft.server.isolation import ADMIN

    users = {login.user, *[urlsplit(address).username for address in addresses]}
    return {"inbox_prefix": "_INBOX"} if ADMIN in users else {}


async def check_server_listens(addresses: list[str], seconds: float) -> None:
    """Refuse at once if no server listens; a client would wait for one to start."""
    for address in addresses:
        parts = urlsplit(address)
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_NATS_PORT)
        except (OSError, TimeoutError, ValueError):
            continue
        writer.transport.abort()
        return
    raise Unanswered(
        f"no NATS server answers at {', '.join(map(without_login, addresses))}: "
        "start one with `keyloft serve`, or name another with --nats"
    )
