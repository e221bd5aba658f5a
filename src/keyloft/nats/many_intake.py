"""Takes the requests out of messages that hold several: they are the owner's next ones; replies are collected."""

from functools import partial
from time import perf_counter
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.joint_reads import read_at_once
from keyloft.nats.many import NO_REPLIES, Collector, Collectors, ManyRequests, PartCollector, requests_of
from keyloft.nats.outbox import Outbox
from keyloft.nats.reporting import IntakeReporter
from keyloft.nats.requests import Owner, Request


class ManyIntake:
    """The part of an intake that knows of messages with several requests."""

    _bounds: IntakeBounds
    _collectors: Collectors
    _engine: Engine
    _outbox: Outbox
    _reply_bytes: int
    _reporter: IntakeReporter

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
        answered = 0
        if content.reads and collector is not None and self._may_answer_reads(owner):
            answered = self._answer_reads(request, content, collector)
        requests = requests_of(request, content, collector, self._bounds.requests_per_second, answered)
        given = sum([one.size for one in requests])  # the bounds have counted them with the message
        request.size -= given
        owner.under_way_bytes -= given
        owner.waiting.extendleft(reversed(requests))
        if collector is None:
            self._collected(request, count, NO_REPLIES, True)

    def _may_answer_reads(self, owner: Owner) -> bool:
        """Whether point reads of an owner wait for nothing, and none of them is counted or logged by itself."""
        return (
            self._engine.reads_at_once
            and not owner.writes
            and self._bounds.requests_per_second is None
            and not self._reporter.logs_all()
        )

    def _answer_reads(self, message: Request, content: ManyRequests, collector: Collector | PartCollector) -> int:
        """Answer the first point reads of a message, without a request for each; returns how many."""
        owner, operation, reads = message.owner, content.requests[0][0], content.reads[: limits.GETS_PER_READ]
        if not self._has_room(owner) or (records := read_at_once(self._engine, reads)) is None:
            return 0
        try:
            replies = list(map(operation.reply, reads, records))
        except Exception:
            return 0  # as a request of its own, each has its own error
        seconds = perf_counter() - message.arrived
        owner.meter.durations[operation.name].add_several(seconds, len(reads))
        if seconds > limits.SLOW_SECONDS:
            for get, record in zip(reads, records, strict=True):
                request = Request(owner, operation, message.about, b"", get, message.arrived, 0)
                self._reporter.done(request, seconds, record)
        collector.add_read(replies)
        return len(reads)

    def _collected(self, request: Request, count: int, reply: bytes, is_last: bool) -> None:
        """Send replies to the requests that a message held."""
        if is_last:
            self._finish(request, reply, count)
            self.end(request)
        else:
            request.owner.reply_bytes += len(reply)
            self._reply_bytes += len(reply)
            self._outbox.add(request.owner, request.reply, reply)
