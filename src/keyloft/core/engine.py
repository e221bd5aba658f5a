"""The contract between interfaces and engines: three verbs.

The rules that every engine keeps are the tests of `tests/engines/contract.py`.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol, overload

from keyloft.core import records


class Watch(Protocol):
    """Changes as they happen; the iteration ends when the engine closes."""

    def __aiter__(self) -> AsyncIterator[list[records.Change]]: ...

    async def __anext__(self) -> list[records.Change]: ...

    async def aclose(self) -> None: ...


class Reader(Protocol):
    """The part of an engine that reads."""

    @overload
    async def read(self, *asks: records.Get) -> list[records.Record | None]: ...
    @overload
    async def read(self, *asks: records.Scan) -> list[records.Page]: ...
    @overload
    async def read(self, *asks: records.Expired) -> list[list[records.Record]]: ...
    @overload
    async def read(self, *asks: records.Count | records.Latest | records.Now) -> list[int]: ...
    @overload
    async def read(self, *asks: records.Usage) -> list[list[records.Used]]: ...
    @overload
    async def read(self, *asks: records.Ask) -> list[Any]: ...
    async def read(self, *asks: records.Ask) -> list[Any]:
        """Answer all requests from one consistent view, in their order. Expired entries are absent."""


class Engine(Reader, Protocol):
    """An ordered, versioned, durable store of records."""

    @property
    def location(self) -> str:
        """Where the data is, for people: a file, a server and its database, or memory; never a password."""

    @property
    def is_closed(self) -> bool: ...

    async def commit(self, batch: records.Batch) -> records.Committed | records.Conflict:
        """Write the whole batch or nothing of it; once this returns Committed, it is durable.

        Raises:
            NotACounter: A Sum, Min or Max met a value that is not a U64.
            CommitUnknown: The connection was lost during the commit; the whole batch was written, or nothing of it.
            DatabaseError: The database failed in any other way; nothing was written.
            Closed: The engine is closed.
        """

    def watch(self, *asks: records.Get | records.Scan) -> Watch:
        """Report changes to some keys (Gets), or in a range (one Scan). Changes to one key may be joined.

        For Gets: first the state of all keys, then again the state of all whenever one changed, in the order given.
        For a Scan: the keys that changed since the watch was made.
        """

    async def aclose(self) -> None:
        """Finish or refuse the calls under way, end the watches, close the database."""


def shown(engine: Engine) -> str:
    """Where its data is, and whether it is closed, for `repr`."""
    return f"{engine.location}, {'closed' if engine.is_closed else 'open'}"


async def write(engine: Engine, *mutations: records.Mutation) -> records.Committed:
    """Commit mutations without checks."""
    done = await engine.commit(records.Batch(mutations))
    assert isinstance(done, records.Committed), "a batch without checks has nothing to conflict with"
    return done
