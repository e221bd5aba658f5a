"""What the services on NATS share: starting, stopping, and answering `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`."""

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import (
    EndpointInfo,
    EndpointStats,
    Service,
    ServiceConfig,
    ServiceInfo,
    ServicePing,
    ServiceStats,
    ServiceVerb,
    control_subject,
)

import keyloft
from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine
from keyloft.errors import Busy, InvalidArgument, InvalidSubject, KeyloftError, NoService
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.compatibility import check_nats_py
from keyloft.nats.connection import servers
from keyloft.nats.direct_requests import DirectRequest
from keyloft.nats.events import EVENTS, WATCH
from keyloft.nats.intake import Intake
from keyloft.nats.messages import NatsConnection
from keyloft.nats.meters import OTHER, ServiceMeters
from keyloft.nats.overload import OverloadLog
from keyloft.nats.payloads import to_json
from keyloft.nats.publications import Watchable
from keyloft.nats.publisher import EventPublisher
from keyloft.nats.refused_operations import RefusedOperation
from keyloft.nats.reporting import EventSubject, Route
from keyloft.nats.requests import Operation, Request
from keyloft.nats.schemas import Messages
from keyloft.nats.service_streams import ServiceStream, ServiceStreams
from keyloft.nats.watch_operation import WatchOperation

# nats-py calls datetime.utcnow(), which Python 3.12 deprecates; a program that makes warnings errors could not serve.
warnings.filterwarnings("ignore", r"datetime\.datetime\.utcnow", DeprecationWarning, r"nats\.micro")

Metadata: TypeAlias = Mapping[str, str] | Callable[[], Awaitable[Mapping[str, str]]]
"""What an instance says about itself to `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`. A function is called each time."""

_DiscoveryAnswer: TypeAlias = ServicePing | ServiceInfo | ServiceStats


class NatsService(AsyncClosing):
    """A service that answers the requests below some prefixes."""

    name: ClassVar[str]
    description: ClassVar[str]
    subject_names: ClassVar[Sequence[str]]
    """What a subject names between its prefix and the operation; the first of them is the owner."""
    messages: ClassVar[Mapping[str, Messages]]
    """What the requests and replies of each operation look like."""

    def __init__(
        self,
        nats: Nats,
        prefixes: Iterable[str],
        operations: Sequence[Operation],
        watchable: Watchable,
        *,
        reserved: Iterable[str],
        queue: str,
        deadline: float,
        bounds: IntakeBounds,
        meters: ServiceMeters,
        metadata: Metadata | None,
        lease_seconds: float = limits.LEASE_SECONDS,
    ) -> None:
        self.nats = nats
        self.meters = meters
        self._prefixes = tuple([f"{prefix}." for prefix in prefixes])
        self._reserved = (*self._prefixes, *[f"{prefix}." for prefix in reserved])
        self._watchable = watchable
        self._watches = {prefix: WatchOperation(nats, prefix, watchable, lease_seconds) for prefix in self._prefixes}
        """The operation `watch` by prefix: its events have the prefix of the request."""
        operations = [*operations, self._watches[self._prefixes[0]]]
        self._operations: dict[str, Operation] = {operation.name: operation for operation in operations}
        self._queue = queue
        self._deadline = deadline
        self.bounds = bounds
        self._metadata: Metadata = metadata or {}
        self._state = "not started"
        self._subscriptions: list[Subscription] = []
        self.intake: Intake | None = None
        """Takes in the requests, from `start` to `aclose`; for tests, as `publisher`."""
        self.publisher: EventPublisher | None = None
        self._streams: ServiceStreams | None = None
        self._discovery: _Discovery | None = None
        self._logger = logging.getLogger(type(self).__module__)
        self._overload = OverloadLog(self._logger, self.subject_names[0])
        self._subject_form = ".".join([f"<{name}>" for name in (*self.subject_names, "operation")])
        wildcards = ".".join("*" * len(self.subject_names))
        # The endpoint without a name counts the requests whose subject names no operation.
        self._endpoints = {
            name: EndpointStats(name, f"{self._prefixes[0]}{wildcards}.{name}", queue, 0, 0, 0, 0)
            for name in (*self._operations, "")
        }

    def __repr__(self) -> str:
        subjects = ", ".join([prefix.removesuffix(".") for prefix in self._prefixes])
        return f"<{type(self).__name__} of {subjects} at {servers(self.nats)}, {self._state}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    @property
    def unanswered(self) -> int:
        """How many requests are accepted and not yet answered."""
        return 0 if self.intake is None else self.intake.unanswered

    async def start(self) -> None:
        """Begin to serve. The database is opened if it is not yet open.

        Raises:
            DatabaseError: The database can't be opened.
            InvalidArgument: The client is not connected, or the service has started already.
            IncompatibleLibrary: The installed nats-py can't be used.
        """
        check_nats_py()
        if self.intake is not None:
            raise InvalidArgument("this service has started already")
        if not (self.nats.is_connected or self.nats.is_reconnecting):
            raise InvalidArgument("nats: expected a connected client: call `await nats.connect(…)` before `start`")
        engine = await self._engine()
        self.intake = intake = Intake(
            self.nats,
            engine,
            route=self._route,
            words=len(self.subject_names) + 1,
            reporter=self,
            meters=self.meters,
            reserved=self._reserved,
            deadline=self._deadline,
            bounds=self.bounds,
        )
        for prefix in self._prefixes:
            # No bounds in nats-py, which would drop what exceeds them without a word: the intake has its own.
            subscription = await self.nats.subscribe(
                f"{prefix}>", queue=self._queue, cb=self._receive_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
            self._subscriptions.append(subscription)
            if isinstance(self.nats, NatsConnection):
                self.nats.handle(subscription, intake.receive, intake.refuses)
        self._streams = ServiceStreams(engine, intake, self._watchable)
        self.publisher = EventPublisher(self.nats, engine, intake, self._watchable, self.name, self.meters)
        self.publisher.start()
        for watch in self._watches.values():
            watch.serve(engine, self.publisher)
        self._discovery = _Discovery(self)
        await self._discovery.start()
        # nats-py sends a ping before what is in its buffer. The first flush sends the subscriptions, the second waits.
        for _ in range(2):
            await self.nats.flush()
        self._state = "serving"
        refused = self.nats.refused if isinstance(self.nats, NatsConnection) else ()
        served = [f"{prefix}{self._subject_form}" for prefix in self._prefixes if f"{prefix}>".lower() not in refused]
        if served:
            self._logger.info("[KV] serving %s", ", ".join(served))

    # Requests that don't arrive over NATS

    def hand_in(
        self,
        names: Sequence[str],
        operation: str,
        data: bytes,
        answer: Callable[[bytes], None],
        stream: ServiceStream | None = None,
    ) -> DirectRequest:
        """Take in a request as if it had arrived over NATS: the same bounds, turns, order, deadline and counts.

        NATS may be away meanwhile.

        Args:
            names: What a subject names between its prefix and the operation: a plugin, or a tenant and a project.
            operation: What is asked for.
            data: The message.
            answer: Called with the reply, later, unless the request is withdrawn before.
            stream: Gets the events of a `watch`, instead of a subject.

        Raises:
            NoService: The service has not started, or ends.
            Busy: Too much is waiting.
            InvalidSubject: There is no such operation.
            KeyloftError: There can't be such an owner.
        """
        intake = self._accepting()
        self._named(operation)
        self._owner_of(names)
        subject = ".".join([self._prefixes[0].removesuffix("."), *names, operation])
        return intake.hand_in(subject.encode(), data, answer, stream)

    def event_stream(self) -> ServiceStream:
        """A stream of events, for `hand_in`; the caller closes it.

        Raises:
            NoService: The service has not started, or ends.
        """
        self._accepting()
        assert self._streams is not None, "made with the intake"
        return ServiceStream(self._streams)

    def _accepting(self) -> Intake:
        if self.intake is None or self._state != "serving":
            raise NoService(f"this service is {self._state}: try again soon")
        return self.intake

    async def aclose(self) -> None:
        """Accept no more requests, answer those that were accepted, then return. A second call does nothing."""
        self._state = "ending"
        if self._streams is not None:
            self._streams.end()
        subscriptions, self._subscriptions = self._subscriptions, []
        # A drain that takes too long is not cancelled: nats-py would fail at an answer that arrives later. Without a
        # connection nothing more arrives: the server gives the requests to another instance, or to none.
        if draining := [asyncio.ensure_future(one.drain()) for one in subscriptions]:  # type: ignore[no-untyped-call]
            await asyncio.wait(draining, timeout=self._deadline)
        if isinstance(self.nats, NatsConnection):
            for subscription in subscriptions:
                self.nats.handle(subscription, None)
        if self.publisher is not None:
            await self.publisher.aclose()
        if self.intake is not None:
            remark = asyncio.get_running_loop().call_later(limits.CLOSING_REMARK_SECONDS, self._log_waiting)
            try:
                left = await self.intake.close()
            finally:
                remark.cancel()
            self.intake = None
            self._overload.close()
            if left:
                self._logger.error("[KV] stopped; the database does not answer, %d requests are left behind", left)
            else:
                self._logger.info("[KV] stopped; all accepted requests are answered")
        self._state = "closed"
        discovery, self._discovery = self._discovery, None
        if discovery is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(discovery.stop(), self._deadline)

    stop = aclose

    def _log_waiting(self) -> None:
        text = "[KV] stopping: the database has not carried out %d requests yet; waiting up to %g s for it"
        self._logger.warning(text, self.unanswered, limits.CLOSING_SECONDS)

    async def _receive_message(self, message: Msg) -> None:
        """Pass on a message of a plain client of nats-py."""
        if self.intake is None:
            return
        handled = self.intake.receive(message.subject.encode(), message.reply.encode(), message.data)
        if isinstance(handled, Coroutine):
            await handled

    def _route(self, subject: str) -> Route:
        """What a subject means: identity comes from it alone, never from the message."""
        words = len(self.subject_names)
        if f".{EVENTS}." in subject:
            first, *_, before_id, _ = subject.rsplit(".", words + 2)
            if before_id == EVENTS and f"{first}." in self._prefixes:
                raise EventSubject
        prefix, *names, name = subject.rsplit(".", words + 1)
        try:
            is_served = len(names) == words and f"{prefix}." in self._prefixes
            operation = self._named(name if is_served else "")
            if name == WATCH:
                operation = self._watches[f"{prefix}."]
            owner, about = self._owner_of(names)
        except InvalidSubject as error:
            about_subjects = f"a subject is {self._shown_prefix}.{self._subject_form}: {error}"
            return Route("", RefusedOperation(InvalidSubject, about_subjects), None)
        except KeyloftError as error:
            return Route("", RefusedOperation(type(error), str(error)), None)
        return Route(owner, operation, about)

    def _named(self, name: str) -> Operation:
        """The operation of this name.

        Raises:
            InvalidSubject: There is none.
        """
        if (operation := self._operations.get(name)) is None:
            operations = ", ".join(self._operations)
            raise InvalidSubject(f"the operation is one of {operations}")
        return operation

    @property
    def _shown_prefix(self) -> str:
        return "<prefix>" if len(self._prefixes) > 1 else self._prefixes[0].removesuffix(".")

    def _owner_of(self, names: Sequence[str]) -> tuple[str, Any]:
        """Whose request it is, and what its operation needs to know of the subject.

        Raises:
            KeyloftError: There can't be such an owner.
        """
        raise NotImplementedError

    async def _engine(self) -> Engine:
        """The database, opened."""
        raise NotImplementedError

    # What became of requests

    def logs_all(self) -> bool:
        """Whether each request is logged, or slow ones alone."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def done(self, request: Request, seconds: float, outcome: Any) -> None:
        """Log a request that was carried out."""
        raise NotImplementedError

    def refused(self, request: Request, error: Exception) -> bytes:
        """Log a request that was refused or failed; returns the reply."""
        raise NotImplementedError

    def refused_busy(self, owner: str, operation: Operation, answered: int, dropped: int) -> None:
        """Log requests that were refused because too much is waiting."""
        self._count_errors(operation.name, Busy.code, answered + dropped)
        self._overload.add(owner or OTHER, answered, dropped)

    def unsent(self, reason: str) -> None:
        """Log that replies could not be sent; the senders of the requests will time out."""
        raise NotImplementedError

    def _count_errors(self, operation: str, code: str, times: int = 1) -> None:
        endpoint = self._endpoints[operation]
        endpoint.num_errors += times
        endpoint.last_error = code

    async def metadata(self) -> dict[str, str]:
        """What this instance says about itself, as of now."""
        return dict(await self._metadata() if callable(self._metadata) else self._metadata)

    def counted(self) -> list[EndpointStats]:
        """The operations and what was counted of each, as `$SRV.STATS` shows it."""
        found = [self._endpoints[name] for name in self._operations]
        for endpoint in found:
            done = self.meters.histogram(endpoint.name)
            endpoint.num_requests = endpoint.num_errors + done.count
            endpoint.processing_time = int(done.seconds * 1e9)
        return found


class _Discovery(Service):
    """Answers the discovery requests of NATS for a service that subscribes to its other requests itself."""

    def __init__(self, service: NatsService) -> None:
        super().__init__(service.nats, ServiceConfig(service.name, keyloft.__version__, service.description))
        self.service = service
        self._answering: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe; not with the methods of nats-py, whose answers have the metadata of the start."""
        name = self.service.name
        answers: dict[ServiceVerb, Callable[[], _DiscoveryAnswer]]
        answers = {ServiceVerb.PING: self._ping, ServiceVerb.INFO: self.info, ServiceVerb.STATS: self.stats}
        for verb, made in answers.items():
            for named in ({}, {"name": name}, {"name": name, "id": self.id}):
                answer = partial(self._answer, made)
                self._answering.append(await self.service.nats.subscribe(control_subject(verb, **named), cb=answer))

    async def stop(self) -> None:
        subscriptions, self._answering = self._answering, []
        for subscription in subscriptions:
            await subscription.drain()  # type: ignore[no-untyped-call]

    async def _answer(self, made: Callable[[], _DiscoveryAnswer], message: Msg) -> None:
        metadata = await self.service.metadata()
        answer = made()
        answer.metadata = metadata
        await message.respond(to_json(answer.to_dict()))

    def _ping(self) -> ServicePing:
        return ServicePing(id=self.id, name=self.service.name, version=keyloft.__version__)

    def info(self) -> ServiceInfo:
        info = super().info()
        info.endpoints = [EndpointInfo(one.name, one.subject, one.queue_group) for one in self.service.counted()]
        return info

    def stats(self) -> ServiceStats:
        stats = super().stats()
        stats.endpoints = self.service.counted()
        for endpoint in stats.endpoints:
            endpoint.average_processing_time = endpoint.processing_time // max(1, endpoint.num_requests)
        return stats
