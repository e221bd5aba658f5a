"""Watches of entries over NATS: events of the service say which entries have changed, and gets read them."""

from typing import TYPE_CHECKING, Self

from keyloft.errors import HistoryGone
from keyloft.nats.remote_watch import RemoteWatch
from keyloft.semantic.entry_watches import EntryWatch
from keyloft.semantic.envelope import Envelope

if TYPE_CHECKING:
    from keyloft.semantic.client import SemanticClient


class RemoteEntryWatch(EntryWatch[Envelope | None]):
    """The entry at a key now, then after each change; None while there is none."""

    def __init__(self, client: "SemanticClient", key: str) -> None:
        self._client = client
        self._key = key
        self._events: RemoteWatch = client.events(key)
        self._is_stale = True
        """Whether the entry has to be read: at the beginning, and after an event until it was read."""
        self._version: int | None = 0
        """The version of the entry that was last reported; None for no entry, 0 before the first report."""

    async def __aenter__(self) -> Self:
        await self._events.__aenter__()
        return self

    async def __anext__(self) -> Envelope | None:
        await self._events.__aenter__()  # begins before the read, so that no change falls between the two
        while True:
            if not self._is_stale:
                await self._wait()
            entry = await self._client.get(self._key)
            version = None if entry is None else entry.version
            self._is_stale, is_new = False, version != self._version
            self._version = version
            if is_new:
                return entry

    async def _wait(self) -> None:
        """Wait for an event that the last read has not shown."""
        while not self._is_stale:
            try:
                event = await anext(self._events)
            except HistoryGone:
                await self._events.aclose()
                self._events = self._client.events(self._key)
                await self._events.__aenter__()
                self._is_stale = True
                return
            if event.deleted:
                self._is_stale = self._version is not None
            else:
                self._is_stale = self._version is None or event.version > self._version

    async def aclose(self) -> None:
        await self._events.aclose()


class RemoteEntryChanges(EntryWatch[dict[str, Envelope | None]]):
    """The entries that change from now on, by whole key; None for those that are gone."""

    def __init__(self, client: "SemanticClient", prefix: str) -> None:
        self._client = client
        self._events: RemoteWatch = client.events(prefix=prefix)
        self._changed: str | None = None
        """The path of an entry that has changed, and was not yet read."""

    async def __aenter__(self) -> Self:
        await self._events.__aenter__()
        return self

    async def __anext__(self) -> dict[str, Envelope | None]:
        if self._changed is None:
            self._changed = (await anext(self._events)).key
        entry = await self._client.get(self._changed)
        key, self._changed = self._client.project.prefix + self._changed, None
        return {key: entry}

    async def aclose(self) -> None:
        await self._events.aclose()
