"""Learns of the commits of other processes: by NOTIFY where that works, by polling the version counter where not."""

import asyncio
import logging
from collections.abc import Callable

from keyloft import limits
from keyloft.engines.commit.batcher import Batcher
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.errors import Failure
from keyloft.engines.postgres.listeners import SHOW_LISTENER
from keyloft.engines.postgres.log import CHANNEL, NOTIFY, READ_VERSION
from keyloft.engines.postgres.server import Connection, PostgresServer
from keyloft.engines.watches.feed import ChangeFeed
from keyloft.errors import CannotOpen, Closed, DatabaseError

logger = logging.getLogger(__name__)


class CommitListener:
    """Reports commits of other processes to the watches' feed, for as long as there are watches.

    The version counter is polled in any case: often until the first notification arrives and all other processes know
    that this one listens, and now and then after that.
    If it moved without one, notifications get lost on their way, as with PgBouncer, and it is polled often again.
    """

    def __init__(
        self, server: PostgresServer, feed: ChangeFeed, batcher: Batcher, set_clock: Callable[[int], None]
    ) -> None:
        self._server = server
        self._feed = feed
        self._batcher = batcher
        self._set_clock = set_clock
        self._loop = asyncio.get_running_loop()
        self._listening = Slot(server)
        self._polling = Slot(server)
        self._listener: Connection = None
        self._task: asyncio.Task[None] | None = None
        self._notifications_arrive = False
        self._missed = 0
        self._is_known_from = 0.0
        """From when on all processes know that this one listens, by the event loop's time."""

    def start(self) -> None:
        """Start, unless it runs already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="keyloft watcher")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._feed.has_watches:
                try:
                    await self._listen()
                    await self._poll()
                except Closed:
                    return
                except CannotOpen as error:
                    # Waiting does not cure it: the database holds another store, say, or refuses this user.
                    self._feed.fail(error)
                    await asyncio.sleep(limits.WATCH_CHECK_SECONDS)
                except DatabaseError as error:
                    self._notifications_arrive = False
                    logger.warning("polling for commits of other processes failed, trying again: %s", error)
                is_notified = self._notifications_arrive and self._loop.time() >= self._is_known_from
                await asyncio.sleep(limits.WATCH_CHECK_SECONDS if is_notified else limits.WATCH_POLL_SECONDS)
        finally:
            self._listening.abandon()
            self._polling.abandon()

    async def _listen(self) -> None:
        if (
            not self._server.has_notifications
            or self._server.is_pooled
            or (self._listener is not None and not self._listener.is_closed())
        ):
            return
        self._notifications_arrive = False
        self._listener = await self._listening.retry(self._listening.connected)
        try:
            async with asyncio.timeout(self._server.patience):
                await self._listener.execute(SHOW_LISTENER)
                await self._listener.add_listener(CHANNEL, self._on_notification)
                self._is_known_from = self._loop.time() + 2 * limits.POSTGRES_LISTENERS_SECONDS
                # If notifications arrive here, so does this one.
                await self._listener.execute(NOTIFY.format(name=self._server.process, version=0))
        except (*Failure, TimeoutError) as error:
            logger.info("%s sends no notifications, so its version counter is polled: %s", self._server.name, error)

    def _on_notification(self, connection: Connection, process: int, channel: str, payload: str) -> None:
        self._notifications_arrive = True
        self._missed = 0
        name, _, version = payload.partition(" ")
        store, _, _ = name.partition(".")
        if name != self._server.process and self._server.process.startswith(f"{store}."):
            self._feed.observe(int(version) if version.isdecimal() else 0)

    async def _poll(self) -> None:
        """Read the version counter, unless this engine is committing: then the outcome will report it."""
        if not self._batcher.idle:
            return
        seen = self._feed.last_version
        rows = await self._polling.retry(lambda: self._polling.fetch(READ_VERSION, None))
        latest, now = self._server.counter_row(rows)
        self._set_clock(now)
        if self._batcher.idle and seen == self._feed.last_version:
            if latest != seen:
                self._missed += 1
                # One notification may still be on its way; two in a row are lost.
                self._notifications_arrive = self._notifications_arrive and self._missed < 2
            if latest < seen:
                self._feed.read_again()  # after a failover that has lost commits: the log does not know the position
            self._feed.observe(latest)
