"""Finds out whether a process listens for commits: if none does, commits need not notify, which takes time (ADR 13)."""

import asyncio
from typing import Final

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.errors import is_lost
from keyloft.engines.postgres.server import PostgresServer

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

    async def refresh(self, slot: Slot) -> None:
        """Look for listeners, unless that was done a moment ago."""
        server, now = self._server, self._loop.time()
        if now < self._known_until or not server.has_notifications:
            return
        try:
            [[server.has_listeners]] = await slot.fetch(FIND_LISTENERS)
        except asyncpg.PostgresError as error:
            if is_lost(error):
                raise
            server.has_listeners = True  # the server does not say, so there may be some
        self._known_until = now + limits.POSTGRES_LISTENERS_SECONDS
