"""Watches of some keys: what is stored at all of them, whenever one has changed."""

import asyncio
from typing import TYPE_CHECKING

from keyloft.core.records import Change, Changes, Get, Key, LoggedChange, LogPosition
from keyloft.engines.watches.watch import EngineWatch
from keyloft.errors import HistoryGone

if TYPE_CHECKING:
    from keyloft.engines.watches.feed import ChangeFeed


class KeyWatch(EngineWatch[Change]):
    """The state of some keys: once at first, or with `since` once one has changed; then whenever one changed."""

    def __init__(self, feed: "ChangeFeed", gets: list[Get], since: int | None) -> None:
        super().__init__(feed)
        self._gets = gets
        self.reported_to = since
        self._compared = None if since is None else LogPosition(since)
        """With `since`: up to where no change of the keys was found. A reader that is cancelled goes on from there."""
        self._began: int | None = None
        """The time of the version `since`, once it is known."""
        self._reported: list[tuple[int, int | None] | None] | None = None

    def start(self, version: int, at: int) -> None:
        super().start(version, at)
        # Not earlier: changes between a first read and the start would be missed.
        self._woken.set()

    def changed(self, change: LoggedChange) -> None:
        if self._started_at is None or change.version > self._started_at:
            self._woken.set()

    def expired(self, key: Key, at: int) -> None:
        self._woken.set()

    def clock_was_set_back(self) -> None:
        self._reported = None  # so that an absence is reported again: a get may show the entry meanwhile

    def lost(self, gone: HistoryGone) -> None:
        self._woken.set()  # the keys are read again, and compared with what was reported

    async def _read_changes(self) -> list[Change]:
        if self._compared is not None and not await self._has_changed(self._compared):
            self._compared = None
            return []
        reached = self._feed.dispatched_to
        records = await self._feed.reader.read(*self._gets)
        self.reported_to = max(reached, self.reported_to or 0)
        state = [None if record is None else (record.version, record.expires_at) for record in records]
        if state == self._reported:
            return []
        self._compared, self._reported = None, state
        return [Change(get.key, record) for get, record in zip(self._gets, records, strict=True)]

    async def _has_changed(self, after: LogPosition) -> bool:
        """Whether one of the keys changed, or its entry expired, after a position in the log."""
        addresses = self.registration.addresses
        [piece] = await self._feed.reader.read(Changes(after))
        began = self._began = piece.began if self._began is None else self._began
        while not any([(change.space, change.key) in addresses for change in piece.changes]):
            if piece.is_last:
                stored = await self._feed.reader.read(
                    *[Get(get.space, get.key, include_expired=True) for get in self._gets]
                )
                may_have_expired = [
                    get
                    for get, record in zip(self._gets, stored, strict=True)
                    if record is not None and record.expires_at is not None and record.expires_at > began
                ]
                del stored  # so that the values of two reads are never in memory at the same time
                if may_have_expired and None in await self._feed.reader.read(*may_have_expired):
                    return True
                self.reported_to = piece.end.version
                return False
            self._compared = piece.end
            await asyncio.sleep(0)
            [piece] = await self._feed.reader.read(Changes(self._compared))
        return True
