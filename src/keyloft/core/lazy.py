"""Things that are fetched when somebody asks for them: all by `await`, or one by one with `async for`."""

from collections.abc import AsyncIterator, Generator
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class LazyList(Generic[T]):
    """Subclasses say what they are, and fetch it in `__aiter__`."""

    what: ClassVar[str]

    def __repr__(self) -> str:
        return f"<{self.what} on request: await them, or go through them with async for>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"these {self.what} are still to be fetched: await them first, or go through them with async for"
        )

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        return [one async for one in self]

    def __aiter__(self) -> AsyncIterator[T]:
        raise NotImplementedError
