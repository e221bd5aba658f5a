"""The routes of watches: changes as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from keyloft import limits
from keyloft.core.records import Get, Scan, Space
from keyloft.errors import InvalidArgument, KeyloftError
from keyloft.http import audit_log
from keyloft.http.channels import EventChannel, EventListener, WatchedKeys, failure_event
from keyloft.http.connections import HttpConnection
from keyloft.http.context import HttpContext
from keyloft.http.descriptions import WATCH
from keyloft.http.kv import BASES
from keyloft.http.problems import Problem
from keyloft.http.replies import EVENTS_TYPE, HttpReply
from keyloft.http.requests import ClientGone, HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.sse import HEARTBEAT
from keyloft.http.tokens import AccessToken
from keyloft.http.watch_memory import WatchMemory
from keyloft.http.wire import read_key, read_prefix, read_versionstamp, shown_key
from keyloft.tuples.selector import Selector


async def begin_events(request: HttpRequest) -> None:
    """Send the head of an answer that has events.

    Raises:
        Problem: The client speaks HTTP/1.0, which has no body in chunks.
    """
    if request.scope["http_version"] == "1.0":
        raise Problem(400, "BAD_REQUEST", "a watch takes HTTP/1.1")
    headers = [
        (b"content-type", EVENTS_TYPE),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
        (b"x-content-type-options", b"nosniff"),
        *request.origin_headers,
    ]
    await request.send({"type": "http.response.start", "status": 200, "headers": headers})


class EventStream:
    """The answer to one watching client: events as they come, until the client or the service ends it.

    The channel itself writes events to the connections of all its listeners. With a task for each listener, this
    would take ten times as long (`scripts/bench http`, row «watch»).
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._connection: HttpConnection = request.scope["connection"]
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.get_running_loop().create_future()
        """Done when the client is gone, or has left `connected`."""

    @property
    def token(self) -> AccessToken:
        return self._request.token

    async def begin(self) -> None:
        """Send the head of the answer."""
        await begin_events(self._request)

    @property
    def room(self) -> Callable[[], Awaitable[None]]:
        """Waits while clients leave too much unread to send more."""
        return self._connection.server_state.room

    def beat(self) -> None:
        """Send a comment, unless the client has events to read."""
        if not self._connection.transport.get_write_buffer_size():
            self.write(HEARTBEAT)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """A block in which it is noticed that the client hangs up. After the block, the answer is complete."""
        self._gone = asyncio.ensure_future(self._request.wait_for_end())
        try:
            yield
        finally:
            self._gone.cancel()
            await asyncio.gather(self._gone, return_exceptions=True)
            self.end()
        await self._request.send({"type": "http.response.body", "body": b""})

    async def until_end(self) -> int | None:
        """Return when the client is gone, when there will be no more events, or when the client has left its channel.

        Returns:
            If it has left, the version up to which it knows all changes.
        """
        await asyncio.wait([self._gone, self._ended, self._left], return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done() or self._ended.done():
            return None
        version, self._left = self._left.result(), asyncio.get_running_loop().create_future()
        return version

    def leave(self, version: int) -> None:
        """Note that the channel goes on without this client, which knows all changes up to a version."""
        if not self._left.done():
            self._left.set_result(version)

    async def is_ready_again(self) -> bool:
        """Wait until a client that has left its channel has read most of what was sent; one that does not is cut off.

        Returns False if the client is gone, or there will be no more events.
        """
        reading = asyncio.ensure_future(self.has_read(limits.HTTP_ANSWER_SECONDS))
        try:
            await asyncio.wait([self._gone, self._ended, reading], return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done() or self._ended.done():
                return False
            if not reading.result():
                self.cut_off()
            return reading.result()
        finally:
            reading.cancel()

    def write(self, chunk: bytes) -> None:
        """Send a chunk with events; a client that does not read is cut off."""
        transport = self._connection.transport
        if transport.is_closing() or self._ended.done():
            return
        if transport.get_write_buffer_size() > limits.HTTP_LISTENER_BYTES:
            transport.abort()
            return
        transport.write(chunk)
        if transport.get_write_buffer_size() > limits.HTTP_LISTENER_BYTES:
            self._connection.server_state.unsent(self._connection)

    async def has_read(self, seconds: float) -> bool:
        """Wait until the client has read most of what was sent, or is gone; returns False if time is up before."""
        if not self._connection.is_unread:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._connection.has_read()
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> None:
        """End the connection of a client that does not read."""
        self._connection.abort()

    def end(self) -> None:
        """End the stream: there will be no more events."""
        if not self._ended.done():
            self._ended.set_result(None)


class ChannelTable:
    """All channels, and the streams on them."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._channels: dict[tuple[str | None, WatchedKeys], list[EventChannel]] = {}
        self._streams: dict[EventStream, None] = {}
        self._memory = WatchMemory(context.large_parts)
        self._beating: asyncio.Task[None] | None = None

    async def watch(self, request: HttpRequest) -> HttpReply | None:
        """Changes of keys, or below a prefix, as events."""
        request.expect_query("key", "prefix", "since")
        store = request.parameter("store")
        asks = _asks(request, store)
        since = _since(request)
        self._context.check_listeners()
        if request.method == "HEAD":
            return HttpReply(content_type=EVENTS_TYPE)
        if self._context.engine is None and EVENTS_TYPE.decode() in (request.header(b"accept") or ""):
            # An EventSource connects again if its connection is lost, but gives up for good at a status like 503.
            request.scope["connection"].abort()
            raise ClientGone
        stream = EventStream(request)
        self._streams[stream] = None
        self._context.meters.watches += 1
        try:
            await self._listen(store, asks, since, stream)
        finally:
            self._context.meters.watches -= 1
            del self._streams[stream]
        return None

    async def _listen(self, store: str | None, asks: WatchedKeys, since: int | None, stream: EventStream) -> None:
        async with stream.connected():
            known = await self._on_a_channel(store, asks, since, stream, is_new=True)
            # A channel goes on without a slow client, which joins another one as soon as it has read.
            while known is not None and await stream.is_ready_again():
                try:
                    known = await self._on_a_channel(store, asks, known, stream, is_new=False)
                except KeyloftError as error:
                    stream.write(failure_event(error))
                    break

    async def _on_a_channel(
        self, store: str | None, asks: WatchedKeys, since: int | None, stream: EventStream, *, is_new: bool
    ) -> int | None:
        """Let a client listen until it leaves the channel; then the version up to which it knows all changes."""
        await stream.room()
        channel = self._channel(store, asks, since, stream)
        listener = EventListener(
            write=partial(self._write, stream),
            has_read=stream.has_read,
            cut_off=stream.cut_off,
            leave=stream.leave,
            end=stream.end,
        )
        channel.users += 1
        try:
            await channel.start()
            if is_new:
                audit_log.read(stream.token, "watch", store, map(_shown, asks))
                await stream.begin()
            await stream.room()
            if not channel.join(listener, since, is_new=is_new):
                stream.end()  # the client connects again, and gets another channel
            if self._beating is None:
                self._beating = asyncio.create_task(self._beat(), name="keyloft http heartbeats")
            return await stream.until_end()
        finally:
            channel.listeners.pop(listener, None)
            channel.users -= 1
            if not channel.users:
                self._remove(store, asks, channel)
                await channel.aclose()

    def _write(self, stream: EventStream, chunk: bytes) -> None:
        """Send events, unless the token of the stream is no longer valid."""
        if self._context.tokens.is_valid(stream.token):
            stream.write(chunk)
        else:
            stream.end()

    def end_streams(self) -> None:
        """End all streams: the service is ending."""
        for stream in self._streams:
            stream.end()
        if self._beating is not None:
            self._beating.cancel()

    def _channel(self, store: str | None, asks: WatchedKeys, since: int | None, stream: EventStream) -> EventChannel:
        """A channel that can serve a new listener; a new one if there is none."""
        for channel in self._channels.get((store, asks), ()):
            if channel.serves(since):
                return channel
        channel = EventChannel(
            self._context.store(store).engine,
            asks,
            since,
            memory=self._memory,
            failures=self._context.failures,
            room=stream.room,
        )
        self._channels.setdefault((store, asks), []).append(channel)
        return channel

    def _remove(self, store: str | None, asks: WatchedKeys, channel: EventChannel) -> None:
        channels = self._channels[store, asks]
        channels.remove(channel)
        if not channels:
            del self._channels[store, asks]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(limits.HTTP_HEARTBEAT_SECONDS)
            for stream in list(self._streams):
                if self._context.tokens.is_valid(stream.token):
                    stream.beat()
                else:
                    stream.end()


def _asks(request: HttpRequest, store: str | None) -> WatchedKeys:
    """What the parameters `key` or `prefix` name, if the token may read it."""
    texts, prefix = request.query.get("key", []), request.one("prefix")
    if bool(texts) == (prefix is not None):
        raise InvalidArgument("key, prefix: expected keys (key=…&key=…) or one prefix")
    if prefix is not None:
        scan = Selector.of(read_prefix(prefix), None, None).scan()
        request.token.check_range(store, scan.start, scan.end)
        return (scan,)
    if len(texts) > limits.HTTP_WATCHED_KEYS:
        raise InvalidArgument(f"key: expected at most {limits.HTTP_WATCHED_KEYS:,}; watch a prefix instead")
    gets = tuple(dict.fromkeys([Get(Space.TUPLES, read_key(text)) for text in texts]))
    for get in gets:
        request.token.check_key(store, get.key)
    return gets


def _shown(ask: Get | Scan) -> str:
    return shown_key(ask.key) if isinstance(ask, Get) else f"prefix={shown_key(ask.start[:-1])}"


def _since(request: HttpRequest) -> int | None:
    """The version after which changes are wanted: Last-Event-ID, which a reconnecting browser sends, or `since`."""
    last = request.header(b"last-event-id")
    if last:
        return read_versionstamp(last, "last-event-id")
    since = request.one("since")
    return None if since is None else read_versionstamp(since, "since")


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The routes of watches."""
    channels = ChannelTable(context)
    context.when_ending(channels.end_streams)
    return [ApiRoute(path=f"{base}/watch", handlers={"GET": channels.watch}, described=WATCH) for base in BASES]
