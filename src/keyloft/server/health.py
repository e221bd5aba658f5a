"""Answers the requests for metrics, health and readiness, which need no token."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.health import ServerHealth
from keyloft.core.records import Batch, Check, Get, Space, StoreId
from keyloft.errors import KeyloftError
from keyloft.http.monitoring import CLOSE, unavailable
from keyloft.http.replies import TEXT_TYPE, HttpReply
from keyloft.nats.connection import flush
from keyloft.server.metrics import Metrics

logger = logging.getLogger(__name__)

_PROBE: Final = Get(Space.PLUGINS, ("keyloft", "health"))
_NOT_OPEN: Final = "the database is not open yet"
_NOT_CONNECTED: Final = "not connected to NATS"
_NOT_SUBSCRIBED: Final = "NATS has not carried out the service's subscriptions yet"


class ServiceHealth:
    """What is known about the state of a service. Its owner sets the fields as the service starts."""

    def __init__(self, metrics: Callable[["ServiceHealth"], Metrics]) -> None:
        """`metrics` makes the metrics, which show the servers of the database, too."""
        self.is_open = False
        """Whether the database is open."""
        self.engine: Engine | None = None
        self.nats: Nats | None = None
        self.is_serving = False
        """Whether the services have subscribed to their requests, on this connection."""
        self._subscribed: tuple[Nats, int] | None = None
        """The connection that is known to deliver requests, and how many times it had been restored by then."""
        self._metrics = metrics(self)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to NATS."""
        return self.nats is not None and self.nats.is_connected

    def servers(self) -> ServerHealth | None:
        """What is known about the servers of the database."""
        return None if self.engine is None else self.engine.health()

    async def metrics(self) -> HttpReply:
        """The page of metrics."""
        if not self.is_open:
            return unavailable(_NOT_OPEN)
        text = await self._metrics.render()
        return HttpReply(text, content_type=self._metrics.content_type.encode(), headers=CLOSE)

    async def readiness(self) -> HttpReply:
        """Whether requests are served. This asks no database, so one that hangs does not make a service unready."""
        if not self.is_open:
            return unavailable(_NOT_OPEN)
        if (reason := await self._undelivered()) is not None:
            return unavailable(reason)
        return HttpReply(b"ready\n", content_type=TEXT_TYPE, headers=CLOSE)

    async def health(self) -> HttpReply:
        """Whether the service is connected, and its database can be read and written."""
        if self.engine is None:
            return unavailable(_NOT_OPEN)
        if (reason := await self._undelivered()) is not None:
            return unavailable(reason)
        try:
            async with asyncio.timeout(limits.HEALTH_SECONDS):
                store_id, _ = await self.engine.read(StoreId(), _PROBE)  # each time: a restore changes the id
                await try_to_write(self.engine)
        except TimeoutError:
            return self._unusable(f"the database has not answered within {limits.HEALTH_SECONDS:g} s")
        except KeyloftError as error:
            # The message may name files and hosts: it belongs in the log.
            logger.warning("the database can't be used: %s", error)
            return self._unusable(f"the database can't be used ({error.code})")
        lines = ["ok", f"store {store_id}", *(servers.lines if (servers := self.servers()) else ())]
        body = "".join([f"{line}\n" for line in lines]).encode()
        return HttpReply(body, content_type=TEXT_TYPE, headers=CLOSE)

    async def _undelivered(self) -> str | None:
        """Why NATS does not deliver requests to this service; None if it does."""
        nats = self.nats
        if nats is None or not nats.is_connected:
            return _NOT_CONNECTED
        if not self.is_serving:
            return _NOT_SUBSCRIBED
        connection = nats, nats.stats["reconnects"]
        if connection != self._subscribed:
            # nats-py is connected again before NATS has read its subscriptions. Asked once, not with each request: in a
            # flood of messages the answer comes late.
            try:
                async with asyncio.timeout(limits.HEALTH_SECONDS):
                    await flush(nats)
            except (NatsError, OSError, TimeoutError):
                return _NOT_SUBSCRIBED
            self._subscribed = connection
        return None

    def _unusable(self, reason: str) -> HttpReply:
        # Hosts are asked regularly only if there are several. For a single host, the reason says all.
        lines = servers.lines if (servers := self.servers()) is not None and len(servers.hosts) > 1 else ()
        return unavailable("\n".join([reason, *lines]))


async def try_to_write(engine: Engine) -> None:
    """Commit a check that fails: it goes the way of every write, and writes nothing.

    Raises:
        DatabaseError: The database can't be written.
    """
    await engine.commit(Batch((), (Check(_PROBE.space, _PROBE.key, -1),)))
