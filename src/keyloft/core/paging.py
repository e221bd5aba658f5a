"""Reads a scan of any length a page at a time."""

import asyncio

from msgspec.structs import replace

from keyloft import limits
from keyloft.core.engine import Reader
from keyloft.core.records import Page, Scan


class PageSize:
    """How many entries the next page may have, as learned from the pages of earlier scans."""

    def __init__(self, first: int = limits.FIRST_PAGE_ROWS, most: int = limits.SCAN_ROWS) -> None:
        self.fitting = first
        self._most = most

    def learn(self, page: Page) -> None:
        size = sum(map(len, page.values)) if page.value_bytes is None else page.value_bytes
        fitting = max(1, limits.SCAN_BYTES * len(page) // max(1, size))
        self.fitting = min(self._most, limits.PAGE_GROWTH * self.fitting, fitting)


class Pages:
    """The records of a scan of any length, a page at a time; each page is consistent in itself.

    Pages start small and grow; if the values of a page were large, the next page has fewer entries. A scan with a small
    limit starts with the page size that fitted earlier scans. Other tasks run before the third and each further page.
    If reading a page fails or is cancelled, the next step reads it again.
    """

    def __init__(self, engine: Reader, scan: Scan, lately: PageSize | None = None) -> None:
        self._engine = engine
        self._rest = scan
        self._lately = lately or PageSize()
        self._size = self._lately.fitting
        if scan.limit > limits.SCAN_ROWS:
            self._size = min(self._size, limits.FIRST_PAGE_ROWS)
        self._pages = 0

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> Page:
        rest = self._rest
        if rest.limit < 1:
            raise StopAsyncIteration
        if self._pages > 1:
            await asyncio.sleep(0)  # reads may complete without waiting, and a long scan would starve other tasks
        wanted = min(rest.limit, self._size)
        [page] = await self._engine.read(replace(rest, limit=wanted))
        self._pages += 1
        self._rest = replace(rest, limit=rest.limit - wanted if len(page) == wanted else 0)
        if not page:
            raise StopAsyncIteration
        if rest.reverse:
            self._rest = replace(self._rest, end=page.keys[-1])
        else:
            self._rest = replace(self._rest, start=page.keys[-1], after=True)
        self._lately.learn(page)
        self._size = min(limits.PAGE_GROWTH * self._size, self._lately.fitting)
        return page
