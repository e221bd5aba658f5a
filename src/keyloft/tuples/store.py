"""The tuple store: values under tuple keys, in order, with versions, expiry, atomic writes and watches."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias, TypeVar

from keyloft import limits
from keyloft.core import keys, values
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine, shown, write
from keyloft.core.keys import KeyLike, TupleKey, encode
from keyloft.core.paging import Pages, PageSize
from keyloft.core.records import Count, Delete, Get, Set, Space, Touch
from keyloft.core.slices import free_in_slices, in_slices
from keyloft.core.sweeper import sweep, sweep_regularly
from keyloft.errors import InvalidArgument, InvalidKeyType, InvalidValue
from keyloft.tuples.atomic import Atomic
from keyloft.tuples.entries import Entry, entries_of, entry_of, keys_of, milliseconds
from keyloft.tuples.listing import Listing
from keyloft.tuples.named import NamedEngine
from keyloft.tuples.selector import Selector
from keyloft.tuples.watching import Watching

K = TypeVar("K", bound=TupleKey)

_TUPLES = Space.TUPLES
# Inside Store, `list` is the method.
Entries: TypeAlias = list[Entry]


class Store(AsyncClosing):
    """An open store. Get one from `keyloft.open`; close it with `aclose`, or use `async with`."""

    def __init__(
        self, engine: Engine, *, max_value_bytes: int = limits.VALUE_BYTES, sweep_every: float | None = None
    ) -> None:
        self.engine = engine
        self._max_value_bytes = max_value_bytes
        self._page_size = PageSize()
        self._key_page_size = PageSize()
        self._sweeper: asyncio.Task[None] | None = None
        if sweep_every is not None:
            self._sweeper = asyncio.create_task(sweep_regularly(self.sweep, sweep_every))

    def __repr__(self) -> str:
        return f"<Store on {shown(self.engine)}>"

    async def get(self, key: KeyLike) -> Entry:
        """The entry at a key; `exists` is False where there is none."""
        [record] = await self.engine.read(Get(_TUPLES, keys.encode(key)))
        return entry_of(tuple(key), record)

    async def get_many(self, keys: Iterable[KeyLike]) -> Entries:
        """The entries at several keys, in their order, all as of one moment."""
        wanted = _several(keys)
        if len(wanted) <= limits.SLICE_ITEMS:
            found = await self.engine.read(*[Get(_TUPLES, encode(key)) for key in wanted])
            return [entry_of(tuple(key), record) for key, record in zip(wanted, found, strict=True)]
        asks = await in_slices(lambda key: Get(_TUPLES, encode(key)), wanted)
        records = await self.engine.read(*asks)
        await free_in_slices(asks)
        entries = await in_slices(lambda key, record: entry_of(tuple(key), record), wanted, records)
        await free_in_slices(records)
        return entries

    async def set(self, key: KeyLike, value: object, *, expire_in: float | timedelta | None = None) -> int:
        """Store a value and return its versionstamp; without `expire_in` it never expires."""
        data, encoding = values.encode(value, self._max_value_bytes)
        done = await write(self.engine, Set(_TUPLES, keys.encode(key), data, encoding, milliseconds(expire_in)))
        return done.version

    async def set_many(
        self,
        entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
        *,
        expire_in: float | timedelta | None = None,
    ) -> int:
        """Store several values, all or none, under one versionstamp, which is returned."""
        wanted, given = _columns(entries)
        due = milliseconds(expire_in)

        def encoded(key: KeyLike, value: object) -> Set:
            at = keys.encode(key)
            try:
                data, encoding = values.encode(value, self._max_value_bytes)
            except InvalidValue as error:
                error.add_note(f"this is the value for {key!r}; nothing was written")
                raise
            return Set(_TUPLES, at, data, encoding, due)

        sets = await in_slices(encoded, wanted, given)
        version = (await write(self.engine, *sets)).version
        await free_in_slices(sets)
        return version

    async def delete(self, key: KeyLike) -> bool:
        """Remove an entry; returns whether there was one."""
        return (await write(self.engine, Delete(_TUPLES, keys.encode(key)))).found[0]

    async def delete_many(self, keys: Iterable[KeyLike]) -> int:
        """Remove several entries, all or none; returns how many there were."""
        deletes = await in_slices(lambda key: Delete(_TUPLES, encode(key)), _several(keys))
        found = sum((await write(self.engine, *deletes)).found)
        await free_in_slices(deletes)
        return found

    async def touch(self, key: KeyLike, *, expire_in: float | timedelta | None) -> bool:
        """Give an entry another expiry, or with None no expiry; its value and versionstamp stay.

        Returns whether there was an entry.
        """
        return (await write(self.engine, Touch(_TUPLES, keys.encode(key), milliseconds(expire_in)))).found[0]

    def list(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> "Listing[Entry]":
        """The entries below a prefix, or from `start` up to but not including `end`, or both, in the order of keys.

        Await it for a list, or iterate it: a long one is read page by page, each page consistent in itself.

        Example:
            users = await kv.list(prefix=("users",), limit=10)
            more = await kv.list(prefix=("users",), limit=10, cursor=users.cursor)
            async for entry in kv.list(prefix=("users",)):
                print(entry.key, entry.value)
        """
        selector = Selector.of(prefix, start, end, reverse=reverse, cursor=cursor)
        return Listing(self.engine, selector, limit, entries_of, self._page_size)

    def keys(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> "Listing[TupleKey]":
        """Like `list`, but the keys alone; no value is read."""
        selector = Selector.of(prefix, start, end, reverse=reverse, cursor=cursor)
        return Listing(self.engine, selector, limit, keys_of, self._key_page_size, keys_only=True)

    async def count(
        self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None
    ) -> int:
        """How many entries there are in a range, as of one moment."""
        selector = Selector.of(prefix, start, end)
        [found] = await self.engine.read(Count(_TUPLES, selector.start, selector.end))
        return found

    async def delete_range(
        self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None
    ) -> int:
        """Remove all entries of a range; returns how many there were.

        Entries go in slices of up to a thousand, so that other writers are not held up. Each slice is removed as a
        whole; an entry that is written into the range meanwhile may stay.
        """
        if prefix is None and start is None and end is None:
            raise InvalidArgument("delete_range needs a prefix, a start or an end; prefix=() stands for everything")
        selector = Selector.of(prefix, start, end)
        removed = 0
        async for page in Pages(self.engine, selector.scan(keys_only=True)):
            removed += sum((await write(self.engine, *[Delete(_TUPLES, key) for key in page.keys])).found)
        return removed

    def atomic(self) -> Atomic:
        """Begin a set of writes that are made together, if their checks hold."""
        return Atomic(self.engine, self._max_value_bytes)

    def watch(self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None) -> "Watching":
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

        Raises:
            HistoryGone: By the iteration: the change log does not reach back to `since`, or the reader of a prefix was
                so slow that it does not reach back to what it has seen. List, then watch again.

        Example:
            async for [config, flags] in kv.watch(("config",), ("flags",)):
                ...
        """
        if bool(watched) == (prefix is not None):
            raise InvalidArgument("watch takes keys or a prefix: watch(key, …) or watch(prefix=…)")
        if since is not None and (type(since) is not int or since < 0):
            raise InvalidArgument("since: expected a versionstamp, which is a whole number from 0 on")
        if prefix is not None:
            return Watching(self.engine, Selector.of(prefix, None, None).scan(), since=since)
        return Watching(self.engine, *[Get(_TUPLES, keys.encode(key)) for key in watched], since=since)

    async def sweep(self) -> int:
        """Remove what has expired from the database; returns how many entries. Readers never see them either way."""
        engine = self.engine.database if isinstance(self.engine, NamedEngine) else self.engine
        return await sweep(engine, _TUPLES)

    async def aclose(self) -> None:
        """Finish the writes under way, end the watches and close the database. A second call does nothing."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.engine.aclose()


def _columns(
    entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
) -> tuple[Sequence[KeyLike], Sequence[object]]:
    """The keys and the values of some entries. Two lists: a pair for each would cost the garbage collector."""
    if isinstance(entries, Mapping):
        return [*entries], [*entries.values()]
    wanted: list[KeyLike] = []
    given: list[object] = []
    with suppress(TypeError, ValueError):
        for key, value in entries:
            wanted.append(key)
            given.append(value)
        if not any([isinstance(key, str) for key in wanted]):
            return wanted, given
    raise InvalidArgument("entries: expected a dict, or pairs of a key and a value, as in {key: value, other_key: 1}")


def _several(many: Iterable[KeyLike]) -> list[KeyLike]:
    several = [*many]
    if several and not isinstance(several[0], (tuple, list)):
        raise InvalidKeyType("keys: expected a list of keys, each a tuple, as in get_many([key, other_key])")
    return several
