"""Serves the semantic store on NATS: `db.semantic.<tenant>.<project>.<operation>`.

Each request is a task. Requests for one key are carried out in the order in which they came: a get sees the put before
it. A batch waits for the writes of its keys that came before it, a list for those of its project.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from msgspec import Struct
from nats.aio.client import Client as Nats
from nats.aio.subscription import Subscription

import keyloft
from keyloft import limits
from keyloft.errors import Busy, DatabaseError, InvalidSubject, InvalidValue, KeyloftError, Stalled, ValueTooLarge
from keyloft.nats.connection import drain, subscribe
from keyloft.nats.discovery import Discovery, Endpoint
from keyloft.nats.errors import wire_code
from keyloft.nats.log_rate import LogRate
from keyloft.semantic import keys, wire
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.planning import Delete, Put
from keyloft.semantic.store import SemanticStore
from keyloft.semantic.wire import Listing, Spot

logger = logging.getLogger(__name__)

NAME: Final = "keyloft-semantic"
_WRITES: Final = ("put", "delete", "batch")
_LINES_PER_SECOND: Final = 20
_MOST_UNTOLD: Final = 1000
"""So many refusals may wait to be sent before no further request is read."""


class _Request(Struct, gc=False):
    """A message that was taken in."""

    spot: Spot
    operation: str
    asked: Any
    reply: str
    came: float


class SemanticService:
    """Lets workflows keep their state by sending NATS messages.

    Example:
        service = SemanticService(nats, SemanticStore(kv))
        await service.start()
        …
        await service.stop()      # after this the connection and the store can be closed
    """

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
        nats: A connected client; it stays the caller's to close.
        store: It stays the caller's to close, too.
        prefix: The subject before `.<tenant>.<project>.<operation>`.
        reserved: Prefixes of other services on this connection: no answer goes there.
        queue: Services of one queue group share the requests.
        requests_per_tenant: How many of one tenant are taken before one is answered BUSY.
        requests_in_all: How many of all tenants are taken before one is answered BUSY.
        deadline: Seconds after which a request is answered with an error if the database has not answered.
        metadata: What `$SRV.PING` is to tell of this instance.
        """
        self.nats = nats
        self.store = store
        self._prefix = f"{prefix}."
        self._reserved = (self._prefix, *[f"{other}." for other in reserved])
        self._queue = queue
        self._per_tenant = requests_per_tenant
        self._in_all = requests_in_all
        self._deadline = deadline
        self._subscriptions: list[Subscription] = []
        self._taken: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: dict[Spot, dict[str, asyncio.Task[None]]] = {}
        self._refusals: deque[tuple[str, bytes]] = deque()
        self._refusing: asyncio.Task[None] | None = None
        self._log_rate = LogRate(_LINES_PER_SECOND, self._tell_unsaid)
        self._endpoints: dict[str, Endpoint] = {
            operation: Endpoint(operation, f"{self._prefix}*.*.{operation}") for operation in keys.OPERATIONS
        }
        self._others = Endpoint("", "")
        self._discovery = Discovery(
            nats,
            name=NAME,
            version=keyloft.__version__,
            description="state that says what it means",
            queue=queue,
            metadata=metadata or {},
            endpoints=self._endpoints.values,
        )

    async def start(self) -> None:
        """Begin to serve."""
        self._subscriptions = await subscribe(self.nats, [self._prefix], self._queue, self._receive)
        await self._discovery.start()
        logger.info("[KV] serving %s<tenant>.<project>.<operation>", self._prefix)

    async def stop(self) -> None:
        """Take no more requests, answer those that were taken, then return. A second call does nothing."""
        subscriptions, self._subscriptions = self._subscriptions, []
        await drain(self.nats, subscriptions, self._deadline)
        while self._tasks or self._refusing:
            await asyncio.wait([*self._tasks, *([self._refusing] if self._refusing else [])])
        if subscriptions:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._discovery.stop(), self._deadline)

    # Taking requests in

    def _receive(self, subject: str, reply: str, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Take a request, or refuse it; what is returned is to be awaited before the next one."""
        came = perf_counter()
        operation = ""
        try:
            if reply.startswith(self._reserved):
                # Answering, be it with a refusal, would be a request in our name, to anybody's keys.
                reply = ""
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            spot, operation = self._route(subject)
            if self._taken[spot.tenant] >= self._per_tenant or len(self._tasks) >= self._in_all:
                raise Busy("too many requests are under way, and this one was not carried out: try again later")
            asked = wire.READERS[operation](spot, data)
        except Exception as error:
            self._note_error(operation, error, subject)
            return self._refuse(reply, wire.refusal(error, self.nats.max_payload))
        self._take(_Request(spot, operation, asked, reply, came))
        return None

    def _route(self, subject: str) -> tuple[Spot, str]:
        """Whose request this is and what it asks for: both come from the subject alone."""
        words = subject[len(self._prefix) :].split(".")
        if len(words) != 3 or words[2] not in keys.OPERATIONS:
            raise InvalidSubject(
                f"a subject is {self._prefix}<tenant>.<project>.<operation>, "
                f"the operation one of {', '.join(keys.OPERATIONS)}"
            )
        return Spot(keys.tenant_id(words[0]), keys.project_id(words[1])), words[2]

    def _take(self, request: _Request) -> None:
        writing = self._writing.setdefault(request.spot, {})
        paths = _paths(request)
        earlier = {task for path, task in writing.items() if paths is None or path in paths}
        task = asyncio.create_task(self._carry_out(request, earlier))
        self._taken[request.spot.tenant] += 1
        self._tasks.add(task)
        written = paths if paths is not None and request.operation in _WRITES else set()
        for path in written:
            writing[path] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._taken[request.spot.tenant] -= 1
            if not self._taken[request.spot.tenant]:
                del self._taken[request.spot.tenant]
            for path in written:
                if writing.get(path) is task:
                    del writing[path]
            if not writing and self._writing.get(request.spot) is writing:
                del self._writing[request.spot]

        task.add_done_callback(done)

    # Carrying them out

    async def _carry_out(self, request: _Request, earlier: set[asyncio.Task[None]]) -> None:
        stalled = f"the database has not answered within {self._deadline:g} s"
        if earlier:
            _, unfinished = await asyncio.wait(earlier, timeout=self._left(request))
            if unfinished:
                await self._fail(request, Stalled(f"{stalled}; it was not carried out"))
                await asyncio.wait(unfinished)  # whoever comes next waits for us, and so for them
                return
        working = asyncio.ensure_future(self._answer(request))
        await asyncio.wait([working], timeout=self._left(request))
        if not working.done():
            if request.operation in _WRITES:
                await self._fail(request, Stalled(f"{stalled}; it may still be carried out"))
            else:
                working.cancel()
                await self._fail(request, Stalled(stalled))
            # Whatever comes after it for the same key waits for its end.
            await asyncio.wait([working])
            if not working.cancelled():
                working.exception()
            return
        try:
            data = working.result()
        except Exception as error:
            await self._fail(request, error)
            return
        endpoint = self._endpoints[request.operation]
        endpoint.requests += 1
        endpoint.seconds += perf_counter() - request.came
        await self._publish(request.reply, data)

    async def _answer(self, request: _Request) -> bytes:
        asked, store = request.asked, self.store
        match request.operation:
            case "get":
                return wire.entry(await store.get(asked))
            case "put":
                put, request_id = asked
                return wire.entry(await _put(store, put, request_id))
            case "delete":
                delete, request_id = asked
                return wire.entry(await _delete(store, delete, request_id))
            case "batch":
                operations, request_id = asked
                return wire.entries(await store.batch(operations, request_id=request_id), self.nats.max_payload)
        return await self._list(asked)

    async def _list(self, asked: Listing) -> bytes:
        reply = wire.ListReply(self.nats.max_payload, values=asked.values)
        entries = self.store.list(asked.prefix, values=asked.values, limit=asked.limit + 1, after=asked.after)
        async for entry in entries:
            if len(reply) == asked.limit or not reply.add(entry):
                return reply.data(truncated=True)
        return reply.data(truncated=False)

    def _left(self, request: _Request) -> float:
        return max(0.0, self._deadline - (perf_counter() - request.came))

    # Answering

    async def _fail(self, request: _Request, error: Exception) -> None:
        self._note_error(request.operation, error, f"{request.spot.tenant}/{request.spot.project}")
        await self._publish(request.reply, wire.refusal(error, self.nats.max_payload))

    def _refuse(self, reply: str, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Tell who was refused; the next message waits for that only when too many are to be told."""
        if reply:
            self._refusals.append((reply, data))
            if self._refusing is None:
                self._refusing = asyncio.create_task(self._tell_refused())
            if len(self._refusals) >= _MOST_UNTOLD:
                return self._told(self._refusing)
        return None

    async def _told(self, refusing: asyncio.Task[None]) -> None:
        await asyncio.wait([refusing])

    async def _tell_refused(self) -> None:
        try:
            while self._refusals:
                await self._publish(*self._refusals.popleft())
        finally:
            self._refusing = None

    async def _publish(self, reply: str, data: bytes) -> None:
        if not reply:
            return  # nobody waits for it
        try:
            await self.nats.publish(reply, data)
        except Exception as error:
            if self._log_rate.allows():
                logger.error("[KV] a reply could not be sent: %s", str(error) or type(error).__name__)

    def _note_error(self, operation: str, error: Exception, where: str) -> None:
        code = wire_code(error)
        endpoint = self._endpoints.get(operation, self._others)
        endpoint.requests += 1
        endpoint.errors += 1
        endpoint.last_error = code
        if code in ("VERSION_CONFLICT", "STALE_FENCE"):
            return  # of conflicts the store itself has told
        ours = not isinstance(error, KeyloftError) or (isinstance(error, DatabaseError) and not isinstance(error, Busy))
        told = str(error)
        if isinstance(error, InvalidValue) and not isinstance(error, ValueTooLarge):
            told = "the value was refused"  # where it is wrong is told by the names in it, to its sender alone
        if self._log_rate.allows():
            logger.log(
                logging.ERROR if ours else logging.WARNING,
                "[KV] semantic %s failed: %s error=%s %s",
                operation or "request",
                where,
                code,
                told,
                exc_info=None if isinstance(error, KeyloftError) else error,
                extra={"operation": f"semantic_{operation}", "where": where, "error_code": code},
            )

    def _tell_unsaid(self, lines: int) -> None:
        logger.warning("[KV] %d more semantic requests failed within a second", lines)


async def _put(store: SemanticStore, put: Put, request_id: str | None) -> Envelope:
    return await store.put(
        put.key,
        put.value,
        expected_version=put.expected_version,
        writer=put.writer,
        semantics=put.semantics,
        request_id=request_id,
        spec_ref=put.spec_ref,
        fence=put.fence,
    )


async def _delete(store: SemanticStore, delete: Delete, request_id: str | None) -> Envelope | None:
    return await store.delete(
        delete.key,
        expected_version=delete.expected_version,
        writer=delete.writer,
        request_id=request_id,
        spec_ref=delete.spec_ref,
        fence=delete.fence,
    )


def _paths(request: _Request) -> set[str] | None:
    """The keys that a request is about; None for a whole project."""
    match request.operation:
        case "get":
            return {request.asked}
        case "put" | "delete":
            return {request.asked[0].key}
        case "batch":
            return {operation.key for operation in request.asked[0]}
    return None
