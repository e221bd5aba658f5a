"""A watch over NATS, as its client sees it: an async iterator that renews itself and goes on after interruptions."""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import UNSET
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.errors import DatabaseError, KeyloftError, NotPermitted, Unanswered, WatchExpired
from keyloft.nats.connection import cancel, flush
from keyloft.nats.errors import refused
from keyloft.nats.events import Event, EventMessage, decode
from keyloft.nats.payloads import to_json

if TYPE_CHECKING:
    from keyloft.nats.client import ServiceClient

logger = logging.getLogger(__name__)


class RemoteWatch(AsyncClosing):
    """Changes as they happen: iterate it with `async for`. Closing it, or the client, ends the iteration.

    It misses no change from the moment on at which it was entered, or asked for its first event. It renews itself, and
    goes on after a restart of the service or of NATS. A change may be reported twice.

    Example:
        async with client.kv.watch(prefix="user:") as changes:
            async for event in changes:
                print(event.key, "is deleted" if event.deleted else "has changed")
    """

    def __init__(self, client: "ServiceClient", subject: str, fields: Mapping[str, Any], since: int | None) -> None:
        """Args:
        client: Asks for the watch.
        subject: The subject of the operation `watch`.
        fields: What to watch, as the request has it.
        since: Report what changed after this version; None for what changes from now on.
        """
        self._client = client
        self._operation = subject
        self._fields = fields
        self._subject = ""
        """Where its events arrive."""
        self._expires_in = limits.LEASE_SECONDS
        self._subscription: Subscription | None = None
        self._run = 0
        """The run whose messages count."""
        self._next = 1
        """The sequence of its next message; 0 if one was missed, so that all others are ignored."""
        self._received_to = since
        """Everything up to this version has arrived; after an interruption the watch continues from there."""
        self._reported_to = since
        self._newest = 0
        """The version of the event that was reported last."""
        self.unread: deque[EventMessage] = deque()
        """Events that have arrived and are not yet reported."""
        self._seen: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        """The last event of each key: an event that arrives a second time is skipped."""
        self._is_silent = False
        """Whether no message has arrived since the last renewal."""
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        """Set when an event was missed, and all that have arrived are reported."""
        self._failure: Exception | None = None
        self._beginning = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "ended" if self._is_closed else "not begun" if self._keeping is None else "open"
        return f"<RemoteWatch of {self._client!r}, {state}>"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def reported_to(self) -> int | None:
        """The version up to which all changes were reported: `watch(…, since=…)` continues from there.

        None until the watch has begun. To continue after a restart, keep it once an event is dealt with.
        """
        return self._reported_to

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        await self._begin()
        while True:
            while self.unread:
                if (event := self._report(self.unread.popleft())) is not None:
                    return event
            if (failure := self._failure) is not None:
                await self.aclose()
                # Forgotten once it is raised: a caller that is cancelled while the watch ends may ask again.
                self._failure = None
                raise failure
            if self._is_closed:
                raise StopAsyncIteration
            if not self._next:
                self._drained.set()
            self._arrived.clear()
            await self._arrived.wait()

    async def aclose(self) -> None:
        """End the watch. A second call does nothing."""
        was_closed, self._is_closed = self._is_closed, True
        self._arrived.set()
        if was_closed:
            return
        try:
            if self._keeping is not None:
                await cancel(self._keeping)
        finally:
            await self._leave()

    def fail(self, error: Exception) -> None:
        """End the watch with an error, once what has arrived is reported."""
        self._failure = self._failure or error
        self._arrived.set()

    # What arrives

    async def _receive(self, message: Msg) -> None:
        try:
            event = decode(message.data)
        except msgspec.MsgspecError:
            logger.warning("a message on %s is no event: another program publishes there", self._subject)
            return
        self._is_silent = False
        received_to = self._received_to or 0
        if event.run > self._run and event.sequence == 1 and event.version <= received_to:
            self._run, self._next = event.run, 1  # another service goes on, or this one begins again
        if event.run < self._run or not self._next or (event.run == self._run and event.sequence < self._next):
            return
        if event.run > self._run or event.sequence > self._next or len(self.unread) >= limits.UNREAD_EVENTS:
            self._next = 0
            self._arrived.set()  # once all earlier events are reported, the missed one is asked for
            return
        self._next += 1
        self._received_to = max(received_to, event.version - event.more)
        self.unread.append(event)
        self._arrived.set()

    def _report(self, message: EventMessage) -> Event | None:
        """The event of a message for the user; None if there is none, or it was reported before."""
        if message.error_code is not UNSET:
            self.fail(refused({"error_code": message.error_code, "message": message.message}))
            return None
        self._reported_to = max(self._reported_to or 0, message.version - message.more)
        if message.key is UNSET:
            return None
        deleted, version = bool(message.deleted), message.version
        last = self._seen.get(message.key)
        if last is not None and ((version, deleted) <= last or (deleted and last[1])):
            return None
        self._seen[message.key] = version, deleted
        self._seen.move_to_end(message.key)
        if len(self._seen) > limits.REMEMBERED_EVENTS:
            self._seen.popitem(last=False)
        # A service that goes on gives an expiry the version from which it goes on; the one before may have published
        # events of a later one.
        self._newest = max(version, self._newest)
        return Event(message.key, self._newest if deleted else version, deleted)

    # Beginning and going on

    async def _begin(self) -> None:
        if self._keeping is None and not self._is_closed:
            async with self._beginning:
                if self._keeping is None and not self._is_closed:
                    await self._begin_alone()

    async def _begin_alone(self) -> None:
        try:
            await self._ask()
        except BaseException as error:
            await self._leave()  # `__aexit__` does not run
            if not self._is_closed or not isinstance(error, KeyloftError):
                raise
        if self._is_closed:  # while it began
            await self._leave()
            return
        self._keeping = asyncio.create_task(self._keep(), name=f"keyloft watch {self._subject}")
        self._client.watches[self] = self._subject

    async def _ask(self) -> None:
        """Ask for a lease, subscribe to its subject, and let the service begin to publish."""
        await self._leave()
        reply = await self._client.ask(self._operation, {**self._fields, "since": self._received_to})
        self._subject, self._expires_in = str(reply["subject"]), float(reply["expires_in"])
        self._run, self._next = 0, 1
        if self._received_to is None:
            self._received_to = self._reported_to = int(reply["version"])
        self._client.watches[self] = self._subject
        nats = self._client.nats
        try:
            # No bounds in nats-py, which would drop what exceeds them: this class has its own.
            self._subscription = await nats.subscribe(
                self._subject, cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
            )
            # nats-py sends a ping before what is in its buffer: the first flush sends it, the second waits for it.
            for _ in range(2):
                await flush(nats)
        except (NatsError, TimeoutError) as error:
            raise Unanswered(f"the connection to NATS failed: {error or type(error).__name__}") from error
        if self._failure is not None:
            raise self._failure
        await self._renew()

    async def _leave(self) -> None:
        """End the lease and its subscription, as far as that is possible now; otherwise the lease expires."""
        self._client.watches.pop(self, None)
        subscription, self._subscription = self._subscription, None
        nats = self._client.nats
        if subscription is not None and not nats.is_closed:
            with contextlib.suppress(NatsError, OSError):
                # Without a connection, too: otherwise nats-py would subscribe again when it has one.
                await subscription.unsubscribe()
                if nats.is_connected:
                    await nats.publish(self._operation, to_json({"subject": self._subject, "end": True}))

    async def _renew(self) -> None:
        """Renew the lease; if something was missed, the service publishes again."""
        fields: dict[str, Any] = {"subject": self._subject}
        if self._run and not self._next:
            fields["since"] = self._received_to
        self._is_silent = True
        reply = await self._client.ask(self._operation, fields)
        if reply["run"] > self._run and (not self._run or "since" in fields):
            self._run, self._next = int(reply["run"]), 1

    async def _keep(self) -> None:
        """Renew the lease in time, and at once if something was missed."""
        nats, loop = self._client.nats, asyncio.get_running_loop()
        reconnects, renewed, pause = nats.stats["reconnects"], loop.time(), 0.0
        while not nats.is_closed:
            self._drained.clear()
            left = renewed + self._expires_in / limits.RENEWALS - loop.time()
            if left > 0 and not self._must_resume:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), min(left, limits.WATCH_CHECK_SECONDS))
            is_due = loop.time() >= renewed + self._expires_in / limits.RENEWALS
            if nats.stats["reconnects"] != reconnects or (is_due and self._is_silent):
                reconnects, self._next = nats.stats["reconnects"], 0
            if not nats.is_connected:
                await asyncio.sleep(limits.WATCH_RETRY_SECONDS)
                continue
            if not is_due and not self._must_resume:
                continue
            try:
                await self._renew_or_ask()
            except (Unanswered, DatabaseError) as error:
                if isinstance(error, NotPermitted):
                    self.fail(error)
                    return
                logger.debug("a watch can't be renewed, trying again: %s", error)
                pause = min(2 * pause + limits.WATCH_RETRY_SECONDS, limits.WATCH_CHECK_SECONDS)
                await asyncio.sleep(pause)
            except Exception as error:
                self.fail(error)
                return
            else:
                renewed, pause = loop.time(), 0.0
        self.fail(Unanswered("the connection to NATS is closed"))

    async def _renew_or_ask(self) -> None:
        try:
            if self._subscription is None:
                await self._ask()
            else:
                await self._renew()
        except WatchExpired:
            await self._ask()

    @property
    def _must_resume(self) -> bool:
        return not self._next and not self.unread
