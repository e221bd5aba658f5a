"""Publishes the events of one lease, in the turns of its owner."""

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol

from msgspec import UNSET

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import ChangeKind, Get, Key, Scan
from keyloft.errors import HistoryGone, KeyloftError
from keyloft.nats.change_reader import ChangeReader
from keyloft.nats.events import EventMessage, encode
from keyloft.nats.instance import PublishingInstance
from keyloft.nats.intake import Intake
from keyloft.nats.leases import Lease
from keyloft.nats.requests import Call

logger = logging.getLogger(__name__)


class Watchable(Protocol):
    """What a service lets its owners watch."""

    def names(self, about: Any) -> tuple[str, ...]:
        """Whose changes are watched, as the subject of a request names it: a plugin, or a tenant and a project."""

    def owner(self, names: Sequence[str]) -> str:
        """Whose turns and bounds the events of a lease count towards."""

    def asks(self, names: Sequence[str], prefix: str | None, keys: Sequence[str] | None) -> tuple[Get | Scan, ...]:
        """What is watched: keys that begin with a text, or some keys.

        Raises:
            KeyloftError: There can't be such keys.
        """

    def key(self, key: Key) -> str:
        """A key of the engine as the owner writes it."""


class Publication:
    """The events of one run of a lease. It has no task of its own, because there may be ten thousand publications."""

    __slots__ = (
        "_changes",
        "_failed",
        "_instance",
        "_instance_id",
        "_intake",
        "_is_queued",
        "_owner",
        "_sequence",
        "_watchable",
        "is_stopped",
        "lease",
    )

    def __init__(
        self,
        lease: Lease,
        engine: Engine,
        intake: Intake,
        instance: PublishingInstance,
        watchable: Watchable,
        failed: Callable[["Publication", HistoryGone], None],
    ) -> None:
        """`failed` is called if the change log no longer has what is to be published."""
        self.lease = lease
        self.is_stopped = False
        self._intake = intake
        self._instance = instance
        self._instance_id = instance.id
        self._watchable = watchable
        self._failed = failed
        self._owner = watchable.owner(lease.names)
        self._sequence = 0
        self._is_queued = True  # until the first message is sent
        watched = watchable.asks(lease.names, lease.prefix, lease.keys)
        self._changes = ChangeReader(engine.follow(*watched, woken=self._enqueue, since=lease.since), lease.since)
        self._send([self._message(lease.since)])
        self._is_queued = False
        if self._changes.has_more:
            self._enqueue()

    @property
    def reached(self) -> int:
        """The version up to which everything is published."""
        return self._changes.reached

    async def aclose(self) -> None:
        self.is_stopped = True
        await self._changes.watch.aclose()

    def renewed(self) -> None:
        """After a renewal, report up to which version everything was published, so that the client notices a gap."""
        self._send([self._message(self.reached)])

    def tell(self, gone: HistoryGone) -> None:
        """Report to the client that nothing more can be published."""
        message = self._message(gone.version)
        message.error_code, message.message = gone.code, str(gone)
        self._send([message])

    def _enqueue(self) -> None:
        """Publish in the owner's next turn."""
        if not self._is_queued and not self.is_stopped:
            self._is_queued = True
            self._intake.enqueue(self._owner, _EVENTS, self)

    async def in_turn(self) -> None:
        """Publish some events: it is the owner's turn."""
        pause = 0.0
        try:
            if not self.is_stopped:
                await self._publish_some()
        except HistoryGone as gone:
            self._failed(self, gone)
        except KeyloftError as error:
            logger.warning("[KV] events of a watch are delayed: %s", error)
            pause = limits.WATCH_CHECK_SECONDS
        except Exception:
            logger.exception("[KV] events of a watch are delayed")
            pause = limits.WATCH_CHECK_SECONDS
        self._is_queued = False
        if self._changes.watch.has_ended:
            self.is_stopped = True
        elif pause:
            asyncio.get_running_loop().call_later(pause, self._enqueue)
        elif self._changes.has_more:
            self._enqueue()

    async def _publish_some(self) -> None:
        messages: list[EventMessage] = []
        for change, may_continue in await self._changes.next_changes():
            message = self._message(change.version)
            message.key = self._watchable.key(change.key)
            message.deleted = change.kind is not ChangeKind.PUT
            message.more = may_continue
            messages.append(message)
        self._send(messages)

    def _message(self, version: int) -> EventMessage:
        self._sequence += 1
        return EventMessage(key=UNSET, version=version, run=self.lease.run, sequence=self._sequence)

    def _send(self, messages: Sequence[EventMessage]) -> None:
        instance = self._instance
        if not instance.is_alive or instance.id != self._instance_id:
            self.is_stopped = True  # another instance may publish by now, from the confirmed progress on
        if messages and not self.is_stopped:
            subject = self.lease.subject
            self._intake.publish(self._owner, [(subject, encode(message)) for message in messages])


class PublishEvents(Call):
    """Not an operation that can be requested: it lets the events of watches take turns with their owner's requests."""

    name = "events"
    reply_bytes = limits.EVENTS_REPLY_BYTES

    def read(self, about: object, data: Publication, /) -> Publication:  # type: ignore[override]
        return data

    def keys_read(self, content: Publication) -> Collection[Hashable]:
        return ()

    def key(self, content: Publication) -> str:
        return content.lease.subject

    async def carry_out(self, content: Publication) -> tuple[bytes, None]:
        await content.in_turn()
        return b"", None


_EVENTS = PublishEvents()
