"""Sends the refusals of a plugin service, so that a flood of bad requests delays no other plugin's answers."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import Busy
from keyloft.nats.connection import Handled
from keyloft.nats.errors import refusal
from keyloft.nats.internals import publish_all, publish_to_all
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.requests import Plugin

_TOO_MANY: Final = "too many requests are unanswered, and this one was not carried out: try again later"
_BUSY: Final = refusal(Busy(_TOO_MANY))


class Refusals:
    """The refusals that are still to be sent."""

    def __init__(
        self,
        nats: Nats,
        log: OperationLog,
        reserved: Sequence[str],
        *,
        count: Callable[[str, str, str, int], None],
        release: Callable[[Sequence[Plugin]], None],
    ) -> None:
        """Args:
        nats: The connection.
        log: Where refusals are logged.
        reserved: No answer is sent to subjects that begin with one of these.
        count: Counts errors: plugin, operation, code, how many.
        release: Called with the plugins whose refused requests are answered.
        """
        self._nats = nats
        self._log = log
        self._reserved = tuple(reserved)
        self._reserved_bytes = tuple([prefix.encode() for prefix in reserved])
        self._count = count
        self._release = release
        self._waiting: deque[tuple[Plugin, str, bytes]] = deque()
        self._busy: dict[tuple[Plugin, str], list[bytes]] = {}
        self._something_waits = asyncio.Event()
        self.has_refused_busy = False
        """Set by each BUSY; the service resets it."""

    def __len__(self) -> int:
        return len(self._waiting)

    def busy(self, plugin: Plugin, operation: str, reply: str) -> Handled:
        """Answer BUSY to a request, and to all that follow it before the next iteration of the event loop."""
        replies = self._busy.setdefault((plugin, operation), [])
        replies.append(reply.encode())
        self.has_refused_busy = True
        self._something_waits.set()
        return self._wait_until_sent() if self._is_behind() else replies

    def add(self, plugin: Plugin, reply: str, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Answer a request with an error; a coroutine is to be awaited before the next request is read."""
        if reply.startswith(self._reserved):
            reply = ""  # an answer would be a request in the service's name, to any plugin's keys
        self._waiting.append((plugin, reply, data))
        self._something_waits.set()
        return self._wait_until_sent() if self._is_behind() else None

    def _is_behind(self) -> bool:
        return len(self._waiting) >= limits.UNSENT_PLUGIN_REFUSALS or self._much_is_unsent()

    def _much_is_unsent(self) -> bool:
        return self._nats.is_connected and self._nats.pending_data_size > limits.UNSENT_BYTES

    async def _wait_until_sent(self) -> None:
        """Read no further for a while: NATS slows down the senders of what is not read."""
        while self._is_behind():  # noqa: ASYNC110
            await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)

    async def run(self) -> None:
        """Send refusals for ever. Not together with answers, which may have to wait for the database."""
        while True:
            await self._something_waits.wait()
            self._something_waits.clear()
            await self.send_all()

    async def send_all(self) -> None:
        """Send all refusals that wait."""
        while self._busy or self._waiting:
            await self._send_busy()
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), limits.REFUSALS_AT_ONCE))]
            if wanted := [(reply, data) for _, reply, data in some if reply]:
                await self._log.sending(publish_all(self._nats, wanted))
            self._release([plugin for plugin, _, _ in some])
            if self._waiting:
                await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)
            # If nats-py's buffer were full of refusals, each answer would wait until all of them are sent.
            while self._much_is_unsent():  # noqa: ASYNC110
                await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)

    async def _send_busy(self) -> None:
        busy, self._busy = self._busy, {}
        some: list[bytes] = []
        for (plugin, operation), replies in busy.items():
            self._count(plugin.name, operation, Busy.code, len(replies))
            self._log.refusal(
                operation, plugin.name, "", Busy.code, _TOO_MANY, level=logging.WARNING, times=len(replies)
            )
            some += [reply for reply in replies if reply and not reply.startswith(self._reserved_bytes)]
        if some:
            await self._log.sending(publish_to_all(self._nats, some, _BUSY))
