"""Lists that are read when they are awaited or iterated: the base of every list that an interface returns."""

from collections.abc import AsyncIterator, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyList(Generic[T]):
    """A list to await as a whole, or to iterate with `async for`. Subclasses name their items and yield them."""

    what: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.what}: await it, or iterate it with async for>"

    def __bool__(self) -> bool:
        raise TypeError(f"this list of {self.what} has not been read yet: await it, or iterate it with async for")

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        return [item async for item in self]

    def __aiter__(self) -> AsyncIterator[T]:
        raise NotImplementedError
