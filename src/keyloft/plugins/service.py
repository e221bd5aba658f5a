"""Serves the plugins' storage on NATS: `db.kv.<plugin>.<operation>`.

The path of a message: `_receive` accepts or refuses it. Gets gather for `_answer_gets`, which reads all gets of one
iteration of the event loop at once; writes gather for `_commit_writes`, which commits them together. A get of a key
that is being written waits for that write, so that a plugin reads what it published. `_receive` never awaits: no
further message is read before it has returned. Reading waits only while too many refusals are unsent. Of a plugin with
too many unanswered requests, `_receive` sees one message per read from the socket; those that follow are refused
unread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from nats.aio.client import Client as Nats
from nats.micro.service import EndpointStats

from keyloft import limits
from keyloft.core.engine import write
from keyloft.core.records import Committed, Set
from keyloft.errors import Busy, InvalidSubject, InvalidValue, KeyloftError, Stalled, ValueTooLarge
from keyloft.nats.connection import cancel
from keyloft.nats.errors import refusal, wire_code
from keyloft.nats.messages import Handled, publish_all, publish_to_all
from keyloft.nats.service import NatsService
from keyloft.plugins import rules, wire
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.meters import OTHER, Meter, Meters
from keyloft.plugins.requests import Plugin, PluginRequest, PluginWrite, WriteQueue, end
from keyloft.plugins.store import BotDatabase, listed

logger = logging.getLogger(__name__)

_TOO_MANY: Final = "too many requests are unanswered, and this one was not carried out: try again later"
_BUSY: Final = refusal(Busy(_TOO_MANY))


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
        self._unanswered = 0
        self._most_per_plugin = requests_per_plugin
        self._most_in_all = requests_in_all
        self._cleanup_every = cleanup_every
        self._log = OperationLog(logger)
        self._tasks: list[asyncio.Task[None]] = []
        self._plugins: dict[str, Plugin] = {}
        self._routes: dict[str, tuple[Plugin, str, wire.Reader]] = {}
        self._reserved_bytes = tuple([prefix.encode() for prefix in self._reserved])
        self._no_plugin = Plugin(OTHER, Meter())
        """Stands for the sender of a request whose subject names no plugin."""
        self._gets: list[PluginRequest] = []
        self._gets_arrived = asyncio.Event()
        self._lists: dict[Plugin, deque[PluginRequest]] = {}
        self._lists_arrived = asyncio.Event()
        self._writes = WriteQueue()
        self._refusals: deque[tuple[PluginRequest, bytes]] = deque()
        self._busy_replies: dict[tuple[Plugin, str], list[bytes]] = {}
        """The reply subjects to which BUSY is sent, by plugin and operation."""
        self._is_flooded = False
        self._refusals_arrived = asyncio.Event()

    @property
    def unanswered(self) -> int:
        """How many requests are accepted and not yet answered."""
        return self._unanswered

    @property
    def unsent_refusals(self) -> int:
        """How many refusals wait to be sent, BUSY not counted."""
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
        steps = (self._answer_gets, self._answer_next_list, self._commit_writes, self._send_refusals, self._clean_up)
        self._tasks = [
            asyncio.create_task(self._forever(step), name=f"keyloft plugins: {step.__name__}") for step in steps
        ]

    async def _forever(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Repeat a step, whatever happens: an error is logged."""
        while True:
            try:
                await step()
            except Exception:
                logger.exception("[KV] a task of the service failed and goes on")
                await asyncio.sleep(limits.FAILED_TASK_SECONDS)

    async def _finish(self) -> None:
        while self._unanswered:  # noqa: ASYNC110 (an event would have to be set and cleared in the path of each request)
            await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)
        self._refusals_arrived.set()  # or `_send_refusals` would wait for the first one
        await self._send_refusals()
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
        is_reserved = reply.startswith(self._reserved)
        try:
            plugin, operation, read = self._routes.get(subject) or self._route(subject)
            if plugin.unanswered >= self._most_per_plugin or self._unanswered >= self._most_in_all:
                return self._refuse_busy(plugin, operation, reply)
            if is_reserved:
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            content = read(plugin.name, data)
            if operation in ("set", "delete"):
                self._writes.add(PluginWrite(plugin, operation, reply, content, arrived))
            else:
                request = PluginRequest(plugin, operation, reply, content, arrived)
                if plugin.writing and (before := request.write_before()):
                    before.waiting.append(request)
                else:
                    self._queue_read(request)
        except Exception as error:
            if plugin is self._no_plugin and plugin.unanswered >= self._most_per_plugin:
                return self._refuse_busy(plugin, operation, reply)
            if not isinstance(error, KeyloftError):
                logger.exception("[KV] reading a request failed unexpectedly")
            # An answer to a reserved subject would be a request in the service's name, to any plugin's keys.
            request = PluginRequest(plugin, operation, "" if is_reserved else reply, None, arrived)
            self._report_error(request, error)
            self._refusals.append((request, refusal(error)))
            self._refusals_arrived.set()
            wait = self._wait_until_sent() if self._too_much_is_unsent() else None
        # Bad requests count, too, until they are answered: a flood of them is refused as cheaply as any other.
        plugin.unanswered += 1
        self._unanswered += 1
        return wait

    def _route(self, subject: str) -> tuple[Plugin, str, wire.Reader]:
        """The plugin, the operation and its reader: a subject names them, and nothing else does."""
        prefix = next((prefix for prefix in self._prefixes if subject.startswith(prefix)), "")
        name, dot, operation = subject[len(prefix) :].partition(".")
        if not dot or operation not in wire.READERS:
            operations = ", ".join(wire.OPERATIONS)
            raise InvalidSubject(f"a subject is <prefix>.<plugin>.<operation>, the operation one of {operations}")
        rules.plugin_name(name)
        if len(self._routes) > limits.ROUTES:
            # Names cost their sender nothing: only plugins with unanswered requests are kept.
            self._routes.clear()
            self._plugins = {name: plugin for name, plugin in self._plugins.items() if plugin.unanswered}
        if (plugin := self._plugins.get(name)) is None:
            plugin = self._plugins[name] = Plugin(name, self.meters.of(name))
        route = self._routes[subject] = plugin, operation, wire.READERS[operation]
        return route

    def _queue_read(self, request: PluginRequest) -> None:
        if request.operation == "get":
            self._gets.append(request)
            self._gets_arrived.set()
        else:
            self._lists.setdefault(request.plugin, deque()).append(request)
            self._lists_arrived.set()

    # Reading

    async def _answer_gets(self) -> None:
        """Answer the gets that arrived since the last time."""
        await self._gets_arrived.wait()
        self._gets_arrived.clear()
        gets, self._gets = self._gets, []
        for first in range(0, len(gets), limits.GETS_PER_READ):
            some = gets[first : first + limits.GETS_PER_READ]
            await self._answer(some, self._get_replies(some))
            if self._is_flooded:
                self._is_flooded = False
                await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)  # see limits.REFUSALS_AT_ONCE

    async def _get_replies(self, gets: Sequence[PluginRequest]) -> list[bytes]:
        records = await self._read(gets)
        # Most requests are gets, so here every call counts.
        now, is_debug, slow = perf_counter(), logger.isEnabledFor(logging.DEBUG), limits.SLOW_SECONDS
        for get, record in zip(gets, records, strict=True):
            seconds = now - get.arrived
            get.plugin.gets.add(seconds)
            if is_debug or seconds > slow:
                self._log.operation("get", get.plugin.name, get.key, seconds, hit=record is not None)
        return list(map(wire.got, records))

    async def _answer_next_list(self) -> None:
        """Answer one list, of each plugin in turn: a list may take long."""
        await self._lists_arrived.wait()
        plugin = next(iter(self._lists))
        queue = self._lists.pop(plugin)
        request = queue.popleft()
        if queue:
            self._lists[plugin] = queue  # at the end
        if not self._lists:
            self._lists_arrived.clear()
        await self._answer([request], self._list_replies(request))

    async def _list_replies(self, request: PluginRequest) -> list[bytes]:
        [page] = await self._read([request])
        keys, truncated = listed(page, request.content.limit - 1)
        self._report_done(request, perf_counter(), count=len(keys))
        return [wire.listed(keys, truncated, self.nats.max_payload)]

    async def _read(self, requests: Sequence[PluginRequest]) -> Any:
        # The first of them may have waited for a write, or for other lists.
        async with asyncio.timeout(self._deadline - (perf_counter() - requests[0].arrived)):
            return await self._engine.read(*[request.content for request in requests])

    # Writing

    async def _commit_writes(self) -> None:
        """Commit the writes that arrived during the last commit."""
        group = await self._writes.next_group()
        committing = asyncio.create_task(write(self._engine, *[request.content for request in group]))
        try:
            await self._answer(group, self._write_replies(group, committing))
            # Stalled: the next group can't begin before this one has ended, but nothing waits beyond the deadline.
            while not committing.done():
                if overdue := self._writes.overdue(group, perf_counter() - self._deadline):
                    await self._fail(overdue, Stalled(f"{self._stalled}; it was not carried out"))
                await asyncio.wait([committing], timeout=self._deadline / 4)
            committing.exception()  # asyncio logs an exception that was never retrieved
        finally:
            for read in end(group):
                self._queue_read(read)

    async def _write_replies(
        self, group: Sequence[PluginRequest], committing: "asyncio.Task[Committed]"
    ) -> list[bytes]:
        """The replies to writes. None of them has a condition, so they fail together or not at all."""
        await asyncio.wait([committing], timeout=self._deadline)
        if not committing.done():
            raise Stalled(f"{self._stalled}; it may still be carried out")
        found, now = iter(committing.result().found), perf_counter()
        replies = []
        for request in group:
            if type(request.content) is Set:
                ttl = request.content.expire_in
                self._report_done(request, now, size=len(request.content.value), ttl=ttl and ttl // 1000)
                replies.append(wire.STORED)
            else:
                existed = next(found)
                self._report_done(request, now, deleted=existed)
                replies.append(wire.DELETED if existed else wire.NOT_DELETED)
        return replies

    # Answering

    async def _answer(self, requests: Sequence[PluginRequest], replies: Awaitable[Sequence[bytes]]) -> None:
        """Wait for the replies to requests and send them, or one error to all."""
        try:
            data = await replies
        except Exception as error:
            await self._fail(requests, error)
        else:
            await self._reply(requests, data)

    def _report_done(self, request: PluginRequest, now: float, **details: int | None) -> None:
        """Count and log a request that was carried out."""
        seconds = now - request.arrived
        request.plugin.meter.durations[request.operation].add(seconds)
        if seconds > limits.SLOW_SECONDS or logger.isEnabledFor(logging.DEBUG):
            self._log.operation(request.operation, request.plugin.name, request.key, seconds, **details)

    async def _fail(self, requests: Sequence[PluginRequest], error: Exception) -> None:
        """Answer requests that failed, all for one reason."""
        if isinstance(error, TimeoutError):  # of a read; a stalled write has more to say
            error = Stalled(self._stalled)
        self._log.failure(len(requests), error)
        for request in requests:
            self._report_error(request, error)
        await self._reply(requests, [refusal(error)] * len(requests))

    async def _reply(self, requests: Sequence[PluginRequest], replies: Sequence[bytes]) -> None:
        """Send replies to the requests that have a reply subject; all are answered then."""
        if wanted := [(request.reply, data) for request, data in zip(requests, replies, strict=True) if request.reply]:
            await self._log.sending(publish_all(self.nats, wanted))
        for request in requests:
            request.plugin.unanswered -= 1
        self._unanswered -= len(requests)

    def _report_error(self, request: PluginRequest, error: Exception) -> None:
        message = str(error) if isinstance(error, KeyloftError) else type(error).__name__
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            message = "the value was refused"  # the message has names of fields in it, which are the sender's data
        self._report_refusals(request.plugin.name, request.operation, request.key, wire_code(error), message)

    def _report_refusals(self, plugin: str, operation: str, key: str, code: str, message: str, times: int = 1) -> None:
        """Count and log requests that were refused or failed for the same reason."""
        self.meters.of(plugin).errors[code] += times
        self._count_errors(operation, code, times)
        self._log.refusal(operation, plugin, key, code, message, times=times)

    # Refusing, so that a flood of bad requests delays no other plugin's answers

    def _refuse_busy(self, plugin: Plugin, operation: str, reply: str) -> Handled:
        """Answer BUSY to a request, and to all that follow it before the next iteration of the event loop."""
        replies = self._busy_replies.setdefault((plugin, operation), [])
        replies.append(reply.encode())
        self._is_flooded = True
        self._refusals_arrived.set()
        return self._wait_until_sent() if self._too_much_is_unsent() else replies

    def _too_much_is_unsent(self) -> bool:
        return len(self._refusals) >= limits.UNSENT_PLUGIN_REFUSALS or self._many_bytes_are_unsent()

    def _many_bytes_are_unsent(self) -> bool:
        return self.nats.is_connected and self.nats.pending_data_size > limits.UNSENT_BYTES

    async def _wait_until_sent(self) -> None:
        """Read no further for a while: NATS slows down the senders of what is not read."""
        while self._too_much_is_unsent():  # noqa: ASYNC110
            await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)

    async def _send_refusals(self) -> None:
        """Send refusals; not together with answers, which may have to wait for the database."""
        await self._refusals_arrived.wait()
        self._refusals_arrived.clear()
        while self._busy_replies or self._refusals:
            await self._send_busy()
            some = [self._refusals.popleft() for _ in range(min(len(self._refusals), limits.REFUSALS_AT_ONCE))]
            await self._reply([request for request, _ in some], [data for _, data in some])
            if self._refusals:
                await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)
            # If nats-py's buffer were full of refusals, each answer would wait until all of them are sent.
            while self._many_bytes_are_unsent():  # noqa: ASYNC110
                await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)

    async def _send_busy(self) -> None:
        busy, self._busy_replies = self._busy_replies, {}
        wanted: list[bytes] = []
        for (plugin, operation), replies in busy.items():
            self._report_refusals(plugin.name, operation, "", Busy.code, _TOO_MANY, len(replies))
            wanted += [reply for reply in replies if reply and not reply.startswith(self._reserved_bytes)]
        if wanted:
            await self._log.sending(publish_to_all(self.nats, wanted, _BUSY))

    # Cleaning up and counting

    async def _clean_up(self) -> None:
        await asyncio.sleep(self._cleanup_every)
        began = perf_counter()
        try:
            removed = await self.db.kv_cleanup_expired()
        except KeyloftError as error:
            logger.error("[KV] Cleanup error (%s): %s", error.code, error, exc_info=True)
            return
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
