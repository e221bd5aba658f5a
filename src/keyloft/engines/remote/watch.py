"""A watch over HTTP: follows a stream of events; if the stream breaks off, continues where it was.

The stream is read only when its user asks for the next changes. What is not yet read waits in the buffers of the
connection and in the service, and both are bounded.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec

from keyloft import limits
from keyloft.core.records import Change, Record
from keyloft.engines.remote import errors
from keyloft.engines.remote.api import HttpApi, pause_seconds
from keyloft.engines.remote.entries import ApiEntry, key_of, read_entries, record_of, text_of
from keyloft.engines.remote.errors import ApiProblem, NotAnswered
from keyloft.engines.remote.events import EventParser, ServerEvent
from keyloft.errors import Closed, KeyloftError

logger = logging.getLogger(__name__)


class StreamedWatch:
    """The changes of some keys, or of all below a prefix."""

    def __init__(
        self,
        api: HttpApi,
        *,
        keys: list[bytes],
        prefix: str,
        since: int | None,
        ended: Callable[["StreamedWatch"], None],
    ) -> None:
        """Begin to watch.

        Args:
            api: Of the service.
            keys: Empty for a prefix.
            prefix: As text; ignored if there are keys.
            since: Report what changed after this version; None for what changes from now on.
            ended: Called when the watch is closed.
        """
        self._api = api
        self._forget = ended
        self._whole = bool(keys)
        """Whether each event has the state of all keys."""
        self._keys = keys
        # A key that is watched twice is asked for once, because the service reports it once.
        self._selection = [("key", text_of(key)) for key in dict.fromkeys(keys)] if keys else [("prefix", prefix)]
        self._since = since
        self._last_event: int | None = None
        """For a prefix: the event after which the next stream continues; None before the first event."""
        self.reported_to: int | None = None
        self._events = deque[ServerEvent]()
        """Complete events that are not yet reported."""
        self._parts: list[Change] = []
        """For keys: the first parts of a state that is sent as several events."""
        self._reported: list[tuple[int, int | None] | None] | None = None
        """For keys: the version and expiry of each, as last reported."""
        self._parser = EventParser()
        self._response: aiohttp.ClientResponse | None = None
        self._broken = 0
        """How many streams broke off since the last change arrived."""
        self._failure: KeyloftError | None = None
        self._ended = asyncio.Event()
        self.starting = asyncio.create_task(self._connect(), name="keyloft watch")

    def __aiter__(self) -> AsyncIterator[list[Change]]:
        return self

    async def __anext__(self) -> list[Change]:
        while not self._ended.is_set():
            if self._events:
                if changes := self._take():
                    return changes
            elif self._failure is not None:
                await self.aclose()
                raise self._failure
            elif self.starting.done() and self._response is not None:
                await self._receive(self._response)
            else:
                # Until the watch has begun, only the task reads the stream: two readers would take each other's bytes.
                if self.starting.done():
                    self.starting = asyncio.create_task(self._connect(), name="keyloft watch")
                # Not `await self.starting`: a caller that is cancelled must not cancel the task.
                await asyncio.wait([self.starting])
                if not self.starting.cancelled():  # by `aclose`
                    self.starting.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._ended.set()
        self._forget(self)
        self.starting.cancel()
        self._disconnect()  # before the wait below: a caller cancelled there must not leave the connection open
        await asyncio.wait([self.starting])

    def _take(self) -> list[Change]:
        """All changes that have arrived; for each key, its last state."""
        changed: dict[bytes, Change] = {}
        whole: list[Change] | None = None
        while self._events:
            event = self._events.popleft()
            changes = [_change(entry) for entry in read_entries(event.data).entries]
            if event.id is not None:
                self.reported_to = max(event.id, self.reported_to or 0)
            if not self._whole:
                for change in changes:
                    changed.pop(change.key, None)
                    changed[change.key] = change
            elif event.id is None:
                self._parts += changes
            else:
                whole, self._parts = [*self._parts, *changes], []
        if not self._whole:
            return list(changed.values())
        state = None if whole is None else [_state(change.record) for change in whole]
        if whole is None or state == self._reported:
            return []
        self._reported = state
        if len(whole) == len(self._keys):
            return whole
        by_key = {change.key: change for change in whole}
        return [by_key[key] for key in self._keys]  # some are watched twice

    async def _receive(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(limits.HTTP_CLIENT_SILENCE_SECONDS):
                piece = await response.content.readany()
        except NotAnswered as failure:
            logger.debug("%s: a watch has lost its connection (%s)", self._api.name, errors.reason(failure))
            piece = b""
        if piece:
            self._feed(piece)
        else:
            self._broken += 1
            self._disconnect()

    def _feed(self, piece: bytes) -> bool:
        """Take what has arrived; returns whether the watch has begun."""
        has_begun = False
        for event in self._parser.feed(piece):
            match event.kind:
                case "ready":
                    has_begun = True
                    if self._since is None and self._last_event is None:
                        self._last_event = event.id
                    if self.reported_to is None:
                        self.reported_to = event.id if self._since is None else self._since
                case "change":
                    self._events.append(event)
                    self._broken = 0
                    if event.id is not None:
                        self._last_event = event.id
                case "error":
                    self._failure = errors.error_of(msgspec.json.decode(event.data, type=ApiProblem))
                    self._disconnect()
        return has_begun or self._failure is not None

    async def _connect(self) -> None:
        """Connect, and read until the service says from which version on it reports; retry while it does not answer."""
        attempt = 0
        if self._broken > 1:
            await self._pause(pause_seconds(self._broken - 2))
        while not self._ended.is_set():
            try:
                async with asyncio.timeout(limits.HTTP_CLIENT_SILENCE_SECONDS):
                    await self._begin()
            except Closed:
                self._ended.set()
                return
            except KeyloftError as error:  # before NotAnswered: NotPermitted is a ConnectionError, too
                self._failure = error
                return
            except NotAnswered as failure:
                self._disconnect()
                if errors.never_helps(failure):
                    self._failure = errors.explain(self._api.name, failure)
                    return
                if not attempt:
                    logger.warning("%s: a watch waits for it (%s)", self._api.name, errors.reason(failure))
            else:
                return
            await self._pause(pause_seconds(attempt))
            attempt += 1

    async def _begin(self) -> None:
        self._parser, self._parts = EventParser(), []
        selection, last_event = self._selection, self._last_event
        if self._whole and last_event is not None:
            last_event = None  # the service sends the state of all keys, which is compared with what was reported
        elif last_event is None and self._since is not None:
            selection = [*selection, ("since", str(self._since))]
        response = await self._api.stream(selection, last_event)
        if self._ended.is_set():
            response.close()
            return
        self._response = response
        while True:
            piece = await response.content.readany()
            if not piece:
                raise aiohttp.ClientConnectionError("the stream ended before it began")
            if self._feed(piece):
                return

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            pass


def _change(entry: ApiEntry) -> Change:
    key = key_of(entry.key)
    return Change(key, record_of(entry, key))


def _state(record: Record | None) -> tuple[int, int | None] | None:
    return None if record is None else (record.version, record.expires_at)
