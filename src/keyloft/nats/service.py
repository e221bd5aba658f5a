"""What the services on NATS share: starting, stopping, and answering `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`."""

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Self

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import EndpointInfo, EndpointStats, Service, ServiceConfig, ServiceInfo, ServiceStats

import keyloft
from keyloft.core.closing import AsyncClosing
from keyloft.nats.connection import servers
from keyloft.nats.messages import Handled, NatsConnection, check_nats_py

# nats-py calls datetime.utcnow(), which Python 3.12 deprecates; a program that makes warnings errors could not serve.
warnings.filterwarnings("ignore", r"datetime\.datetime\.utcnow", DeprecationWarning, r"nats\.micro")


class NatsService(AsyncClosing):
    """A service that answers the requests below some prefixes."""

    name: ClassVar[str]
    description: ClassVar[str]
    owner: ClassVar[str]
    """What stands between a prefix and the operation, as in `<plugin>`."""
    operations: ClassVar[Sequence[str]]

    def __init__(
        self,
        nats: Nats,
        prefixes: Iterable[str],
        *,
        reserved: Iterable[str],
        queue: str,
        deadline: float,
        metadata: Mapping[str, str] | None,
    ) -> None:
        self.nats = nats
        self._prefixes = tuple([f"{prefix}." for prefix in prefixes])
        self._reserved = (*self._prefixes, *[f"{prefix}." for prefix in reserved])
        self._queue = queue
        self._deadline = deadline
        self._stalled = f"the database has not answered within {deadline:g} s"
        self._state = "not started"
        self._subscriptions: list[Subscription] = []
        wildcards = ".".join("*" * len(self.owner.split(".")))
        # The one without a name is for requests whose subject names no operation.
        self._endpoints = {
            operation: EndpointStats(operation, f"{self._prefixes[0]}{wildcards}.{operation}", queue, 0, 0, 0, 0)
            for operation in (*self.operations, "")
        }
        config = ServiceConfig(self.name, keyloft.__version__, self.description, dict(metadata or {}))
        self._discovery = _Discovery(self, config)

    def __repr__(self) -> str:
        subjects = ", ".join([prefix.removesuffix(".") for prefix in self._prefixes])
        return f"<{type(self).__name__} of {subjects} at {servers(self.nats)}, {self._state}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            IncompatibleLibrary: The installed nats-py can't be used.
        """
        check_nats_py()
        for prefix in self._prefixes:
            # No bounds in nats-py, which would drop what exceeds them without a word: a service counts its requests.
            subscription = await self.nats.subscribe(
                f"{prefix}>", queue=self._queue, cb=self._receive_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
            self._subscriptions.append(subscription)
            if isinstance(self.nats, NatsConnection):
                self.nats.handle(subscription, self._receive)
        self._begin()
        await self._discovery.start()
        # Of a plain nats-py client, the ping of the first flush (in start) may overtake the subscriptions; this one
        # follows them.
        await self.nats.flush()
        self._state = "serving"
        served = ", ".join([f"{prefix}{self.owner}.<operation>" for prefix in self._prefixes])
        logging.getLogger(type(self).__module__).info("[KV] serving %s", served)

    async def aclose(self) -> None:
        """Accept no more requests, answer those that were accepted, then return. A second call does nothing."""
        subscriptions, self._subscriptions = self._subscriptions, []
        # Not cancelled when it takes too long: nats-py would fail at an answer that arrives later. Without a server
        # there is nothing to read: it gives the requests to another instance, or to none.
        if draining := [asyncio.ensure_future(one.drain()) for one in subscriptions]:  # type: ignore[no-untyped-call]
            await asyncio.wait(draining, timeout=self._deadline)
        if isinstance(self.nats, NatsConnection):
            for subscription in subscriptions:
                self.nats.handle(subscription, None)
        await self._finish()
        self._state = "closed"
        if subscriptions:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._discovery.stop(), self._deadline)

    stop = aclose

    async def _receive_message(self, message: Msg) -> None:
        """Pass on a message of a plain client of nats-py."""
        handled = self._receive(message.subject, message.reply, message.data)
        if handled is not None and not isinstance(handled, list):
            await handled

    def _receive(self, subject: str, reply: str, data: bytes) -> Handled:
        """Accept a request, or refuse it."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Start what carries out requests: they arrive from now on."""

    async def _finish(self) -> None:
        """Return when all accepted requests are answered."""

    def _count_errors(self, operation: str, code: str, times: int = 1) -> None:
        endpoint = self._endpoints[operation]
        endpoint.num_requests += times
        endpoint.num_errors += times
        endpoint.last_error = code

    def counted(self) -> list[EndpointStats]:
        """The operations and what was counted of each, as `$SRV.STATS` shows it."""
        return [self._endpoints[operation] for operation in self.operations]


class _Discovery(Service):
    """Makes a service known that subscribes to its requests itself."""

    def __init__(self, service: NatsService, config: ServiceConfig) -> None:
        super().__init__(service.nats, config)
        self.service = service

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
