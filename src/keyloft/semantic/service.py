"""Serves the semantic store on NATS: `db.semantic.<tenant>.<project>.<operation>`.

Each request is a task. Requests for one key are carried out in the order in which they arrived: a get sees the put
before it. A batch waits for the earlier writes of its keys, a list for the earlier writes of its project.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from time import perf_counter
from typing import Any

from msgspec import Struct
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import Busy, DatabaseError, InvalidSubject, InvalidValue, KeyloftError, Stalled, ValueTooLarge
from keyloft.nats.errors import wire_code
from keyloft.nats.log_rate import LogRate
from keyloft.nats.service import NatsService
from keyloft.semantic import keys, wire
from keyloft.semantic.intents import WriteRequest
from keyloft.semantic.keys import Project
from keyloft.semantic.store import SemanticStore
from keyloft.semantic.wire import ListRequest

logger = logging.getLogger(__name__)


class _Received(Struct, gc=False, kw_only=True):
    """A request that was accepted."""

    project: Project
    operation: str
    content: str | ListRequest | WriteRequest
    """What `wire.read` made of the message."""
    reply: str
    arrived: float


class SemanticService(NatsService):
    """Lets workflows keep their state by sending NATS messages.

    Example:
        async with SemanticService(nats, store):      # start … aclose
            await forever()
    """

    name = "keyloft-semantic"
    description = "semantic store: state of workflows"
    owner = "<tenant>.<project>"
    operations = keys.OPERATIONS

    def __init__(
        self,
        nats: Nats,
        store: SemanticStore,
        *,
        prefix: str = keys.PREFIX,
        reserved: Sequence[str] = (),
        queue: str = "keyloft",
        requests_per_tenant: int = limits.REQUESTS_PER_PLUGIN,
        requests_in_all: int = limits.REQUESTS,
        deadline: float = limits.DEADLINE_SECONDS,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        nats: A connected client, which the caller closes.
        store: The caller closes it, too.
        prefix: The subject before `.<tenant>.<project>.<operation>`.
        reserved: Prefixes of other services on this connection, to which no reply is sent.
        queue: Services of one queue group share the requests.
        requests_per_tenant: With so many requests of one tenant under way, the next one is answered BUSY.
        requests_in_all: The same for all tenants together.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        metadata: The metadata of this instance in `$SRV.PING`.
        """
        super().__init__(nats, [prefix], reserved=reserved, queue=queue, deadline=deadline, metadata=metadata)
        self.store = store
        self._per_tenant = requests_per_tenant
        self._in_all = requests_in_all
        self._under_way: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: dict[str, asyncio.Task[None]] = {}
        """The last write under way, by key."""
        self._log_rate = LogRate(limits.LOG_LINES_PER_SECOND, self._log_left_out)

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    # Accepting requests

    def _receive(self, subject: str, reply: str, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Accept a request, or refuse it; a returned coroutine must be awaited before the next one."""
        arrived = perf_counter()
        operation = ""
        try:
            if reply.startswith(self._reserved):
                # A reply there would be a request in the service's name, to any tenant's keys.
                reply = ""
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            project, operation = self._route(subject)
            if self._under_way[project.tenant] >= self._per_tenant or len(self._tasks) >= self._in_all:
                raise Busy("too many requests are under way, and this one was not carried out: try again later")
            content = wire.read(operation, project, data)
        except Exception as error:
            return self._publish(reply, self._refusal(operation, error, subject))
        self._accept(_Received(project=project, operation=operation, content=content, reply=reply, arrived=arrived))
        return None

    def _route(self, subject: str) -> tuple[Project, str]:
        """The project and the operation of a request: both are part of the subject alone."""
        [prefix] = self._prefixes
        words = subject[len(prefix) :].split(".")
        if len(words) != 3 or words[2] not in keys.OPERATIONS:
            raise InvalidSubject(
                f"a subject is {prefix}<tenant>.<project>.<operation>, "
                f"the operation one of {', '.join(keys.OPERATIONS)}"
            )
        return keys.checked_project(words[0], words[1]), words[2]

    def _accept(self, request: _Received) -> None:
        tenant, writing, written = request.project.tenant, self._writing, set[str]()
        match request.content:
            case WriteRequest(intents=intents):
                about = written = {intent.key for intent in intents}
            case str(key):
                about = {key}
            case ListRequest():
                about = {key for key in writing if key.startswith(request.project.prefix)}
        task = asyncio.create_task(self._carry_out(request, {writing[key] for key in about if key in writing}))
        self._under_way[tenant] += 1
        self._tasks.add(task)
        writing.update(dict.fromkeys(written, task))

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]
            for key in written:
                if writing.get(key) is task:
                    del writing[key]

        task.add_done_callback(done)

    # Carrying them out

    async def _carry_out(self, request: _Received, earlier: set[asyncio.Task[None]]) -> None:
        if earlier:
            _, unfinished = await asyncio.wait(earlier, timeout=self._left(request))
            if unfinished:
                await self._fail(request, Stalled(f"{self._stalled}; it was not carried out"))
                await asyncio.wait(unfinished)  # later requests wait for this task, and so for those before it
                return
        working = asyncio.ensure_future(self._answer(request))
        await asyncio.wait([working], timeout=self._left(request))
        if not working.done():
            is_write = isinstance(request.content, WriteRequest)
            if not is_write:
                working.cancel()
            await self._fail(request, Stalled(self._stalled + ("; it may still be carried out" if is_write else "")))
            await asyncio.gather(working, return_exceptions=True)  # later requests for the same key wait for its end
            return
        try:
            data = working.result()
        except Exception as error:
            await self._fail(request, error)
            return
        endpoint = self._endpoints[request.operation]
        endpoint.num_requests += 1
        endpoint.processing_time += int((perf_counter() - request.arrived) * 1e9)
        await self._publish(request.reply, data)

    async def _answer(self, request: _Received) -> bytes:
        match request.content:
            case str(key):
                return wire.entry(await self.store.get(key))
            case WriteRequest(intents=intents, request_id=request_id, is_batch=True):
                return wire.entries(await self.store.batch(intents, request_id=request_id), self.nats.max_payload)
            case WriteRequest() as write:
                return wire.entry(*await self.store.write(write))
            case ListRequest(prefix=prefix, values=values, limit=limit, after=after) as asked:
                found = self.store.list(prefix, values=values, limit=limit + 1, after=after)
                return await wire.listed(found, asked, self.nats.max_payload)

    def _left(self, request: _Received) -> float:
        return max(0.0, self._deadline - (perf_counter() - request.arrived))

    # Answering

    async def _fail(self, request: _Received, error: Exception) -> None:
        where = f"{request.project.tenant}/{request.project.name}"
        await self._publish(request.reply, self._refusal(request.operation, error, where))

    async def _publish(self, reply: str, data: bytes) -> None:
        if not reply:
            return
        try:
            await self.nats.publish(reply, data)
        except Exception as error:
            if self._log_rate.allows():
                logger.error("[KV] a reply could not be sent: %s", str(error) or type(error).__name__)

    def _refusal(self, operation: str, error: Exception, where: str) -> bytes:
        """Count and log an error; returns the reply for it."""
        reply, code = wire.refusal(error, self.nats.max_payload), wire_code(error)
        self._count_errors(operation, code)
        if code in ("VERSION_CONFLICT", "STALE_FENCE"):
            return reply  # the store itself has logged the conflict
        is_bug = not isinstance(error, KeyloftError)
        is_failure = is_bug or (isinstance(error, DatabaseError) and not isinstance(error, Busy))
        reason = str(error)
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            reason = "the value was refused"  # the full message names parts of the value; only the sender gets it
        if self._log_rate.allows():
            level = logging.ERROR if is_failure else logging.WARNING
            text = f"[KV] semantic {operation or 'request'} failed: %(where)s error=%(error_code)s %(reason)s"
            fields = {"operation": f"semantic_{operation}", "where": where, "error_code": code}
            logger.log(level, text, fields | {"reason": reason}, exc_info=error if is_bug else None, extra=fields)
        return reply

    def _log_left_out(self, lines: int) -> None:
        logger.warning("[KV] %d more semantic requests failed within a second", lines)
