"""Sends the refusals of a plugin service, so that a flood of bad requests delays no other plugin's answers."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.errors import Busy
from keyloft.nats.errors import refusal
from keyloft.nats.internals import Handled, publish_to_all
from keyloft.plugins.logs import OperationLog
from keyloft.plugins.requests import Plugin, PluginRequest

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
        reply: Callable[[Sequence[PluginRequest], Sequence[bytes]], Awaitable[None]],
    ) -> None:
        """Args:
        nats: The connection.
        log: Where refusals are logged.
        reserved: BUSY is not sent to subjects that begin with one of these.
        count: Counts errors: plugin, operation, code, how many.
        reply: Sends replies to requests.
        """
        self._nats = nats
        self._log = log
        self._reserved = tuple([prefix.encode() for prefix in reserved])
        self._count = count
        self._reply = reply
        self._waiting: deque[tuple[PluginRequest, bytes]] = deque()
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

    def add(self, request: PluginRequest, data: bytes) -> Coroutine[Any, Any, None] | None:
        """Answer a request with an error; a coroutine is to be awaited before the next request is read."""
        self._waiting.append((request, data))
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

    async def send(self) -> None:
        """Wait for refusals and send them. Not together with answers, which may have to wait for the database."""
        await self._something_waits.wait()
        self._something_waits.clear()
        await self.send_all()

    async def send_all(self) -> None:
        """Send all refusals that wait."""
        while self._busy or self._waiting:
            await self._send_busy()
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), limits.REFUSALS_AT_ONCE))]
            await self._reply([request for request, _ in some], [data for _, data in some])
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
            self._log.refusal(operation, plugin.name, "", Busy.code, _TOO_MANY, times=len(replies))
            some += [reply for reply in replies if reply and not reply.startswith(self._reserved)]
        if some:
            await self._log.sending(publish_to_all(self._nats, some, _BUSY))
