"""The tuple store for threads and scripts: every method of `Store`, run to its end.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, overload

from keyloft.core.closing import SyncClosing
from keyloft.core.drivers import LoopThread
from keyloft.core.driving import Driven, SyncList, plain_function
from keyloft.core.engine import Engine, Verdict
from keyloft.core.keys import KeyLike, TupleKey, encode, encode_many
from keyloft.core.own_commits import note_commit
from keyloft.core.records import Batch, Committed, Page, Record
from keyloft.core.values import encode as encode_value
from keyloft.tuples.entries import Entry, entries_at, entry_of
from keyloft.tuples.expiries import UNSET, expiry
from keyloft.tuples.no_subscripts import NoSubscripts
from keyloft.tuples.reads import ITEM, D, Entries, T, several
from keyloft.tuples.store import K, Store
from keyloft.tuples.sync.atomic import SyncAtomic
from keyloft.tuples.sync.closing import close_store
from keyloft.tuples.sync.lists import SyncListing, SyncWatching
from keyloft.tuples.sync.loop_side import LoopSide
from keyloft.tuples.typed import codec_of, codec_or_none


class SyncStore(NoSubscripts, SyncClosing, Driven[Store]):
    """An open store for any thread. Get one from `keyloft.open_sync`; close it with `close`, or use `with`.

    Wherever a `type` can be named, values are objects of it: a dataclass, a msgspec Struct, an attrs class, a
    TypedDict, a pydantic model, or a type made of such. Of `expire_in` and `expire_at`, at most one is given.
    """

    loop_side: LoopSide | None = None
    """What `on_a_loop` opens, if the store itself has no event loop."""
    get_record: Callable[[bytes], Record | None] | None = None
    """What `get` reads with, if its engine can do so without a coroutine."""
    get_records: Callable[[Sequence[bytes]], Page | list[Record | None]] | None = None
    """The same for `get_many`."""
    set_value: Callable[[bytes, bytes, int], int] | None = None
    """The same for `set` without type and expiry."""
    commit_batch: Callable[[Batch], Committed] | None = None
    """The same for what any other `set` commits, a batch without checks."""
    decide: Callable[[Batch], Verdict] | None = None
    """The same for what `atomic` commits."""

    def __enter__(self) -> Self:
        self._inner._check_open()
        return self

    def close(self) -> None:
        """Finish the writes under way, end the watches and close the database. A second call does nothing."""
        close_store(self._inner, self._driver, self.loop_side)

    @property
    def engine(self) -> Engine:
        """The engine below, as `Store.engine`."""
        return self._inner.engine

    def on_a_loop(self) -> "tuple[Store, LoopThread]":
        """The same database in an event loop, and what runs it: for locks and others with work in the background."""
        if self.loop_side is not None:
            return self.loop_side.opened()
        assert isinstance(self._driver, LoopThread)
        return self._inner, self._driver

    @overload
    def get(self, key: KeyLike, default: Any = None) -> Entry: ...
    @overload
    def get(self, key: KeyLike, *, type: type[T]) -> Entry[T]: ...
    @overload
    def get(self, key: KeyLike, default: D, *, type: type[T]) -> Entry[T | D]: ...
    @overload
    def get(self, key: KeyLike, default: Any = None, *, type: object) -> Entry: ...
    def get(self, key: KeyLike, default: Any = None, *, type: Any = None) -> Entry:
        """The entry at a key; where there is none, `exists` is False, and the value is the default.

        Example:
            visits = (kv.get(("visits",), default=0)).value
            user = kv.get(("users", "alice"), type=User)
        """
        if self.get_record is not None:
            record = self.get_record(encode(key))
            return entry_of(tuple(key), record, None if type is None else codec_of(type), default)
        return self._run(self._untyped.get(key, default, type=type))

    @overload
    def get_many(self, keys: Iterable[KeyLike]) -> Entries[Any]: ...
    @overload
    def get_many(self, keys: Iterable[KeyLike], *, type: type[T]) -> Entries[T]: ...
    @overload
    def get_many(self, keys: Iterable[KeyLike], *, type: object) -> Entries[Any]: ...
    def get_many(self, keys: Iterable[KeyLike], *, type: Any = None) -> Entries[Any]:
        """The entries at several keys, in their order, all as of one moment."""
        if self.get_records is not None:
            wanted = several(keys)
            found = self.get_records(encode_many(wanted, ITEM))
            return entries_at(wanted, found, codec_or_none(type))
        return self._run(self._untyped.get_many(keys, type=type))

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
    ) -> SyncListing[Entry]: ...
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
    ) -> SyncListing[Entry[T]]: ...
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
    ) -> SyncListing[Entry]: ...
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
    ) -> SyncListing[Entry]:
        """The entries below a prefix, or from `start` up to but not including `end`, or both, in the order of keys.

        Iterate it, or call `all` for a list: a long one is read page by page, each page consistent in itself.

        Example:
            users = kv.list(prefix=("users",), limit=10).all()
            more = kv.list(prefix=("users",), limit=10, cursor=users.cursor).all()
            for entry in kv.list(prefix=("users",)):
                print(entry.key, entry.value)
        """
        return SyncListing(
            self._untyped.list(prefix, start=start, end=end, limit=limit, reverse=reverse, cursor=cursor, type=type),
            self._driver,
        )

    def keys(
        self,
        prefix: KeyLike | None = None,
        *,
        start: KeyLike | None = None,
        end: KeyLike | None = None,
        limit: int | None = None,
        reverse: bool = False,
        cursor: str | None = None,
    ) -> SyncListing[TupleKey]:
        """Like `list`, but the keys alone; no value is read."""
        return SyncListing(
            self._inner.keys(prefix, start=start, end=end, limit=limit, reverse=reverse, cursor=cursor), self._driver
        )

    def children(self, prefix: KeyLike = (), *, limit: int | None = None, reverse: bool = False) -> SyncList[TupleKey]:
        """The keys one part below a prefix, each once, whether something is stored there or only further below.

        Iterate it, or call `all` for a list. What lies below a child is skipped, however much that is.

        Example:
            for key in kv.children(("users",)):
                print(key)                            # ("users", "alice"), ("users", "bob")
        """
        return SyncList(self._inner.children(prefix, limit=limit, reverse=reverse), self._driver)

    def count(self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None) -> int:
        """How many entries there are in a range, as of one moment."""
        return self._run(self._inner.count(prefix, start=start, end=end))

    @overload
    def watch(self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None) -> SyncWatching: ...
    @overload
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: type[T]
    ) -> SyncWatching[T]: ...
    @overload
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: object
    ) -> SyncWatching: ...
    def watch(
        self, *watched: KeyLike, prefix: KeyLike | None = None, since: int | None = None, type: Any = None
    ) -> SyncWatching:
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
            for [config, flags] in kv.watch(("config",), ("flags",)):
                ...
        """
        return SyncWatching(
            self._driver.call(self._untyped.watch, *watched, prefix=prefix, since=since, type=type), self._driver
        )

    def set(
        self,
        key: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> int:
        """Store a value and return its versionstamp; without `expire_in` or `expire_at` it never expires.

        Example:
            kv.set(("users", "alice"), User("Alice"), type=User, expire_in=3600)
        """
        if self.set_value is not None and type is None and (expire_in is None) and (expire_at is None):
            data, encoding = encode_value(value, self._inner._max_value_bytes)
            version = self.set_value(encode(key), data, encoding)
            note_commit(version)
            return version
        if self.commit_batch is not None:
            due = expiry(expire_in, expire_at)
            version = self.commit_batch(Batch((self._inner._set(key, value, type, due),))).version
            note_commit(version)
            return version
        return self._run(self._inner.set(key, value, type=type, expire_in=expire_in, expire_at=expire_at))

    def add(
        self,
        key: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> bool:
        """Store a value only if there is none at the key; returns whether it was stored."""
        return self._run(self._inner.add(key, value, type=type, expire_in=expire_in, expire_at=expire_at))

    def set_many(
        self,
        entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> int:
        """Store several values, all or none, under one versionstamp, which is returned."""
        return self._run(self._inner.set_many(entries, type=type, expire_in=expire_in, expire_at=expire_at))

    def delete(self, key: KeyLike) -> bool:
        """Remove an entry; returns whether there was one."""
        return self._run(self._inner.delete(key))

    def delete_many(self, keys: Iterable[KeyLike]) -> int:
        """Remove several entries, all or none; returns how many there were."""
        return self._run(self._inner.delete_many(keys))

    @overload
    def pop(self, key: KeyLike, default: Any = None) -> Entry: ...
    @overload
    def pop(self, key: KeyLike, *, type: type[T]) -> Entry[T]: ...
    @overload
    def pop(self, key: KeyLike, default: D, *, type: type[T]) -> Entry[T | D]: ...
    @overload
    def pop(self, key: KeyLike, default: Any = None, *, type: object) -> Entry: ...
    def pop(self, key: KeyLike, default: Any = None, *, type: Any = None) -> Entry:
        """Remove an entry and return it; of several callers, one gets it. If there is none, `exists` is False.

        Raises:
            VersionConflict: Other writers changed the entry a hundred times meanwhile.
            WrongType: The value does not fit the type; the entry stays.
        """
        return self._run(self._untyped.pop(key, default, type=type))

    def touch(
        self, key: KeyLike, *, expire_in: float | timedelta | None = UNSET, expire_at: datetime | None = None
    ) -> bool:
        """Give an entry another expiry, or with `expire_in=None` no expiry; its value and versionstamp stay.

        Returns whether there was an entry.
        """
        return self._run(self._inner.touch(key, expire_in=expire_in, expire_at=expire_at))

    def increment(
        self,
        key: KeyLike,
        by: int = 1,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> int:
        """Add to an integer, or subtract from it, and return the new one, from any number of threads and processes.

        An absent integer begins at 0, as JSON, and expires as asked. One that exists keeps its expiry, and a U64 stays
        a U64.

        Raises:
            NotACounter: Something else than an integer is stored.
            CounterOutOfRange: A U64 would fall below 0 or rise above 2**64 - 1.
        """
        return self._run(self._inner.increment(key, by, expire_in=expire_in, expire_at=expire_at))

    @overload
    def update(
        self,
        key: KeyLike,
        fn: Callable[[Any], Any],
        default: Any = None,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> Entry: ...
    @overload
    def update(
        self,
        key: KeyLike,
        fn: Callable[[T], T],
        default: T = ...,
        *,
        type: type[T],
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> Entry[T]: ...
    def update(
        self,
        key: KeyLike,
        fn: Callable[[Any], Any],
        default: Any = None,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> Entry:
        """Read a value, change it, and store it, again if another writer was faster: no change is lost.

        Args:
            key: Of the entry.
            fn: Called with the stored value, or a copy of the default; returns the new value. It
                may be called several times. If it changes a list or dict in place, it must return that list or dict.
            default: For a key without an entry.
            type: What the value is read and stored as.
            expire_in: Seconds after which the entry expires. With None, it keeps the expiry that it has;
                `touch(key, expire_in=None)` removes that.
            expire_at: The same, as a moment.

        Returns:
            The entry as it was stored.

        Raises:
            VersionConflict: Other writers were faster a hundred times.
            InvalidValue: What `fn` returned can't be stored.
            InvalidArgument: `fn` changed the value in place and returned None; or it writes the entry itself.

        Example:
            kv.update(("players",), lambda players: [*players, "alice"], default=[])
        """
        fn = plain_function(fn)
        return self._run(self._untyped.update(key, fn, default, type=type, expire_in=expire_in, expire_at=expire_at))

    def delete_range(
        self, prefix: KeyLike | None = None, *, start: KeyLike | None = None, end: KeyLike | None = None
    ) -> int:
        """Remove all entries of a range; returns how many there were.

        Entries go in slices of up to a thousand, so that other writers are not held up. Each slice is removed as a
        whole; an entry that is written into the range meanwhile may stay.
        """
        return self._run(self._inner.delete_range(prefix, start=start, end=end))

    def atomic(self) -> SyncAtomic:
        """Begin a set of writes that are made together, if their checks hold."""
        if self.decide is not None:
            atomic = SyncAtomic(self._inner.atomic(), self._driver)
            atomic.decide = self.decide
            return atomic
        return SyncAtomic(self._inner.atomic(), self._driver)

    def scoped(self, prefix: KeyLike) -> "SyncStore":
        """The same store below a prefix: keys given and returned begin after it, and nothing else is visible.

        It lives as long as this store, and need not be closed.

        Example:
            tenant = kv.scoped(("tenants", 7))
            tenant.set(("plan",), "free")       # stored at ("tenants", 7, "plan")
        """
        return SyncStore(self._inner.scoped(prefix), self._driver)

    def sweep(self) -> int:
        """Remove expired entries from the database; returns how many. Readers don't see them even before that."""
        return self._run(self._inner.sweep())
