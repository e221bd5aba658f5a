"""The contract between the faces of Keyloft and what stores their data: three verbs.

The rules that every engine keeps are the tests of `tests/engines/contract.py`.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol, overload

from keyloft.core.records import (
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

    @property
    def location(self) -> str:
        """Where the data is, for people: a file, a server and its database, or memory; never a password."""

    @property
    def is_closed(self) -> bool: ...

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
