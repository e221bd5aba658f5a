"""The contract between the faces of Keyloft and what stores their data: three verbs.

The rules that every engine keeps are the tests of `tests/engines/contract.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, overload

from msgspec.structs import replace

from keyloft import limits
from keyloft.records import (
    Ask,
    Batch,
    Change,
    Committed,
    Conflict,
    Count,
    Expired,
    Get,
    Latest,
    Now,
    Page,
    Record,
    Scan,
    Usage,
    Used,
)


class Watch(Protocol):
    """Changes as they come; the iteration ends when the engine closes."""

    def __aiter__(self) -> AsyncIterator[list[Change]]: ...

    async def __anext__(self) -> list[Change]: ...

    async def aclose(self) -> None: ...


class Reader(Protocol):
    """What can be asked."""

    @overload
    async def read(self, *asks: Get) -> list[Record | None]: ...
    @overload
    async def read(self, *asks: Scan) -> list[Page]: ...
    @overload
    async def read(self, *asks: Expired) -> list[list[Record]]: ...
    @overload
    async def read(self, *asks: Count | Latest | Now) -> list[int]: ...
    @overload
    async def read(self, *asks: Usage) -> list[list[Used]]: ...
    @overload
    async def read(self, *asks: Ask) -> list[Any]: ...
    async def read(self, *asks: Ask) -> list[Any]:
        """Answer all asks from one consistent view, in the order asked. What has expired is absent."""


class Engine(Reader, Protocol):
    """An ordered, versioned, durable store of records."""

    async def commit(self, batch: Batch) -> Committed | Conflict:
        """Make the whole batch or nothing of it; once this returns Committed, it is durable.

        Raises:
            NotACounter: A Sum, Min or Max met something else than a U64.
            CommitUnknown: The database was lost meanwhile; the whole batch was made, or nothing of it.
            DatabaseError: The database failed in any other way; the batch was not made.
            Closed: The engine is closed.
        """

    def watch(self, *asks: Get | Scan) -> Watch:
        """Report changes: to some keys (Gets), or in a range (one Scan). Several changes to a key may come as one.

        For Gets: first the state of all keys, then again the state of all whenever one changed, in the order asked.
        For a Scan: the keys that changed since the watch was made.
        """

    async def aclose(self) -> None:
        """Finish or refuse what is under way, end the watches, let go of the database."""


class PageSize:
    """How many entries a page can hold, as learned from the pages of earlier scans."""

    def __init__(self) -> None:
        self.fitting = _FIRST_PAGE

    def learn(self, page: Page) -> None:
        weight = sum(map(len, page.values)) // len(page)
        self.fitting = min(limits.SCAN_ROWS, 16 * self.fitting, max(1, limits.SCAN_BYTES // max(1, weight)))


class Pages:
    """The records of a scan of any length, a page at a time; each page is consistent in itself.

    Pages start small and grow; where the values of one page were large, the next holds fewer. A scan that says how much
    it wants starts with as much as fitted lately. Before the third page and each after it, other tasks get their turn.
    A page that failed or was cancelled is read again by the next step.
    """

    def __init__(self, engine: Reader, scan: Scan, lately: PageSize | None = None) -> None:
        self._engine = engine
        self._rest = scan
        self._lately = lately or PageSize()
        self._size = self._lately.fitting if scan.limit <= limits.SCAN_ROWS else _FIRST_PAGE
        self._pages = 0

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> Page:
        rest = self._rest
        if rest.limit < 1:
            raise StopAsyncIteration
        if self._pages > 1:
            await asyncio.sleep(0)  # reads don't wait for anything: without this, a long scan would starve other tasks
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
        self._size = min(16 * self._size, self._lately.fitting)
        return page


_FIRST_PAGE = 64
