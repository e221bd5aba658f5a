"""Reads the messages that NATS delivers, and publishes replies: the one module that uses private parts of nats-py.

`_Parser.take` makes messages of what the socket has. `compatibility.py` checks that the installed nats-py has all parts
that this module, `subscribing.py` and `transport.py` use.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from nats.aio.client import Client as Nats
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport, Transport
from nats.errors import BadSubjectError, MaxPayloadError

from keyloft import limits
from keyloft.nats.compatibility import incompatible
from keyloft.nats.errors import NoTlsError
from keyloft.nats.events import EVENTS
from keyloft.nats.handlers import EarlyRefusal, Handler, RefusedNames
from keyloft.nats.transport import LargeReads

logger = logging.getLogger(__name__)

PERMISSION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
"""How nats-py reports that NATS has refused a subject."""


try:
    from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser
except ImportError as error:
    raise incompatible(str(error)) from error


class NatsConnection(Nats):
    """nats-py's client, changed so that no message ends the reading, as one can in the original."""

    _ps: "_Parser"

    def __init__(self) -> None:
        super().__init__()
        # By the number of the subscription, as bytes, as it stands in a message.
        self._handlers: dict[bytes, Handler] = {}
        self._refusing: dict[bytes, EarlyRefusal] = {}
        self._ps = _Parser(self)
        self.read_bytes = 0
        """How many bytes were read since it was made."""
        self.sending = asyncio.Lock()
        """Held by a service while it waits for room and sends, so that services on one connection take turns."""
        self.refused: set[str] = set()
        """In lower case, the subjects of subscriptions, and $SRV.INFO, that NATS has refused."""
        self.refused_events: deque[str] = deque(maxlen=limits.REFUSED_EVENTS)
        """In lower case, the last subjects of events that this program was not allowed to publish to."""

    async def close(self) -> None:
        """End the connection, after what is left to send is sent; a lost connection gives it up.

        nats-py would send it while it closes. It would fail on a lost connection, and stay half open.
        """
        try:
            # A WebSocket raises an AttributeError if it was lost, uvloop a RuntimeError.
            with suppress(OSError, RuntimeError, AttributeError):
                while self.is_connected and self.pending_data_size and (socket := self._transport) is not None:
                    left, self._pending, self._pending_data_size = self._pending, [], 0
                    socket.writelines(left)
                    await socket.drain()  # type: ignore[no-untyped-call]
            self._pending, self._pending_data_size = [], 0
            await super().close()
        except asyncio.CancelledError:
            # The server may read nothing, and closing waits until it has read what was written.
            if isinstance(self._socket, TcpTransport) and (writer := self._socket._io_writer) is not None:
                writer.transport.abort()
            self._pending, self._pending_data_size = [], 0
            await super().close()
            raise

    @property
    def parser(self) -> "_Parser":
        """The parser that reads the messages of this connection; for tests."""
        return self._ps

    def handle(self, subscription: Subscription, handler: Handler | None, refuse: EarlyRefusal | None = None) -> None:
        """Pass a subscription's messages to a function as they are read; None: to the subscription's callback again.

        Without nats-py's queue and task, a flood is refused as fast as it is read, and takes no memory.
        """
        number = b"%d" % subscription._id
        self._handlers.pop(number, None)
        self._refusing.pop(number, None)
        if handler is None:
            return
        self._handlers[number] = handler
        if refuse is not None:
            self._refusing[number] = refuse
        self._receive_at_once()

    def _receive_at_once(self) -> None:
        if isinstance(self._socket, LargeReads):
            self._socket.receive_for(self._ps)

    def note_refusal(self, error: str) -> None:
        """Remember the subject of an error if this program chose it. Subjects of replies were chosen by senders."""
        if (found := PERMISSION.search(error)) is None:
            return
        kind, subject = found[1].lower(), found[2].lower()
        if kind == "subscription" or subject == "$srv.info":
            self.refused.add(subject)
        elif f".{EVENTS}." in subject:
            self.refused_events.append(subject)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if (sub := self._subs.get(sid)) is not None:
            # Stop reading while too much is unread, to bound memory; if this lasts, NATS reports a slow consumer.
            while sub.pending_msgs > limits.UNREAD_MESSAGES or sub.pending_bytes > limits.UNREAD_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(limits.UNREAD_PAUSE_SECONDS)
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:
            _log_unreadable(error)

    @property
    def _transport(self) -> Transport | None:
        return self._socket

    @_transport.setter
    def _transport(self, made: Transport | None) -> None:
        self._socket = LargeReads() if type(made) is TcpTransport else made

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py would send the login and all data as plain text to a server that does not insist on TLS.
        if initial_connection and not info.get("tls_required") and self._is_tls_wanted():
            if not info.get("tls_available"):
                raise NoTlsError
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _is_tls_wanted(self) -> bool:
        """Whether this server's address, or a certificate that was passed, asks for TLS; `wss://` has it already."""
        scheme = self._current_server.uri.scheme if self._current_server is not None else ""
        return scheme == "tls" or (scheme == "nats" and "tls" in self.options)

    async def _read_loop(self) -> None:
        # Half a message of the connection before this one may be left in the parser.
        self._ps.reset()
        if self._handlers:
            self._receive_at_once()
        await super()._read_loop()
        # After an unexpected error, nats-py would stay connected and read nothing more. It also catches a cancellation:
        # that is how `asyncio.run` ends a program that has left its connection open.
        reading = asyncio.current_task()
        if self.is_connected and not (reading is not None and reading.cancelling()):
            logger.error("NATS: reading has ended unexpectedly; connecting again")
            await self.force_reconnect()

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        # nats-py writes a ping straight to the socket, past the commands in its buffer. A flush, and the drain of a
        # subscription, would end before the server has seen these commands.
        if not self.is_connected:
            await super()._send_ping(future)
            return
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        await self._send_command(b"PING\r\n")
        await self._flush_pending()

    async def _process_pong(self) -> None:
        # nats-py fails at the answer to a flush that was cancelled or has timed out, and all reading ends.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class _Parser(Parser):
    """nats-py's parser with another way to read messages: no message can end the reading.

    Messages of subscriptions with a handler take a shorter path, and messages of a flood the shortest.
    """

    nc: NatsConnection
    unwanted = 0
    """How many of the next bytes belong to a message that was refused before it had arrived."""
    _enough = 0
    """An incomplete message waits in the buffer until the buffer has this many bytes."""
    _large: tuple[bytes, bytes, bytes, int] | None = None
    """A large message of which a part has arrived: its subject, subscription, reply subject and size."""
    _space = bytearray()
    """Where the data of large messages is put together."""
    missing = memoryview(b"")
    """The memory for the next bytes of the large message's data."""
    _awaited: Coroutine[Any, Any, Any] | None = None
    """The coroutine to be awaited before the next message is read."""
    _rest = b""
    """The bytes to be read after that."""

    def reset(self) -> None:
        super().reset()
        self.unwanted = self._enough = 0
        self._large, self.missing = None, memoryview(b"")
        self._rest = b""
        if self._awaited is not None:
            self._awaited.close()
            self._awaited = None

    async def parse(self, data: bytes = b"") -> None:
        is_done = self._awaited is None and self.take(data)
        while not is_done:
            if self._awaited is not None:
                awaited, self._awaited = self._awaited, None
                await awaited
            rest, self._rest = self._rest, b""
            is_done = self.take(rest)

    def leave_out(self, count: int) -> None:
        """Note that this many unwanted bytes have arrived."""
        self.unwanted -= count
        self.nc.read_bytes += count

    def fill(self, count: int) -> bool:
        """Note that this many missing bytes have arrived; returns what `take` does."""
        self.nc.read_bytes += count
        self.missing = self.missing[count:]
        if self.missing or self._large is None:
            return True
        (subject, sid, reply, size), self._large = self._large, None
        self.unwanted = len(b"\r\n")
        data = bytes(memoryview(self._space)[:size])
        if (handler := self.nc._handlers.get(sid)) is None:
            return self._wait_for(self.nc._process_msg(int(sid), subject, reply, data, b""), b"")
        try:
            handled = handler(subject, reply, data)
        except UnicodeDecodeError as error:
            handled = None
            _log_unreadable(error)
        return self._wait_for(handled, b"") if isinstance(handled, Coroutine) else True

    def _receive_rest(self, subject: bytes, sid: bytes, reply: bytes, size: int, first: memoryview) -> None:
        """Receive the data of a large message in one piece, since its first bytes are here."""
        # All large messages use the same memory, and each is copied once: allocating for every part is the slowest.
        if len(self._space) < size:
            self._space = bytearray(size)
        self._large = subject, sid, reply, size
        self._space[: len(first)] = first
        self.missing = memoryview(self._space)[len(first) : size]

    def take(self, data: bytes) -> bool:
        """Handle what was read; returns whether that is done, or `parse` has to wait for something."""
        if self.missing:
            first, data = data[: len(self.missing)], data[len(self.missing) :]
            self.missing[: len(first)] = first
            if not self.fill(len(first)):
                self._rest = data
                return False
        self.nc.read_bytes += len(data)
        handlers = self.nc._handlers
        if self.unwanted:
            unwanted = min(self.unwanted, len(data))
            self.unwanted -= unwanted
            data = data[unwanted:]
        if not handlers or self.state != AWAITING_CONTROL_LINE:
            self._enough = 0
            if not data:
                return True
            self._awaited = super().parse(data)
            return False
        if self.buf:
            self.buf += data
            if len(self.buf) < self._enough:
                return True
            data = bytes(self.buf)
            self.buf.clear()
        at = 0
        refused: dict[tuple[bytes, bytes], list[bytes]] = {}
        names: dict[bytes, RefusedNames] = {}
        arrived = len(data)
        while at < arrived:
            if (found := _PLAIN_MESSAGE(data, at)) is not None and _LINE_END not in found[3]:  # most of them
                subject, sid, reply, size = found.groups()
                headers = b""
            elif (found := _MESSAGE(data, at)) is not None:
                _, subject, sid, reply, headers, size = found.groups(b"")
            else:
                end = data.find(b"\r\n", at) + 2
                if end < 2:
                    self.buf += data[at:]
                    self._enough = 0
                    return True
                return self._wait_for(super().parse(data[at:end]), data[end:])
            begin = found.end()
            end = begin + (_SMALL_SIZES.get(size) or int(size))
            if (missing := end + 2 - arrived) > 0:
                refuse = self.nc._refusing.get(sid) if missing >= limits.REFUSED_EARLY_BYTES else None
                if refuse is not None and refuse(subject, reply, int(size) - int(headers or 0)):
                    self.unwanted = missing
                    return True
                if missing >= limits.REFUSED_EARLY_BYTES and not headers:
                    self._receive_rest(subject, sid, reply, int(size), memoryview(data)[begin:])
                    return True
                self.buf += data[at:]
                self._enough = end + 2 - at
                return True
            at = end + 2
            # Most messages of a flood end here, so every step counts: a connection that reads too slowly is cut off by
            # nats-server, with other senders' requests (ADR 7; tests/plugins/test_service.py floods a service).
            if refused and (replies := refused.get((sid, subject))) is not None:
                replies.append(reply)
                continue
            if names and (some := names.get(sid)) is not None and not some.knows(subject):
                some.replies.append(reply)
                continue
            body = begin + int(headers) if headers else begin
            if (handler := handlers.get(sid)) is None:
                message = self.nc._process_msg(int(sid), subject, reply, data[body:end], data[begin:body])
                return self._wait_for(message, data[at:])
            try:
                handled = handler(subject, reply, data[body:end])
            except UnicodeDecodeError as error:
                _log_unreadable(error)
                continue
            if handled is None:
                continue
            if isinstance(handled, list):
                refused[sid, subject] = handled
            elif isinstance(handled, RefusedNames):
                names[sid] = handled
            else:
                return self._wait_for(handled, data[at:])
        return True

    def _wait_for(self, awaited: Coroutine[Any, Any, Any], rest: bytes) -> bool:
        """Let `parse` wait before it goes on with the rest."""
        self._awaited, self._rest = awaited, rest
        self.nc.read_bytes -= len(rest)  # the rest is counted when `take` gets it
        return False


# Groups: whether it has headers, subject, subscription, reply subject, size of the headers, size of headers and data.
# The server lets everything into a subject except what separates it from the next word.
_MESSAGE: Final = re.compile(
    rb"(?:MSG|(H)MSG) ([^ \t\r\n]++) ([0-9]++) (?:([^ \t\r\n]++) )?(?(1)([0-9]++) )([0-9]++)\r\n"
).match

# The same, and faster, with a reply subject and no headers. Groups: subject, subscription, reply subject, size. It only
# looks for spaces: in a message without a reply subject, it goes on into the data, past the end of the line.
_PLAIN_MESSAGE: Final = re.compile(rb"MSG ([^ ]++) ([0-9]++) ([^ ]++) ([0-9]++)\r\n").match
_LINE_END: Final = ord("\r")

# To look up a number takes a third of the time that converting it takes, and each message has one.
_SMALL_SIZES: Final = {b"%d" % size: size for size in range(1024)}

_WHITE_SPACE: Final = re.compile(r"\s").search


def _log_unreadable(error: Exception) -> None:
    # A subject that is not UTF-8, or a broken header: such a message can be neither carried out nor answered.
    logger.debug("NATS: a message that can't be read was left out: %s", type(error).__name__)


async def publish_all(connection: Nats, messages: Sequence[tuple[bytes, bytes]]) -> None:
    """Publish to subjects that arrived from NATS. Joined into one command, they take a fraction of the time.

    Raises:
        MaxPayloadError: Some were too large for a message; the others are on their way.
    """
    if not connection.is_connected:
        await _publish_each(connection, messages)
        return
    commands = _publishing(connection, messages)
    await connection._send_command(b"".join(commands))
    await connection._flush_pending()
    if len(commands) < len(messages):
        raise MaxPayloadError


def publish_at_once(connection: Nats, messages: Sequence[tuple[bytes, bytes]]) -> bool:
    """Publish as `publish_all` does, but directly, if nothing waits to be sent; returns whether it did."""
    if (socket := _idle_socket(connection)) is None:
        return False
    commands = _publishing(connection, messages)
    if len(commands) < len(messages):
        return False
    socket.write(b"".join(commands))  # type: ignore[no-untyped-call]
    return True


def _idle_socket(connection: Nats) -> TcpTransport | None:
    """The socket of a connection, if nothing waits to be sent, and all that was sent before is on its way."""
    socket = connection._transport
    if not isinstance(socket, TcpTransport) or connection.pending_data_size or not connection.is_connected:
        return None
    writer = socket._io_writer
    if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size():
        return None
    return socket


def _publishing(connection: Nats, messages: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The commands that publish messages; none for one that is too large."""
    pub, largest = b"PUB %b %d\r\n%b\r\n", connection.max_payload
    return [pub % (subject, len(data), data) for subject, data in messages if len(data) <= largest]


async def publish_requests(connection: Nats, requests: Sequence[tuple[str, str, bytes]]) -> None:
    """Publish requests, each with its subject, reply subject and data, in their order; none is larger than a message.

    Raises:
        BadSubjectError: A subject holds white space, or nothing.
        ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError: They can't be sent.
    """
    if not connection.is_connected or connection.is_draining_pubs:
        for subject, reply, data in requests:
            await connection.publish(subject, data, reply)
        return
    pub = b"PUB %b %b %d\r\n%b\r\n"
    if any([not subject or _WHITE_SPACE(subject) for subject, _, _ in requests]):
        raise BadSubjectError
    commands = b"".join(
        [pub % (subject.encode(), reply.encode(), len(data), data) for subject, reply, data in requests]
    )
    if (socket := _idle_socket(connection)) is not None:
        socket.write(commands)  # type: ignore[no-untyped-call]
        return
    await connection._send_command(commands)
    await connection._flush_pending()


async def publish_to_all(connection: Nats, subjects: Sequence[bytes], data: bytes) -> None:
    """Publish the same data to subjects that arrived from NATS, at least one."""
    if not connection.is_connected:
        await _publish_each(connection, [(subject, data) for subject in subjects])
        return
    rest = b" %d\r\n%b\r\n" % (len(data), data)
    await connection._send_command(b"PUB " + (rest + b"PUB ").join(subjects) + rest)
    await connection._flush_pending()


async def _publish_each(connection: Nats, messages: Iterable[tuple[bytes, bytes]]) -> None:
    """Publish one by one: while the server is away, nats-py buffers messages up to a limit, and refuses the others."""
    sending = [connection.publish(subject.decode(errors="replace"), data) for subject, data in messages]
    if failures := [failure for failure in await asyncio.gather(*sending, return_exceptions=True) if failure]:
        raise failures[-1]
