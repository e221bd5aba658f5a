"""Serves the plugins' storage on NATS: `db.kv.<plugin>.<operation>`.

A message takes this way: `_take` reads it, or refuses it; gets gather for `_answer`, which asks the database
once for all that came in one turn of the event loop; writes gather for `_write`, which commits them together. A get
whose key has a write under way waits for that write, so that a plugin reads what it published. `_take` never awaits:
no further message is read before it has returned. Only when refusals pile up does reading wait until some are sent.
Of a plugin with too much under way, one message comes to `_take` per reading; those behind it are refused unseen.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, TypeAlias

from msgspec import Struct
from nats.aio.client import Client as Nats
from nats.aio.subscription import Subscription

import keyloft
from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Committed, Delete, Get, Scan, Set, Space
from keyloft.errors import Busy, DatabaseError, InvalidSubject, InvalidValue, KeyloftError, Stalled, ValueTooLarge
from keyloft.nats.connection import Handled, cancel, drain, subscribe
from keyloft.nats.discovery import Discovery, Endpoint
from keyloft.nats.errors import refusal, wire_code
from keyloft.nats.internals import publish_all, publish_to_all
from keyloft.plugins import rules, wire
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.meters import OTHER, Meter, Meters
from keyloft.plugins.store import BotDatabase, listed

logger = logging.getLogger(__name__)

NAME: Final = "keyloft-plugins"

_PLUGINS: Final = Space.PLUGINS
_SLOW_CLEANUP_SECONDS: Final = 1.0
_NOT_CARRIED_OUT: Final = "it was not carried out"
_TOO_MANY: Final = "too many requests are under way, and this one was not carried out: try again later"
_BUSY: Final = refusal(Busy(_TOO_MANY))
_MOST_UNTOLD: Final = 10_000
"""So many refusals may wait to be sent before no further request is read."""
_TOLD_AT_ONCE: Final = 64
"""A mistake or a get takes as long as several requests that are answered BUSY. Were a flood's own answered without a
pause, others would be taken in their place at once: a quarter of the time in which the flood has to be read."""
_PAUSE_SECONDS: Final = 0.001
_MOST_UNSENT_BYTES: Final = 512 * 1024


class _Plugin:
    """A plugin that has sent something: what it has under way."""

    __slots__ = ("gets", "meter", "name", "taken", "writing")

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.gets = meter.durations["get"]
        self.taken = 0
        """Requests that are not yet answered."""
        self.writing: dict[str, int] = {}
        """The keys with a write under way, and the number of the last one."""


class _PluginRequest(Struct, gc=False):
    """A message that was taken in."""

    plugin: _Plugin
    operation: str
    reply: str
    key: str
    came: float


_Write: TypeAlias = tuple[_PluginRequest, Set | Delete, int]
"""What was asked for, what it writes, and its number among all writes."""

_Read: TypeAlias = tuple[_PluginRequest, Scan | None]
"""A list and what it scans, or a get."""


class DatabaseService:
    """Lets plugins store JSON by sending NATS messages.

    Example:
        service = DatabaseService(nats, BotDatabase("sqlite:///bot.db"))
        await service.start()
        …
        await service.stop()      # after this the connection and the database can be closed
    """

    def __init__(
        self,
        nats: Nats,
        db: BotDatabase,
        *,
        prefixes: Sequence[str] = rules.PREFIXES,
        reserved: Sequence[str] = (),
        queue: str = rules.QUEUE,
        requests_per_plugin: int = limits.REQUESTS_PER_PLUGIN,
        requests_in_all: int = limits.REQUESTS,
        deadline: float = limits.DEADLINE_SECONDS,
        cleanup_every: float = limits.CLEANUP_SECONDS,
        meters: Meters | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        nats: A connected client; it stays the caller's to close.
        db: It stays the caller's to close, too.
        prefixes: The subjects before `.<plugin>.<operation>`.
        reserved: Prefixes of other services on this connection: no answer goes there.
        queue: Services of one queue group share the requests.
        requests_per_plugin: How many of one plugin are taken before one is answered BUSY.
        requests_in_all: How many of all plugins are taken before one is answered BUSY.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        cleanup_every: Seconds between two removals of what has expired.
        meters: Where to count what is done.
        metadata: What `$SRV.PING` is to tell of this instance.
        """
        self.nats = nats
        self.db = db
        self.meters = meters or Meters()
        self._prefixes = tuple([f"{prefix}." for prefix in prefixes])
        self._reserved = (*self._prefixes, *[f"{prefix}." for prefix in reserved])
        self._reserved_bytes = tuple([prefix.encode() for prefix in self._reserved])
        self._queue = queue
        self._per_plugin = requests_per_plugin
        self._in_all = requests_in_all
        self._deadline = deadline
        self._cleanup_every = cleanup_every
        self._engine: Engine
        self._log = OperationLog(logger)
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._plugins: dict[str, _Plugin] = {}
        self._routes: dict[str, tuple[_Plugin, str]] = {}
        self._nobody = _Plugin(OTHER, Meter())
        """Has sent what is below our prefixes, and no plugin's request."""
        self._taken = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._refusals: deque[tuple[_Plugin, str, bytes]] = deque()
        self._is_shedding = False
        self._busy: dict[tuple[_Plugin, str], list[bytes]] = {}
        self._something_to_refuse = asyncio.Event()
        self._lists: dict[_Plugin, deque[tuple[_PluginRequest, Scan]]] = {}
        self._something_to_list = asyncio.Event()
        self._gets: list[_PluginRequest] = []
        self._something_to_answer = asyncio.Event()
        self._writes: deque[_Write] = deque()
        self._something_to_write = asyncio.Event()
        self._number = 0
        self._parked: dict[int, list[_Read]] = {}
        self._errors: Counter[str] = Counter()
        self._last_errors: dict[str, str] = {}
        self._discovery = Discovery(
            nats,
            name=NAME,
            version=keyloft.__version__,
            description="JSON storage for the plugins of a bot",
            queue=queue,
            metadata=metadata or {},
            endpoints=self._endpoints,
        )

    async def start(self) -> None:
        """Begin to serve. The database is opened if it is not yet open.

        Raises:
            DatabaseError: The database can't be opened.
        """
        self._engine = await self.db.engine()
        self._tasks = [
            asyncio.create_task(self._forever(job), name=f"keyloft plugins: {job.__name__}")
            for job in (self._answer, self._write, self._list, self._tell_refused, self._clean_up)
        ]
        self._subscriptions = await subscribe(self.nats, self._prefixes, self._queue, self._take)
        await self._discovery.start()
        logger.info("[KV] serving %s", ", ".join(f"{prefix}<plugin>.<operation>" for prefix in self._prefixes))

    async def stop(self) -> None:
        """Take no more requests, answer those that were taken, then return. A second call does nothing."""
        subscriptions, self._subscriptions = self._subscriptions, []
        await drain(self.nats, subscriptions, self._deadline)
        await self._all_answered.wait()
        await self._tell_all_refused()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await cancel(task)
        if subscriptions:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._discovery.stop(), self._deadline)
            logger.info("[KV] stopped; everything that was taken is answered")

    # Taking requests in

    def _take(self, subject: str, reply: str, data: bytes) -> Handled:
        """Take a request, or refuse it."""
        came = perf_counter()
        plugin, operation, wait = self._nobody, "", None
        try:
            plugin, operation = self._routes.get(subject) or self._route(subject)
            if plugin.taken >= self._per_plugin or self._taken >= self._in_all:
                return self._shed(plugin, operation, reply)
            if reply.startswith(self._reserved):
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            if operation == "get":
                request = _PluginRequest(plugin, operation, reply, wire.key(data), came)
                if request.key in plugin.writing:
                    self._park(plugin.writing[request.key], request, None)
                else:
                    self._gets.append(request)
                    self._something_to_answer.set()
            elif operation == "list":
                self._take_list(_PluginRequest(plugin, operation, reply, "", came), wire.listing(plugin.name, data))
            else:
                mutation = wire.MUTATIONS[operation](plugin.name, data)
                self._take_write(_PluginRequest(plugin, operation, reply, mutation.key[1], came), mutation)
        except Exception as error:
            if plugin is self._nobody and plugin.taken >= self._per_plugin:
                return self._shed(plugin, operation, reply)
            if not isinstance(error, KeyloftError):
                logger.exception("[KV] reading a request failed unexpectedly")
            self._note_error(plugin.name, operation, error)
            wait = self._refuse(plugin, reply, refusal(error))
        # Mistakes count, too, until they are answered: a flood of them is refused as cheaply as any other.
        plugin.taken += 1
        self._taken += 1
        if self._taken == 1:
            self._all_answered.clear()
        return wait

    def _shed(self, plugin: _Plugin, operation: str, reply: str) -> Handled:
        """Answer BUSY, also to all that follows: no room is made before the event loop's next turn."""
        replies = self._busy.setdefault((plugin, operation), [])
        replies.append(reply.encode())
        self._is_shedding = True
        self._something_to_refuse.set()
        return self._tell_some() if self._is_behind() else replies

    def _refuse(self, plugin: _Plugin, reply: str, data: bytes) -> Coroutine[Any, Any, None] | None:
        if reply.startswith(self._reserved):
            reply = ""  # answering, be it with a refusal, would be a request in our name, to any plugin's keys
        self._refusals.append((plugin, reply, data))
        self._something_to_refuse.set()
        return self._tell_some() if self._is_behind() else None

    def _is_behind(self) -> bool:
        """Whether so many refusals are not yet sent that there must not be more."""
        return len(self._refusals) >= _MOST_UNTOLD or self._much_is_unsent()

    def _much_is_unsent(self) -> bool:
        return self.nats.is_connected and self.nats.pending_data_size > _MOST_UNSENT_BYTES

    async def _tell_some(self) -> None:
        """Read no further for a while: NATS slows down those who send what is not read."""
        while self._is_behind():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS)

    def _take_list(self, request: _PluginRequest, scan: Scan) -> None:
        if request.plugin.writing:
            self._park(max(request.plugin.writing.values()), request, scan)
        else:
            self._enlist(request, scan)

    def _enlist(self, request: _PluginRequest, scan: Scan) -> None:
        self._lists.setdefault(request.plugin, deque()).append((request, scan))
        self._something_to_list.set()

    def _take_write(self, request: _PluginRequest, mutation: Set | Delete) -> None:
        self._number += 1
        request.plugin.writing[request.key] = self._number
        self._writes.append((request, mutation, self._number))
        self._something_to_write.set()

    def _park(self, write: int, request: _PluginRequest, scan: Scan | None) -> None:
        """Let a request wait until a write has come to an end."""
        self._parked.setdefault(write, []).append((request, scan))

    def _route(self, subject: str) -> tuple[_Plugin, str]:
        """Whose request this is and what it asks for: both come from the subject alone."""
        prefix = next((prefix for prefix in self._prefixes if subject.startswith(prefix)), "")
        name, dot, operation = subject[len(prefix) :].partition(".")
        if not dot or "." in operation or operation not in wire.OPERATIONS:
            raise InvalidSubject(
                f"a subject is <prefix>.<plugin>.<operation>, the operation one of {', '.join(wire.OPERATIONS)}"
            )
        rules.plugin_name(name)
        if len(self._routes) > limits.ROUTES:
            # Names cost their sender nothing. Whoever has something under way is still known by it.
            self._routes.clear()
            self._plugins = {name: plugin for name, plugin in self._plugins.items() if plugin.taken}
        if (plugin := self._plugins.get(name)) is None:
            plugin = self._plugins[name] = _Plugin(name, self.meters.of(name))
        self._routes[subject] = plugin, operation
        return plugin, operation

    # Reading

    async def _tell_refused(self) -> None:
        """Tell who was refused; not with the answers, which may have to wait for the database."""
        while True:
            await self._something_to_refuse.wait()
            self._something_to_refuse.clear()
            await self._tell_all_refused()

    async def _tell_all_refused(self) -> None:
        while self._busy or self._refusals:
            busy, self._busy = self._busy, {}
            await self._tell_busy(busy)
            refusals = [self._refusals.popleft() for _ in range(min(len(self._refusals), _TOLD_AT_ONCE))]
            await self._publish([(reply, data) for _, reply, data in refusals])
            self._release([plugin for plugin, _, _ in refusals])
            if self._refusals:
                await asyncio.sleep(_PAUSE_SECONDS)
            # Were nats-py's buffer full of refusals, each answer would wait until all of them are sent.
            while self._much_is_unsent():  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _tell_busy(self, busy: Mapping[tuple[_Plugin, str], list[bytes]]) -> None:
        some: list[bytes] = []
        for (plugin, operation), replies in busy.items():
            times = len(replies)
            self._count_error(plugin.name, operation, Busy.code, times)
            self._log.refusal(operation, plugin.name, "", Busy.code, _TOO_MANY, level=logging.WARNING, times=times)
            some += [reply for reply in replies if reply and not reply.startswith(self._reserved_bytes)]
        if some:
            await self._tell(publish_to_all(self.nats, some, _BUSY))

    async def _tell(self, publishing: Coroutine[Any, Any, None]) -> None:
        try:
            await publishing
        except Exception as error:
            self._log.lost_reply(error)

    async def _answer(self) -> None:
        """Ask the database for what came since the last turn."""
        while True:
            await self._something_to_answer.wait()
            self._something_to_answer.clear()
            gets, self._gets = self._gets, []
            for first in range(0, len(gets), limits.GETS_PER_READ):
                await self._answer_gets(gets[first : first + limits.GETS_PER_READ])
                if self._is_shedding:
                    self._is_shedding = False
                    await asyncio.sleep(_PAUSE_SECONDS)  # as with mistakes, see _TOLD_AT_ONCE

    async def _answer_gets(self, gets: list[_PluginRequest]) -> None:
        try:
            # The first of them may have waited for its turn.
            async with asyncio.timeout(self._deadline - (perf_counter() - gets[0].came)):
                records = await self._engine.read(*[Get(_PLUGINS, (get.plugin.name, get.key)) for get in gets])
        except Exception as error:
            await self._fail(gets, self._told(error))
            return
        # Most requests are gets, so here every call counts.
        now, tell = perf_counter(), logger.isEnabledFor(logging.DEBUG)
        replies = []
        for get, record in zip(gets, records, strict=True):
            seconds = now - get.came
            get.plugin.gets.add(seconds)
            if tell or seconds > limits.SLOW_SECONDS:
                self._log.operation("get", get.plugin.name, get.key, seconds, hit=record is not None)
            replies.append((get.reply, wire.got(record)))
        await self._publish(replies)
        self._release([get.plugin for get in gets])

    async def _list(self) -> None:
        """Answer lists, one at a time and one of each plugin in turn: a list may take long."""
        while True:
            await self._something_to_list.wait()
            while self._lists:
                plugin = next(iter(self._lists))
                queue = self._lists.pop(plugin)
                request, scan = queue.popleft()
                if queue:
                    self._lists[plugin] = queue  # at the end
                await self._answer_list(request, scan)
            self._something_to_list.clear()

    async def _answer_list(self, request: _PluginRequest, scan: Scan) -> None:
        try:
            # It may have waited for its turn, too.
            async with asyncio.timeout(self._deadline - (perf_counter() - request.came)):
                [page] = await self._engine.read(scan)
        except Exception as error:
            await self._fail([request], self._told(error))
            return
        keys, truncated = listed(page, scan.limit - 1)
        if self._count(request, now := perf_counter()):
            self._tell_of(request, now, count=len(keys))
        await self._publish([(request.reply, wire.listed(keys, truncated, self.nats.max_payload))])
        self._release([request.plugin])

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            return Stalled(f"the database has not answered within {self._deadline:g} s")
        return error

    # Writing

    async def _write(self) -> None:
        while True:
            await self._something_to_write.wait()
            group = self._gather()
            if not self._writes:
                self._something_to_write.clear()
            if not group:
                continue  # what was to be written was overdue, and is answered
            try:
                await self._commit(group)
            finally:
                for request, scan in self._settle(group):
                    if scan is None:
                        self._gets.append(request)
                    else:
                        self._enlist(request, scan)
                if self._gets:
                    self._something_to_answer.set()

    def _gather(self) -> list[_Write]:
        group: list[_Write] = []
        size = 0
        while self._writes and len(group) < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            write = self._writes.popleft()
            group.append(write)
            size += len(write[1].value) if type(write[1]) is Set else 0
        return group

    async def _commit(self, group: list[_Write]) -> None:
        """Commit writes together. None of them has a condition, so they fail together or not at all."""
        batch = Batch(tuple([mutation for _, mutation, _ in group]))
        committing = asyncio.create_task(self._engine.commit(batch))
        await asyncio.wait([committing], timeout=self._deadline)
        if not committing.done():
            await self._wait_for_stalled(committing, group)
            return
        try:
            done = committing.result()
        except Exception as error:
            await self._fail([request for request, _, _ in group], error)
            return
        assert isinstance(done, Committed), "a batch without checks has nothing to conflict with"
        found = iter(done.found)
        now = perf_counter()
        replies = []
        for request, mutation, _ in group:
            if type(mutation) is Set:
                data = wire.STORED
                if self._count(request, now):
                    ttl = mutation.expire_in
                    self._tell_of(request, now, size=len(mutation.value), ttl=ttl and ttl // 1000)
            else:
                existed = next(found)
                data = wire.DELETED if existed else wire.NOT_DELETED
                if self._count(request, now):
                    self._tell_of(request, now, deleted=existed)
            replies.append((request.reply, data))
        await self._publish(replies)
        self._release([request.plugin for request, _, _ in group])

    async def _wait_for_stalled(self, committing: asyncio.Future[Any], group: list[_Write]) -> None:
        """Nobody waits longer than the deadline, but the next group can't begin before this one has an end."""
        stalled = f"the database has not answered within {self._deadline:g} s"
        await self._fail([request for request, _, _ in group], Stalled(f"{stalled}; it may still be carried out"))
        while not committing.done():
            late = perf_counter() - self._deadline
            overdue: list[_Write] = []
            while self._writes and self._writes[0][0].came <= late:
                overdue.append(self._writes.popleft())
            waited = self._settle(overdue) + self._unpark(late)
            error = Stalled(f"{stalled}; {_NOT_CARRIED_OUT}")
            await self._fail([request for request, _, _ in overdue] + [request for request, _ in waited], error)
            await asyncio.wait([committing], timeout=self._deadline / 4)
        with contextlib.suppress(Exception):
            committing.result()

    def _settle(self, group: Iterable[_Write]) -> list[_Read]:
        """Writes have come to an end, good or bad; returns what waited for them."""
        waited: list[_Read] = []
        for request, _, number in group:
            if request.plugin.writing.get(request.key) == number:
                del request.plugin.writing[request.key]
            if self._parked:
                waited += self._parked.pop(number, ())
        return waited

    def _unpark(self, late: float) -> list[_Read]:
        """What has waited too long for a write."""
        overdue: list[_Read] = []
        for number, reads in list(self._parked.items()):
            overdue += [read for read in reads if read[0].came <= late]
            self._parked[number] = [read for read in reads if read[0].came > late]
        return overdue

    # Answering

    def _count(self, request: _PluginRequest, now: float) -> bool:
        """A request is carried out: count it; returns whether the log is to hear of it."""
        seconds = now - request.came
        request.plugin.meter.durations[request.operation].add(seconds)
        return seconds > limits.SLOW_SECONDS or logger.isEnabledFor(logging.DEBUG)

    def _tell_of(self, request: _PluginRequest, now: float, **details: int | None) -> None:
        self._log.operation(request.operation, request.plugin.name, request.key, now - request.came, **details)

    async def _fail(self, requests: list[_PluginRequest], error: Exception) -> None:
        """Requests came to nothing, all for one reason."""
        if not requests:
            return
        self._log.failure(len(requests), error)
        data = refusal(error)
        for request in requests:
            self._note_error(request.plugin.name, request.operation, error, request.key)
        await self._publish([(request.reply, data) for request in requests])
        self._release([request.plugin for request in requests])

    def _release(self, plugins: Sequence[_Plugin]) -> None:
        """Requests of these plugins are answered: there is room for others."""
        for plugin in plugins:
            plugin.taken -= 1
        self._taken -= len(plugins)
        if not self._taken:
            self._all_answered.set()

    async def _publish(self, replies: Sequence[tuple[str, bytes]]) -> None:
        """Answer those who want an answer."""
        if wanted := [reply for reply in replies if reply[0]]:
            await self._tell(publish_all(self.nats, wanted))

    def _note_error(self, plugin: str, operation: str, error: Exception, key: str = "") -> None:
        code = wire_code(error)
        self._count_error(plugin, operation, code)
        ours = code in (DatabaseError.code, KeyloftError.code)
        told = str(error) if isinstance(error, KeyloftError) else type(error).__name__
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            told = "the value was refused"  # where it is wrong is told by the names in it, to its sender alone
        self._log.refusal(operation, plugin, key, code, told, level=logging.ERROR if ours else logging.WARNING)

    def _count_error(self, plugin: str, operation: str, code: str, times: int = 1) -> None:
        self.meters.of(plugin).errors[code] += times
        self._errors[operation] += times
        self._last_errors[operation] = code

    # What goes on beside

    async def _forever(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Without one of these jobs the service would be deaf: an error is logged, and the job goes on."""
        while True:
            try:
                await job()
            except Exception:
                logger.exception("[KV] a task of the service failed and goes on")
                await asyncio.sleep(0.1)

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(self._cleanup_every)
            began = perf_counter()
            try:
                removed = await self.db.kv_cleanup_expired()
            except KeyloftError as error:
                logger.error("[KV] Cleanup error (%s): %s", error.code, error, exc_info=True)
                continue
            seconds = perf_counter() - began
            self.meters.cleanups.add(seconds)
            self.meters.cleaned += removed
            fields = {"operation": "kv_cleanup", "removed": removed, "latency_ms": round(seconds * 1000, 1)}
            if removed:
                logger.info("[KV] Cleanup: removed %d expired keys in %.2fs", removed, seconds, extra=fields)
            if seconds > _SLOW_CLEANUP_SECONDS:
                logger.warning("[KV] Cleanup slow: %.2fs for %d keys", seconds, removed, extra=fields)

    def _endpoints(self) -> list[Endpoint]:
        found = []
        for operation in wire.OPERATIONS:
            endpoint = Endpoint(operation, f"{self._prefixes[0]}*.{operation}")
            endpoint.errors = self._errors[operation]
            endpoint.last_error = self._last_errors.get(operation, "")
            endpoint.requests = endpoint.errors
            for meter in self.meters.plugins.values():
                if operation in meter.durations:
                    endpoint.requests += meter.durations[operation].count
                    endpoint.seconds += meter.durations[operation].seconds
            found.append(endpoint)
        return found
