"""Watches of entries over NATS: events of the service say which entries have changed, and gets read them."""

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from keyloft import limits
from keyloft.errors import DatabaseError, HistoryGone, NotPermitted, Unanswered
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.semantic.envelope import Envelope

if TYPE_CHECKING:
    from keyloft.semantic.client import SemanticClient

logger = logging.getLogger(__name__)


async def read_again(client: "SemanticClient", key: str, events: RemoteWatch) -> Envelope | None:
    """The entry at a key, after an event: once the service can be reached.

    Raises:
        StopAsyncIteration: The watch was closed meanwhile.
    """
    pause = limits.WATCH_RETRY_SECONDS
    while not events.is_closed:
        try:
            return await client.get(key)
        except (Unanswered, DatabaseError) as error:
            if isinstance(error, NotPermitted) or client.nats.is_closed:
                raise
            logger.debug("an entry that has changed can't be read, trying again: %s", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, limits.WATCH_CHECK_SECONDS)
    raise StopAsyncIteration


class RemoteEntryWatch(EntryWatch[Envelope | None]):
    """The entry at a key now, then after each change; None while there is none."""

    def __init__(self, client: "SemanticClient", key: str) -> None:
        self._client = client
        self._key = key
        self.events: RemoteWatch = client.events(key)
        """What tells that the entry has changed. Public for tests."""
        self._is_stale = True
        """Whether the entry has to be read: at the beginning, and after an event until it was read."""
        self._version: int | None = 0
        """The version of the entry that was last reported; None for no entry, 0 before the first report."""
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.events.__aenter__()
        return self

    async def __anext__(self) -> Envelope | None:
        await self.events.__aenter__()  # begins before the read, so that no change falls between the two
        while True:
            if not self._is_stale:
                await self._wait()
            # The first read says whether the service can be reached; later ones wait for it, as the events do.
            if self._version == 0:
                entry = await self._client.get(self._key)
            else:
                entry = await read_again(self._client, self._key, self.events)
            version = None if entry is None else entry.version
            self._is_stale, is_new = False, version != self._version
            self._version = version
            if is_new:
                return entry

    async def _wait(self) -> None:
        """Wait for an event that the last read has not shown."""
        while not self._is_stale:
            try:
                event = await anext(self.events)
            except HistoryGone:
                self._is_stale = True  # before the events begin again, which may fail: then the next call reads it
                if self._is_closed:
                    raise StopAsyncIteration from None
                self.events = self._client.events(self._key)
                await self.events.__aenter__()
                return
            if event.deleted:
                self._is_stale = self._version is not None
            else:
                self._is_stale = self._version is None or event.version > self._version

    async def aclose(self) -> None:
        self._is_closed = True
        await self.events.aclose()


class RemoteEntryChanges(EntryWatch[dict[str, Envelope | None]]):
    """The entries that change from now on, by whole key; None for those that are gone."""

    def __init__(self, client: "SemanticClient", prefix: str) -> None:
        self._client = client
        self.events: RemoteWatch = client.events(prefix=prefix)
        """What tells that entries have changed. Public for tests."""
        self._changed: str | None = None
        """The path of an entry that has changed, and was not yet read."""

    async def __aenter__(self) -> Self:
        await self.events.__aenter__()
        return self

    async def __anext__(self) -> dict[str, Envelope | None]:
        if self._changed is None:
            self._changed = (await anext(self.events)).key
        entry = await read_again(self._client, self._changed, self.events)
        key, self._changed = self._client.project.prefix + self._changed, None
        return {key: entry}

    async def aclose(self) -> None:
        await self.events.aclose()
