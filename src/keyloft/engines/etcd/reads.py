"""Answers read requests from etcd: concurrent gets share a transaction, each other read has a view of its own."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from keyloft import limits
from keyloft.core.records import (
    Ask,
    Changes,
    Count,
    Due,
    Expired,
    Get,
    Head,
    Latest,
    Now,
    Record,
    Scan,
    StoreId,
    Usage,
)
from keyloft.engines.etcd import errors, log, scans
from keyloft.engines.etcd.errors import Failure
from keyloft.engines.etcd.layout import Chunks, chunks_of, record_of
from keyloft.engines.etcd.views import RevisionView, RevisionViews
from keyloft.engines.pending_gets import PendingGets, fail, fail_late
from keyloft.errors import Closed

Answers: TypeAlias = list[Any]


class EtcdReads:
    """Answers all requests."""

    def __init__(self, views: RevisionViews) -> None:
        self._views = views
        self._cluster = views.cluster
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PendingGets] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def read(self, *asks: Ask) -> Answers:
        """The answers to all requests, from one view."""
        if not asks:
            return []
        if self._closed:
            raise Closed
        if len(asks) <= limits.ETCD_KEYS_PER_READ and all([type(ask) is Get for ask in asks]):
            return await self.gets(cast("Sequence[Get]", asks))
        arrived = self._loop.time()
        while True:
            try:
                return await self._answer(asks, arrived)
            except Failure as error:
                # The revision was compacted, because the read took so long: it begins again.
                if self._loop.time() > arrived + self._cluster.patience:
                    raise errors.explain(self._cluster.name, error) from error

    async def counter(self) -> RevisionView:
        """The newest view, for the version counter and the time."""
        view, _ = await self._views.fetch()
        return view

    async def aclose(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        fail(self._waiting, Closed())

    # Gets

    def gets(self, gets: Sequence[Get]) -> "asyncio.Future[list[Record | None]]":
        """The entries at some keys. While a transaction is under way, the keys for the next one gather."""
        if self._closed:
            raise Closed
        future: asyncio.Future[list[Record | None]] = self._loop.create_future()
        self._waiting.append((gets, future, self._loop.time()))
        if len(self._tasks) < limits.ETCD_READS_AT_ONCE:
            self._start()
        return future

    def _start(self) -> None:
        task = self._loop.create_task(self._serve(), name="keyloft reader")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if self._waiting and not self._closed and not self._tasks:
            self._start()  # asyncio.run cancels all tasks at its end, and callers may still read

    async def _serve(self) -> None:
        while some := self._take():
            try:
                await self._look_up(some)
            except asyncio.CancelledError:
                self._waiting.extendleft(reversed(some))
                raise

    def _take(self) -> list[PendingGets]:
        taken: list[PendingGets] = []
        keys = 0
        while self._waiting and (not taken or keys + len(self._waiting[0][0]) <= limits.ETCD_KEYS_PER_READ):
            gets, future, _ = lookup = self._waiting.popleft()
            if not future.done():
                taken.append(lookup)
                keys += len(gets)
        return taken

    async def _look_up(self, lookups: list[PendingGets]) -> None:
        try:
            found = await self._read_gets([get for gets, _, _ in lookups for get in gets], lookups[0][2])
        except Exception as error:
            rest = fail_late(lookups, error, self._cluster.name, self._cluster.patience)
            self._waiting.extendleft(reversed(rest))
            return
        at = 0
        for gets, future, _ in lookups:
            if not future.done():
                future.set_result(found[at : at + len(gets)])
            at += len(gets)

    async def _read_gets(self, gets: Sequence[Get], arrived: float) -> list[Record | None]:
        while True:
            view, stored = await self._views.look_up(
                lambda keys: [keys.data(get.space, get.key) for get in gets], arrived
            )
            try:
                return await _found(view, gets, stored)
            except Failure as error:
                if self._loop.time() > arrived + self._cluster.patience:
                    raise errors.explain(self._cluster.name, error) from error

    # Other reads

    async def _answer(self, asks: Sequence[Ask], arrived: float) -> Answers:
        view, _ = await self._views.fetch(arrived=arrived)
        gets = [ask for ask in asks if isinstance(ask, Get)]
        stored = await view.gets([view.keys.data(get.space, get.key) for get in gets])
        found = iter(await _found(view, gets, stored))
        return [next(found) if isinstance(ask, Get) else await answer(view, ask) for ask in asks]


async def _found(view: RevisionView, gets: Sequence[Get], stored: Sequence[Any]) -> list[Record | None]:
    """The entries that were asked for; `stored` has of each key a list of one or none."""
    now = view.now
    found: list[Record | None] = []
    chunked: list[tuple[int, Record, Chunks]] = []
    for get, kvs in zip(gets, stored, strict=True):
        if not kvs:
            found.append(None)
            continue
        value = kvs[0].value
        record = record_of(get.key, value)
        if record.expires_at is not None and not get.include_expired and not record.is_alive(now):
            found.append(None)
            continue
        if type(record) is Head:
            chunked.append((len(found), record, chunks_of(value)))
        found.append(record)
    values = await view.values([chunks for _, _, chunks in chunked])
    for (at, head, _), value in zip(chunked, values, strict=True):
        found[at] = scans.with_value(view, head, value)
    return found


async def answer(view: RevisionView, ask: Ask) -> Any:
    """The answer to one request from a view."""
    match ask:
        case Latest():
            return view.counter.version
        case Now():
            return view.now
        case StoreId():
            return view.counter.store_id
        case Scan():
            return await scans.scan(view, ask)
        case Count():
            return await scans.count(view, ask)
        case Expired():
            return await scans.expired(view, ask)
        case Due():
            return await scans.due(view, ask)
        case Usage():
            return await scans.usage(view, ask)
        case Changes():
            return await log.read(view, ask.after)
    raise TypeError(f"an engine can't answer {type(ask).__name__}")
