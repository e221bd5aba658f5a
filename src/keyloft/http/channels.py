"""Channels: one watch of the database for all clients that watch the same keys or prefix.

An event is encoded once, and the same bytes are written to each listener's connection. A channel keeps its last events,
so that a client that was away for a moment continues without another watch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine, Watch
from keyloft.core.records import Change, Changes, Get, Latest, LogPosition, Record, Scan
from keyloft.errors import Closed, KeyloftError, ReplyTooLarge
from keyloft.http.problems import is_unexpected, problem_of
from keyloft.http.wire import WireEntry, shown_key, to_json, wire_entry

logger = logging.getLogger(__name__)

WatchedKeys: TypeAlias = tuple[Get | Scan, ...]

HEARTBEAT: Final = b"3\r\n:\n\n\r\n"
"""A comment, which keeps a connection alive; as a chunk of the body, like events."""


class KeptEvent(Struct, frozen=True):
    """An event as it is sent."""

    version: int
    """The version that is reached with it."""
    may_be_news: bool
    """Whether a listener that knows this version may not know the event: an expiry has no version of its own, and a
    part of a long commit is reported with the version before it."""
    data: bytes
    """One chunk of the body: all listeners share its bytes."""

    def concerns(self, since: int) -> bool:
        """Whether a listener that knows all up to a version needs it.

        One that knows a later version does not: the keys may have other entries since.
        """
        return self.version > since or (self.may_be_news and self.version == since)


class EventListener:
    """One client of a channel. `write` takes the bytes of events; `end` is called when there will be no more."""

    def __init__(self, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self.write = write
        self.end = end
        self.since = 0
        """The version up to which it knows all."""


class EventChannel:
    """One watch of the database, and its listeners."""

    def __init__(self, engine: Engine, asks: WatchedKeys, since: int | None) -> None:
        self._engine = engine
        self._asks = asks
        self._since = since
        self._watch: Watch | None = None
        self._events: deque[KeptEvent] = deque()
        self._kept_bytes = 0
        self._current: bytes | None = None
        """Of keys: the last event, which has the state of all of them."""
        self._absent: frozenset[bytes] = frozenset()
        """Of keys: those without an entry in that event."""
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._first_kept = 0
        """All changes after this version are among the kept events."""
        self.version = 0
        """The version up to which all was reported."""
        self._joined = asyncio.Event()
        """Set once there was a listener: what is reported before may be dropped before it is sent."""
        self.listeners: dict[EventListener, None] = {}
        self.users = 0
        """How many requests wait for it to start, or listen."""
        self.has_ended = False

    async def start(self) -> None:
        """Begin to watch; returns once it is known from which version on.

        Raises:
            HistoryGone: The change log does not reach back to `since`.
            ReplyTooLarge: The values of the keys don't fit one event.
            KeyloftError: The database failed.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._started.add_done_callback(lambda started: started.exception())  # no listener may be left to read it
            self._task = asyncio.create_task(self._run(), name="keyloft http watch")
        await asyncio.shield(self._started)

    def serves(self, since: int | None) -> bool:
        """Whether a listener can join, perhaps once it has started, that knows all up to this version."""
        if self.has_ended:
            return False
        if self._started is None or not self._started.done():
            return since == self._since
        if since is None:
            # One that resumed does not report the state of its keys before one of them changes.
            return self._current is not None or isinstance(self._asks[0], Scan)
        return self._first_kept <= since

    def join(self, listener: EventListener, since: int | None) -> bool:
        """Let a listener have the events from now on, or from a version on; first of all, it learns from which.

        Returns False if it can't: the channel has ended, or has dropped events that this listener needs.
        """
        if not self.serves(since):
            return False
        start = self.version if since is None else since
        listener.since = start
        ready = as_chunk(event_text("ready", start, b"{}"))
        if since is not None:
            # In one write: between two of them, the listener would be cut off as one that does not read.
            listener.write(b"".join([ready, *[event.data for event in self._events if event.concerns(since)]]))
        else:
            listener.write(ready)
            if self._current is not None:
                listener.write(self._current)
        self.listeners[listener] = None
        self._joined.set()
        return True

    async def aclose(self) -> None:
        """End the watch."""
        self.has_ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        assert self._started is not None
        try:
            await self._check_size()
            # Here, and not before: some engines bind a watch to the task that reads it.
            self._watch = watch = self._engine.watch(*self._asks, since=self._since)
            if self._since is not None:
                await self._engine.read(Changes(LogPosition(self._since)))  # raises if it is too long ago
                self.version = self._first_kept = self._since
                self._started.set_result(None)
            elif isinstance(self._asks[0], Scan):
                [latest] = await self._engine.read(Latest())  # answered once the watch has begun
                self.version = watch.reported_to or latest
                self._first_kept = self.version + 1  # what expired since that version, but before now, is not known
                self._started.set_result(None)
            if self._started.done():
                await self._joined.wait()
            async for changes in watch:
                self._report(changes, watch.reported_to or self.version)
                if not self._started.done():
                    self._first_kept = self.version + 1
                    self._started.set_result(None)
                await asyncio.sleep(0)  # a watch with a long backlog has its next changes at once
        except KeyloftError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("a watch over HTTP failed unexpectedly")
            self._fail(KeyloftError(str(error)))
        finally:
            self.has_ended = True
            if self._watch is not None:
                await self._watch.aclose()
            if not self._started.done():
                self._started.set_exception(Closed())
            for listener in list(self.listeners):
                listener.end()

    async def _check_size(self) -> None:
        """Refuse many keys with too large values before the engine reads all of them at once."""
        if len(self._asks) <= limits.HTTP_PAGE_ROWS:
            return
        size = 0
        for at in range(0, len(self._asks), limits.HTTP_PAGE_ROWS):
            size += _size_of(await self._engine.read(*self._asks[at : at + limits.HTTP_PAGE_ROWS]))
            _check_fits(size)

    def _report(self, changes: Sequence[Change], version: int) -> None:
        if isinstance(self._asks[0], Get):
            _check_fits(_size_of([each.record for each in changes]))
        self.version = max(self.version, version)
        absent = frozenset([each.key for each in changes if each.record is None])
        entries = [wire_entry(shown_key(each.key), each.record) for each in changes]
        data = as_chunk(change_events(entries, self.version))
        is_part = any([each.record is not None and each.record.version > self.version for each in changes])
        event = KeptEvent(self.version, is_part or not absent <= self._absent, data)
        if isinstance(self._asks[0], Get):
            self._current, self._absent = data, absent
        self._events.append(event)
        self._kept_bytes += len(data)
        while len(self._events) > limits.HTTP_KEPT_EVENTS or self._kept_bytes > limits.HTTP_KEPT_EVENT_BYTES:
            oldest = self._events.popleft()
            self._kept_bytes -= len(oldest.data)
            self._first_kept = oldest.version + oldest.may_be_news
        for listener in list(self.listeners):
            if event.concerns(listener.since):
                listener.write(data)

    def _fail(self, error: KeyloftError) -> None:
        if is_unexpected(error):
            logger.error("a watch over HTTP ended: %s: %s", error.code, error)
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(error)
            return
        data = as_chunk(event_text("error", None, problem_of(error).reply().body))
        for listener in self.listeners:
            listener.write(data)


def _size_of(records: Sequence[Record | None]) -> int:
    return sum([len(record.value) for record in records if record is not None])


def _check_fits(size: int) -> None:
    if size > limits.HTTP_REPLY_BYTES:
        raise ReplyTooLarge("key: their values are too large for one event; watch fewer keys")


def change_events(entries: Sequence[WireEntry], version: int) -> bytes:
    """The events of a change: mostly one; several if it is long, of which only the last has the id."""
    if len(entries) == 1:
        return event_text("change", version, b'{"entries":[%b]}' % to_json(entries[0]))
    events: list[bytes] = []
    some: list[bytes] = []
    weight = 0
    for entry in entries:
        text = to_json(entry)
        if some and weight + len(text) > limits.HTTP_EVENT_BYTES:
            events.append(event_text("change", None, b'{"entries":[%b]}' % b",".join(some)))
            some, weight = [], 0
        some.append(text)
        weight += len(text)
    events.append(event_text("change", version, b'{"entries":[%b]}' % b",".join(some)))
    return b"".join(events)


def as_chunk(data: bytes) -> bytes:
    """Bytes as a chunk of the body of an HTTP response."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event_text(name: str, version: int | None, data: bytes) -> bytes:
    """An event as SSE has it. The data is JSON, which has no line breaks."""
    known = b"" if version is None else b"id: %d\n" % version
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), known, data)
