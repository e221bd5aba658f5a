"""Keyloft: an ordered, versioned, durable key-value store.

    async with keyloft.open("app.db") as kv:
        await kv.set(("users", "alice"), {"name": "Alice"})
        entry = await kv.get(("users", "alice"))

`open` gives a `Store`, and `open_sync` the same without `await`, for threads and scripts; `Entry` is what it reads;
`Store.atomic` writes several keys at once; every error is a `KeyloftError` with a `code`.
"""

import asyncio
import importlib
import math
import os
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from msgspec.structs import replace

from keyloft import errors, limits
from keyloft.clock import Clock, ManualClock
from keyloft.core.drivers import OnThisThread
from keyloft.core.driving import SyncList
from keyloft.core.sweeper import sweep_regularly
from keyloft.core.urls import DatabaseUrl, check_reads, shown_url
from keyloft.core.values import U64
from keyloft.engines import (
    KeptHistory,
    MemoryOnLoop,
    open_blocking_engine,
    open_engine,
    open_service,
    opens_on_this_thread,
)
from keyloft.errors import *  # noqa: F403 (all errors are public)
from keyloft.tuples.atomic import Atomic, CommitResult
from keyloft.tuples.children import Children
from keyloft.tuples.entries import Entry
from keyloft.tuples.listing import EntryList, Listing
from keyloft.tuples.named import NamedEngine, check_name
from keyloft.tuples.store import Store
from keyloft.tuples.sync.atomic import SyncAtomic
from keyloft.tuples.sync.lists import SyncListing, SyncWatching
from keyloft.tuples.sync.loop_side import LoopSide
from keyloft.tuples.sync.store import SyncStore
from keyloft.tuples.watching import Watching

__version__ = "0.1.0"

__all__ = ["U64", "Atomic", "Children", "Clock", "CommitResult", "Entry", "EntryList", "Listing", "ManualClock"]
__all__ += ["Opening", "Store", "Watching", "open", "open_sync"]
__all__ += ["SyncAtomic", "SyncList", "SyncListing", "SyncStore", "SyncWatching"]
__all__ += errors.__all__

_PACKAGES = ("admin", "plugins", "semantic")


if TYPE_CHECKING:  # with a `__getattr__`, a type checker would accept any name
    from keyloft import admin as admin
    from keyloft import plugins as plugins
    from keyloft import semantic as semantic
else:

    def __getattr__(name: str) -> Any:
        """Import a public package when it is first used: `keyloft.semantic`."""
        if name in _PACKAGES:
            return importlib.import_module(f"keyloft.{name}")
        raise AttributeError(f"module 'keyloft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])


def open(
    url: str | os.PathLike[str] | None = None,
    *,
    durability: Literal["full", "relaxed"] = "full",
    sync: Literal["auto", "thread"] = "auto",
    max_value_bytes: int = limits.VALUE_BYTES,
    sweep_every: float | None = limits.SWEEP_EVERY,
    patience: float = limits.SERVER_SECONDS,
    name: str | None = None,
    history_seconds: float = limits.HISTORY_SECONDS,
    history_mib: float = limits.HISTORY_MIB,
    reads: Literal["primary", "standby"] | None = None,
    max_lag: float | None = None,
    token: str | None = None,
    clock: Clock | None = None,
) -> "Opening":
    """Open a store: `async with keyloft.open("app.db") as kv:`, or `kv = await keyloft.open("app.db")`.

    Args:
        url: A path, `sqlite:///relative.db`, `sqlite:////absolute.db`, `postgresql://user:password@host/database`,
            `etcd://host,host,host/prefix`, `https://host:port` for a running service;
            None or `:memory:` for a store in memory. `sqlite:///app.db?mode=ro` opens a file read-only.
        durability: "full": a write that returned survives a power cut. "relaxed": it survives the end of the process,
            and a lone write takes less than half the time, but the last writes before a power cut may be lost.
        sync: Where writes to an SQLite file wait for the disk. "thread": on a thread. "auto": on the event loop, which
            spares a hand-over to the thread, while one task alone uses the store and the disk takes under a
            millisecond. Use "thread" in a program with other work that can't wait for a millisecond.
        max_value_bytes: The largest value that is accepted, in bytes as stored.
        sweep_every: Seconds between two removals of expired entries; None leaves them to `sweep()`.
        patience: Seconds that a call waits for a database server that does not answer before it fails.
        name: One of several stores in the same database, made by its first write; None is the unnamed one.
        history_seconds: How long the change log keeps what changed, at least, for `watch(…, since=…)` and slow watches;
            older changes go with later commits.
        history_mib: How large the change log may grow, in MiB; the oldest changes go first.
        reads: "standby" lets standbys of PostgreSQL, whose hosts the URL names, too, answer gets and lists. They show
            this store's own writes, and never an older state than one that was read before. None: as the URL says,
            which may have `reads=standby`; otherwise the primary.
        max_lag: How many seconds a standby may be behind; None: as the URL says, or 5.
        token: Of a service over HTTP; None: what the variable KEYLOFT_HTTP_TOKEN holds.
        clock: Another clock, for tests of expiry.

    Raises:
        DatabaseError: The database can't be opened; the message says why.
    """

    async def open_store() -> Store:
        _check_loop()
        _check_options(max_value_bytes, sweep_every, patience, clock)
        history = KeptHistory.of(history_seconds, history_mib)
        database, store_name = _store_in(url, name, token, clock)
        if database.http is not None:
            return Store(await open_service(database.http, token, patience=patience), max_value_bytes=max_value_bytes)
        engine = await open_engine(
            database,
            clock,
            durability=durability,
            sync=sync,
            patience=patience,
            history=history,
            reads=reads,
            max_lag=max_lag,
        )
        if store_name is not None:
            engine = NamedEngine(engine, store_name)
        return Store(engine, max_value_bytes=max_value_bytes, sweep_every=None if database.read_only else sweep_every)

    return Opening(open_store, shown_url(url))


def open_sync(
    url: str | os.PathLike[str] | None = None,
    *,
    durability: Literal["full", "relaxed"] = "full",
    max_value_bytes: int = limits.VALUE_BYTES,
    sweep_every: float | None = limits.SWEEP_EVERY,
    patience: float = limits.SERVER_SECONDS,
    name: str | None = None,
    history_seconds: float = limits.HISTORY_SECONDS,
    history_mib: float = limits.HISTORY_MIB,
    reads: Literal["primary", "standby"] | None = None,
    max_lag: float | None = None,
    token: str | None = None,
    clock: Clock | None = None,
) -> SyncStore:
    """Open a store for threads and scripts: the same methods as those of `open`, without `await`, from any thread.

    On a file and in memory, each call runs on its caller's thread, and there is no event loop. On PostgreSQL, etcd and
    a service over HTTP, calls run on an event loop in a thread of the store.

    Args:
        url: As for `open`.
        durability: As for `open`.
        max_value_bytes: The largest value that is accepted, in bytes as stored.
        sweep_every: Seconds between two removals of expired entries; None leaves them to `sweep()`.
        patience: Seconds that a call waits for a database server that does not answer before it fails.
        name: One of several stores in the same database, made by its first write; None is the unnamed one.
        history_seconds: How long the change log keeps what changed, at least.
        history_mib: How large the change log may grow, in MiB.
        reads: As for `open`.
        max_lag: As for `open`.
        token: As for `open`.
        clock: Another clock, for tests of expiry.

    Raises:
        DatabaseError: The database can't be opened; the message says why.

    Example:
        with keyloft.open_sync("app.db") as kv:
            kv.set(("users", "alice"), {"name": "Alice"})
            for entry in kv.list(prefix=("users",)):
                print(entry.key, entry.value)
    """
    _check_options(max_value_bytes, sweep_every, patience, clock)
    check_reads(reads, max_lag)
    history = KeptHistory.of(history_seconds, history_mib)
    database, store_name = _store_in(url, name, token, clock)

    async def open_store(sweep_every: float | None) -> Store:
        return await open(
            url,
            durability=durability,
            max_value_bytes=max_value_bytes,
            sweep_every=sweep_every,
            patience=patience,
            name=name,
            history_seconds=history_seconds,
            history_mib=history_mib,
            reads=reads,
            max_lag=max_lag,
            token=token,
            clock=clock,
        )

    if not opens_on_this_thread(database):
        store, loop = LoopSide(lambda: open_store(sweep_every), database.shown).opened()
        return SyncStore(store, loop)
    engine = open_blocking_engine(database, clock, durability=durability, history=history)
    named = engine if store_name is None else NamedEngine(engine, store_name)
    store = Store(named, max_value_bytes=max_value_bytes)
    driver = OnThisThread(database.shown, engine.close)
    if sweep_every is not None and not database.read_only:
        driver.waiting.start(sweep_regularly(store.sweep, sweep_every, driver.waiting.sleep), "keyloft sweeper")
    sync = SyncStore(store, driver)
    if store_name is None:
        sync.get_record, sync.get_records = engine.get, engine.get_many
        sync.set_value, sync.commit_batch, sync.decide = engine.set_now, engine.commit_now, engine.verdict

    async def same_memory() -> Store:
        on_loop = MemoryOnLoop(engine)
        return Store(
            on_loop if store_name is None else NamedEngine(on_loop, store_name), max_value_bytes=max_value_bytes
        )

    sync.loop_side = LoopSide(same_memory if database.is_in_memory else lambda: open_store(None), database.shown)
    return sync


def _store_in(
    url: str | os.PathLike[str] | None, name: str | None, token: str | None, clock: Clock | None
) -> tuple[DatabaseUrl, str | None]:
    """The database, and the name of the store in it; of a service, the URL has the name."""
    database = DatabaseUrl.parse(url)
    store_name = None if name is None else check_name(name)
    if database.http is None:
        if token is not None:
            raise errors.InvalidArgument("token: only a service has tokens; its URL begins with https:// or http://")
        return database, store_name
    if clock is not None:
        raise errors.InvalidArgument("clock: the time of a service is its own; pass no clock")
    address = database.http.named(store_name)
    return replace(database, http=address, shown=address.name), None


class Opening:
    """A store that is not open yet: await it, or enter it with `async with`."""

    def __init__(self, open_store: Callable[[], Coroutine[object, None, Store]], shown: str) -> None:
        self._open_store = open_store
        self._shown = shown
        self._store: Store | None = None
        self._in_use = False

    def __repr__(self) -> str:
        return f"<Opening of {self._shown}, {'entered' if self._in_use else 'not open yet'}>"

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"the store is not open yet, so it has no {name}: write `async with keyloft.open(…) as kv:`, or "
                "`kv = await keyloft.open(…)`"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "keyloft.open(…) is asynchronous: write `async with keyloft.open(…) as kv:`, or use "
                "keyloft.open_sync(…)"
            )

        def __exit__(self, *exc_info: object) -> None: ...

    def __await__(self) -> Generator[object, None, Store]:
        return self._open_store().__await__()

    async def __aenter__(self) -> Store:
        if self._in_use:
            raise errors.InvalidArgument("keyloft.open(…) was entered already: call it again for a second store")
        self._in_use = True
        try:
            self._store = await self._open_store()
        except BaseException:
            self._in_use = False
            raise
        return self._store

    async def __aexit__(self, *exc_info: object) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            self._in_use = False
            await store.aclose()


def _check_loop() -> None:
    """Refuse a task of another library, such as trio, with an error that says what to do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise errors.WrongLoop(
            "keyloft.open needs an event loop of asyncio, as asyncio.run makes it; with another library, such as trio, "
            "use keyloft.open_sync(…) in threads"
        ) from None


def _check_options(max_value_bytes: int, sweep_every: float | None, patience: float, clock: Clock | None) -> None:
    if type(max_value_bytes) is not int or not 1 <= max_value_bytes <= limits.LARGEST_VALUE_BYTES:
        raise errors.InvalidArgument(f"max_value_bytes: expected an int from 1 to {limits.LARGEST_VALUE_BYTES:,}")
    if sweep_every is not None and not (type(sweep_every) in (int, float) and sweep_every > 0):
        raise errors.InvalidArgument("sweep_every: expected a number of seconds above 0, or None")
    if not (type(patience) in (int, float) and 0 < patience < math.inf):
        raise errors.InvalidArgument("patience: expected a number of seconds above 0")
    is_clock = all(callable(getattr(clock, name, None)) for name in ("now", "call_at"))
    if clock is not None and (not is_clock or isinstance(clock, type)):
        raise errors.InvalidArgument("clock: expected an object with now() and call_at(), such as ManualClock()")
