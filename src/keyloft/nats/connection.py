"""What services and clients on NATS share: the connection, errors as they travel, and the NATS services API."""

import asyncio
import logging
import re
import ssl
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec import Struct
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import AuthorizationError, MaxPayloadError
from nats.micro.service import EndpointInfo, EndpointStats, Service, ServiceConfig, ServiceInfo, ServiceStats
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from keyloft.errors import (
    Busy,
    CommitUnknown,
    DatabaseError,
    InvalidArgument,
    InvalidJson,
    InvalidPluginName,
    InvalidSubject,
    KeyloftError,
    MissingField,
    NotPermitted,
    StaleFence,
    Stalled,
    ValueTooLarge,
    VersionConflict,
)

logger = logging.getLogger(__name__)

# nats-py calls datetime.utcnow(), of which Python 3.12 warns; whoever makes warnings errors would get no service.
warnings.filterwarnings("ignore", r"datetime\.datetime\.utcnow", DeprecationWarning, r"nats\.micro")

# Errors as they travel

WIRE_ERRORS: Final[Mapping[str, type[KeyloftError]]] = {
    "INVALID_JSON": InvalidJson,
    "MISSING_FIELD": MissingField,
    "VALIDATION_ERROR": InvalidArgument,
    "VALUE_TOO_LARGE": ValueTooLarge,
    "INVALID_PLUGIN_NAME": InvalidPluginName,
    "INVALID_SUBJECT": InvalidSubject,
    "VERSION_CONFLICT": VersionConflict,
    "STALE_FENCE": StaleFence,
    "BUSY": Busy,
    "DATABASE_ERROR": DatabaseError,
    "INTERNAL_ERROR": KeyloftError,
}
"""All codes that a service answers with, and what a client raises for them."""

_FAILED: Final = "the database failed, and this request was not carried out; the service's log says why"
_UNKNOWN: Final = "the database was lost while it wrote this: it was carried out, or not; read to find out"
_UNEXPECTED: Final = "the service failed unexpectedly; its log says why"


def wire_code(error: BaseException) -> str:
    """The code under which an error travels: its own, or that of the nearest kind of error that has one on the wire."""
    for kind in type(error).__mro__:
        code = kind.__dict__.get("code")
        if code in WIRE_ERRORS:
            return str(code)
    return KeyloftError.code


def refusal(error: BaseException, more: Mapping[str, Any] | None = None) -> bytes:
    """The reply that tells of an error. What a database or a bug says stays in the service's log."""
    code = wire_code(error)
    told = str(error)
    if isinstance(error, CommitUnknown):
        told = _UNKNOWN
    elif code == DatabaseError.code and not isinstance(error, Stalled):
        told = _FAILED
    elif code == KeyloftError.code:
        told = _UNEXPECTED
    return _to_json({"success": False, "error_code": code, "message": told, **(more or {})})


def refused(reply: Mapping[str, Any]) -> KeyloftError:
    """The error that a reply tells of."""
    code, told = str(reply.get("error_code")), str(reply.get("message"))
    kind = WIRE_ERRORS.get(code, KeyloftError)
    return ValueTooLarge(None, None, told) if kind is ValueTooLarge else kind(told)


_to_json = msgspec.json.Encoder().encode


# The connection


class Login(Struct, frozen=True):
    """How to get into a NATS server; empty where anybody may."""

    credentials: Path | None = None
    """A credentials file, as `nsc` makes it."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    ca: Path | None = None
    """The authority that signed the server's certificate, where the system does not know it."""
    certificate: Path | None = None
    """Our own certificate, where the server asks for one; with `key`."""
    key: Path | None = None

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, …)"  # secrets have no place in logs

    def options(self) -> dict[str, Any]:
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


Taken: TypeAlias = Coroutine[Any, Any, None] | list[bytes] | None
"""What comes of a message. No further one is read before a coroutine is done. A list takes the reply subjects of all
that follows with the same subject before the event loop's next turn: whoever returns it has refused them."""

Taker: TypeAlias = Callable[[str, str, bytes], Taken]
"""Takes a message's subject, reply subject and data."""


class SturdyNats(Nats):
    """nats-py's client, made to survive what a stranger may send: with it, one message could make a service deaf."""

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Taker] = {}
        self._ps = _Parser(self)

    def hand_over(self, subscription: Subscription, taker: Taker | None) -> None:
        """Have a function take a subscription's messages as they are read, or None to have them go to its callback.

        Past nats-py's queue and task, a flood is refused as fast as it is read, and takes no memory.
        """
        if taker is None:
            self._takers.pop(subscription._id, None)
        else:
            self._takers[subscription._id] = taker

    def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> Coroutine[Any, Any, None]:
        if (taker := self._takers.get(sid)) is not None:
            try:
                taken = taker(subject.decode(), reply.decode(), data)
                return _NOTHING if taken is None or isinstance(taken, list) else taken
            except UnicodeDecodeError as error:
                _left_out(error)
                return _NOTHING
        # Most messages can't go wrong: they go to nats-py without a step between.
        if headers or not (subject + (reply or b"")).isascii() or not self.stats["in_msgs"] % _LOOK_EVERY:
            return self._process_carefully(sid, subject, reply, data, headers)
        return Nats._process_msg(self, sid, subject, reply, data, headers)

    async def _process_carefully(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        await self._wait_for_readers(sid)
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:
            _left_out(error)

    async def _wait_for_readers(self, sid: int) -> None:
        """Reading on would only fill our memory; if this lasts, NATS will tell us that we are too slow."""
        subscription = self._subs.get(sid)
        while subscription is not None and (  # noqa: ASYNC110
            subscription.pending_msgs > _MOST_UNREAD or subscription.pending_bytes > _MOST_UNREAD_BYTES
        ):
            await asyncio.sleep(0.001)

    async def _read_loop(self) -> None:
        # nats-py may have read on after the last connection was lost: half a message of that one would spoil this one.
        self._ps.reset()
        await super()._read_loop()
        # After an error that it did not expect, nats-py stays connected and reads no more.
        if self.is_connected:
            logger.error("NATS: reading has ended; connecting anew")
            await self.force_reconnect()

    async def flush(self, timeout: int = 10) -> None:  # noqa: ASYNC109 (nats-py's signature)
        # Twice: its ping goes straight to the socket, past what still waits in its buffer.
        await super().flush(timeout)
        await super().flush(timeout)


class _Parser(Parser):
    """nats-py's parser, but for messages: nothing that a stranger writes into one ends the reading, with which the
    others' requests would be lost; and those that are handed over take a shorter way, a flood's a very short one."""

    nc: SturdyNats

    def reset(self) -> None:
        super().reset()
        self._enough = 0  # so much must lie in the buffer before it is worth a look

    async def parse(self, data: bytes = b"") -> None:
        takers = self.nc._takers
        if not takers or self.state != AWAITING_CONTROL_LINE:
            self._enough = 0
            await super().parse(data)
            return
        if self.buf:
            self.buf += data
            if len(self.buf) < self._enough:
                return
            data = bytes(self.buf)
            self.buf.clear()
        at = 0
        refused: dict[tuple[bytes, bytes], list[bytes]] = {}
        while at < len(data):
            if (found := _MESSAGE(data, at)) is None:
                end = data.find(b"\r\n", at) + 2
                if end < 2:
                    self._keep(data[at:], 0)
                    return
                await super().parse(data[at:end])
                refused.clear()
                at = end
                if self.state != AWAITING_CONTROL_LINE:  # a message as no nats-server writes it
                    await super().parse(data[at:])
                    return
                continue
            _, subject, sid, reply, headers, size = found.groups(b"")
            begin = found.end()
            end = begin + int(size)
            if end + 2 > len(data):
                self._keep(data[at:], end + 2 - at)
                return
            at = end + 2
            # Most messages of a flood end here. All in all one takes 1.3 µs; at 3 µs nats-server cut us off as a slow
            # consumer, and the others' requests that it held for us were lost.
            if refused and (replies := refused.get((sid, subject))) is not None:
                replies.append(reply)
                continue
            body = begin + int(headers) if headers else begin
            if (taker := takers.get(int(sid))) is None:
                await self.nc._process_msg(int(sid), subject, reply, data[body:end], data[begin:body])
                refused.clear()
                continue
            try:
                taken = taker(subject.decode(), reply.decode(), data[body:end])
            except UnicodeDecodeError as error:
                _left_out(error)
                continue
            if taken is None:
                continue
            if isinstance(taken, list):
                refused[sid, subject] = taken
            else:
                await taken
                refused.clear()

    def _keep(self, begun: bytes, enough: int) -> None:
        """Half a message: the rest of it comes with the next reads."""
        self.buf += begun
        self._enough = enough


# Whether it has headers, subject, subscription, reply subject, size of the headers, size of headers and data. The
# server lets anything into a subject but what separates it from the next word.
_MESSAGE: Final = re.compile(
    rb"(?:MSG|(H)MSG) ([^ \t\r\n]++) ([0-9]++) (?:([^ \t\r\n]++) )?(?(1)([0-9]++) )([0-9]++)\r\n"
).match


def _left_out(error: Exception) -> None:
    # A subject that is no UTF-8, a header that is none: nobody to answer, nothing to carry out.
    logger.debug("NATS: a message that can't be read was left out: %s", type(error).__name__)


class _Nothing:
    """Nothing to wait for, at a fraction of what a coroutine costs."""

    def __await__(self) -> Iterator[Any]:
        return iter(())


_NOTHING: Final = cast("Coroutine[Any, Any, None]", _Nothing())
_LOOK_EVERY: Final = 64
_MOST_UNREAD: Final = 20_000
_MOST_UNREAD_BYTES: Final = 64 * 1024 * 1024


async def publish_all(connection: Nats, messages: Sequence[tuple[str, bytes]]) -> None:
    """Publish to subjects that came from NATS: joined into one command, it takes a fraction of the time.

    Raises:
        MaxPayloadError: Some were too large for a message; the others are on their way.
    """
    if not connection.is_connected:
        await _publish_each(connection, messages)
        return
    largest = connection.max_payload
    commands = [
        b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(data), data)
        for subject, data in messages
        if len(data) <= largest
    ]
    await connection._send_command(b"".join(commands))
    await connection._flush_pending()
    if len(commands) < len(messages):
        raise MaxPayloadError


async def _publish_each(connection: Nats, messages: Iterable[tuple[str, bytes]]) -> None:
    """While the server is away: nats-py knows how much it may keep until then, and refuses the rest one by one."""
    failure = None
    for subject, data in messages:
        try:
            await connection.publish(subject, data)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


async def publish_to_all(connection: Nats, subjects: Sequence[bytes], data: bytes) -> None:
    """Publish one text to subjects that came from NATS, at least one."""
    if not connection.is_connected:
        await _publish_each(connection, [(subject.decode(errors="replace"), data) for subject in subjects])
        return
    rest = b" %d\r\n%b\r\n" % (len(data), data)
    await connection._send_command(b"PUB " + (rest + b"PUB ").join(subjects) + rest)
    await connection._flush_pending()


class Pace:
    """Lets so many lines a second into the log: what others send must not fill the disk."""

    def __init__(self, lines: int, tell_unsaid: Callable[[int], None] | None = None) -> None:
        """`tell_unsaid` is told how many lines a second lacked, when the next line comes."""
        self._lines = lines
        self._tell_unsaid = tell_unsaid
        self._second = 0.0
        self._said = 0

    def allows(self) -> bool:
        now = time.monotonic()
        if now - self._second >= 1.0:
            unsaid, self._second, self._said = self._said - self._lines, now, 0
            if unsaid > 0 and self._tell_unsaid is not None:
                self._tell_unsaid(unsaid)
        self._said += 1
        return self._said <= self._lines


async def connect(
    servers: str | list[str],
    *,
    name: str,
    login: Login | None = None,
    on_error: Callable[[Exception], None] | None = None,
    **options: Any,
) -> Nats:
    """A connection that is kept up for as long as it takes: a server that is not there is asked again for ever.

    Raises:
        NotPermitted: The server refuses this login, or a certificate is not trusted.
    """
    hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    was_told = ""
    pace = Pace(10)

    async def failed(error: Exception) -> None:
        nonlocal was_told
        if on_error is not None:
            on_error(error)
        reason = _what_waiting_does_not_cure(error)
        if reason and not hopeless.done():
            hopeless.set_result(reason)
        # nats-py tells of every failed attempt; the first one was news.
        told = str(error) or type(error).__name__
        level = logging.WARNING if told != was_told and pace.allows() else logging.DEBUG
        logger.log(level, "NATS: %s%s", told, "" if connection.is_connected else "; trying again until it is there")
        was_told = told

    async def lost() -> None:
        if not connection.is_closed:
            logger.warning("NATS: the connection is lost; trying to get it back")

    async def back() -> None:
        nonlocal was_told
        was_told = ""
        logger.info("NATS: connected again")

    connection = SturdyNats()
    connecting = asyncio.ensure_future(
        connection.connect(
            servers,
            name=name,
            error_cb=failed,
            disconnected_cb=lost,
            reconnected_cb=back,
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
            await ended(connecting)
            await connection.close()
    return connection


def _what_waiting_does_not_cure(error: Exception) -> str | None:
    """Left alone, nats-py would try a wrong password or certificate for ever."""
    if isinstance(error, AuthorizationError) or "authorization violation" in str(error).lower():
        return "NATS refuses this login: check the user and password, token or credentials file"
    if isinstance(error, ssl.SSLError):
        return f"NATS and this side don't trust each other's certificates: {error.reason or error}"
    return None


async def ended(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, whatever that is."""
    while not task.done():
        # Once is not enough: nats-py takes a cancellation for a failed attempt if both come at the same moment.
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
    if not task.cancelled():
        task.exception()


# Serving


async def subscribe(connection: Nats, prefixes: Iterable[str], queue: str, take: Taker) -> list[Subscription]:
    """Hear all requests below some prefixes, each of which ends with a dot; once this returns, they are heard."""

    async def receive(message: Msg) -> None:
        taken = take(message.subject, message.reply, message.data)
        if taken is not None and not isinstance(taken, list):
            await taken

    found = []
    for prefix in prefixes:
        # No bounds in nats-py, which would drop what is over them in silence: a service counts what it takes.
        subscription = await connection.subscribe(
            f"{prefix}>", queue=queue, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        found.append(subscription)
        if isinstance(connection, SturdyNats):
            connection.hand_over(subscription, take)
    # Twice: nats-py's first ping may overtake the subscriptions that are still in its buffer.
    await connection.flush()
    await connection.flush()
    return found


async def drain(connection: Nats, subscriptions: Iterable[Subscription], seconds: float) -> None:
    """Take what the server has sent already, and no more."""
    # Without a server there is nothing to drain: what it had for us it gives to another instance, or to none.
    # Not cancelled when it takes too long: nats-py would stumble over an answer that still comes.
    if draining := [asyncio.ensure_future(_drained(subscription)) for subscription in subscriptions]:
        await asyncio.wait(draining, timeout=seconds)
    if isinstance(connection, SturdyNats):
        for subscription in subscriptions:
            connection.hand_over(subscription, None)


async def _drained(subscription: Subscription) -> None:
    await subscription.drain()  # type: ignore[no-untyped-call]


# The NATS services API


class Endpoint(Struct):
    """One kind of request, as `$SRV.STATS` shows it."""

    name: str
    subject: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    seconds: float = 0.0


class Listed(Service):
    """Answers `$SRV.PING`, `.INFO` and `.STATS` for a service that takes its requests itself."""

    def __init__(
        self,
        connection: Nats,
        *,
        name: str,
        version: str,
        description: str,
        queue: str,
        metadata: Mapping[str, str],
        endpoints: Callable[[], Iterable[Endpoint]],
    ) -> None:
        super().__init__(
            connection, ServiceConfig(name=name, version=version, description=description, metadata=dict(metadata))
        )
        self._queue = queue
        self._current = endpoints

    def info(self) -> ServiceInfo:
        info = super().info()
        info.endpoints = [
            EndpointInfo(name=endpoint.name, subject=endpoint.subject, queue_group=self._queue)
            for endpoint in self._current()
        ]
        return info

    def stats(self) -> ServiceStats:
        stats = super().stats()
        stats.endpoints = [
            EndpointStats(
                name=endpoint.name,
                subject=endpoint.subject,
                queue_group=self._queue,
                num_requests=endpoint.requests,
                num_errors=endpoint.errors,
                last_error=endpoint.last_error,
                processing_time=int(endpoint.seconds * 1e9),
                average_processing_time=int(endpoint.seconds * 1e9 / endpoint.requests) if endpoint.requests else 0,
            )
            for endpoint in self._current()
        ]
        return stats
