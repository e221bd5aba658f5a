"""Connects to NATS and stays connected."""

import asyncio
import importlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct
from nats.aio import transport
from nats.aio.client import DEFAULT_INBOX_PREFIX
from nats.aio.client import Client as Nats
from nats.errors import AuthorizationError
from nats.errors import Error as NatsError

from keyloft import limits
from keyloft.core.addresses import without_login
from keyloft.core.log_text import printable
from keyloft.errors import InvalidArgument, NotPermitted, Unanswered
from keyloft.nats.compatibility import check_nats_py
from keyloft.nats.errors import NoTlsError
from keyloft.nats.log_rate import LogRate
from keyloft.nats.messages import NatsConnection

logger = logging.getLogger(__name__)

_TRUST: Final = (
    "--nats-ca, or `ca` of a Login, is the authority that signed the server's certificate; --nats-cert and --nats-key, "
    "or `certificate` and `key`, are the client's own, where the server asks for one"
)

T = TypeVar("T")


def _use_websockets() -> None:
    """Let nats-py use aiohttp for addresses that begin with ws: or wss:, also where it was imported without."""
    if getattr(transport, "aiohttp", True) is None:
        with suppress(ImportError):  # not installed: nats-py says so when it connects
            vars(transport).update({name: importlib.import_module(name) for name in ("aiohttp", "multidict")})


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
        """The options of `nats.connect` for this login.

        Raises:
            InvalidArgument: One of the files can't be read.
        """
        for name in ("credentials", "ca", "certificate", "key"):
            file = getattr(self, name)
            if file is not None and not os.access(file, os.R_OK):
                raise InvalidArgument(f"login: {name}: the file {file} does not exist, or can't be read")
        secrets = {"user": self.user, "password": self.password, "token": self.token}
        options = {**secrets, "user_credentials": self.credentials}
        if self.ca is None and self.certificate is None:
            return options
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return {**options, "tls": context}


async def connect(
    servers: str | list[str],
    *,
    name: str,
    login: Login | None = None,
    on_error: Callable[[Exception], None] | None = None,
    on_restored: Callable[[], None] | None = None,
    subjects: Callable[[], Iterable[str]] = tuple,
    gives_up: bool = False,
    **options: Any,
) -> NatsConnection:
    """Connect, and keep trying for as long as no server answers; a lost connection is restored in the same way.

    Args:
        servers: The address of a server, or of several of one cluster.
        name: The name under which nats-server shows the connection.
        login: How to log in.
        on_error: Called with every error that nats-py reports in the background.
        on_restored: Called when a lost connection is restored.
        subjects: Returns the subjects that an error may be about, or how they begin, as the caller wrote them: nats-py
            reports errors in lower case.
        gives_up: Whether the caller cancels this if it takes long: then no message promises further attempts.
        options: Passed on to `nats.connect`.

    Raises:
        NotPermitted: The server refuses this login.
        Unanswered: The server does not offer TLS, which its address or a certificate asks for; or a certificate is not
            trusted.
        InvalidArgument: A file of the login can't be read.
        TypeError: `nats.connect` has no such option.
        IncompatibleLibrary: The installed nats-py can't be used.
    """
    check_nats_py()
    if any(["ws://" in one or "wss://" in one for one in ([servers] if isinstance(servers, str) else servers)]):
        _use_websockets()
    connection = NatsConnection()
    hopeless: asyncio.Future[Unanswered] = asyncio.get_running_loop().create_future()
    last_logged, inbox, has_connected = "", inbox_prefix(options), False
    on_closed: Callable[[], Awaitable[None]] | None = options.pop("closed_cb", None)

    def left_out(lines: int) -> None:
        logger.warning("NATS: %d more errors within a second; at the level DEBUG all are logged", lines)

    rate = LogRate(limits.CONNECTION_LOG_LINES_PER_SECOND, left_out)

    async def failed(error: Exception) -> None:
        nonlocal last_logged
        if (real := _in_real_case(str(error), [inbox, *subjects()])) != str(error):
            error = NatsError(real)
        if on_error is not None:
            on_error(error)
        connection.note_refusal(str(error))
        was_hopeless = hopeless.done() and not has_connected
        permanent = _permanent(error)
        if permanent is not None and not hopeless.done():
            hopeless.set_result(permanent)
        # nats-py reports every failed attempt; the repetitions are for debugging only.
        # A refused reply names its subject, which the sender of the request chose.
        text = printable(str(error)).removeprefix("nats: ") or type(error).__name__
        level = logging.WARNING if text != last_logged and not was_hopeless and rate.allows() else logging.DEBUG
        goes_on = not (connection.is_connected or permanent or was_hopeless) and (has_connected or not gives_up)
        logger.log(level, "NATS: %s%s", text, "; trying again until it answers" if goes_on else "")
        last_logged = text

    async def lost() -> None:
        if not connection.is_closed:
            logger.warning("NATS: the connection is lost; trying to restore it")

    async def restored() -> None:
        nonlocal last_logged
        last_logged = ""
        logger.info("NATS: connected again")
        if on_restored is not None:
            on_restored()

    async def closed() -> None:
        rate.close()
        if on_closed is not None:
            await on_closed()

    callbacks: dict[str, Any] = {
        "error_cb": failed,
        "disconnected_cb": lost,
        "reconnected_cb": restored,
        "closed_cb": closed,
    }
    options = {"max_reconnect_attempts": -1, "reconnect_time_wait": 1, **(login or Login()).options(), **options}
    connecting = connection.connect(servers, name=name, **callbacks, **options)  # may not know one of the options
    try:
        await unless(hopeless, connecting)
    except BaseException:
        await connection.close()
        raise
    has_connected = True
    return connection


def inbox_prefix(options: Mapping[str, Any]) -> str:
    """Where replies arrive, according to the options of `nats.connect`."""
    prefix = options.get("inbox_prefix", DEFAULT_INBOX_PREFIX)
    return prefix.decode() if isinstance(prefix, bytes) else str(prefix)


def _in_real_case(text: str, subjects: Iterable[str]) -> str:
    for subject in subjects:
        text = text.replace(f'"{subject.lower()}', f'"{subject}')
    return text


def _permanent(error: Exception) -> Unanswered | None:
    """The error, if no further attempt can succeed; nats-py would try a wrong password or certificate for ever."""
    if isinstance(error, AuthorizationError) or "authorization violation" in str(error).lower():
        return NotPermitted("NATS refuses this login: check the user and password, token or credentials file")
    if isinstance(error, NoTlsError):
        return Unanswered(str(error))
    if isinstance(error, ssl.SSLError):
        return Unanswered(
            f"the TLS certificates of NATS and of this client don't fit: {error.reason or error}; {_TRUST}"
        )
    return None


def servers(connection: Nats) -> str:
    """The addresses that a connection uses, for `repr`."""
    return shown([url.geturl() for url in connection.servers]) or "no server"


def shown(addresses: Iterable[str]) -> str:
    """Addresses of NATS without users and passwords, for messages; they may lack the scheme."""
    return ", ".join(map(without_login, addresses))


async def unless(hopeless: "asyncio.Future[Unanswered]", work: Coroutine[Any, Any, T]) -> T:
    """Wait for some work; cancel it, and raise the error, as soon as `hopeless` holds one."""
    working = asyncio.ensure_future(work)
    either: list[asyncio.Future[Any]] = [working, hopeless]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise hopeless.result()
        return await working
    finally:
        await cancel(working)


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, whatever its outcome."""
    while not task.done():
        # Once is not enough: nats-py takes a cancellation for a failed attempt if both happen at the same moment.
        task.cancel()
        await asyncio.wait([task], timeout=limits.CANCEL_SECONDS)
    if not task.cancelled():
        task.exception()


async def flush(nats: Nats) -> None:
    """Wait until the server has carried out what was sent. If the caller is cancelled, the flush goes on.

    Otherwise nats-py would fail at the server's answer to a cancelled flush, and connect again.
    """
    flushing = asyncio.ensure_future(nats.flush())
    flushing.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(flushing)
