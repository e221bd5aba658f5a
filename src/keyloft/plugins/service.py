"""Serves the plugins' storage on NATS: `db.kv.<plugin>.<operation>`.

The path of a message: `_receive` accepts or refuses it. Gets gather for `_answer`, which reads all gets of one
iteration of the event loop at once; writes gather for `_write`, which commits them together. A get of a key that is
being written waits for that write, so that a plugin reads what it published. `_receive` never awaits: no further
message is read before it has returned. Reading waits only while too many refusals are unsent. Of a plugin with too many
unanswered requests, `_receive` sees one message per read from the socket; those that follow are refused unread.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from nats.aio.client import Client as Nats
from nats.micro.service import EndpointStats

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Batch, Committed, Get, Scan, Set, Space
from keyloft.errors import DatabaseError, InvalidSubject, InvalidValue, KeyloftError, Stalled, ValueTooLarge
from keyloft.nats.connection import Handled, cancel
from keyloft.nats.errors import refusal, wire_code
from keyloft.nats.internals import publish_all
from keyloft.nats.service import NatsService
from keyloft.plugins import rules, wire
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.meters import OTHER, Meter, Meters
from keyloft.plugins.refusals import Refusals
from keyloft.plugins.requests import Plugin, PluginRequest, Read, Write
from keyloft.plugins.store import BotDatabase, listed

logger = logging.getLogger(__name__)


class DatabaseService(NatsService):
    """Lets plugins store JSON by sending NATS messages.

    Example:
        async with DatabaseService(nats, BotDatabase("sqlite:///bot.db")):
            …                     # after this the connection and the database can be closed
    """

    name = "keyloft-plugins"
    description = "JSON storage for the plugins of a bot"
    owner = "<plugin>"
    operations = wire.OPERATIONS

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
        nats: A connected client of nats-py; the caller closes it.
        db: The plugins' entries; the caller closes it.
        prefixes: The subjects before `.<plugin>.<operation>`.
        reserved: Prefixes of other services on this connection: no answer is sent there.
        queue: Services of one queue group share the requests.
        requests_per_plugin: How many unanswered requests one plugin may have before the next is answered BUSY.
        requests_in_all: The same for all plugins together.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        cleanup_every: Seconds between two removals of expired entries.
        meters: Where to count the operations.
        metadata: Shown for this instance by `$SRV.PING`.
        """
        super().__init__(nats, prefixes, reserved=reserved, queue=queue, deadline=deadline, metadata=metadata)
        self.db = db
        self.meters = meters or Meters()
        self._per_plugin = requests_per_plugin
        self._in_all = requests_in_all
        self._cleanup_every = cleanup_every
        self._engine: Engine
        self._log = OperationLog(logger)
        self._tasks: list[asyncio.Task[None]] = []
        self._plugins: dict[str, Plugin] = {}
        self._routes: dict[str, tuple[Plugin, str]] = {}
        self._no_plugin = Plugin(OTHER, Meter())
        """Stands for the sender of a request whose subject names no plugin."""
        self._unanswered = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._refusals = Refusals(nats, self._log, self._reserved, count=self._count_error, release=self._release)
        self._lists: dict[Plugin, deque[tuple[PluginRequest, Scan]]] = {}
        self._something_to_list = asyncio.Event()
        self._gets: list[PluginRequest] = []
        self._something_to_get = asyncio.Event()
        self._writes: deque[Write] = deque()
        self._something_to_write = asyncio.Event()
        self._last_write = 0
        self._parked: dict[int, list[Read]] = {}
        """The reads that wait for a write, by the number of that write."""

    @property
    def unanswered(self) -> int:
        """How many requests are accepted and not yet answered."""
        return self._unanswered

    @property
    def unsent_refusals(self) -> int:
        """How many refusals wait to be sent."""
        return len(self._refusals)

    async def start(self) -> None:
        """Begin to serve. The database is opened if it is not yet open.

        Raises:
            DatabaseError: The database can't be opened.
            IncompatibleLibrary: The installed nats-py can't be used.
        """
        self._engine = await self.db.engine()
        await super().start()

    def _begin(self) -> None:
        jobs = (self._answer, self._write, self._list, self._refusals.run, self._clean_up)
        self._tasks = [asyncio.create_task(self._forever(job), name=f"keyloft plugins: {job.__name__}") for job in jobs]

    async def _finish(self) -> None:
        await self._all_answered.wait()
        await self._refusals.send_all()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await cancel(task)
        if tasks:
            logger.info("[KV] stopped; all accepted requests are answered")

    # Accepting requests

    def _receive(self, subject: str, reply: str, data: bytes) -> Handled:
        """Accept a request, or refuse it."""
        arrived = perf_counter()
        plugin, operation, wait = self._no_plugin, "", None
        try:
            plugin, operation = self._routes.get(subject) or self._route(subject)
            if plugin.unanswered >= self._per_plugin or self._unanswered >= self._in_all:
                return self._refusals.busy(plugin, operation, reply)
            if reply.startswith(self._reserved):
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            if operation == "get":
                request = PluginRequest(plugin, operation, reply, wire.key(data), arrived)
                if request.key in plugin.writing:
                    self._parked.setdefault(plugin.writing[request.key], []).append((request, None))
                else:
                    self._gets.append(request)
                    self._something_to_get.set()
            elif operation == "list":
                scan = wire.listing(plugin.name, data)
                request = PluginRequest(plugin, operation, reply, "", arrived)
                if plugin.writing:
                    self._parked.setdefault(max(plugin.writing.values()), []).append((request, scan))
                else:
                    self._add_list(request, scan)
            else:
                mutation = wire.MUTATIONS[operation](plugin.name, data)
                request = PluginRequest(plugin, operation, reply, mutation.key[1], arrived)
                self._last_write += 1
                plugin.writing[request.key] = self._last_write
                self._writes.append((request, mutation, self._last_write))
                self._something_to_write.set()
        except Exception as error:
            if plugin is self._no_plugin and plugin.unanswered >= self._per_plugin:
                return self._refusals.busy(plugin, operation, reply)
            if not isinstance(error, KeyloftError):
                logger.exception("[KV] reading a request failed unexpectedly")
            self._note_error(plugin.name, operation, error)
            wait = self._refusals.add(plugin, reply, refusal(error))
        # Bad requests count, too, until they are answered: a flood of them is refused as cheaply as any other.
        plugin.unanswered += 1
        self._unanswered += 1
        if self._unanswered == 1:
            self._all_answered.clear()
        return wait

    def _route(self, subject: str) -> tuple[Plugin, str]:
        """The plugin and the operation of a request: both are in the subject, and nowhere else."""
        prefix = next((prefix for prefix in self._prefixes if subject.startswith(prefix)), "")
        name, dot, operation = subject[len(prefix) :].partition(".")
        if not dot or "." in operation or operation not in wire.OPERATIONS:
            raise InvalidSubject(
                f"a subject is <prefix>.<plugin>.<operation>, the operation one of {', '.join(wire.OPERATIONS)}"
            )
        rules.plugin_name(name)
        if len(self._routes) > limits.ROUTES:
            # Names cost their sender nothing: only plugins with unanswered requests are kept.
            self._routes.clear()
            self._plugins = {name: plugin for name, plugin in self._plugins.items() if plugin.unanswered}
        if (plugin := self._plugins.get(name)) is None:
            plugin = self._plugins[name] = Plugin(name, self.meters.of(name))
        self._routes[subject] = plugin, operation
        return plugin, operation

    def _add_list(self, request: PluginRequest, scan: Scan) -> None:
        self._lists.setdefault(request.plugin, deque()).append((request, scan))
        self._something_to_list.set()

    # Reading

    async def _answer(self) -> None:
        """Read the gets that arrived since the last read."""
        while True:
            await self._something_to_get.wait()
            self._something_to_get.clear()
            gets, self._gets = self._gets, []
            for first in range(0, len(gets), limits.GETS_PER_READ):
                await self._answer_gets(gets[first : first + limits.GETS_PER_READ])
                if self._refusals.has_refused_busy:
                    self._refusals.has_refused_busy = False
                    await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)  # see limits.REFUSALS_AT_ONCE

    async def _answer_gets(self, gets: list[PluginRequest]) -> None:
        try:
            # The first of them may have waited for a write.
            async with asyncio.timeout(self._deadline - (perf_counter() - gets[0].arrived)):
                records = await self._engine.read(*[Get(Space.PLUGINS, (get.plugin.name, get.key)) for get in gets])
        except Exception as error:
            await self._fail(gets, error)
            return
        # Most requests are gets, so here every call counts.
        now, is_debug = perf_counter(), logger.isEnabledFor(logging.DEBUG)
        replies = []
        for get, record in zip(gets, records, strict=True):
            seconds = now - get.arrived
            get.plugin.gets.add(seconds)
            if is_debug or seconds > limits.SLOW_SECONDS:
                self._log.operation("get", get.plugin.name, get.key, seconds, hit=record is not None)
            replies.append((get.reply, wire.got(record)))
        await self._reply(replies, [get.plugin for get in gets])

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

    async def _answer_list(self, request: PluginRequest, scan: Scan) -> None:
        try:
            # It may have waited for a write, or for other lists.
            async with asyncio.timeout(self._deadline - (perf_counter() - request.arrived)):
                [page] = await self._engine.read(scan)
        except Exception as error:
            await self._fail([request], error)
            return
        keys, truncated = listed(page, scan.limit - 1)
        self._count(request, perf_counter(), count=len(keys))
        await self._reply([(request.reply, wire.listed(keys, truncated, self.nats.max_payload))], [request.plugin])

    # Writing

    async def _write(self) -> None:
        while True:
            await self._something_to_write.wait()
            group = self._next_group()
            if not self._writes:
                self._something_to_write.clear()
            if not group:
                continue  # the writes were overdue, and are answered
            try:
                await self._commit(group)
            finally:
                for request, scan in self._end(group):
                    if scan is None:
                        self._gets.append(request)
                    else:
                        self._add_list(request, scan)
                if self._gets:
                    self._something_to_get.set()

    def _next_group(self) -> list[Write]:
        group: list[Write] = []
        size = 0
        while self._writes and len(group) < limits.GROUP_OPERATIONS and size < limits.GROUP_BYTES:
            write = self._writes.popleft()
            group.append(write)
            size += len(write[1].value) if type(write[1]) is Set else 0
        return group

    async def _commit(self, group: list[Write]) -> None:
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
                ttl = mutation.expire_in
                self._count(request, now, size=len(mutation.value), ttl=ttl and ttl // 1000)
            else:
                existed = next(found)
                data = wire.DELETED if existed else wire.NOT_DELETED
                self._count(request, now, deleted=existed)
            replies.append((request.reply, data))
        await self._reply(replies, [request.plugin for request, _, _ in group])

    async def _wait_for_stalled(self, committing: asyncio.Future[Any], group: list[Write]) -> None:
        """Answer what waits longer than the deadline; the next group can't begin before this one has ended."""
        await self._fail([request for request, _, _ in group], Stalled(f"{self._stalled}; it may still be carried out"))
        while not committing.done():
            late = perf_counter() - self._deadline
            overdue: list[Write] = []
            while self._writes and self._writes[0][0].arrived <= late:
                overdue.append(self._writes.popleft())
            waited = self._end(overdue) + self._unpark(late)
            error = Stalled(f"{self._stalled}; it was not carried out")
            await self._fail([request for request, _, _ in overdue] + [request for request, _ in waited], error)
            await asyncio.wait([committing], timeout=self._deadline / 4)
        with contextlib.suppress(Exception):
            committing.result()

    def _end(self, group: Iterable[Write]) -> list[Read]:
        """Writes have ended, with or without success; returns the reads that waited for them."""
        waited: list[Read] = []
        for request, _, number in group:
            if request.plugin.writing.get(request.key) == number:
                del request.plugin.writing[request.key]
            if self._parked:
                waited += self._parked.pop(number, ())
        return waited

    def _unpark(self, late: float) -> list[Read]:
        """The reads that have waited too long for a write."""
        overdue: list[Read] = []
        for number, reads in list(self._parked.items()):
            overdue += [read for read in reads if read[0].arrived <= late]
            self._parked[number] = [read for read in reads if read[0].arrived > late]
        return overdue

    # Answering

    def _count(self, request: PluginRequest, now: float, **details: int | None) -> None:
        """Count and log a request that was carried out."""
        seconds = now - request.arrived
        request.plugin.meter.durations[request.operation].add(seconds)
        if seconds > limits.SLOW_SECONDS or logger.isEnabledFor(logging.DEBUG):
            self._log.operation(request.operation, request.plugin.name, request.key, seconds, **details)

    async def _fail(self, requests: list[PluginRequest], error: Exception) -> None:
        """Answer requests that failed, all for one reason."""
        if not requests:
            return
        if isinstance(error, TimeoutError):  # of a read; a stalled write has more to say
            error = Stalled(self._stalled)
        self._log.failure(len(requests), error)
        data = refusal(error)
        for request in requests:
            self._note_error(request.plugin.name, request.operation, error, request.key)
        await self._reply([(request.reply, data) for request in requests], [request.plugin for request in requests])

    async def _reply(self, replies: Sequence[tuple[str, bytes]], plugins: Sequence[Plugin]) -> None:
        """Send replies to the requests that have a reply subject; all are answered then."""
        if wanted := [reply for reply in replies if reply[0]]:
            await self._log.sending(publish_all(self.nats, wanted))
        self._release(plugins)

    def _release(self, plugins: Sequence[Plugin]) -> None:
        """Requests of these plugins are answered: others can be accepted."""
        for plugin in plugins:
            plugin.unanswered -= 1
        self._unanswered -= len(plugins)
        if not self._unanswered:
            self._all_answered.set()

    def _note_error(self, plugin: str, operation: str, error: Exception, key: str = "") -> None:
        code = wire_code(error)
        self._count_error(plugin, operation, code)
        is_internal = code in (DatabaseError.code, KeyloftError.code)
        message = str(error) if isinstance(error, KeyloftError) else type(error).__name__
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            message = "the value was refused"  # the message has names of fields in it, which are the sender's data
        level = logging.ERROR if is_internal else logging.WARNING
        self._log.refusal(operation, plugin, key, code, message, level=level)

    def _count_error(self, plugin: str, operation: str, code: str, times: int = 1) -> None:
        self.meters.of(plugin).errors[code] += times
        self._count_errors(operation, code, times)

    # Tasks

    async def _forever(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a job that must never end: an error is logged, and the job goes on."""
        while True:
            try:
                await job()
            except Exception:
                logger.exception("[KV] a task of the service failed and goes on")
                await asyncio.sleep(limits.FAILED_TASK_SECONDS)

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
            if seconds > limits.SLOW_CLEANUP_SECONDS:
                logger.warning("[KV] Cleanup slow: %.2fs for %d keys", seconds, removed, extra=fields)

    def counted(self) -> list[EndpointStats]:
        meters = list(self.meters.plugins.values())
        found = super().counted()
        for endpoint in found:
            done = [meter.durations[endpoint.name] for meter in meters if endpoint.name in meter.durations]
            endpoint.num_requests = endpoint.num_errors + sum([histogram.count for histogram in done])
            endpoint.processing_time = int(sum([histogram.seconds for histogram in done]) * 1e9)
        return found
