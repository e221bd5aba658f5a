"""What every class that must be closed has in common: `async with`, or `with`, closes it."""

from typing import TYPE_CHECKING, NoReturn, Self


class NoCopies:
    """What belongs to the process that has opened it: `multiprocessing` and `copy` get an error with the cure."""

    if not TYPE_CHECKING:

        def __reduce__(self) -> NoReturn:
            raise TypeError(
                f"this {type(self).__name__} can't be copied or passed to another process: open the database there, by "
                "its URL"
            )


class AsyncClosing(NoCopies):
    """Closed by `aclose`, or at the end of an `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        raise NotImplementedError

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __enter__(self) -> NoReturn:
            raise TypeError(f"this {type(self).__name__} is asynchronous: write `async with` instead of `with`")

        def __exit__(self, *exc_info: object) -> None: ...


class SyncClosing(NoCopies):
    """Closed by `close`, or at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    if not TYPE_CHECKING:

        async def __aenter__(self) -> NoReturn:
            raise TypeError(f"this {type(self).__name__} is synchronous: write `with` instead of `async with`")

        async def __aexit__(self, *exc_info: object) -> None: ...
