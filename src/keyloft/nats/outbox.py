"""Sends the replies of a service, all of one iteration of the event loop at once, and refusals of a flood cheaply."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nats.aio.client import Client as Nats
from nats.errors import MaxPayloadError

from keyloft import limits
from keyloft.errors import ReplyTooLarge
from keyloft.nats.connection import cancel
from keyloft.nats.errors import overloaded, refusal
from keyloft.nats.messages import NatsConnection, publish_all, publish_at_once, publish_to_all
from keyloft.nats.requests import Operation, Owner

TOO_MUCH: Final = "too many requests at once, and this one was not carried out: try again later"
BUSY: Final = refusal(overloaded(TOO_MUCH))


class Outbox:
    """The replies that wait to be sent; `sent`, `refused` and `failed` learn what became of them."""

    def __init__(
        self,
        nats: Nats,
        reserved: Sequence[bytes],
        sent: Callable[[Iterable[tuple[Owner, int]]], None],
        refused: Callable[[Owner, Operation, int, int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Args:
        nats: The connection.
        reserved: What no reply's subject may begin with: such a reply would be a request in the service's name.
        sent: Called when replies were sent, or could not be: with owners, each with the size of some of them.
        refused: Called with an owner, an operation, how many requests were answered BUSY, and how many were dropped.
        failed: Called with the reason if replies can't be sent.
        """
        self._nats = nats
        self._sending = nats.sending if isinstance(nats, NatsConnection) else asyncio.Lock()
        self._reserved = tuple(reserved)
        self._sent = sent
        self._refused = refused
        self._failed = failed
        self._replies: list[tuple[bytes, bytes]] = []
        self._owners: list[tuple[Owner, int]] = []
        self._busy: dict[tuple[Owner, Operation], list[bytes]] = {}
        self._arrived = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_idle = True
        """Whether the task waits for something to send."""
        self._is_scheduled = False
        """Whether replies are sent soon without the task."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._send_forever(), name="keyloft replies")

    def add(self, owner: Owner, subject: bytes, data: bytes) -> None:
        """Send a reply soon. `sent` is called for it."""
        self._replies.append((subject, data))
        self._owners.append((owner, len(data)))
        if self._is_idle and not self._is_scheduled:
            self._schedule()

    def add_all(self, replies: Iterable[tuple[bytes, bytes]], sizes: Iterable[tuple[Owner, int]]) -> None:
        """Send replies soon; `sizes` has their bytes by owner. `sent` is called for them."""
        self._replies += replies
        self._owners += sizes
        if self._is_idle and not self._is_scheduled:
            self._schedule()

    def refuse(self, owner: Owner, operation: Operation) -> list[bytes]:
        """The list to which the caller adds the reply subjects of refused messages; empty for a published one."""
        if self._is_idle:
            self._wake()
        return self._busy.setdefault((owner, operation), [])

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._send_soon)

    def _send_soon(self) -> None:
        self._is_scheduled = False
        self.send_at_once()

    def send_at_once(self) -> None:
        """Send all replies now with one write, if the socket is free; otherwise the task sends them."""
        if not self._is_idle or not self._replies:
            return
        if self._sending.locked() or not publish_at_once(self._nats, self._replies):
            self._wake()
            return
        self._replies = []
        owners, self._owners = self._owners, []
        self._sent(owners)

    def _wake(self) -> None:
        self._is_idle = False
        self._arrived.set()
        self._is_empty.clear()

    def is_full(self) -> bool:
        """Whether so much is unsent that no further message should be read."""
        return self._nats.is_connected and self._nats.pending_data_size > limits.UNSENT_BYTES

    async def wait_for_room(self) -> None:
        async with self._sending:
            await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        while self.is_full():  # noqa: ASYNC110 (nats-py has no event for it)
            await asyncio.sleep(limits.FLOOD_PAUSE_SECONDS)

    async def close(self, seconds: float) -> None:
        """Return once all replies are sent, or after this many seconds if NATS does not take them."""
        if self._is_scheduled:
            self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_empty.wait()
        await cancel(self._task)

    async def _send_forever(self) -> None:
        while True:
            if not self._replies and not self._busy:
                self._is_idle = True
                self._is_empty.set()
                self._arrived.clear()
                await self._arrived.wait()
            replies, self._replies = self._replies, []
            owners, self._owners = self._owners, []
            busy, self._busy = self._busy, {}
            try:
                await self._send(replies, busy)
            except Exception as error:
                # The replies are lost, and their receivers time out: the next ones may be sent again.
                self._failed(str(error) or type(error).__name__)
            self._sent(owners)

    async def _send(
        self, replies: Sequence[tuple[bytes, bytes]], busy: dict[tuple[Owner, Operation], list[bytes]]
    ) -> None:
        # Services of one connection take turns: otherwise one with large replies would keep it full for ever.
        async with self._sending:
            # With a full buffer, nats-py would let each further reply wait until all before it are sent.
            await self._wait_for_room()
            if busy:
                await self._send_busy(busy)
            if replies:
                try:
                    await publish_all(self._nats, replies)
                except MaxPayloadError:
                    await self._send_refusals(replies)
                    raise

    async def _send_refusals(self, replies: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer the requests whose replies were not sent because they are too large for NATS."""
        most = self._nats.max_payload
        rule = f"the reply does not fit into a message of {most:,} bytes, the max_payload of this NATS"
        too_large = refusal(ReplyTooLarge(f"{rule}; if it was to a write, read to find out whether that was made"))
        await publish_all(self._nats, [(subject, too_large) for subject, data in replies if len(data) > most])

    async def _send_busy(self, busy: dict[tuple[Owner, Operation], list[bytes]]) -> None:
        wanted: list[bytes] = []
        for (owner, operation), subjects in busy.items():
            answered = [subject for subject in subjects if subject]
            self._refused(owner, operation, len(answered), len(subjects) - len(answered))
            wanted += [subject for subject in answered if not subject.startswith(self._reserved)]
        if wanted:
            await publish_to_all(self._nats, wanted, BUSY)
