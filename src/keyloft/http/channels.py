"""Channels: one watch of the database for all clients that watch the same keys or prefix.

An event is encoded once, and the same bytes are written to each listener's connection. A channel keeps its last events,
so that a client that was away for a moment continues without another watch. It reads changes only once there is room
for them in memory, and sends large ones as fast as its listeners read them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine, PacedWatch
from keyloft.core.records import Change, Changes, Get, Latest, LogPosition, Record, Scan
from keyloft.errors import Busy, Closed, KeyloftError, ReplyTooLarge
from keyloft.http.problems import is_unexpected, problem_of
from keyloft.http.wire import shown_key, to_json, wire_entry

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
    """One client of a channel.

    `write` takes the bytes of events; `has_read` waits for some seconds for the client to read most of them; `cut_off`
    ends a client that does not; `end` is called when there will be no more events.
    """

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        has_read: Callable[[float], Awaitable[bool]],
        cut_off: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.write = write
        self.has_read = has_read
        self.cut_off = cut_off
        self.end = end
        self.since = 0
        """The version up to which it knows all."""


class WatchTurns:
    """Bounds what all channels have in memory at a time."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(limits.HTTP_WATCH_READS)
        self.large_reads = asyncio.Semaphore(limits.HTTP_LARGE_READS)
        self._large = asyncio.Semaphore(limits.HTTP_LARGE_STATES)
        self._waiting = 0

    @property
    def are_awaited(self) -> bool:
        """Whether one waits for a large state."""
        return self._waiting > 0

    def check_large(self) -> None:
        """Refuse one more large state.

        Raises:
            Busy: So many wait that it would take long.
        """
        if self._waiting >= limits.HTTP_WAITING_STATES:
            raise Busy("key: too many watches of large values begin at a time; try again later, or watch fewer keys")

    @asynccontextmanager
    async def large(self) -> AsyncIterator[None]:
        """A large state may be in memory."""
        self._waiting += 1
        try:
            await self._large.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._large.release()


class EventChannel:
    """One watch of the database, and its listeners."""

    def __init__(
        self,
        engine: Engine,
        asks: WatchedKeys,
        since: int | None,
        turns: WatchTurns,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare it.

        Args:
            engine: Of the store that is watched.
            asks: Keys, or one range.
            since: Report what changed after this version; None for what changes from now on.
            turns: Of all channels.
            room: Waits until more may be sent.
        """
        self._engine = engine
        self._asks = asks
        self._keys = [ask.key for ask in asks if isinstance(ask, Get)]
        self._of_keys = bool(self._keys)
        self._may_be_large = len(self._keys) > 1
        """Whether the values of the keys may be too large to be sent in one go."""
        self._since = since
        self._turns = turns
        self._room = room
        self._watch: PacedWatch | None = None
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
        self._is_state_next = False
        """Whether a large state of keys is to be sent, to those as well who join before."""
        self._is_sending = False
        """Whether a state is being sent in parts: who joins then would miss some."""

    async def start(self) -> None:
        """Begin to watch; returns once it is known from which version on.

        Raises:
            HistoryGone: The change log does not reach back to `since`.
            ReplyTooLarge: The values of the keys are too large.
            Busy: Too many large ones wait to be sent.
            KeyloftError: The database failed.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._started.add_done_callback(lambda started: started.exception())  # no listener may be left to read it
            self._task = asyncio.create_task(self._run(), name="keyloft http watch")
        await asyncio.shield(self._started)

    def serves(self, since: int | None) -> bool:
        """Whether a listener can join, perhaps once it has started, that knows all up to this version."""
        if self.has_ended or self._is_sending:
            return False
        if self._started is None or not self._started.done():
            return since == self._since
        if since is None:
            # One that resumed does not report the state of its keys before one of them changes.
            return self._current is not None or self._is_state_next or not self._of_keys
        return self._first_kept <= since

    def join(self, listener: EventListener, since: int | None) -> bool:
        """Let a listener have the events from now on, or from a version on; first of all, it learns from which.

        Returns False if it can't: the channel has ended, or has dropped events that this listener needs.
        """
        if not self.serves(since):
            return False
        start = self.version if since is None else since
        listener.since = start - 1 if since is None and self._is_state_next else start
        # Without an id where a state of keys follows: a client that is cut off before it would not ask for it again.
        ready = as_chunk(event_text("ready", None if self._of_keys and since is None else start, b"{}"))
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
            watch = self._engine.watch(*self._asks, since=self._since)
            assert isinstance(watch, PacedWatch), "a store over HTTP is not served over HTTP"
            self._watch = watch
            if self._since is not None:
                await self._engine.read(Changes(LogPosition(self._since)))  # raises if it is too long ago
                self.version = self._first_kept = self._since
                self._started.set_result(None)
            elif not self._of_keys:
                [latest] = await self._engine.read(Latest())  # answered once the watch has begun
                self.version = watch.reported_to or latest
                self._first_kept = self.version + 1  # what expired since that version, but before now, is not known
                self._started.set_result(None)
            if self._started.done():
                await self._joined.wait()
            while not watch.has_ended:
                await watch.wait()
                await self._report_next(watch)
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

    async def _report_next(self, watch: PacedWatch) -> None:
        """Report what there is; nothing of it stays in memory while this waits for anything else."""
        assert self._started is not None
        await self._room()
        async with self._turns.large_reads if self._may_be_large else self._turns.reads:
            if self._of_keys and self._started.done():
                await self._check_size()
            changes = await watch.take()
            if not changes:
                return
            self.version = max(self.version, watch.reported_to or 0)
            if self._of_keys:
                size = _size_of([each.record for each in changes])
                _check_fits(size)
                self._may_be_large = size > limits.HTTP_KEPT_EVENT_BYTES
            if not self._may_be_large:
                unread = self._send(changes)
                self._begun()
            else:
                del changes
                unread = None
                await asyncio.sleep(0)  # others run between two large reads
        if unread is None:
            await self._send_large_state()
        elif unread > limits.HTTP_LISTENER_BYTES:
            await self._until_read()

    def _begun(self) -> None:
        """A watch of keys begins with their state."""
        assert self._started is not None
        if not self._started.done():
            self._first_kept = self.version + 1
            self._started.set_result(None)

    def _send(self, changes: Sequence[Change]) -> int:
        """Send changes in one go, and keep them for clients that come back; returns how many bytes these are."""
        event = self._event(changes, as_chunk(b"".join(change_events(changes, self.version))))
        if self._of_keys:
            self._current = event.data
        self._events.append(event)
        self._kept_bytes += len(event.data)
        while len(self._events) > limits.HTTP_KEPT_EVENTS or self._kept_bytes > limits.HTTP_KEPT_EVENT_BYTES:
            oldest = self._events.popleft()
            self._kept_bytes -= len(oldest.data)
            self._first_kept = oldest.version + oldest.may_be_news
        for listener in self._concerned(event):
            listener.write(event.data)
        return len(event.data) if self.listeners else 0

    def _event(self, changes: Sequence[Change], data: bytes) -> KeptEvent:
        absent = frozenset([each.key for each in changes if each.record is None])
        is_part = any([each.record is not None and each.record.version > self.version for each in changes])
        event = KeptEvent(self.version, is_part or not absent <= self._absent, data)
        if self._of_keys:
            self._absent = absent
        return event

    def _concerned(self, event: KeptEvent) -> list[EventListener]:
        return [listener for listener in self.listeners if event.concerns(listener.since)]

    async def _send_large_state(self) -> None:
        """Send the state of keys in parts, as fast as the listeners read it. It is not kept."""
        assert self._started is not None
        if not self._started.done():
            self._turns.check_large()
        # Who joins from now on gets this state instead of kept events.
        self._events.clear()
        self._kept_bytes, self._current, self._is_state_next = 0, None, True
        self._begun()
        await self._joined.wait()
        async with self._turns.large():
            await self._room()
            records: list[Record | None] = await self._engine.read(*self._asks)
            _check_fits(_size_of(records))
            changes = [Change(key, record) for key, record in zip(self._keys, records, strict=True)]
            del records
            event = self._event(changes, b"")
            self._first_kept = event.version + event.may_be_news
            self._is_state_next, self._is_sending = False, True
            try:
                listeners = self._concerned(event)
                for part in change_events(changes, self.version):
                    await self._room()
                    chunk = as_chunk(part)  # one for all listeners
                    for listener in listeners:
                        if listener in self.listeners:
                            listener.write(chunk)
                    await self._until_read()
            finally:
                self._is_sending = False

    async def _until_read(self) -> None:
        """Wait until all listeners have read what was sent. One that is slow is cut off if others wait for it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for listener in list(self.listeners):
            pause = limits.HTTP_READ_CHECK_SECONDS
            while not await listener.has_read(pause):
                is_awaited = len(self.listeners) > 1 or (self._is_sending and self._turns.are_awaited)
                most = limits.HTTP_UNSENT_SECONDS if is_awaited else limits.HTTP_ANSWER_SECONDS
                left = began + most - loop.time()
                if left <= 0:
                    listener.cut_off()
                    self.listeners.pop(listener, None)
                    break
                pause = min(limits.HTTP_READ_CHECK_SECONDS, left)

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


def change_events(changes: Sequence[Change], version: int) -> Iterator[bytes]:
    """The events of changes: mostly one; several if they are long, of which only the last has the id."""
    some: list[bytes] = []
    weight = 0
    for change in changes:
        text = to_json(wire_entry(shown_key(change.key), change.record))
        if some and weight + len(text) > limits.HTTP_EVENT_BYTES:
            yield _change_event(some, None)
            some, weight = [], 0
        some.append(text)
        weight += len(text)
    yield _change_event(some, version)


def _change_event(entries: Iterable[bytes], version: int | None) -> bytes:
    return event_text("change", version, b'{"entries":[%b]}' % b",".join(entries))


def as_chunk(data: bytes) -> bytes:
    """Bytes as a chunk of the body of an HTTP response."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event_text(name: str, version: int | None, data: bytes) -> bytes:
    """An event as SSE has it. The data is JSON, which has no line breaks."""
    known = b"" if version is None else b"id: %d\n" % version
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), known, data)
