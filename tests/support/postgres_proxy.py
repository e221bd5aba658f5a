"""Stands between clients and PostgreSQL, on a port of its own: pauses, cuts, swallows messages, pools transactions."""

import asyncio
import re
import struct
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Verdict = Callable[["Message"], bool]

ENDLESS_SECONDS = 8.0
"""A call that took longer has waited for as long as callers wait by default; a busy machine is slow, too."""
NOTIFICATION = b"A"
_READY = b"Z"
_ASKS_FOR_READY = (b"Q", b"S")
_END = b"X"
_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102


class Message(NamedTuple):
    """One message of the protocol; the first ones of a client have no kind."""

    kind: bytes
    body: bytes

    @property
    def wire(self) -> bytes:
        return self.kind + struct.pack("!i", len(self.body) + 4) + self.body

    @classmethod
    async def read(cls, reader: asyncio.StreamReader, *, first: bool = False) -> "Message":
        kind = b"" if first else await reader.readexactly(1)
        [length] = struct.unpack("!i", await reader.readexactly(4))
        return cls(kind, await reader.readexactly(length - 4))


async def connect(url: str) -> Streams:
    """Connect to the server that a URL names, as a client does before its first message."""
    parts = urllib.parse.urlsplit(url)
    options = dict(urllib.parse.parse_qsl(parts.query))
    host = options.get("host") or parts.hostname or "localhost"
    port = int(options.get("port") or parts.port or 5432)
    if host.startswith("/"):
        return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
    return await asyncio.open_connection(host, port)


def through(url: str, port: int) -> str:
    """The URL of the same database by way of a port of this machine."""
    parts = urllib.parse.urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    return f"postgresql://{login}{at}127.0.0.1:{port}{parts.path}"


@asynccontextmanager
async def listening(
    meet: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A port whose clients are met one by one, each in a task that ends with the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, EOFError):
                await meet(reader, writer)
        finally:
            writer.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, Message]:
    """The first message of a client, after the reply that there is no encryption."""
    while True:
        message = await Message.read(reader, first=True)
        [code] = struct.unpack("!i", message.body[:4])
        if code not in (_SSL_REQUEST, _GSS_REQUEST):
            return code, message
        writer.write(b"N")


_NO_TRANSACTIONS = Message(b"E", b"SFATAL\0C08P01\0Mtransaction blocks not allowed in statement pooling mode\0\0")


class Proxy:
    """Forwards whole messages, unless a test changes that."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self.accepted = 0
        """How many clients have connected so far."""
        self.lets_ask: Verdict = lambda message: True
        """Whether a message of a client goes on to the server; what does not is swallowed."""
        self.lets_answer: Verdict = lambda message: True

    def pause(self) -> None:
        """Forward nothing, not even that one side has hung up; both wait."""
        self._flows.clear()

    def go_on(self) -> None:
        """Deliver what has arrived meanwhile, and all that follows."""
        self._flows.set()

    def cut(self) -> None:
        """Break every connection there is, without a word."""
        for writer in self._open:
            writer.transport.abort()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await self._flows.wait()
        _, first = await _startup(reader, writer)
        from_server, to_server = await connect(self._url)
        ends = {writer, to_server}
        self._open |= ends
        try:
            to_server.write(first.wire)
            forwarding = [
                asyncio.create_task(self._forward(reader, to_server, lambda message: self.lets_ask(message))),
                asyncio.create_task(self._forward(from_server, writer, lambda message: self.lets_answer(message))),
            ]
            try:
                await asyncio.wait(forwarding, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in forwarding:
                    task.cancel()
                await asyncio.gather(*forwarding, return_exceptions=True)
        finally:
            self._open -= ends
            # Not aborted: the last bytes are still delivered.
            to_server.close()
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lets: Verdict) -> None:
        while True:
            try:
                message = await Message.read(reader)
            except (OSError, EOFError):
                await self._flows.wait()
                raise
            await self._flows.wait()
            if lets(message):
                writer.write(message.wire)
                await writer.drain()


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before a server, and the URL that leads through it."""
    between = Proxy(url)
    async with listening(between.meet) as port:
        yield between, through(url, port)


@asynccontextmanager
async def silent_port(met: Callable[[], object] = lambda: None) -> AsyncIterator[int]:
    """A port that takes connections, calls `met` for each, and never says a word."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met()
        while await reader.read(1000):
            pass

    async with listening(meet) as port:
        yield port


class _Session:
    """A session on the server, which serves whichever client has a transaction to make."""

    def __init__(self, streams: Streams, greeting: bytes) -> None:
        self.reader, self.writer = streams
        self.greeting = greeting
        """What the server says to a client that has logged in."""


class Pooler:
    """Gives every transaction the session that has rested longest, as PgBouncer does in its transaction mode.

    Sessions are made when they are needed, as the user of the first client, who needs no password. What a client left
    behind in one is met by the next: settings, prepared statements. Notifications reach no client.
    """

    def __init__(self, url: str, sessions: int, *, allows_transactions: bool) -> None:
        self._url = url
        self._allows_transactions = allows_transactions
        self.idle_sessions: asyncio.Queue[_Session | None] = asyncio.Queue()
        for _ in range(sessions):
            self.idle_sessions.put_nowait(None)
        self.transactions = 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        code, startup = await _startup(reader, writer)
        if code == _CANCEL_REQUEST:
            return
        session = await self._take(startup)
        writer.write(session.greeting)
        self.idle_sessions.put_nowait(session)
        while (message := await Message.read(reader)).kind != _END:
            if message.body.startswith(b"BEGIN") and not self._allows_transactions:
                writer.write(_NO_TRANSACTIONS.wire)
                return
            session = await self._take(startup)
            try:
                await self._carry_out(message, session, reader, writer)
            except BaseException:
                # Left in the middle of a transaction: no other client may go on with it.
                session.writer.transport.abort()
                self.idle_sessions.put_nowait(None)
                raise
            self.idle_sessions.put_nowait(session)

    async def close(self) -> None:
        while not self.idle_sessions.empty():
            if (session := self.idle_sessions.get_nowait()) is not None:
                session.writer.transport.abort()

    async def _carry_out(
        self, message: Message, session: _Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One transaction, from its first message until the server is ready for another one."""
        self.transactions += 1
        awaited = 0
        asking: asyncio.Task[Message] | None = None
        answering: asyncio.Task[Message] | None = None
        try:
            session.writer.write(message.wire)
            awaited += message.kind in _ASKS_FOR_READY
            while True:
                asking = asking or asyncio.create_task(Message.read(reader))
                answering = answering or asyncio.create_task(Message.read(session.reader))
                await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answer, answering = answering.result(), None
                    awaited -= answer.kind == _READY
                    is_over = answer == Message(_READY, b"I") and not awaited
                    if is_over:
                        # Before the client hears of it: its next message is for another session.
                        await _take_back(asking)
                        asking = None
                    if answer.kind != NOTIFICATION:
                        writer.write(answer.wire)
                    if is_over:
                        return
                elif asking.done():
                    message, asking = asking.result(), None
                    session.writer.write(message.wire)
                    awaited += message.kind in _ASKS_FOR_READY
        finally:
            for task in (asking, answering):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _take(self, startup: Message) -> _Session:
        session = await self.idle_sessions.get()
        if session is not None:
            return session
        try:
            return await self._log_in(startup)
        except BaseException:
            self.idle_sessions.put_nowait(None)
            raise

    async def _log_in(self, startup: Message) -> _Session:
        reader, writer = await connect(self._url)
        # The client's own settings stay with the client, as with PgBouncer; only who and where goes to the server.
        names = dict(re.findall(rb"(\w+)\x00([^\x00]*)\x00", startup.body[4:]))
        settings = b"".join(b"%s\x00%s\x00" % (name, names[name]) for name in (b"user", b"database"))
        writer.write(Message(b"", startup.body[:4] + settings + b"client_encoding\x00UTF8\x00\x00").wire)
        greeting = b""
        while True:
            message = await Message.read(reader)
            assert message.kind != b"E", message.body
            greeting += message.wire
            if message.kind == _READY:
                return _Session((reader, writer), greeting)


async def _take_back(reading: "asyncio.Task[Message]") -> None:
    """Stop reading; nothing is lost as long as nothing had come, and a client waits for the server to be ready."""
    if reading.done():
        reading.result()
        raise AssertionError("this client does not wait for its answers, which this pooler can't cope with")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def pooler(url: str, sessions: int = 3, *, allows_transactions: bool = True) -> AsyncIterator[tuple[Pooler, str]]:
    """A pooler before a server, and the URL that leads through it.

    Without transactions, it ends the connection of a client that begins one, as PgBouncer does in its statement mode.
    """
    between = Pooler(url, sessions, allows_transactions=allows_transactions)
    try:
        async with listening(between.meet) as port:
            yield between, through(url, port)
    finally:
        await between.close()
