"""Lists and watches of the synchronous tuple store: plain iterators."""

from collections.abc import Iterator
from typing import Generic, Self, TypeVar, cast

from keyloft.core.closing import SyncClosing
from keyloft.core.driving import Driven, SyncList, next_of
from keyloft.tuples.entries import Entry
from keyloft.tuples.listing import EntryList, Listing
from keyloft.tuples.watching import T as W
from keyloft.tuples.watching import Watching

T = TypeVar("T")


class SyncListing(SyncList[T]):
    """A list to read, from its beginning each time: iterate it, or call `all`; `cursor` continues it."""

    _inner: Listing[T]

    @property
    def cursor(self) -> str | None:
        """Continues after the last item that was read; before the first one, the cursor that this list was given."""
        return self._inner.cursor

    def all(self) -> EntryList[T]:
        """All items, read now, with the cursor that continues after the last one."""
        return cast("EntryList[T]", super().all())

    def __iter__(self) -> Iterator[T]:
        pages = self._inner.pages()
        while True:
            try:
                items = self._run(next_of(pages))
            except StopAsyncIteration:
                return
            yield from items


class SyncWatching(SyncClosing, Driven[Watching[W]], Generic[W]):
    """An open watch: iterate it; closing it, or the store, ends the iteration, also from another thread."""

    @property
    def reported_to(self) -> int | None:
        """The versionstamp up to which all changes were reported: `watch(…, since=…)` continues from there."""
        return self._inner.reported_to

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Entry[W]]:
        try:
            return self._run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the watch. A second call does nothing."""
        self._close_inner()
