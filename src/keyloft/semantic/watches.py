"""A watch of entries, as the semantic store returns it."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Watch
from keyloft.core.records import Change

T = TypeVar("T")


class EntryWatch(AsyncClosing, Generic[T]):
    """Iterate it with `async for`. It misses no change after it was made, but may merge several into one.

    Closing it, or the store, ends the iteration.
    """

    def __init__(self, watch: Watch, show: Callable[[list[Change]], T]) -> None:
        self._watch = watch
        self._show = show

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return self._show(await self._watch.__anext__())

    async def aclose(self) -> None:
        await self._watch.aclose()
