"""Connects to NATS and stays connected; subscribes to a service's requests."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import AuthorizationError

from keyloft import limits
from keyloft.core.urls import without_login
from keyloft.errors import NotPermitted
from keyloft.nats.internals import Handled, Handler, NatsConnection, check_nats_py
from keyloft.nats.log_rate import LogRate

__all__ = ["Handled", "Login", "cancel", "connect", "drain", "servers", "shown", "subscribe"]

logger = logging.getLogger(__name__)


class Login(Struct, frozen=True):
    """How to log in to a NATS server; empty for a server that asks for nothing."""

    credentials: Path | None = None
    """A credentials file, as `nsc` makes it."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    ca: Path | None = None
    """The authority that signed the server's certificate, where the system does not know it."""
    certificate: Path | None = None
    """The client's certificate, where the server asks for one; with `key`."""
    key: Path | None = None

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, …)"  # secrets must not get into logs

    def options(self) -> dict[str, Any]:
        """The options of `nats.connect` for this login."""
        options: dict[str, Any] = {}
        if self.credentials is not None:
            options["user_credentials"] = str(self.credentials)
        for name in ("user", "password", "token"):
            if (secret := getattr(self, name)) is not None:
                options[name] = secret
        if self.ca is not None or self.certificate is not None:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
            options["tls"] = context
        return options


async def connect(
    servers: str | list[str],
    *,
    name: str,
    login: Login | None = None,
    on_error: Callable[[Exception], None] | None = None,
    **options: Any,
) -> NatsConnection:
    """Connect, and keep trying for as long as no server answers; a lost connection is restored in the same way.

    Args:
        servers: The address of a server, or of several of one cluster.
        name: The name under which nats-server shows the connection.
        login: How to log in.
        on_error: Called with every error that nats-py reports by the way.
        options: Passed on to `nats.connect`.

    Raises:
        NotPermitted: The server refuses this login, or a certificate is not trusted.
        IncompatibleLibrary: The installed nats-py can't be used.
    """
    check_nats_py()
    hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    last_logged = ""
    rate = LogRate(limits.CONNECTION_LOG_LINES_PER_SECOND)

    async def failed(error: Exception) -> None:
        nonlocal last_logged
        if on_error is not None:
            on_error(error)
        reason = _permanent_reason(error)
        if reason and not hopeless.done():
            hopeless.set_result(reason)
        # nats-py reports every failed attempt; the repetitions are for debugging only.
        text = str(error) or type(error).__name__
        level = logging.WARNING if text != last_logged and rate.allows() else logging.DEBUG
        logger.log(level, "NATS: %s%s", text, "" if connection.is_connected else "; trying again until it answers")
        last_logged = text

    async def lost() -> None:
        if not connection.is_closed:
            logger.warning("NATS: the connection is lost; trying to restore it")

    async def restored() -> None:
        nonlocal last_logged
        last_logged = ""
        logger.info("NATS: connected again")

    connection = NatsConnection()
    connecting = asyncio.ensure_future(
        connection.connect(
            servers,
            name=name,
            error_cb=failed,
            disconnected_cb=lost,
            reconnected_cb=restored,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            **(login or Login()).options(),
            **options,
        )
    )
    either: list[asyncio.Future[Any]] = [connecting, hopeless]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise NotPermitted(hopeless.result())
        await connecting
    finally:
        if not connecting.done():
            await cancel(connecting)
            await connection.close()
    return connection


def _permanent_reason(error: Exception) -> str | None:
    """Why no further attempt can succeed, or None; nats-py would try a wrong password or certificate for ever."""
    if isinstance(error, AuthorizationError) or "authorization violation" in str(error).lower():
        return "NATS refuses this login: check the user and password, token or credentials file"
    if isinstance(error, ssl.SSLError):
        return f"the TLS certificates of NATS and of this client don't fit: {error.reason or error}"
    return None


def servers(connection: Nats) -> str:
    """The addresses that a connection uses, for `repr`."""
    return shown([url.geturl() for url in connection.servers]) or "no server"


def shown(addresses: Iterable[str]) -> str:
    """Addresses of NATS without users and passwords, for messages; they may lack the scheme."""
    return ", ".join(map(without_login, addresses))


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, whatever its outcome."""
    while not task.done():
        # Once is not enough: nats-py takes a cancellation for a failed attempt if both happen at the same moment.
        task.cancel()
        await asyncio.wait([task], timeout=limits.CANCEL_SECONDS)
    if not task.cancelled():
        task.exception()


async def subscribe(connection: Nats, prefixes: Iterable[str], queue: str, handler: Handler) -> list[Subscription]:
    """Pass all requests below some prefixes, each of which ends with a dot, to a handler.

    The server knows of the subscriptions after the next flush; `Discovery.start` makes one.
    """
    check_nats_py()

    async def receive(message: Msg) -> None:
        handled = handler(message.subject, message.reply, message.data)
        if handled is not None and not isinstance(handled, list):
            await handled

    subscriptions = []
    for prefix in prefixes:
        # No bounds in nats-py, which would drop what exceeds them without a word: a service counts its requests.
        subscription = await connection.subscribe(
            f"{prefix}>", queue=queue, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        subscriptions.append(subscription)
        if isinstance(connection, NatsConnection):
            connection.handle(subscription, handler)
    return subscriptions


async def drain(connection: Nats, subscriptions: Iterable[Subscription], seconds: float) -> None:
    """Read what the server has sent already, and no more."""
    # Not cancelled when it takes too long: nats-py would fail at an answer that arrives later. Without a server there
    # is nothing to read: it gives the requests to another instance, or to none.
    if draining := [asyncio.ensure_future(_drained(subscription)) for subscription in subscriptions]:
        await asyncio.wait(draining, timeout=seconds)
    if isinstance(connection, NatsConnection):
        for subscription in subscriptions:
            connection.handle(subscription, None)


async def _drained(subscription: Subscription) -> None:
    await subscription.drain()  # type: ignore[no-untyped-call]
