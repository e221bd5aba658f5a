"""Hears of the commits of other processes: by NOTIFY where that works, by looking at the clock where it does not."""

import asyncio
import logging
from collections.abc import Callable

from keyloft import limits
from keyloft.engines.commit.groups import Groups
from keyloft.engines.postgres.connections import Link, patiently
from keyloft.engines.postgres.server import Connection, Failure, PostgresServer
from keyloft.engines.postgres.tables import CHANNEL, READ_CLOCK
from keyloft.engines.watches import Notifier
from keyloft.errors import Closed, DatabaseError

logger = logging.getLogger(__name__)


class Notices:
    """Tells the notifier when others commit, for as long as somebody watches.

    The clock is looked at in any case: often as long as no notice was ever heard, and now and then after that. If it
    moved and nobody said so, notices get lost on their way (PgBouncer does that), and it is looked at often again.
    """

    def __init__(
        self, server: PostgresServer, name: str, notifier: Notifier, groups: Groups, told: Callable[[int], None]
    ) -> None:
        self._server = server
        self._name = name
        self._notifier = notifier
        self._groups = groups
        self._told = told
        self._listening = Link(server)
        self._looking = Link(server)
        self._listener: Connection = None
        self._task: asyncio.Task[None] | None = None
        self._are_heard = False
        self._missed = 0

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="keyloft watcher")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._tell()
        finally:
            self._listening.abandon()
            self._looking.abandon()

    async def _tell(self) -> None:
        while self._notifier.has_watches:
            try:
                await self._listen()
                await self._look()
            except Closed:
                return
            except DatabaseError as error:
                self._are_heard = False
                logger.warning("looking for changes failed, trying again: %s", error)
            pause = limits.WATCH_CHECK_SECONDS if self._are_heard else limits.WATCH_POLL_SECONDS
            await asyncio.sleep(pause)

    async def _listen(self) -> None:
        if self._server.is_pooled or (self._listener is not None and not self._listener.is_closed()):
            return
        self._are_heard = False
        self._listener = await patiently(self._server, self._listening, _connected, self._now())
        try:
            async with asyncio.timeout(self._server.patience):
                await self._listener.add_listener(CHANNEL, self._hear)
                # If notices can be heard here, then this one, too.
                await self._listener.execute(f"SELECT pg_notify('{CHANNEL}', '{self._name} 0')")
        except (*Failure, TimeoutError) as error:
            logger.info("%s announces no commits, so its clock is watched: %s", self._server.name, error)

    def _hear(self, connection: Connection, process: int, channel: str, notice: str) -> None:
        self._are_heard = True
        self._missed = 0
        name, _, clock = notice.partition(" ")
        store, _, _ = name.partition(".")
        if name != self._name and self._name.startswith(f"{store}."):
            self._notifier.committed_up_to(int(clock) if clock.isdecimal() else 0)

    async def _look(self) -> None:
        """Look at the clock, unless a group of ours is under way, which will find out by itself."""
        if not self._groups.idle:
            return
        seen = self._notifier.last_version
        rows = await patiently(self._server, self._looking, _clock, self._now())
        latest, now = self._server.clock_of(rows)
        self._told(now)
        if self._groups.idle and seen == self._notifier.last_version:
            if latest != seen:
                self._missed += 1
                # One may still be on its way; two in a row are not.
                self._are_heard = self._are_heard and self._missed < 2
            self._notifier.observe(latest, latest)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _connected(link: Link) -> Connection:
    return await link.connected()


async def _clock(link: Link) -> list[tuple[int, int]]:
    return await link.fetch(READ_CLOCK, None)
