"""Answers read requests from PostgreSQL: concurrent gets share a statement, other requests are read one by one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from keyloft import limits
from keyloft.core.records import (
    Ask,
    Changes,
    Count,
    Due,
    DuePage,
    Expired,
    Get,
    Latest,
    LogSlice,
    Now,
    Record,
    Scan,
    Space,
    StoreId,
    Usage,
)
from keyloft.core.schema import NEVER, READ_STORE_ID, lost_store_id
from keyloft.engines.pending_gets import PendingGets, fail, fail_late
from keyloft.engines.postgres import log
from keyloft.engines.postgres.connections import SNAPSHOT, Slot, Transaction
from keyloft.engines.postgres.log import READ_VERSION
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, PLUGIN_USAGE
from keyloft.engines.tables import usage_slice
from keyloft.errors import Closed, HistoryGone

# A count of a whole range or table may also scan the table sequentially.
_COUNTING: Final = f"{SNAPSHOT}; SET LOCAL enable_seqscan = on; SET LOCAL enable_bitmapscan = on"


_SHOWN_WITH_VERSION: Final = (Get, Scan, Count)
"""The requests whose statements can select the version counter, too."""


class SnapshotAnswers(list[Any]):
    """Answers, with the version counter of the snapshot that they show."""

    version = 0


class _BesideCounter:
    """Statements on a connection or in a transaction, each of which also selects the version counter."""

    def __init__(self, at: Slot | Transaction) -> None:
        self._at = at
        self.version = 0

    async def fetch(self, statement: str, *bindings: Any) -> list[Any]:
        rows = await self._at.fetch(log.beside_counter(statement), *bindings)
        self.version = rows[0][0]
        # Without a match there is one row of NULLs.
        return [row[1:] for row in rows] if len(rows) > 1 or rows[0][1] is not None else []


class PointReads:
    """Answers gets. While a statement is under way, the keys for the next one gather."""

    def __init__(self, server: PostgresServer, *, shows_version: bool) -> None:
        self._server = server
        self._shows_version = shows_version
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Space, list[PendingGets]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False
        self._slots = [Slot(server) for _ in range(limits.POSTGRES_GET_CONNECTIONS)]
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._serving = 0

    def read(self, space: Space, gets: Sequence[Get]) -> asyncio.Future[list[Record | None]]:
        """The live entries at keys of one space."""
        future: asyncio.Future[list[Record | None]] = self._loop.create_future()
        if self._closed:
            future.set_exception(Closed())
            return future
        lookup = (gets, future, self._loop.time())
        if space in self._waiting:
            self._waiting[space].append(lookup)
        else:
            self._waiting[space] = [lookup]
        if self._serving < len(self._slots):
            self._start()
        elif self._idle:
            self._wake_one()
        return future

    def _wake_one(self) -> None:
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                return

    def _start(self) -> None:
        """Start the tasks that don't run: asyncio.run cancels all tasks at its end, and callers may still read."""
        for slot in self._slots:
            if slot not in self._tasks or self._tasks[slot].done():
                self._serving += 1
                task = self._tasks[slot] = asyncio.create_task(self._serve(slot), name="keyloft reader")
                task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for lookups in self._waiting.values():
            fail(lookups, Closed())
        for slot in self._slots:
            slot.abandon()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving -= 1
        if self._waiting and not self._closed:
            self._start()

    async def _serve(self, slot: Slot) -> None:
        while True:
            if not self._waiting:
                idle: asyncio.Future[None] = self._loop.create_future()
                self._idle.append(idle)
                await idle
            if some := self._take():
                try:
                    await self._answer(slot, some)
                except asyncio.CancelledError:
                    self._put_back(some)
                    raise

    def _take(self) -> list[PendingGets]:
        """The lookups of one space, as many as one statement takes; other spaces are next."""
        if not self._waiting:
            return []  # the other task took them
        space = next(iter(self._waiting))
        lookups = self._waiting.pop(space)
        # Many are shared with an idle task: it waits for its statement while this one hands out results.
        share = self._idle and len(lookups) >= limits.POSTGRES_SHARED_GETS
        most = (len(lookups) + 1) // 2 if share else len(lookups)
        count = taken = 0
        while taken < most and (count < limits.POSTGRES_KEYS_PER_READ or not taken):
            count += len(lookups[taken][0])
            taken += 1
        if taken < len(lookups):
            self._waiting[space] = lookups[taken:]
            self._wake_one()
        return [lookup for lookup in lookups[:taken] if not lookup[1].done()]

    def _put_back(self, lookups: Sequence[PendingGets]) -> None:
        """Put lookups back, so that the next statement of any task answers them first."""
        if lookups:
            space = lookups[0][0][0].space
            self._waiting[space] = [*lookups, *self._waiting.get(space, [])]

    async def _answer(self, slot: Slot, lookups: list[PendingGets]) -> None:
        keys = list({get.key for gets, _, _ in lookups for get in gets})
        space = lookups[0][0][0].space
        try:
            version, found = await slot.retry(lambda: self._fetch(slot, space, keys), lookups[0][2])
        except Exception as error:
            self._put_back(fail_late(lookups, error, self._server.name, self._server.patience))
            return
        for gets, future, _ in lookups:
            if not future.done():
                answers = [found.get(get.key) for get in gets]
                future.set_result(answers if version is None else _shown(version, answers))

    async def _fetch(self, slot: Slot, space: Space, keys: list[Any]) -> tuple[int | None, Mapping[Any, Record]]:
        layout = LAYOUTS[space]
        at = _BesideCounter(slot) if self._shows_version else slot
        if len(keys) == 1:
            rows = await at.fetch(layout.get, self._server.now(), *layout.bind_key(keys[0]))
        else:
            rows = await at.fetch(layout.gets, self._server.now(), *layout.bind_keys(keys))
        return at.version if isinstance(at, _BesideCounter) else None, layout.found(rows)


def _shown(version: int, answers: Sequence[Any]) -> SnapshotAnswers:
    shown = SnapshotAnswers(answers)
    shown.version = version
    return shown


_Fetching: TypeAlias = Slot | Transaction | _BesideCounter


class PostgresReads:
    """Answers all requests: gets of one space by `points`, any others on a connection of its own for each call."""

    def __init__(self, server: PostgresServer, *, shows_version: bool = False) -> None:
        """With `shows_version`, answers to gets, lists and counts are `SnapshotAnswers`."""
        self.points = PointReads(server, shows_version=shows_version)
        self._server = server
        self._shows_version = shows_version
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(limits.POSTGRES_READ_CONNECTIONS)
        self._slots = [Slot(server) for _ in range(limits.POSTGRES_READ_CONNECTIONS)]
        self._closed = False

    async def read(self, *asks: Ask) -> list[Any]:
        """The answers to all requests, from one snapshot."""
        if not asks:
            return []
        if len(asks) > limits.SCAN_ROWS:
            return await self._on_connection(lambda slot: self._answer_many(slot, asks))
        if (space := _space_of_gets(asks)) is not None:
            return await self.points.read(space, cast("Sequence[Get]", asks))
        return await self._on_connection(lambda slot: self._answer(slot, asks))

    async def counter(self) -> tuple[int, int]:
        """The version counter and the time."""
        version, now = await self.counter_and_time()
        return version, now

    async def counter_and_time(self) -> SnapshotAnswers:
        """The version counter and the time, as answers."""
        rows = await self._on_connection(lambda slot: slot.fetch(READ_VERSION, self._server.now()))
        version, now = self._server.counter_row(rows)
        return _shown(version, (version, now))

    async def _on_connection(self, read: Callable[[Slot], Awaitable[list[Any]]]) -> list[Any]:
        """Read on a connection that no one else uses meanwhile."""
        arrived = self._loop.time()
        try:
            async with asyncio.timeout_at(arrived + self._server.patience):
                await self._free.acquire()
        except TimeoutError:
            raise self._server.unreachable(self._server.patience) from None
        slot = self._slots.pop()
        try:
            if self._closed:
                raise Closed
            return await slot.retry(lambda: read(slot), arrived)
        finally:
            if self._closed:
                slot.abandon()
            self._slots.append(slot)
            self._free.release()

    async def _answer(self, slot: Slot, asks: Sequence[Ask]) -> list[Any]:
        counts = all([isinstance(ask, Count) for ask in asks])
        now = self._server.now()
        # Expired entries and the next expiry must be read at one moment.
        if len(asks) == 1 and not counts and not isinstance(asks[0], Due):
            return await self._answer_at(slot, asks, now)
        async with slot.transaction(_COUNTING if counts else SNAPSHOT) as transaction:
            return await self._answer_at(transaction, asks, now)

    async def _answer_many(self, slot: Slot, asks: Sequence[Ask]) -> list[Any]:
        """The answers to thousands of requests, from one snapshot: a slice at a time, so that other tasks run, too."""
        now, some_at_once = self._server.now(), limits.POSTGRES_KEYS_PER_READ
        answers, version = list[Any](), 0
        async with slot.transaction(SNAPSHOT) as transaction:
            for first in range(0, len(asks), some_at_once):
                some = await self._answer_at(transaction, asks[first : first + some_at_once], now)
                answers += some
                version = some.version if isinstance(some, SnapshotAnswers) else version
        return _shown(version, answers) if version else answers

    async def _answer_at(self, at: Slot | Transaction, asks: Sequence[Ask], now: int | None) -> list[Any]:
        if not self._shows_version or not all([type(ask) in _SHOWN_WITH_VERSION for ask in asks]):
            return await self._answers(at, asks, now)
        beside = _BesideCounter(at)
        answers = await self._answers(beside, asks, now)
        return _shown(beside.version, answers)

    async def _answers(self, at: _Fetching, asks: Sequence[Ask], now: int | None) -> list[Any]:
        if len(asks) == 1 or (space := _space_of_gets(asks)) is None:
            return [await _answer_one(self._server, at, ask, now) for ask in asks]
        layout, gets = LAYOUTS[space], cast("Sequence[Get]", asks)
        rows = await at.fetch(layout.gets, now, *layout.bind_keys([get.key for get in gets]))
        found = layout.found(rows)
        return [found.get(get.key) for get in gets]

    async def aclose(self) -> None:
        await self.points.aclose()
        self._closed = True
        for slot in self._slots:
            slot.abandon()


def _space_of_gets(asks: Sequence[Ask]) -> Space | None:
    """The space of gets of live entries; None if there are other requests, or those of several spaces."""
    space = getattr(asks[0], "space", None)
    if all([type(ask) is Get and ask.space is space and not ask.include_expired for ask in asks]):
        return cast("Space", space)
    return None


async def _answer_one(server: PostgresServer, at: _Fetching, ask: Ask, now: int | None) -> Any:
    if isinstance(ask, (Latest, Now)):
        version, time = server.counter_row(await at.fetch(READ_VERSION, now))
        return version if isinstance(ask, Latest) else time
    if isinstance(ask, StoreId):
        for [store_id] in await at.fetch(READ_STORE_ID):
            return store_id
        raise lost_store_id(server.name)
    if isinstance(ask, Usage):
        rows = await at.fetch(PLUGIN_USAGE, now, *ask.after, ask.limit)
        version = server.counter_row(rows)[0]
        return usage_slice([row[1:] for row in rows if row[1] is not None], ask.limit, version)
    if isinstance(ask, Changes):
        return await _read_log(at, ask)
    layout = LAYOUTS[ask.space]
    match ask:
        case Due():
            return await _read_due(server, at, ask, now)
        case Get():
            key = layout.bind_key(ask.key)
            finding = at.fetch(layout.get_expired, *key) if ask.include_expired else at.fetch(layout.get, now, *key)
            return layout.found(await finding).get(ask.key)
        case Scan():
            bindings = (*layout.bind_range(ask.start, ask.end), ask.limit)
            return layout.page(await at.fetch(layout.scan(ask), now, *bindings))
        case Count():
            [[count]] = await at.fetch(layout.count, now, *layout.bind_range(ask.start, ask.end))
            return count
        case Expired():
            return list(layout.page(await at.fetch(layout.expired, now, ask.limit)))
    raise TypeError(f"an engine can't answer {type(ask).__name__}")


async def _read_log(at: _Fetching, ask: Changes) -> LogSlice:
    rows = await at.fetch(log.READ_LOG, *log.read_log_bindings(ask.after))
    if not log.holds(ask.after, rows):
        [[oldest_base, latest]] = await at.fetch(log.LOG_ENDS)
        raise HistoryGone(ask.after.version, oldest_base + 1, latest)
    return log.log_slice(ask.after, rows)


async def _read_due(server: PostgresServer, at: _Fetching, ask: Due, now: int | None) -> DuePage:
    layout = LAYOUTS[ask.space]
    version, moment = server.counter_row(await at.fetch(log.READ_SNAPSHOT_VERSION, now))
    rows = [tuple(row) for row in await at.fetch(layout.due, now, ask.after, ask.limit)]
    upcoming = [row[0] for row in await at.fetch(layout.next_expiry, now) if row[0] != NEVER]
    return layout.due_page(rows, upcoming[0] if upcoming else None, ask, moment, version)
