"""Lists of the tuple store: read page by page, awaited or iterated, continued by a cursor."""

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from functools import partial
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
    """A list to read, from its beginning each time: await it, or iterate it with `async for`; `cursor` continues it."""

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
        super().__init__(engine)
        self._selector = selector
        self._begin = partial(Pages, engine, selector.scan(check_limit(limit), keys_only=keys_only), size)
        self._decode_page = decode_page
        self.what = "keys" if keys_only else "entries"
        self._decoded(Page())

    @property
    def cursor(self) -> str | None:
        """Continues after the last item that was read; before the first one, the cursor that this list was given."""
        read = len(self._page) - length_hint(self._items)
        return self._selector.cursor_after(self._page.keys[read - 1]) if read else self._selector.cursor

    def __await__(self) -> Generator[Any, None, EntryList[T]]:
        return self._all().__await__()

    async def _all(self) -> EntryList[T]:
        items = EntryList[T]((), self._selector.cursor)
        self._decoded(page := Page())
        async for page in self._begin():
            items.extend(self._decoded(page))
        if page:
            items.cursor = self._selector.cursor_after(page.keys[-1])
        return items

    async def __aiter__(self) -> AsyncIterator[T]:
        async for items in self.pages():
            for item in items:
                yield item

    async def pages(self) -> AsyncIterator[Iterator[T]]:
        """The items page by page, from the beginning. An item that can't be read raises in its position."""
        self._decoded(Page())
        async for page in self._begin():
            yield self._decoded(page)

    def _decoded(self, page: Page) -> Iterator[T]:
        self._page, self._items = page, self._decode_page(page)
        return self._items
