"""Answers what PostgreSQL is asked: gets that come together with one statement, everything else one by one."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, Final, TypeAlias, TypeVar

from keyloft.core.records import Ask, Count, Expired, Get, Latest, Now, Record, Scan, Space, Usage, Used
from keyloft.engines.commit.outcomes import copy
from keyloft.engines.postgres.connections import Link, Transaction, patiently
from keyloft.engines.postgres.server import PostgresServer
from keyloft.engines.postgres.tables import LAYOUTS, PLUGIN_USAGE, READ_CLOCK
from keyloft.errors import Busy, Closed, DatabaseError, Unreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEYS_AT_ONCE: Final = 512
"""How many keys of several callers one statement looks up; a caller with more has a statement to himself."""

_WORTH_SHARING: Final = 16
_POINT_LINKS: Final = 2
_OTHER_LINKS: Final = 4

_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# What looks at whole ranges and tables may also walk a table from one end to the other.
_WALKING: Final = f"{_SNAPSHOT}; SET LOCAL enable_seqscan = on; SET LOCAL enable_bitmapscan = on"


_Lookup: TypeAlias = tuple[Sequence[Get], asyncio.Future[list[Record | None]], float]


class Points:
    """Looks up keys. While a statement is on its way, the keys for the next one gather."""

    def __init__(self, server: PostgresServer, now: Callable[[], int | None]) -> None:
        self._server = server
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Space, list[_Lookup]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False
        self._links = [Link(server) for _ in range(_POINT_LINKS)]
        self._tasks: dict[Link, asyncio.Task[None]] = {}
        self._serving = 0

    def ask(self, space: Space, gets: Sequence[Get]) -> asyncio.Future[list[Record | None]]:
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
        if self._serving < _POINT_LINKS:
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
        """Begin to serve, or begin again: whoever ends a program cancels all tasks, and may still want to read."""
        for link in self._links:
            if link not in self._tasks or self._tasks[link].done():
                self._serving += 1
                task = self._tasks[link] = asyncio.create_task(self._serve(link), name="keyloft reader")
                task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for lookups in self._waiting.values():
            _fail(lookups, Closed())
        for link in self._links:
            link.abandon()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving -= 1
        if self._waiting and not self._closed:
            self._start()

    async def _serve(self, link: Link) -> None:
        while True:
            if not self._waiting:
                idle: asyncio.Future[None] = self._loop.create_future()
                self._idle.append(idle)
                await idle
            if some := self._take():
                try:
                    await self._answer(link, some)
                except asyncio.CancelledError:
                    self._put_back(some)
                    raise

    def _take(self) -> list[_Lookup]:
        """The lookups of one space, as many as go into a statement; those of the others are next."""
        if not self._waiting:
            return []  # the other one was faster
        space = next(iter(self._waiting))
        lookups = self._waiting.pop(space)
        # Many are shared with whoever is idle: what one statement found is handed out while the next is on its way.
        most = (len(lookups) + 1) // 2 if self._idle and len(lookups) >= _WORTH_SHARING else len(lookups)
        count = taken = 0
        while taken < most and (count < _KEYS_AT_ONCE or not taken):
            count += len(lookups[taken][0])
            taken += 1
        if taken < len(lookups):
            self._waiting[space] = lookups[taken:]
            self._wake_one()
        return [lookup for lookup in lookups[:taken] if not lookup[1].done()]

    def _put_back(self, lookups: list[_Lookup]) -> None:
        """They are the next to be looked up, whoever does it."""
        if lookups:
            space = lookups[0][0][0].space
            self._waiting[space] = lookups + self._waiting.get(space, [])

    async def _answer(self, link: Link, lookups: list[_Lookup]) -> None:
        keys = list({get.key for gets, _, _ in lookups for get in gets})
        space = lookups[0][0][0].space
        try:
            found = await patiently(self._server, link, lambda link: self._fetch(link, space, keys), lookups[0][2])
        except (Unreachable, Busy) as error:
            # For the first of them it is too late; whoever came later has time left.
            late = self._loop.time() - self._server.patience
            overdue = max(1, sum(came <= late for _, _, came in lookups))
            _fail(lookups[:overdue], error)
            self._put_back(lookups[overdue:])
            return
        except DatabaseError as error:
            _fail(lookups, error)
            return
        except Exception as error:
            logger.exception("looking up keys failed unexpectedly")
            _fail(lookups, DatabaseError(f"{self._server.name}: reading failed unexpectedly: {type(error).__name__}"))
            return
        for gets, future, _ in lookups:
            if not future.done():
                future.set_result([found.get(get.key) for get in gets])

    async def _fetch(self, link: Link, space: Space, keys: list[Any]) -> Mapping[Any, Record]:
        layout = LAYOUTS[space]
        if len(keys) == 1:
            return layout.found(await link.fetch(layout.get, self._now(), *layout.bind_key(keys[0])))
        return layout.found(await link.fetch(layout.gets, self._now(), *layout.bind_keys(keys)))


def _fail(lookups: list[_Lookup], error: DatabaseError | Closed) -> None:
    for _, future, _ in lookups:
        if not future.done():
            future.set_exception(copy(error) if isinstance(error, DatabaseError) else Closed())
            future.exception()  # whoever asked may be gone


class Others:
    """Answers everything else, each read on a connection of its own."""

    def __init__(self, server: PostgresServer, now: Callable[[], int | None]) -> None:
        self._server = server
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(_OTHER_LINKS)
        self._links: list[Link] = []
        self._closed = False

    async def read(self, asks: Sequence[Ask]) -> list[Any]:
        """The answers to all asks, from one snapshot."""
        came = self._loop.time()
        now = self._now()

        async def work(link: Link) -> list[Any]:
            walks = all([isinstance(ask, (Count, Usage)) for ask in asks])
            if len(asks) == 1 and not walks:
                return [await _answer_one(self._server, link, asks[0], now)]
            async with link.transaction(_WALKING if walks else _SNAPSHOT) as transaction:
                return [await _answer_one(self._server, transaction, ask, now) for ask in asks]

        try:
            async with asyncio.timeout_at(came + self._server.patience):
                await self._free.acquire()
        except TimeoutError:
            raise self._server.unreachable() from None
        link = self._links.pop() if self._links else Link(self._server)
        try:
            if self._closed:
                raise Closed
            return await patiently(self._server, link, work, came)
        finally:
            if self._closed:
                link.abandon()
            else:
                self._links.append(link)
            self._free.release()

    async def aclose(self) -> None:
        self._closed = True
        for link in self._links:
            link.abandon()


async def _answer_one(server: PostgresServer, at: Link | Transaction, ask: Ask, now: int | None) -> Any:
    if isinstance(ask, (Latest, Now)):
        version, moment = server.clock_of(await at.fetch(READ_CLOCK, now))
        return version if isinstance(ask, Latest) else moment
    if isinstance(ask, Usage):
        return list(starmap(Used, await at.fetch(PLUGIN_USAGE, now)))
    layout = LAYOUTS[ask.space]
    match ask:
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
