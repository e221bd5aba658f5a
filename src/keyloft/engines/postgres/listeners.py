"""Finds out whether a process listens for commits: if none does, commits need not notify, which takes time (ADR 13)."""

import asyncio
from typing import Final

import asyncpg  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.engines.postgres.connections import Slot
from keyloft.engines.postgres.errors import is_lost, may_pass
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
        self._commits = 0
        """How many commits have notified since then, because listeners may have come."""
        self._are_shown = True
        """Whether the server shows its sessions."""

    async def refresh(self, slot: Slot) -> None:
        """Before a commit, look for listeners, unless that was done a moment ago, or commits are rare."""
        server, now = self._server, self._loop.time()
        if now < self._known_until or not server.has_notifications:
            return
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
