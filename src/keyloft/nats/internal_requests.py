"""Queues internal requests, such as events of watches to be published, as if their owner had sent them."""

import asyncio
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

from keyloft import limits
from keyloft.nats.outbox import Outbox
from keyloft.nats.owners import Owners
from keyloft.nats.requests import Call, Owner, Request
from keyloft.nats.scheduler import OwnerScheduler


class InternalRequests:
    """The part of an intake that knows its owners, and takes internal requests in their names."""

    _owners: Owners
    _turns: OwnerScheduler
    _outbox: Outbox
    _request_bytes: int
    _reply_bytes: int
    _is_empty: asyncio.Event

    @property
    def owners(self) -> Iterable[Owner]:
        """The owners that have sent something lately."""
        return self._owners

    @property
    def unanswered(self) -> int:
        """How many requests are accepted and not yet finished."""
        return sum([len(owner.waiting) + owner.under_way for owner in self._owners])

    def enqueue(self, name: str, operation: Call, content: Any) -> None:
        """Carry out an operation in an owner's next turn, although no message asks for it."""
        owner = self._owner(name)
        if not self._request_bytes:
            self._is_empty.clear()
        owner.request_bytes += limits.REQUEST_BYTES
        self._request_bytes += limits.REQUEST_BYTES
        owner.waiting.append(Request(owner, operation, None, b"", content, perf_counter(), limits.REQUEST_BYTES))
        if not owner.is_in_turn:
            self._turns.give(owner)

    def publish(self, name: str, messages: Sequence[tuple[str, bytes]]) -> None:
        """Publish messages that count as an owner's replies until they are sent."""
        owner, size = self._owner(name), sum([len(data) for _, data in messages])
        owner.meter.events += len(messages)
        owner.reply_bytes += size
        self._reply_bytes += size
        self._outbox.add_all([(subject.encode(), data) for subject, data in messages], [(owner, size)])

    def _owner(self, name: str) -> Owner:
        return self._owners.known.get(name) or self._owners.of(name)
