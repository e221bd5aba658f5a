"""Takes the requests out of messages that hold several: they are the owner's next ones; replies are collected."""

from functools import partial
from typing import Any

from keyloft import limits
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.many import NO_REPLIES, Collectors, ManyRequests, requests_of
from keyloft.nats.outbox import Outbox
from keyloft.nats.requests import Owner, Request
from keyloft.nats.turn_reads import TurnReads


class ManyIntake:
    """The part of an intake that knows of messages with several requests."""

    _bounds: IntakeBounds
    _collectors: Collectors
    _outbox: Outbox
    _reply_bytes: int
    _turn_reads: TurnReads

    def _has_room(self, owner: Owner) -> bool:
        raise NotImplementedError

    def _send_replies(self) -> None:
        """Send all replies that there are."""
        self._collectors.send_parts()
        self._outbox.send_at_once()

    def _finish(self, request: Request, reply: bytes, outcome: Any) -> None:
        raise NotImplementedError

    def end(self, request: Request) -> None:
        """A request is done."""
        raise NotImplementedError

    def _take_in_many(self, request: Request, content: ManyRequests) -> None:
        """Let the requests that a message holds be the owner's next ones."""
        owner, count, collector = request.owner, len(content.requests), None
        owner.meter.gathered += count
        if request.reply and count:
            collected = partial(self._collected, request, count)
            collector = self._collectors.collector(content, collected, in_one=request.collector is not None)
        requests = requests_of(request, content, collector, self._bounds.requests_per_second)
        given = sum([one.size for one in requests])  # the bounds have counted them with the message
        request.size -= given
        owner.under_way_bytes -= given
        is_limited = self._bounds.requests_per_second is not None
        if content.are_point_reads and not owner.writes and not is_limited and self._has_room(owner):
            at_once, requests = requests[: limits.GETS_PER_READ], requests[limits.GETS_PER_READ :]
            for first in range(0, len(at_once), limits.GETS_PER_REPLY):
                self._read_at_once(owner, at_once[first : first + limits.GETS_PER_REPLY])
                self._send_replies()
        owner.waiting.extendleft(reversed(requests))
        if collector is None:
            self._collected(request, count, NO_REPLIES, True)

    def _read_at_once(self, owner: Owner, requests: list[Request]) -> None:
        """Make point reads that wait for nothing, without a step for each."""
        owner.under_way += len(requests)
        owner.under_way_bytes += sum([one.size for one in requests])
        reserved = requests[0].operation.reply_bytes
        for request in requests:
            request.reserved = reserved
        owner.reply_bytes += reserved * len(requests)
        self._reply_bytes += reserved * len(requests)
        self._turn_reads.make(owner, requests)

    def _collected(self, request: Request, count: int, reply: bytes, is_last: bool) -> None:
        """Send replies to the requests that a message held."""
        if is_last:
            self._finish(request, reply, count)
            self.end(request)
        else:
            request.owner.reply_bytes += len(reply)
            self._reply_bytes += len(reply)
            self._outbox.add(request.owner, request.reply, reply)
