"""How the tuple store is read: entries, lists, children, counts and watches."""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeAlias, TypeVar, overload

from keyloft import limits
from keyloft.core import keys
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine
from keyloft.core.keys import KeyLike, TupleKey, encode, encode_many
from keyloft.core.paging import PageSize
from keyloft.core.records import Count, Get, Space
from keyloft.core.slices import free_in_slices, in_slices
from keyloft.errors import InvalidArgument, InvalidKeyType
from keyloft.tuples.children import Children
from keyloft.tuples.entries import Entry, entries_at, entries_of, entry_of, keys_of
from keyloft.tuples.listing import Listing
from keyloft.tuples.named import key_maker
from keyloft.tuples.no_subscripts import NoSubscripts
from keyloft.tuples.selector import Selector
from keyloft.tuples.typed import codec_of, codec_or_none
from keyloft.tuples.watching import Watching

T = TypeVar("T")
D = TypeVar("D")

_TUPLES = Space.TUPLES
ITEM = "an item of keys"
"""What a message calls one of several keys."""
# Inside the class, `list` is the method.
Entries: TypeAlias = list[Entry[T]]


class StoreReads(NoSubscripts, AsyncClosing):
    """The part of a store that reads.

    Wherever a `type` can be named, values are read as objects of it: a dataclass, a msgspec Struct, an attrs class, a
    TypedDict, a pydantic model, or a type made of such. An entry that does not fit raises `WrongType`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._key = key_maker(engine)
        """Makes the keys of entries."""
        self._page_size = PageSize()
        self._key_page_size = PageSize()

    @overload
    async def get(self, key: KeyLike, default: Any = None) -> Entry: ...
    @overload
    async def get(self, key: KeyLike, *, type: type[T]) -> Entry[T]: ...
    @overload
    async def get(self, key: KeyLike, default: D, *, type: type[T]) -> Entry[T | D]: ...
    @overload
    async def get(self, key: KeyLike, default: Any = None, *, type: object) -> Entry: ...
    async def get(self, key: KeyLike, default: Any = None, *, type: Any = None) -> Entry:
        """The entry at a key; where there is none, `exists` is False, and the value is the default.

        Example:
            visits = (await kv.get(("visits",), default=0)).value
            user = await kv.get(("users", "alice"), type=User)
        """
        [record] = await self.engine.read(Get(_TUPLES, keys.encode(key)))
        return entry_of(self._key(key), record, None if type is None else codec_of(type), default)

    @overload
    async def get_many(self, keys: Iterable[KeyLike]) -> Entries[Any]: ...
    @overload
    async def get_many(self, keys: Iterable[KeyLike], *, type: type[T]) -> Entries[T]: ...
    @overload
    async def get_many(self, keys: Iterable[KeyLike], *, type: object) -> Entries[Any]: ...
    async def get_many(self, keys: Iterable[KeyLike], *, type: Any = None) -> Entries[Any]:
        """The entries at several keys, in their order, all as of one moment."""
        wanted, codec = several(keys), codec_or_none(type)
        if len(wanted) <= limits.SLICE_ITEMS:
            found = await self.engine.read(*[Get(_TUPLES, key) for key in encode_many(wanted, ITEM)])
            return entries_at(wanted, found, codec, self._key)
        asks = await in_slices(lambda key: Get(_TUPLES, encode(key, ITEM)), wanted)
        records = await self.engine.read(*asks)
        await free_in_slices(asks)
        entries = await in_slices(lambda key, record: entry_of(self._key(key), record, codec), wanted, records)
        await free_in_slices(records)
        await free_in_slices(wanted)
        return entries

    @overload
    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> Listing[Entry]: ...
    @overload
    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
        type: type[T],
    ) -> Listing[Entry[T]]: ...
    @overload
    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
        type: object,
    ) -> Listing[Entry]: ...
    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
        type: Any = None,
    ) -> Listing[Entry]:
        """The entries below a prefix, or from `start` up to but not including `end`, or both, in the order of keys.

        Await it for a list, or iterate it: a long one is read page by page, each page consistent in itself.

        Example:
            users = await kv.list(prefix=("users",), limit=10)
            more = await kv.list(prefix=("users",), limit=10, cursor=users.cursor)
            async for entry in kv.list(prefix=("users",)):
                print(entry.key, entry.value)
        """
        selector = Selector.of(prefix, start, end, reverse=reverse, cursor=cursor)
        decode = partial(entries_of, codec=codec_or_none(type), make_key=self._key)
        return Listing(self.engine, selector, limit, decode, self._page_size)

    def keys(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> Listing[TupleKey]:
        """Like `list`, but the keys alone; no value is read."""
        selector = Selector.of(prefix, start, end, reverse=reverse, cursor=cursor)
        return Listing(self.engine, selector, limit, keys_of, self._key_page_size, keys_only=True)

    def children(self, prefix: KeyLike = (), *, limit: int | None = None, reverse: bool = False) -> Children:
        """The keys one part below a prefix, each once, whether something is stored there or only further below.

        Await it for a list, or iterate it. What lies below a child is skipped, however much that is.

        Example:
            async for key in kv.children(("users",)):
                print(key)                            # ("users", "alice"), ("users", "bob")
        """
        return Children(self.engine, prefix, limit, reverse=reverse)

    async def count(
        self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None
    ) -> int:
        """How many entries there are in a range, as of one moment."""
        selector = Selector.of(prefix, start, end)
        [found] = await self.engine.read(Count(_TUPLES, selector.start, selector.end))
        return found

    @overload
    def watch(self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None) -> Watching: ...
    @overload
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: type[T]
    ) -> Watching[T]: ...
    @overload
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: object
    ) -> Watching: ...
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: Any = None
    ) -> Watching:
        """Changes as they are committed, by this process or by another: writes, deletions and expiries.

        On keys: first their current entries, then all of them again, in the order given, whenever one changed. On a
        prefix: the entries that changed since the watch was made. An entry that was deleted or has expired has `exists`
        False; one that was touched has its old versionstamp. A slow reader misses intermediate states, never the last
        one. To know all entries below a prefix at any time: watch, then list, then apply what the watch reports. The
        iteration ends when the store closes.

        Args:
            watched: Keys.
            prefix: Instead of keys, all that is stored below it.
            since: A versionstamp: report what changed after it, instead of from now on. Keys are then reported only
                once one of them has changed.
            type: What values are read as.

        Raises:
            HistoryGone: Raised by the iteration. The change log does not reach back to `since`; or, on a prefix, not to
                the changes that a slow reader has seen last. List, then watch again.

        Example:
            async for [config, flags] in kv.watch(("config",), ("flags",)):
                ...
        """
        if bool(watched) == (prefix is not None):
            raise InvalidArgument("watch takes keys or a prefix: watch(key, …) or watch(prefix=…)")
        if len(watched) == 1 and isinstance(watched[0], list) and isinstance([*watched[0], None][0], (tuple, list)):
            raise InvalidKeyType("watched: expected keys one after the other, as in watch(key, other_key), got a list")
        _check_since(since)
        codec = codec_or_none(type)
        if prefix is not None:
            return Watching(self.engine, Selector.of(prefix, None, None).scan(), since=since, codec=codec)
        return Watching(self.engine, *[Get(_TUPLES, keys.encode(key)) for key in watched], since=since, codec=codec)


def _check_since(since: object) -> None:
    if since is not None and (type(since) is not int or since < 0):
        raise InvalidArgument("since: expected a versionstamp, which is a whole number from 0 on")


def several(many: Iterable[KeyLike], call: str = "get_many") -> list[KeyLike]:
    """The keys of a call that takes several."""
    keys = [*many] if isinstance(many, Iterable) else None
    if keys is None or (keys and not isinstance(keys[0], (tuple, list))):
        raise InvalidKeyType(f"keys: expected a list of keys, each a tuple, as in {call}([key, other_key])")
    return keys
