"""Connects a command to a service over NATS; fails at once if no server listens."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from keyloft.cli.database import run_quietly
from keyloft.cli.terminal import fail
from keyloft.core.addresses import without_login
from keyloft.errors import InvalidArgument, NotPermitted, Unanswered
from keyloft.server.config import DEFAULT_NATS_PORT, Config

if TYPE_CHECKING:
    from keyloft.nats.connection import Login

C = TypeVar("C")
T = TypeVar("T")


def over_nats(
    settings: Config,
    seconds: float,
    connect: Callable[..., Awaitable[AbstractAsyncContextManager[C]]],
    work: Callable[[C], Awaitable[T]],
) -> T:
    """Connect a client, and work with it; a login that NATS refuses ends the command.

    Args:
        settings: Where NATS is, and the login.
        seconds: How long to wait for a server, and for each reply.
        connect: Makes the client, from addresses, `login`, `timeout` and perhaps `inbox_prefix`.
        work: Called with the client.
    """
    addresses = list(settings.nats) or [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]

    async def working() -> T:
        await check_server_listens(addresses, seconds)
        login = settings.login()
        async with await connect(addresses, login=login, timeout=seconds, **_inbox(login, addresses)) as client:
            return await work(client)

    try:
        return run_quietly(working())
    except NotPermitted as error:
        fail(f"{error.code}: {error}; --nats-user and KEYLOFT_NATS_PASSWORD set the login")


def check_timeout(seconds: float) -> None:
    """Refuse a --timeout that is out of range."""
    if not 0 < seconds <= 3600:
        raise InvalidArgument("--timeout: expected a number of seconds above 0, at most 3600")


def _inbox(login: "Login", addresses: list[str]) -> dict[str, Any]:
    """The option for the inbox of a login: ADMIN receives replies in another inbox than plugins and tenants."""
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
