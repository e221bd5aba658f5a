"""Watches of entries: the entry at a key now and after each change, or the entries that change below a prefix."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, Watch
from keyloft.core.records import NO_LIMIT, Change, Get, Scan
from keyloft.semantic import keys
from keyloft.semantic.envelope import Envelope, envelope_of
from keyloft.semantic.keys import SPACE

T = TypeVar("T")


class EntryWatch(AsyncClosing, Generic[T]):
    """An open watch: iterate it with `async for`. It misses no change, but may report several changes as one.

    Closing it, or the store, ends the iteration.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        raise NotImplementedError


class StoredEntryWatch(EntryWatch[T]):
    """A watch of entries in a database."""

    def __init__(self, watch: Watch, show: Callable[[list[Change]], T]) -> None:
        self._watch = watch
        self._show = show

    async def __anext__(self) -> T:
        return self._show(await self._watch.__anext__())

    async def aclose(self) -> None:
        await self._watch.aclose()


def watch_entry(engine: Engine, key: str) -> EntryWatch[Envelope | None]:
    """The entry at a key now, then after each change; None while there is none."""
    return StoredEntryWatch(engine.watch(Get(SPACE, keys.parse(key).entry)), lambda found: _shown(found[0]))


def watch_entries(engine: Engine, prefix: str) -> EntryWatch[dict[str, Envelope | None]]:
    """The entries that change from now on, by key, if their keys begin with a text; None for an entry that is gone."""
    watch = engine.watch(Scan(SPACE, *keys.parse_prefix(prefix).entries, NO_LIMIT))
    return StoredEntryWatch(watch, lambda found: {keys.key_of_row(change.key): _shown(change) for change in found})


def _shown(change: Change) -> Envelope | None:
    return None if change.record is None else envelope_of(change.record)
