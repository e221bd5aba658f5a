"""Takes the requests out of messages that hold several, as the owner's next requests, and collects their replies."""

import asyncio
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from keyloft import limits
from keyloft.core.engine import Engine, TakesSeveral, Verdict
from keyloft.core.records import Committed, Get
from keyloft.nats.answering import RequestAnswers
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.joint_reads import read_at_once
from keyloft.nats.many import NO_REPLIES, Collectors, ManyRequests, ManyWrites, PartCollector, requests_of
from keyloft.nats.requests import EngineWrite, Operation, Owner, Request


class ManyIntake(RequestAnswers):
    """The part of an intake that handles messages with several requests."""

    _bounds: IntakeBounds
    _collectors: Collectors
    _decided_writes: list[Request]
    """Requests with several writes of which some are decided and not yet answered."""
    _engine: Engine
    _several: TakesSeveral | None
    """The engine, if it takes several batches at once."""
    _loop: asyncio.AbstractEventLoop

    def _has_room(self, owner: Owner) -> bool:
        raise NotImplementedError

    def _send_replies(self) -> None:
        """Send all replies that there are."""
        self._collectors.send_parts()
        self._outbox.send_at_once()

    def _submit_begun(self) -> None:
        """Hand the writes to the engine that turns have begun: later ones of their keys come after them."""
        raise NotImplementedError

    def _answer_writes(self) -> None:
        """Answer the writes that are decided."""
        raise NotImplementedError

    def _take_in_many(self, request: Request, content: ManyRequests, *, is_ordered: bool) -> None:
        """Take the requests out of a message, as the owner's next ones.

        `is_ordered` says that they keep their order with earlier requests without waiting for them.
        """
        owner, count, collector = request.owner, len(content.requests), None
        owner.meter.gathered += count
        if request.reply and count:
            collected = partial(self._collected, request, count)
            collector = self._collectors.collector(content, collected, in_one=request.collector is not None)
        answered = 0
        if content.together and isinstance(collector, PartCollector) and self._may_take_together():
            operation, _ = content.requests[0]
            if isinstance(operation, EngineWrite):
                if is_ordered:
                    self._submit_writes(request, operation, ManyWrites(content.together, collector), content.size)
                    return
            elif not owner.writes:
                answered = self._answer_reads(request, operation, content.together, collector)
        requests = requests_of(request, content, collector, self._bounds.requests_per_second, answered)
        given = sum([one.size for one in requests])  # the bounds have counted them with the message
        request.size -= given
        owner.under_way_bytes -= given
        owner.waiting.extendleft(reversed(requests))
        if collector is None:
            self._collected(request, count, NO_REPLIES, True)

    def _may_take_together(self) -> bool:
        """Whether no request of a message is counted or logged by itself."""
        return self._bounds.requests_per_second is None and not self._reporter.logs_all()

    def _answer_reads(
        self, message: Request, operation: Operation, together: Sequence[Get], collector: PartCollector
    ) -> int:
        """Answer the first point reads of a message, without a request for each; returns how many."""
        owner, reads = message.owner, together[: limits.GETS_PER_READ]
        if not self._engine.reads_at_once or not self._has_room(owner):
            return 0
        if (records := read_at_once(self._engine, reads)) is None:
            return 0
        values, replies = operation.values(records) if collector.is_short else None, []
        if values is None:
            try:
                replies = list(map(operation.reply, reads, records))
            except Exception:
                return 0  # carried out as separate requests, each gets its own error
        seconds = perf_counter() - message.arrived
        owner.meter.durations[operation.name].add_several(seconds, len(reads))
        if seconds > limits.SLOW_SECONDS:
            for get, record in zip(reads, records, strict=True):
                request = Request(owner, operation, message.about, b"", get, message.arrived, 0)
                self._reporter.done(request, seconds, record)
        if values is None or not collector.add_values(values, len(reads)):
            collector.add_first(replies or list(map(operation.reply, reads, records)), is_written=False)
        return len(reads)

    # Writes that are submitted together, with one request for all

    def _submit_writes(self, message: Request, operation: EngineWrite, writes: ManyWrites, size: int) -> None:
        """Hand the writes of a message to the engine. Later requests wait for all of them, as for a write of all keys.

        The engine commits, or refuses, each by itself.
        """
        owner, count = message.owner, len(writes.contents)
        given = count * limits.REQUEST_BYTES + size  # the bounds have counted them with the message
        request = Request(owner, operation, message.about, message.reply, writes, message.arrived, given)
        message.size -= given
        owner.under_way += count
        batches = [operation.batch(content) for content in writes.contents]
        keys = [batch.mutations[0].key for batch in batches]
        if not owner.is_writing(keys):  # requests that wait for it would not wait for the earlier writes of these keys
            request.cancel = partial(self._withdraw_together, request)
        owner.begin_write(request, keys)
        request.is_submitted = True
        self._submit_begun()
        if self._several is not None:
            try:
                writes.together = self._several.submit_each(batches, partial(self._decided_at_once, request))
            except Exception as error:
                self._decided_at_once(request, [error] * count)
            return
        for position, batch in enumerate(batches):
            decided = partial(self._decided_together, request, position)
            try:
                writes.submissions.append(self._engine.submit(batch, decided))
            except Exception as error:
                decided(error)

    def _withdraw_together(self, request: Request) -> bool:
        """Withdraw the writes of a message that are not begun; returns whether that was all of them."""
        writes: ManyWrites = request.content
        count = len(writes.contents)
        if writes.together is not None:
            withdrawn = count if writes.together.withdraw() else 0
        else:
            withdrawn = sum([one.withdraw() for one in writes.submissions])
        if withdrawn < count:
            writes.undecided -= withdrawn
            if not writes.undecided:
                self._answer_soon(request)  # no verdict follows
            return False
        request.owner.under_way -= count - 1  # the last one ends with the request
        return True

    def _decided_together(self, request: Request, position: int, verdict: Verdict | Exception) -> None:
        """Note what became of one of several writes. Writes that are decided at the same time are answered together."""
        writes: ManyWrites = request.content
        writes.outcomes[position] = verdict
        writes.undecided -= 1
        self._answer_soon(request)

    def _decided_at_once(self, request: Request, verdicts: Sequence[Verdict | Exception]) -> None:
        """Note what became of all of several writes."""
        writes: ManyWrites = request.content
        writes.outcomes, writes.undecided = list(verdicts), 0
        self._answer_soon(request)

    def _answer_soon(self, request: Request) -> None:
        writes: ManyWrites = request.content
        if not writes.is_due:
            writes.is_due = True
            if not self._decided_writes:
                self._loop.call_soon(self._answer_writes)
            self._decided_writes.append(request)

    def _answer_together(self, request: Request) -> None:
        """Answer the writes of a message that are decided."""
        writes: ManyWrites = request.content
        writes.is_due = False
        if request.reply:  # otherwise the deadline has passed, and all are answered
            seconds = perf_counter() - request.arrived
            if {*map(type, writes.outcomes)} == {Committed} and seconds <= limits.SLOW_SECONDS and not writes.answered:
                operation = request.operation
                request.owner.meter.durations[operation.name].add_several(seconds, len(writes.contents))
                replies = operation.reply_each(writes.outcomes)
                if replies is None:
                    replies = list(map(operation.reply, writes.contents, writes.outcomes))
                writes.collector.add_first(replies, is_written=True)
            else:
                self._answer_each(request, writes, [one for one in writes.unanswered if one[1] is not None])
        if not writes.undecided:
            request.owner.under_way -= len(writes.contents) - 1  # the last one ends with the request
            self.end(request)

    def _answer_each(self, request: Request, writes: ManyWrites, outcomes: Sequence[tuple[int, Any]]) -> None:
        """Answer some of several writes with a request for each, so that each is logged and counted by itself."""
        owner, requests = request.owner, []
        for position, _ in outcomes:
            content = writes.contents[position]
            one = Request(owner, request.operation, request.about, request.reply, content, request.arrived, 0)
            one.collector, one.position = writes.collector, position
            requests.append(one)
        writes.answered.update([position for position, _ in outcomes])
        owner.under_way += len(requests)  # as `_answer` counts it
        self._answer(requests, [outcome for _, outcome in outcomes])

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request that was refused, or has failed."""
        if isinstance(request.content, ManyWrites):
            self._refuse_together(request, request.content, error)
        else:
            super().refuse(request, error)

    def _refuse_together(self, request: Request, writes: ManyWrites, error: Exception) -> None:
        """Refuse the writes of a message that are not answered, because their deadline has passed."""
        self._answer_each(request, writes, [(position, error) for position, _ in writes.unanswered])
        request.reply = b""

    def _collected(self, request: Request, count: int, reply: bytes, is_last: bool) -> None:
        """Send replies to the requests that a message held."""
        if is_last:
            self._finish(request, reply, count)
            self.end(request)
        else:
            request.owner.reply_bytes += len(reply)
            self._reply_bytes += len(reply)
            self._outbox.add(request.owner, request.reply, reply)
