"""Watches of the tuple store: changes as entries."""

from collections.abc import Sequence

from keyloft.core import keys
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Watch
from keyloft.core.records import Change
from keyloft.errors import Undecodable
from keyloft.tuples.entries import Entry, entry_of


class Watching(AsyncClosing):
    """An open watch: iterate it with `async for`; closing it, or the store, ends the iteration."""

    def __init__(self, watch: Watch, *, whole: bool) -> None:
        self._watch = watch
        self._whole = whole
        self._left: Sequence[Change] = ()

    def __aiter__(self) -> "Watching":
        return self

    async def __anext__(self) -> list[Entry]:
        changes, self._left = self._left or await self._watch.__anext__(), ()
        entries: list[Entry] = []
        for at, change in enumerate(changes):
            try:
                entries.append(entry_of(keys.decode(change.key), change.record))
            except Undecodable:
                if not self._whole:
                    # A damaged entry raises in its order: entries before it are returned first, those after it next.
                    self._left = changes[at:] if entries else changes[at + 1 :]
                if self._whole or not entries:
                    raise
                break
        return entries

    async def aclose(self) -> None:
        await self._watch.aclose()
