"""Lists of the tuple store: read page by page, awaited or iterated, continued by a cursor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from operator import length_hint
from typing import Any, TypeVar

from keyloft.core.engine import Engine
from keyloft.core.lazy import LazyList, check_limit
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import Page
from keyloft.tuples.selector import Selector

T = TypeVar("T")


class EntryList(list[T]):
    """A list that was read, with the cursor that continues after its last item."""

    def __init__(self, items: Iterable[T], cursor: str | None) -> None:
        super().__init__(items)
        self.cursor = cursor
        """Pass it to the next `list` or `keys`. Where nothing was found, the cursor that was given."""


class Listing(LazyList[T]):
    """A list to read: await it, or iterate it with `async for`; `cursor` continues it later."""

    def __init__(
        self,
        engine: Engine,
        selector: Selector,
        limit: int | None,
        decode_page: Callable[[Page], Iterator[T]],
        size: PageSize,
        *,
        keys_only: bool = False,
    ) -> None:
        self._engine = engine
        self._selector = selector
        self._pages = Pages(engine, selector.scan(check_limit(limit), keys_only=keys_only), size)
        self._decode_page = decode_page
        self.what = "keys" if keys_only else "entries"
        self._page = Page()
        self._items: Iterator[T] = iter(())
        self._reading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Listing of {self.what} in {self._engine.location}: await it, or iterate it with async for>"

    @property
    def cursor(self) -> str | None:
        """Continues after the last item that was read; before the first one, the cursor that this list was given."""
        read = len(self._page) - length_hint(self._items)
        return self._selector.cursor_after(self._page.keys[read - 1]) if read else self._selector.cursor

    def __await__(self) -> Generator[Any, None, EntryList[T]]:
        return self._read_all().__await__()

    async def _read_all(self) -> EntryList[T]:
        items = [*self._items]
        while await self._read_page():
            items.extend(self._items)
        return EntryList(items, self.cursor)

    async def __aiter__(self) -> AsyncIterator[T]:
        # All state is in the list itself: after a loop that ended early or was cancelled, the next one continues.
        while True:
            for item in self._items:
                yield item
            if not await self._read_page():
                return

    async def __anext__(self) -> T:
        while not length_hint(self._items):
            if not await self._read_page():
                raise StopAsyncIteration
        return next(self._items)

    async def _read_page(self) -> bool:
        """Read the next page, unless another loop over this list has just read it; False at the end of the list."""
        async with self._reading:
            if not length_hint(self._items):
                page = await anext(self._pages, None)
                if page is None:
                    return False
                self._page, self._items = page, self._decode_page(page)
            return True
