"""Watches of the tuple store: changes as entries."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

from keyloft.core import keys
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, shown
from keyloft.core.records import Change, Get, Scan
from keyloft.errors import Undecodable, WrongType
from keyloft.tuples.entries import Entry, entry_of
from keyloft.tuples.named import key_maker
from keyloft.tuples.typed import Codec

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


class Watching(AsyncClosing, Generic[T]):
    """An open watch: iterate it with `async for`; closing it, or the store, ends the iteration."""

    def __init__(self, engine: Engine, *asks: Get | Scan, since: int | None = None, codec: Codec | None = None) -> None:
        self._engine = engine
        self._codec = codec
        self._key = key_maker(engine)
        self._watch = engine.watch(*asks, since=since)
        self._whole = isinstance(asks[0], Get)
        self._left: Sequence[Change] = ()
        """Changes behind a damaged entry, for the next step."""
        self._reported_before: int | None = None
        """Up to where all was reported before the step that these belong to."""
        self._is_closed = False

    def __repr__(self) -> str:
        what = "keys" if self._whole else "a prefix"
        return f"<Watching of {what} in {shown(self._engine)}{', ended' if self._is_closed else ''}>"

    @property
    def reported_to(self) -> int | None:
        """The versionstamp up to which all changes were reported: `watch(…, since=…)` continues from there.

        None until the database has answered where the watch begins. To continue after a restart, keep it once the
        entries of a step are dealt with.
        """
        return self._reported_before if self._left else self._watch.reported_to

    def __aiter__(self) -> "Watching[T]":
        return self

    async def __anext__(self) -> list[Entry[T]]:
        if not self._left:
            self._reported_before = self._watch.reported_to
        changes, self._left = self._left or await self._watch.__anext__(), ()
        entries: list[Entry[T]] = []
        for at, change in enumerate(changes):
            try:
                entries.append(entry_of(self._key(keys.decode(change.key)), change.record, self._codec))
            except (Undecodable, WrongType):
                if not self._whole:
                    # A damaged entry raises in its order: entries before it are returned first, those after it next.
                    self._left = changes[at:] if entries else changes[at + 1 :]
                if self._whole or not entries:
                    raise
                break
        return entries

    async def aclose(self) -> None:
        self._is_closed = True
        await self._watch.aclose()
