"""The tuple store: values under tuple keys, in order, with versions, expiry, atomic writes and watches."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any, Final, Self, TypeVar, overload

from keyloft import limits
from keyloft.core import keys, values
from keyloft.core.engine import Engine, catch_up, shown, write
from keyloft.core.keys import KeyLike, TupleKey, encode
from keyloft.core.paging import Pages
from keyloft.core.records import Add, Batch, Committed, Delete, Record, Set, Space, Touch
from keyloft.core.slices import free_in_slices, in_slices
from keyloft.core.sweeper import sweep, sweep_regularly
from keyloft.core.updated_values import updated
from keyloft.errors import CLOSED, Closed, InvalidArgument, InvalidKey, InvalidValue
from keyloft.tuples import typed
from keyloft.tuples.atomic import Atomic, check_number, commit
from keyloft.tuples.entries import Entry, entry_of
from keyloft.tuples.expiries import UNSET, expiry, new_expiry
from keyloft.tuples.named import ScopedEngine, whole_database
from keyloft.tuples.reads import ITEM, StoreReads, several
from keyloft.tuples.selector import Selector
from keyloft.tuples.updates import change

D = TypeVar("D")
K = TypeVar("K", bound=TupleKey)
T = TypeVar("T")

_TUPLES = Space.TUPLES
_NEVER: Final = (None, None)


class Store(StoreReads):
    """An open store. Get one from `keyloft.open`; close it with `aclose`, or use `async with`.

    Wherever a `type` can be named, values are objects of it: a dataclass, a msgspec Struct, an attrs class, a
    TypedDict, a pydantic model, or a type made of such. Of `expire_in` and `expire_at`, at most one is given.
    """

    def __init__(
        self, engine: Engine, *, max_value_bytes: int = limits.VALUE_BYTES, sweep_every: float | None = None
    ) -> None:
        super().__init__(engine)
        self._max_value_bytes = max_value_bytes
        self._sweeper: asyncio.Task[None] | None = None
        if sweep_every is not None:
            self._sweeper = asyncio.create_task(sweep_regularly(self.sweep, sweep_every))

    def __repr__(self) -> str:
        return f"<Store on {shown(self.engine)}>"

    async def set(
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
            await kv.set(("users", "alice"), User("Alice"), type=User, expire_in=3600)
        """
        # As `_set`, but without the call: a store in memory spends most of a set in Python calls.
        size = self._max_value_bytes
        data, encoding = values.encode(value, size) if type is None else typed.encode(value, type, size)
        due = _NEVER if expire_in is None and expire_at is None else expiry(expire_in, expire_at)
        return (await write(self.engine, Set(_TUPLES, keys.encode(key), data, encoding, *due))).version

    async def add(
        self,
        key: KeyLike,
        value: object,
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> bool:
        """Store a value only if there is none at the key; returns whether it was stored."""
        new = self._set(key, value, type, expiry(expire_in, expire_at), if_absent=True)
        return not (await write(self.engine, new)).found[0]

    async def set_many(
        self,
        entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
        *,
        type: Any = None,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> int:
        """Store several values, all or none, under one versionstamp, which is returned."""
        wanted, given = _columns(entries)
        due = expiry(expire_in, expire_at)

        def encoded(key: KeyLike, value: object) -> Set:
            try:
                return self._set(key, value, type, due)
            except InvalidValue as error:
                error.args = (f"entries: the value for {key!r} can't be stored, and nothing was: {error}",)
                raise
            except InvalidKey as error:
                error.args = (f"entries: a key can't be stored, and nothing was: {str(error).removeprefix('key: ')}",)
                raise

        sets = await in_slices(encoded, wanted, given)
        await free_in_slices(wanted)
        await free_in_slices(given)
        version = (await write(self.engine, *sets)).version
        await free_in_slices(sets)
        return version

    async def delete(self, key: KeyLike) -> bool:
        """Remove an entry; returns whether there was one."""
        return (await write(self.engine, Delete(_TUPLES, keys.encode(key)))).found[0]

    async def delete_many(self, keys: Iterable[KeyLike]) -> int:
        """Remove several entries, all or none; returns how many there were."""
        wanted = several(keys, "delete_many")
        deletes = await in_slices(lambda key: Delete(_TUPLES, encode(key, ITEM)), wanted)
        await free_in_slices(wanted)
        found = sum((await write(self.engine, *deletes)).found)
        await free_in_slices(deletes)
        return found

    @overload
    async def pop(self, key: KeyLike, default: Any = None) -> Entry: ...
    @overload
    async def pop(self, key: KeyLike, *, type: type[T]) -> Entry[T]: ...
    @overload
    async def pop(self, key: KeyLike, default: D, *, type: type[T]) -> Entry[T | D]: ...
    @overload
    async def pop(self, key: KeyLike, default: Any = None, *, type: object) -> Entry: ...
    async def pop(self, key: KeyLike, default: Any = None, *, type: Any = None) -> Entry:
        """Remove an entry and return it; of several callers, one gets it. If there is none, `exists` is False.

        Raises:
            VersionConflict: Other writers changed the entry a hundred times meanwhile.
            WrongType: The value does not fit the type; the entry stays.
        """
        at, codec = keys.encode(key), typed.codec_or_none(type)

        async def decide(record: Record | None) -> Delete | None:
            entry_of(self._key(key), record, codec)  # an entry that can't be read stays
            return None if record is None else Delete(_TUPLES, at)

        record, _ = await change(self.engine, at, decide)
        return entry_of(self._key(key), record, codec, default)

    async def touch(
        self, key: KeyLike, *, expire_in: float | timedelta | None = UNSET, expire_at: datetime | None = None
    ) -> bool:
        """Give an entry another expiry, or with `expire_in=None` no expiry; its value and versionstamp stay.

        Returns whether there was an entry.
        """
        touch = Touch(_TUPLES, keys.encode(key), *new_expiry(expire_in, expire_at))
        return (await write(self.engine, touch)).found[0]

    async def increment(
        self,
        key: KeyLike,
        by: int = 1,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> int:
        """Add to an integer, or subtract from it, and return the new one, from any number of tasks and processes.

        An absent integer begins at 0, as JSON, and expires as asked. One that exists keeps its expiry, and a U64 stays
        a U64.

        Raises:
            NotACounter: Something else than an integer is stored.
            CounterOutOfRange: A U64 would fall below 0 or rise above 2**64 - 1.
        """
        number = check_number("by", by, -limits.U64_MAX)
        addition = Add(_TUPLES, keys.encode(key), number, *expiry(expire_in, expire_at))
        done = await commit(self.engine, Batch((addition,)))
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        return done.values[0]

    @overload
    async def update(
        self,
        key: KeyLike,
        fn: Callable[[Any], Any],
        default: Any = None,
        *,
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> Entry: ...
    @overload
    async def update(
        self,
        key: KeyLike,
        fn: Callable[[T], T | Awaitable[T]],
        default: T = ...,
        *,
        type: type[T],
        expire_in: float | timedelta | None = None,
        expire_at: datetime | None = None,
    ) -> Entry[T]: ...
    async def update(
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
            fn: Called with the stored value, or a copy of the default; returns the new value, or an awaitable of it. It
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
            await kv.update(("players",), lambda players: [*players, "alice"], default=[])
        """
        at, due, codec = keys.encode(key), expiry(expire_in, expire_at), typed.codec_or_none(type)
        new: Set | None = None

        async def decide(record: Record | None) -> Set:
            nonlocal new

            def before() -> Any:
                return default if record is None else entry_of(self._key(key), record, codec).value

            given = deepcopy(default) if record is None else before()
            value = await updated(fn, given, before, is_default=record is None)
            new = self._set(key, value, type, due, keep_expiry=due == (None, None))
            return new

        before, done = await change(self.engine, at, decide)
        assert new is not None, "each attempt writes"
        assert done is not None, "each attempt writes"
        relative, moment = due
        if relative is not None:
            moment = done.at + relative
        elif moment is None and before is not None:
            moment = before.expires_at
        return entry_of(self._key(key), Record(at, new.value, new.encoding, done.version, moment), codec)

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
        await catch_up(self.engine)
        async for page in Pages(self.engine, selector.scan(keys_only=True)):
            removed += sum((await write(self.engine, *[Delete(_TUPLES, key) for key in page.keys])).found)
        return removed

    def atomic(self) -> Atomic:
        """Begin a set of writes that are made together, if their checks hold."""
        return Atomic(self.engine, self._max_value_bytes)

    def scoped(self, prefix: KeyLike) -> "Store":
        """The same store below a prefix: keys given and returned begin after it, and nothing else is visible.

        It lives as long as this store, and need not be closed.

        Example:
            tenant = kv.scoped(("tenants", 7))
            await tenant.set(("plan",), "free")       # stored at ("tenants", 7, "plan")
        """
        return Store(ScopedEngine(self.engine, prefix), max_value_bytes=self._max_value_bytes)

    async def sweep(self) -> int:
        """Remove expired entries from the database; returns how many. Readers don't see them even before that."""
        return await sweep(self._database, _TUPLES)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    def _check_open(self) -> None:
        if self.engine.is_closed:
            raise Closed(getattr(self._database, "refusal", CLOSED))

    @property
    def _database(self) -> Engine:
        return whole_database(self.engine)

    async def aclose(self) -> None:
        """Finish the writes under way, end the watches and close the database. A second call does nothing."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.engine.aclose()

    def _set(
        self,
        key: KeyLike,
        value: object,
        wanted: Any,
        due: tuple[int | None, int | None],
        *,
        if_absent: bool = False,
        keep_expiry: bool = False,
    ) -> Set:
        data, encoding = typed.encode(value, wanted, self._max_value_bytes)
        return Set(_TUPLES, keys.encode(key), data, encoding, *due, if_absent, keep_expiry)


def _columns(
    entries: Mapping[K, object] | Iterable[tuple[KeyLike, object]],
) -> tuple[list[KeyLike], list[object]]:
    """The keys and the values of some entries; two lists, because pairs would burden the garbage collector."""
    if isinstance(entries, Mapping):
        return [*entries], [*entries.values()]
    wanted: list[KeyLike] = []
    given: list[object] = []
    if isinstance(entries, Iterable):
        for pair in entries:  # what a caller's own generator raises is not caught
            try:
                key, value = pair
            except (TypeError, ValueError):
                break
            wanted.append(key)
            given.append(value)
        else:
            if str not in set(map(type, wanted)):
                return wanted, given
    raise InvalidArgument("entries: expected a dict, or pairs of a key and a value, as in {key: value, other_key: 1}")
