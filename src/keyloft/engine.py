"""The contract between the faces of Keyloft and what stores their data: three verbs.

The rules that every engine keeps are the tests of `tests/contract.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, overload

from keyloft import limits
from keyloft.records import Ask, Batch, Change, Committed, Conflict, Count, Expired, Get, Latest, Record, Scan


class Watch(Protocol):
    """Changes as they come; the iteration ends when the engine closes."""

    def __aiter__(self) -> AsyncIterator[list[Change]]: ...

    async def __anext__(self) -> list[Change]: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """An ordered, versioned, durable store of records."""

    @overload
    async def read(self, *asks: Get) -> list[Record | None]: ...
    @overload
    async def read(self, *asks: Scan | Expired) -> list[list[Record]]: ...
    @overload
    async def read(self, *asks: Count | Latest) -> list[int]: ...
    @overload
    async def read(self, *asks: Ask) -> list[Any]: ...
    async def read(self, *asks: Ask) -> list[Any]:
        """Answer all asks from one consistent view, in the order asked. What has expired is absent."""

    async def commit(self, batch: Batch) -> Committed | Conflict:
        """Make the whole batch or nothing of it; once this returns Committed, it is durable.

        Raises:
            NotACounter: A Sum, Min or Max met something else than a U64.
            DatabaseError: The database failed; the batch was not made.
            Closed: The engine is closed.
        """

    def watch(self, *asks: Get | Scan) -> Watch:
        """Report changes: to some keys (Gets), or in a range (one Scan). Several changes to a key may come as one.

        For Gets: first the state of all keys, then again the state of all whenever one changed, in the order asked.
        For a Scan: the keys that changed since the watch was made.
        """

    async def aclose(self) -> None:
        """Finish or refuse what is under way, end the watches, let go of the database."""


async def pages(engine: Engine, scan: Scan) -> AsyncIterator[list[Record]]:
    """The records of a scan of any length, a page at a time; each page is consistent in itself.

    Pages start small and grow with what their values weigh, so that none holds up the event loop.
    """
    left, size = scan.limit, _FIRST_PAGE
    start, end, after = scan.start, scan.end, scan.after
    while left > 0:
        wanted = min(left, size)
        [page] = await engine.read(
            Scan(scan.space, start, end, wanted, scan.reverse, scan.keys_only, after),
        )
        if page:
            yield page
        if len(page) < wanted:
            return
        left -= wanted
        await asyncio.sleep(0)  # reads don't wait for anything: without this, a long scan would starve other tasks
        if scan.reverse:
            end = page[-1].key
        else:
            start, after = page[-1].key, True
        weight = sum([len(record.value) for record in page]) // len(page)
        size = min(limits.SCAN_ROWS, 16 * size, max(1, limits.SCAN_BYTES // max(1, weight)))


_FIRST_PAGE = 64
