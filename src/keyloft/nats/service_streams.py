"""Streams of events for clients of HTTP, which stay connected: nothing is stored, and a stream ends with its client."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import ChangeKind, Changes, Latest, LoggedChange, LogPosition
from keyloft.errors import HistoryGone, InvalidArgument, KeyloftError, QuotaExceeded
from keyloft.nats import payloads
from keyloft.nats.change_reader import ChangeReader
from keyloft.nats.events import WATCH, Event
from keyloft.nats.internal_requests import InternalRequests
from keyloft.nats.leases import watched_bytes
from keyloft.nats.publications import Watchable
from keyloft.nats.requests import Call
from keyloft.nats.watch_operation import WatchRequest, read_watch

logger = logging.getLogger(__name__)


class StreamedEvent(Struct, frozen=True, gc=False):
    """An event of a stream."""

    event: Event
    is_last: bool
    """Whether it is the last one of its version: a stream that begins again after this version misses nothing."""


class ServiceStreams:
    """The streams of one service, and their bounds."""

    def __init__(self, engine: Engine, intake: InternalRequests, watchable: Watchable) -> None:
        """Args:
        engine: Has the change log.
        intake: Lets the events of a stream take turns with the requests of their owner.
        watchable: What can be watched.
        """
        self.engine = engine
        self.intake = intake
        self.watchable = watchable
        self._open: set[ServiceStream] = set()
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, stream: "ServiceStream", owner: str, keys: Sequence[str] | None) -> None:
        """Count a stream that is about to begin.

        Raises:
            QuotaExceeded: Its owner has too many streams, or they watch too many keys.
        """
        if self._count[owner] >= limits.OWNER_STREAMS:
            raise QuotaExceeded(f"{owner} has {limits.OWNER_STREAMS:,} event streams already: end some of them")
        if self._bytes[owner] + watched_bytes(keys) > limits.OWNER_STREAM_BYTES:
            rule = f"may take {limits.OWNER_STREAM_BYTES:,} bytes in all: watch a prefix, or end some streams"
            raise QuotaExceeded(f"the keys of {owner}'s event streams {rule}")
        self._open.add(stream)
        self._count[owner] += 1
        self._bytes[owner] += watched_bytes(keys)

    def discard(self, stream: "ServiceStream", owner: str, keys: Sequence[str] | None) -> None:
        """Don't count a stream any more."""
        if stream in self._open:
            self._open.discard(stream)
            self._count[owner] -= 1
            self._bytes[owner] -= watched_bytes(keys)

    def end(self) -> None:
        """End all streams: their clients may begin again elsewhere, from the last event that they got."""
        for stream in self._open:
            stream.end()


class ServiceStream(Call):
    """The events of one client: as an operation, it begins after all that its owner has written before.

    Example:
        stream = ServiceStream(streams)           # carried out by the intake as a request for a watch, then:
        while events := await stream.events():
            …
        await stream.aclose()
    """

    name = WATCH
    shows_entries = False

    def __init__(self, streams: ServiceStreams) -> None:
        self._streams = streams
        self._wanted: WatchRequest | None = None
        self._changes: ChangeReader | None = None
        self._woken = asyncio.Event()
        self._has_ended = False

    # As an operation of the intake

    def read(self, about: Any, data: bytes, /) -> WatchRequest:
        wanted = read_watch(self._streams.watchable, about, data)
        if wanted.subject is not None:
            rule = "over HTTP, events arrive in the response, and a watch ends with its connection"
            raise InvalidArgument(f"subject: {rule}; leave it out")
        return wanted

    def key(self, content: WatchRequest) -> str:
        return content.prefix or ""

    async def carry_out(self, content: WatchRequest) -> tuple[bytes, None]:
        streams, since = self._streams, content.since
        owner = streams.watchable.owner(content.names)
        # Counted before the first wait: otherwise, streams that begin at the same time would exceed the bounds.
        streams.add(self, owner, content.keys)
        try:
            if since is None:
                [since] = await streams.engine.read(Latest())
            else:
                await streams.engine.read(Changes(LogPosition(since)))  # raises HistoryGone
            if not self._has_ended:  # meanwhile, the client may have gone, or the service may have begun to end
                asks = streams.watchable.asks(content.names, content.prefix, content.keys)
                self._wanted = content
                self._changes = ChangeReader(streams.engine.follow(*asks, woken=self._woken.set, since=since), since)
                if self._changes.has_more:
                    self._woken.set()
        finally:
            if self._changes is None:
                streams.discard(self, owner, content.keys)
        return payloads.to_json({"success": True, "version": since}), None

    # As a stream

    async def events(self) -> list[StreamedEvent]:
        """Wait for the next events; none once the stream has ended.

        Raises:
            HistoryGone: The change log no longer has them: read everything, then watch again.
        """
        changes, wanted = self._changes, self._wanted
        if self._has_ended:
            return []
        assert changes is not None, "it is carried out"
        assert wanted is not None, "it is carried out"
        watchable = self._streams.watchable
        while not self._has_ended and not changes.watch.has_ended:
            await self._woken.wait()
            self._woken.clear()
            if self._has_ended:
                break
            taking = TakingTurn(changes)
            self._streams.intake.enqueue(watchable.owner(wanted.names), _TAKE, taking)
            try:
                taken = await taking.taken
            except HistoryGone:
                raise
            except KeyloftError as error:
                logger.warning("[KV] events of a stream are delayed: %s", error)
                await asyncio.sleep(limits.WATCH_CHECK_SECONDS)
                self._woken.set()
                continue
            if changes.has_more:
                self._woken.set()
            if taken:
                return [_event(watchable, change, may_continue) for change, may_continue in taken]
        return []

    def end(self) -> None:
        """End the stream; `events` returns nothing more."""
        self._has_ended = True
        self._woken.set()

    async def aclose(self) -> None:
        """End the stream and stop watching."""
        self.end()
        if self._changes is not None and self._wanted is not None:
            owner = self._streams.watchable.owner(self._wanted.names)
            self._streams.discard(self, owner, self._wanted.keys)
            await self._changes.watch.aclose()


def _event(watchable: Watchable, change: LoggedChange, may_continue: bool) -> StreamedEvent:
    event = Event(watchable.key(change.key), change.version, change.kind is not ChangeKind.PUT)
    return StreamedEvent(event, not may_continue)


class TakingTurn:
    """Reads changes from the log in a turn of their owner."""

    __slots__ = ("_changes", "taken")

    def __init__(self, changes: ChangeReader) -> None:
        self._changes = changes
        self.taken: asyncio.Future[list[tuple[LoggedChange, bool]]] = asyncio.get_running_loop().create_future()

    async def in_turn(self) -> None:
        try:
            changes = await self._changes.next_changes()
        except Exception as error:
            if not self.taken.done():
                self.taken.set_exception(error)
        else:
            if not self.taken.done():  # the client may be gone
                self.taken.set_result(changes)


class TakeEvents(Call):
    """Not an operation that can be requested: it lets the events of streams take turns with their owner's requests."""

    name = "events"
    reply_bytes = limits.EVENTS_REPLY_BYTES

    def read(self, about: object, data: TakingTurn, /) -> TakingTurn:  # type: ignore[override]
        return data

    def keys_read(self, content: TakingTurn) -> Collection[Hashable]:
        return ()

    async def carry_out(self, content: TakingTurn) -> tuple[bytes, None]:
        await content.in_turn()
        return b"", None


_TAKE = TakeEvents()
