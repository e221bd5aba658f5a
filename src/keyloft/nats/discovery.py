"""The NATS services API: answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS` for a service of Keyloft."""

import warnings
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from nats.aio.client import Client as Nats
from nats.micro.service import EndpointInfo, EndpointStats, Service, ServiceConfig, ServiceInfo, ServiceStats

# nats-py calls datetime.utcnow(), which Python 3.12 deprecates; a program that makes warnings errors could not serve.
warnings.filterwarnings("ignore", r"datetime\.datetime\.utcnow", DeprecationWarning, r"nats\.micro")


class Endpoint(Struct):
    """One operation and what was counted of it, as `$SRV.STATS` shows it."""

    name: str
    subject: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    seconds: float = 0.0


class Discovery(Service):
    """Makes a service known that subscribes to its requests itself."""

    def __init__(
        self,
        connection: Nats,
        *,
        name: str,
        version: str,
        description: str,
        queue: str,
        metadata: Mapping[str, str],
        endpoints: Callable[[], Iterable[Endpoint]],
    ) -> None:
        super().__init__(
            connection, ServiceConfig(name=name, version=version, description=description, metadata=dict(metadata))
        )
        self.connection = connection
        self.queue = queue
        self.current_endpoints = endpoints

    async def start(self) -> None:
        """Answer from now on. What this connection subscribed to before is served, too, once this returns."""
        await super().start()
        # Of a plain nats-py client, the ping of the first flush (in super) may overtake the subscriptions; this one
        # follows them.
        await self.connection.flush()

    def info(self) -> ServiceInfo:
        info = super().info()
        info.endpoints = [
            EndpointInfo(name=endpoint.name, subject=endpoint.subject, queue_group=self.queue)
            for endpoint in self.current_endpoints()
        ]
        return info

    def stats(self) -> ServiceStats:
        stats = super().stats()
        stats.endpoints = [
            EndpointStats(
                name=endpoint.name,
                subject=endpoint.subject,
                queue_group=self.queue,
                num_requests=endpoint.requests,
                num_errors=endpoint.errors,
                last_error=endpoint.last_error,
                processing_time=int(endpoint.seconds * 1e9),
                average_processing_time=int(endpoint.seconds * 1e9 / endpoint.requests) if endpoint.requests else 0,
            )
            for endpoint in self.current_endpoints()
        ]
        return stats
