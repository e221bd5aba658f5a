"""Lists that are read when they are awaited or iterated: the base of every list that an interface returns.

Each `await` and each `async for` reads a list from its beginning.
"""

from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from keyloft import limits
from keyloft.core.closing import AsyncClosing, NoCopies
from keyloft.core.engine import Engine, shown
from keyloft.core.records import NO_LIMIT
from keyloft.errors import InvalidArgument

T = TypeVar("T")


def check_limit(limit: object, default: int = NO_LIMIT, most: int = NO_LIMIT) -> int:
    """How many items a list may have; `default` if that is None.

    Raises:
        InvalidArgument: Less than one, more than `most`, or not a whole number.
    """
    if limit is None:
        return default
    if type(limit) is not int or not 1 <= limit <= most:
        rule = "of at least 1; leave it out for no limit" if most == NO_LIMIT else f"from 1 to {most}"
        raise InvalidArgument(f"limit: expected a whole number {rule}")
    return limit


class LazyList(NoCopies, Generic[T]):
    """A list to await as a whole, or to iterate with `async for`. Subclasses name their items and yield them."""

    what: str

    def __init__(self, source: Engine | AsyncClosing) -> None:
        """`source` is what the list reads from, for `repr`."""
        self._source = source

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.what} in {self._where}: await it, or iterate it with async for>"

    @property
    def _where(self) -> str:
        return repr(self._source) if isinstance(self._source, AsyncClosing) else shown(self._source)

    def __bool__(self) -> bool:
        raise TypeError(f"this list of {self.what} has not been read yet: await it, or iterate it with async for")

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __iter__(self) -> NoReturn:
            raise TypeError(f"this list of {self.what} is asynchronous: await it, or iterate it with async for")

        def __len__(self) -> NoReturn:
            raise TypeError(f"this list of {self.what} has not been read yet: await it, then take its length")

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"this list of {self.what} has not been read yet: await it, then take an item")

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        return [item async for item in self]

    def __aiter__(self) -> AsyncIterator[T]:
        raise NotImplementedError


class ClosableSource(Protocol):
    """A reader of a database, which can be closed while the database stays open."""

    @property
    def shown(self) -> str:
        """Where the data is, and whether the reader is closed, for `repr`."""

    def open_engine(self) -> Engine:
        """The database.

        Raises:
            Closed: The reader is closed.
        """


class SourceList(LazyList[T]):
    """A list that reads from a `ClosableSource`, and can't be read once that is closed."""

    def __init__(self, source: ClosableSource) -> None:
        super().__init__(source.open_engine())
        self._closable = source

    @property
    def _where(self) -> str:
        return self._closable.shown

    @property
    def _engine(self) -> Engine:
        return self._closable.open_engine()


class PagedList(LazyList[T]):
    """A list that is read page by page, in the order of its keys. Subclasses read a page."""

    def __init__(self, source: AsyncClosing, limit: int | None) -> None:
        super().__init__(source)
        self._limit = limit
        self._most = check_limit(limit)

    async def __aiter__(self) -> AsyncIterator[T]:
        left, after = self._most, None
        while left > 0:
            items, after = await self._page(min(left, limits.LISTED_KEYS), after)
            for item in items:
                yield item
            left = 0 if after is None else left - len(items)

    async def _page(self, limit: int, after: str | None) -> tuple[list[T], str | None]:
        """Up to `limit` items after a key, and the key after which the next page begins; None for the last page."""
        raise NotImplementedError
