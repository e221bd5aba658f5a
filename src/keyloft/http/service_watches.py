"""Watches of plugins and workflows as server-sent events."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from keyloft import limits
from keyloft.errors import HistoryGone, InvalidArgument, NoService
from keyloft.http.context import HttpContext
from keyloft.http.operation_schemas import described_watch
from keyloft.http.operations import PLUGINS, SEMANTIC, OperationHandler, plugin_operations, semantic_operations
from keyloft.http.problems import problem_of
from keyloft.http.replies import EVENTS_TYPE, HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute, HttpHandler
from keyloft.http.service_access import refusal_of, service_unavailable, was_carried_out
from keyloft.http.sse import event_text
from keyloft.http.watch import begin_events
from keyloft.nats import payloads
from keyloft.nats.events import WATCH
from keyloft.nats.schemas import Messages
from keyloft.nats.service_streams import ServiceStream, StreamedEvent
from keyloft.plugins.service import DatabaseService
from keyloft.semantic.service import SemanticService

_COMMENT: Final = b":\n\n"
_MOST_DIGITS: Final = 19


class _Begun(msgspec.Struct):
    """The reply to a watch that has begun."""

    version: int


_read_begun = msgspec.json.Decoder(_Begun).decode


class WatchHandler:
    """Answers the watches of one service."""

    def __init__(self, context: HttpContext, operations: OperationHandler) -> None:
        self._context = context
        self._operations = operations
        self._streams: set[ServiceStream] = set()
        context.when_ending(self._end_streams)

    def _end_streams(self) -> None:
        for stream in self._streams:
            stream.end()

    async def posted(self, request: HttpRequest) -> None:
        """A watch with the same body as over NATS; Last-Event-ID takes the place of `since`."""
        names = self._permitted(request)
        request.expect_query()
        data = await request.body(limits.WATCH_REQUEST_BYTES)
        last = request.header(b"last-event-id")
        if last:
            fields, _ = payloads.read(b"{}" if payloads.is_empty(data) else data)
            data = payloads.to_json({**fields, "since": _version(last, "last-event-id")})
        await self._watch(request, names, data)

    async def got(self, request: HttpRequest) -> HttpReply | None:
        """The same with parameters, for an EventSource: key=…&key=… or prefix=…, and since=…."""
        names = self._permitted(request)
        request.expect_query("key", "prefix", "since")
        fields: dict[str, Any] = {"prefix": request.one("prefix"), "keys": request.query.get("key")}
        last, since = request.header(b"last-event-id"), request.one("since")
        if last:
            fields["since"] = _version(last, "last-event-id")
        elif since is not None:
            fields["since"] = _version(since, "since")
        if request.method == "HEAD":
            return HttpReply(content_type=EVENTS_TYPE)
        await self._watch(request, names, payloads.to_json(fields))
        return None

    def _permitted(self, request: HttpRequest) -> list[str]:
        names = self._operations.names_of(request)
        self._operations.check_scope(request.token, names)
        return names

    async def _watch(self, request: HttpRequest, names: list[str], data: bytes) -> None:
        context, access = self._context, self._operations.access
        context.check_listeners()
        try:
            stream = access.service().event_stream()
        except NoService as error:
            raise service_unavailable(str(error)) from None
        context.meters.watches += 1
        self._streams.add(stream)
        try:
            reply = await access.ask(request, names, WATCH, data, stream)
            if not was_carried_out(reply):
                raise refusal_of(reply)
            self._operations.log(request.token, names, WATCH, data, is_read=True)
            await _Sending(context, request, stream).run(_read_begun(reply).version)
        finally:
            context.meters.watches -= 1
            self._streams.discard(stream)
            await stream.aclose()


class _Sending:
    """Sends the events of one stream, as fast as its client reads them."""

    def __init__(self, context: HttpContext, request: HttpRequest, stream: ServiceStream) -> None:
        self._tokens = context.tokens
        self._request = request
        self._stream = stream

    async def run(self, version: int) -> None:
        """Send events until the client is gone, its token is no longer valid, or the service ends."""
        await begin_events(self._request)
        gone = asyncio.ensure_future(self._request.wait_for_end())
        taking = asyncio.ensure_future(self._stream.events())
        try:
            await self._send(event_text("ready", version, b"{}"))
            while True:
                awaited: list[asyncio.Future[Any]] = [gone, taking]
                await asyncio.wait(awaited, timeout=limits.HTTP_HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() or not self._tokens.is_valid(self._request.token):
                    break
                if taking.done():
                    events = taking.result()
                    if not events:
                        break
                    await self._send(b"".join(map(_text, events)))
                    taking = asyncio.ensure_future(self._stream.events())
                else:
                    await self._send(_COMMENT)
        except HistoryGone as error:
            await self._send(event_text("error", None, problem_of(error).reply().body))
        except TimeoutError:
            self._request.scope["connection"].abort()  # its client does not read
            return
        finally:
            gone.cancel()
            taking.cancel()
            await asyncio.gather(gone, taking, return_exceptions=True)
        await self._request.send({"type": "http.response.body", "body": b""})

    async def _send(self, data: bytes) -> None:
        # uvicorn's `send` waits before it writes: the second call returns once the client has read most of the first.
        async with asyncio.timeout(limits.HTTP_ANSWER_SECONDS):
            await self._request.send({"type": "http.response.body", "body": data, "more_body": True})
            await self._request.send({"type": "http.response.body", "body": b"", "more_body": True})


def _text(one: StreamedEvent) -> bytes:
    # Only the last event of a version has an id, so that a client that reconnects with it has missed none.
    return event_text("change", one.event.version if one.is_last else None, payloads.to_json(one.event))


def _version(text: str, argument: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise InvalidArgument(f"{argument}: expected a version, a whole number, such as the id of an event")
    return int(text)


def routes(context: HttpContext) -> list[ApiRoute]:
    """The routes of watches of both services."""
    plugins, semantic = plugin_operations(context), semantic_operations(context)
    return [
        _route(WatchHandler(context, plugins), f"{PLUGINS}/watch", "plugins", plugins.names, DatabaseService.messages),
        _route(
            WatchHandler(context, semantic), f"{SEMANTIC}/watch", "semantic", semantic.names, SemanticService.messages
        ),
    ]


def _route(
    watches: WatchHandler, path: str, tag: str, names: Sequence[str], messages: Mapping[str, Messages]
) -> ApiRoute:
    handlers: dict[str, HttpHandler] = {"GET": watches.got, "POST": watches.posted}
    return ApiRoute(path=path, handlers=handlers, paths={path: described_watch(tag, names, messages[WATCH])})
