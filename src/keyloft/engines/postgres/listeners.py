"""Finds out whether a process listens for commits: if none does, commits need not notify, which takes time (ADR 13)."""

import asyncio
import logging
from typing import Final

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.errors import is_lost, may_pass
from keyloft.engines.postgres.server import PostgresServer

logger = logging.getLogger(__name__)

_LISTENS: Final = " (listens)"
"""How the `application_name` of a session ends that listens for commits. All users may see it."""

SHOW_LISTENER: Final = (
    f"SELECT set_config('application_name', left(current_setting('application_name'), 50) || '{_LISTENS}', false)"
)
"""Lets other processes know that this session listens for commits."""

FIND_LISTENERS: Final = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity "
    f"WHERE datname = current_database() AND right(application_name, {len(_LISTENS)}) = '{_LISTENS}')"
)


class ListenerLookup:
    """Keeps `PostgresServer.has_listeners` up to date, for commits."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._known_until = 0.0
        """Until when not to look again, by the event loop's time."""
        self._commits = 0
        """How many commits have notified since then, because listeners may have come."""
        self._are_shown = True
        """Whether the server shows its sessions."""
        self._is_paused = False

    async def refresh(self, slot: Slot) -> None:
        """Before a commit, look for listeners, unless that was done a moment ago, or commits are rare."""
        server, now = self._server, self._loop.time()
        if now < self._known_until or not server.has_notifications:
            return
        if self._is_paused:
            await self._shorten_queue(slot)
        server.has_listeners = True  # for all that is known
        self._commits += 1
        if self._commits < limits.POSTGRES_LISTENERS_COMMITS or not self._are_shown:
            return
        try:
            [[server.has_listeners]] = await slot.fetch(FIND_LISTENERS)
        except asyncpg.PostgresError as error:
            if is_lost(error):
                raise
            self._are_shown = may_pass(error)  # the server logs each error
        self._known_until, self._commits = now + limits.POSTGRES_LISTENERS_SECONDS, 0

    def pause(self) -> bool:
        """Let commits not notify for a while, because the server's queue of notifications is full; False if none did.

        The queue is full if a client that listens, of any program, does not read, or stays in a transaction.
        """
        server = self._server
        if server.announcer is None:
            return False
        logger.warning(
            "%s: its queue of notifications is full, so commits don't notify for %g s, and watches poll: find sessions "
            "that listen and are idle in a transaction, or don't read",
            server.name,
            limits.POSTGRES_NOTIFY_PAUSE_SECONDS,
        )
        server.has_listeners, self._is_paused = False, True
        self._known_until = self._loop.time() + limits.POSTGRES_NOTIFY_PAUSE_SECONDS
        return True

    async def _shorten_queue(self, slot: Slot) -> None:
        """Let the server forget what all have heard. A full queue is only shortened by asking its size."""
        try:
            await slot.fetch("SELECT pg_notification_queue_usage()")
        except asyncpg.PostgresError as error:
            if is_lost(error):
                raise
        self._is_paused = False
