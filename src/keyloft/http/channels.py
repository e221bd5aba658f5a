"""Channels: one watch of the database for all clients that watch the same keys or prefix.

An event is encoded once, and the same bytes are written to each listener's connection. A channel keeps its last events,
so that a client that was away for a moment continues without another watch. It reads changes only once there is room
for them in memory, and sends large ones as fast as its listeners read them. A listener that is much slower than the
others leaves the channel, and joins another one once it has read.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine, PacedWatch
from keyloft.core.records import Change, Changes, Get, Latest, LogPosition, Record, Scan
from keyloft.errors import Closed, KeyloftError, ReplyTooLarge
from keyloft.http.failure_log import FailureLog
from keyloft.http.problems import is_unexpected, problem_of
from keyloft.http.sse import as_chunk, change_events, event_text
from keyloft.http.watch_memory import WatchMemory

logger = logging.getLogger(__name__)

WatchedKeys: TypeAlias = tuple[Get | Scan, ...]


class KeptEvent(Struct, frozen=True):
    """An event as it is sent."""

    version: int
    """The version up to which all is reported with this event."""
    may_be_news: bool
    """Whether the event may be new to a listener that already knows its version: an expiry has no version of its own,
    and all parts of a long commit but the last are reported with the version before the commit."""
    data: bytes
    """One chunk of the body: all listeners share its bytes."""

    def concerns(self, since: int) -> bool:
        """Whether a listener that knows all changes up to a version needs this event.

        A listener that knows a later version does not: since then, the keys may have other entries.
        """
        return self.version > since or (self.may_be_news and self.version == since)


class EventListener:
    """One client of a channel.

    `write` takes the bytes of events; `has_read` waits for some seconds until the client has read most of them;
    `cut_off` ends the connection of a client that does not read; `leave` takes the version up to which the client knows
    all changes, if the channel goes on without it; `end` is called when there will be no more events.
    """

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        has_read: Callable[[float], Awaitable[bool]],
        cut_off: Callable[[], None],
        leave: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        self.write = write
        self.has_read = has_read
        self.cut_off = cut_off
        self.leave = leave
        self.end = end
        self.since = 0
        """The version up to which the client knows all changes."""


class EventChannel:
    """One watch of the database, and its listeners."""

    def __init__(
        self,
        engine: Engine,
        asks: WatchedKeys,
        since: int | None,
        *,
        memory: WatchMemory,
        failures: FailureLog,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare a channel; `start` begins to watch.

        Args:
            engine: Of the store that is watched.
            asks: Keys, or one range.
            since: Report what changed after this version; None for what changes from now on.
            memory: What all channels share to bound their memory.
            failures: Where failures are logged.
            room: Waits while clients leave too much unread.
        """
        self._engine = engine
        self._asks = asks
        self._keys = [ask.key for ask in asks if isinstance(ask, Get)]
        self._of_keys = bool(self._keys)
        self._most_bytes = _most_bytes(len(self._keys))
        self._since = since
        self._memory = memory
        self._failures = failures
        self._room = room
        self._watch: PacedWatch | None = None
        self._events: deque[KeptEvent] = deque()
        self._kept_bytes = 0
        self._current: bytes | None = None
        """If keys are watched: the last event, which has the state of all of them."""
        self._absent: frozenset[bytes] = frozenset()
        """If keys are watched: those without an entry in that event."""
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._first_kept = 0
        """All changes after this version are among the kept events."""
        self.version = 0
        """The version up to which all changes were reported."""
        self._joined = asyncio.Event()
        """Set by the first listener: what is reported earlier may be dropped before it is sent."""
        self.listeners: dict[EventListener, None] = {}
        self.users = 0
        """How many requests listen, or wait for this channel to start."""
        self.has_ended = False
        self._is_state_next = False
        """Whether a large state of keys will be sent, which listeners that join until then will get."""
        self._is_sending = False
        """Whether a state is being sent in parts: a listener that joined now would miss some of them."""

    async def start(self) -> None:
        """Begin to watch; return once it is known from which version on changes are reported.

        Raises:
            HistoryGone: The change log does not reach back to `since`.
            ReplyTooLarge: The values of the keys are too large.
            Busy: Too many watches of large values wait.
            KeyloftError: The database failed.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._started.add_done_callback(lambda started: started.exception())  # no listener may be left to read it
            self._task = asyncio.create_task(self._run(), name="keyloft http watch")
        await asyncio.shield(self._started)

    def serves(self, since: int | None) -> bool:
        """Whether a listener that knows all changes up to this version can join, perhaps after the start."""
        if self.has_ended or self._is_sending:
            return False
        if self._started is None or not self._started.done():
            return since == self._since
        if since is None:
            # A channel that began with `since` does not report the state of its keys before one of them changes.
            return self._current is not None or self._is_state_next or not self._of_keys
        return self._first_kept <= since

    def join(self, listener: EventListener, since: int | None, *, is_new: bool) -> bool:
        """Send a listener `ready` with its version if it is new, then the events from now on, or after a version.

        Returns False if the channel has ended, or has dropped events that this listener needs.
        """
        if not self.serves(since):
            return False
        start = self.version if since is None else since
        listener.since = start - 1 if since is None and self._is_state_next else start
        # Where a state of keys follows, `ready` has no id: else a client that loses its connection before the state
        # arrives would not ask for it again.
        ready = (
            as_chunk(event_text("ready", None if self._of_keys and since is None else start, b"{}")) if is_new else b""
        )
        if since is not None:
            # In one write: at a second one, the listener would count as one that has not read the first.
            known = b"".join([ready, *[event.data for event in self._events if event.concerns(since)]])
            if known:
                listener.write(known)
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
            # The traceback of the task's exception holds this channel: a cycle that only the garbage collector frees.
            self._task = None

    async def _run(self) -> None:
        assert self._started is not None
        try:
            async with self._memory.reads.reading(self._most_bytes):
                await self._check_size()
            # In this task, because some engines bind a watch to the task that reads it.
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
        """Report the next changes; none of them stays in memory while this waits for listeners to read."""
        assert self._started is not None
        await self._room()
        async with self._memory.reads.reading(self._most_bytes):
            if self._most_bytes >= limits.HTTP_REPLY_BYTES:
                await self._memory.parts.turn()
            if self._of_keys and self._started.done():
                await self._check_size()
            changes = await watch.take()
            if not changes:
                return
            reached = max(self.version, watch.reported_to or 0)
            size = _size_of([each.record for each in changes])
            if self._of_keys:
                _check_fits(size)
            is_large_state = self._of_keys and size > limits.HTTP_KEPT_EVENT_BYTES
            if not is_large_state:
                if size > limits.HTTP_LARGE_VALUE_BYTES:
                    await self._memory.parts.turn()
                is_later = reached > self.version
                self.version = reached  # not earlier: a listener that joined meanwhile would take it for reported
                event = self._keep(changes, is_later=is_later)
                self._begun()
            del changes
            if not is_large_state:
                # Within the read budget: events of many watches that can't be sent yet would add up in memory.
                await self._write(event.data, self._concerned(event))
                unread = len(event.data) if self.listeners else 0
                del event
        if is_large_state:
            is_later = reached > self.version
            self.version = reached
            await self._send_large_state(is_later=is_later)
        elif unread > limits.HTTP_LISTENER_BYTES:
            await self._until_read()

    def _begun(self) -> None:
        """Note that a watch of keys has started: its first report is their state."""
        assert self._started is not None
        if not self._started.done():
            self._first_kept = self.version + 1
            self._started.set_result(None)

    def _keep(self, changes: Sequence[Change], *, is_later: bool) -> KeptEvent:
        """Make an event of changes, and keep it for clients that reconnect."""
        data = as_chunk(b"".join(change_events(changes, self.version)))
        event = self._event(changes, data, is_later=is_later)
        if self._of_keys:
            self._current = event.data
        self._events.append(event)
        self._kept_bytes += len(event.data)
        while len(self._events) > limits.HTTP_KEPT_EVENTS or self._kept_bytes > limits.HTTP_KEPT_EVENT_BYTES:
            oldest = self._events.popleft()
            self._kept_bytes -= len(oldest.data)
            self._first_kept = oldest.version + oldest.may_be_news
        return event

    async def _write(self, chunk: bytes, listeners: Sequence[EventListener]) -> None:
        """Write to listeners: a small chunk to all at once, a large one to each once clients have read enough."""
        if len(chunk) <= limits.HTTP_LARGE_VALUE_BYTES:
            for listener in listeners:
                listener.write(chunk)
            return
        for at, listener in enumerate(listeners):
            if at:  # for the first, there was room when the chunk was made
                await self._room()
                await self._memory.parts.turn()
            if listener in self.listeners:
                listener.write(chunk)

    def _event(self, changes: Sequence[Change], data: bytes, *, is_later: bool) -> KeptEvent:
        """An event of changes; `is_later` if no event before it has its version, or a later one."""
        absent = frozenset([each.key for each in changes if each.record is None])
        is_part = any([each.record is not None and each.record.version > self.version for each in changes])
        event = KeptEvent(self.version, is_part or not is_later or not absent <= self._absent, data)
        if self._of_keys:
            self._absent = absent
        return event

    def _concerned(self, event: KeptEvent) -> list[EventListener]:
        """The listeners that need an event that was just made: none of them has seen it, whatever its version."""
        return [listener for listener in self.listeners if event.version >= listener.since]

    async def _send_large_state(self, *, is_later: bool) -> None:
        """Send the state of keys in parts, as fast as the listeners read it. It is not kept."""
        assert self._started is not None
        if not self._started.done():
            self._memory.large_states.check_waiting()
        # A listener that joins from now on gets this state instead of kept events.
        self._events.clear()
        self._kept_bytes, self._current, self._is_state_next = 0, None, True
        self._begun()
        await self._joined.wait()
        async with self._memory.large_states.sending():
            await self._room()
            await self._memory.parts.turn()
            records: list[Record | None] = await self._engine.read(*self._asks)
            _check_fits(_size_of(records))
            changes = [Change(key, record) for key, record in zip(self._keys, records, strict=True)]
            del records
            event = self._event(changes, b"", is_later=is_later)
            self._first_kept = event.version + event.may_be_news
            self._is_state_next, self._is_sending = False, True
            try:
                listeners = self._concerned(event)
                parts = change_events(changes, self.version)
                while True:
                    await self._room()
                    await self._memory.parts.turn()
                    chunk = as_chunk(next(parts, b""))  # the same bytes for all listeners
                    if chunk == _NO_CHUNK:
                        break
                    await self._write(chunk, listeners)
                    await self._until_part_is_read()
            finally:
                self._is_sending = False
                changes.clear()  # the traceback of a cancelled task would keep them

    async def _until_read(self) -> None:
        """Wait until one listener has read what was sent, and a moment longer. Slower ones then leave the channel."""
        reading = {asyncio.ensure_future(each.has_read(limits.HTTP_ANSWER_SECONDS)): each for each in self.listeners}
        try:
            if reading:
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(reading, timeout=limits.HTTP_READ_CHECK_SECONDS)
            for read, listener in reading.items():
                if read.done() and read.result():
                    continue
                self.listeners.pop(listener, None)
                if read.done():
                    listener.cut_off()
                else:
                    listener.leave(max(self.version, listener.since))
        finally:
            for read in reading:
                read.cancel()

    async def _until_part_is_read(self) -> None:
        """Wait until all listeners have read a part of a state, of which none may be left out.

        A slow one is cut off, sooner if others wait for it.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        pause = limits.HTTP_READ_CHECK_SECONDS
        for listener in list(self.listeners):
            while not await listener.has_read(pause):
                is_awaited = len(self.listeners) > 1 or self._memory.large_states.are_awaited
                most = limits.HTTP_UNSENT_SECONDS if is_awaited else limits.HTTP_ANSWER_SECONDS
                left = began + most - loop.time()
                pause = max(0, min(limits.HTTP_READ_CHECK_SECONDS, left))
                if left <= 0:
                    listener.cut_off()
                    self.listeners.pop(listener, None)
                    break

    def _fail(self, error: KeyloftError) -> None:
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(error)  # the requests that wait for it report it
            return
        if is_unexpected(error):
            self._failures.failed("a watch", error)
        data = failure_event(error)
        for listener in self.listeners:
            listener.write(data)


def failure_event(error: KeyloftError) -> bytes:
    """The event that ends a watch, as a chunk of the body."""
    return as_chunk(event_text("error", None, problem_of(error).reply().body))


_NO_CHUNK: Final = as_chunk(b"")


def _size_of(records: Sequence[Record | None]) -> int:
    return sum([len(record.value) for record in records if record is not None])


def _check_fits(size: int) -> None:
    if size > limits.HTTP_REPLY_BYTES:
        raise ReplyTooLarge("key: the values together are too large for one event; watch fewer keys")


def _most_bytes(keys: int) -> int:
    """How many bytes a watch of this many keys reads at most at a time; 0 keys stand for a range, which reads few."""
    return min(keys * limits.VALUE_BYTES, limits.HTTP_REPLY_BYTES) if keys else limits.HTTP_RANGE_READ_BYTES
