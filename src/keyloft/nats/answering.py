"""Answers the requests that an intake has carried out, counts them, and makes room for the next ones."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from time import perf_counter
from typing import Any

from keyloft import limits
from keyloft.core.records import Record
from keyloft.errors import Busy
from keyloft.nats.direct_requests import WITHDRAWN
from keyloft.nats.errors import wire_code
from keyloft.nats.many import TOO_FAST
from keyloft.nats.outbox import BUSY, Outbox
from keyloft.nats.reporting import IntakeReporter
from keyloft.nats.requests import Operation, Owner, Request
from keyloft.nats.scheduler import OwnerScheduler


class RequestAnswers:
    """The part of an intake that requests reach last."""

    _is_empty: asyncio.Event
    _most_replies: int
    _outbox: Outbox
    _reply_bytes: int
    _reporter: IntakeReporter
    _request_bytes: int
    _turns: OwnerScheduler
    _without_room: dict[Owner, None]
    """Owners whose next request waits until other owners' replies are sent."""

    def _answer(self, requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
        """Answer reads or writes, each with what became of it."""
        now, logs_all = perf_counter(), self._reporter.logs_all()
        given_back = given_room = 0
        replies: list[tuple[bytes, bytes]] = []
        reply_bytes: dict[Owner, int] = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            owner, operation, written, is_written = request.owner, request.operation, request.written, False
            try:
                if isinstance(outcome, Exception):
                    reply = self._refusal(request, outcome)
                else:
                    reply = operation.reply(request.content, outcome)
                    is_written = written is not None
                    seconds = now - request.arrived
                    owner.meter.durations[operation.name].add(seconds)
                    if logs_all or seconds > limits.SLOW_SECONDS:
                        self._reporter.done(request, seconds, outcome)
            except Exception as error:
                reply = self._refusal(request, error)
            room, size = request.reserved, request.size
            if request.collector is not None:
                request.collector.add(request.position, reply, is_written)
            elif request.reply:
                replies.append((request.reply, reply))
                room -= (length := len(reply))
                reply_bytes[owner] = reply_bytes.get(owner, 0) + length
            if written is not None:
                owner.end_write(request)
            elif request.read is not None:
                owner.end_read(request)
            # As in `end` and in `_make_room`: otherwise these requests would never be freed.
            request.cancel = request.joint = request.content = None
            owner.under_way -= 1
            owner.under_way_bytes -= size
            owner.request_bytes -= size
            given_back += size
            owner.reply_bytes -= room
            given_room += room
            if not owner.is_in_turn and (owner.waiting or owner.ready):
                self._turns.give(owner)
        self._answered(replies, reply_bytes.items(), given_back, given_room)

    def _answer_found(self, reads: Mapping[Owner, Sequence[Request]], records: Sequence[Record | None]) -> list[int]:
        """Answer owners' point reads with what they have found.

        Most gets pass here: what `_answer` does for each request is done once for all of them, or once for an owner.

        Returns:
            About how many bytes the requests of each owner and their replies have.
        """
        requests, now = [*chain.from_iterable(reads.values())], perf_counter()
        operation = requests[0].operation
        replies = operation.reply_each(records) if self._are_usual(requests, now) else None
        if replies is None:
            self._answer(requests, records)
            values = iter([0 if record is None else len(record.value) for record in records])
            return [limits.REQUEST_BYTES * len(some) + sum(islice(values, len(some))) for some in reads.values()]
        name, reserved = operation.name, operation.reply_bytes
        sent: list[tuple[bytes, bytes]] = []
        lengths: list[tuple[Owner, int]] = []
        sizes: list[int] = []
        following = iter(replies)
        for owner, some in reads.items():
            size = length = 0
            timing = owner.meter.durations[name]
            # Without `strict`, which takes as long as a request here, it takes as many replies as there are requests.
            for request, reply in zip(some, following):  # noqa: B905
                timing.add(now - request.arrived)
                size += request.size
                length += len(reply)
                sent.append((request.reply, reply))
            sizes.append(size + length)
            lengths.append((owner, length))
            owner.under_way -= len(some)
            owner.under_way_bytes -= size
            owner.request_bytes -= size
            owner.reply_bytes -= reserved * len(some) - length
            if not owner.is_in_turn and (owner.waiting or owner.ready):
                self._turns.give(owner)
        sent_bytes = sum([length for _, length in lengths])
        self._answered(sent, lengths, sum(sizes) - sent_bytes, reserved * len(requests) - sent_bytes)
        return sizes

    def _are_usual(self, reads: Sequence[Request], now: float) -> bool:
        """Whether these are reads of one operation, none is slow or logged, and each has just a reply over NATS."""
        operation, early = reads[0].operation, now - limits.SLOW_SECONDS
        for request in reads:
            if request.operation is not operation or request.arrived < early or not request.reply:
                return False
            if request.collector is not None or request.read is not None:
                return False
        return not self._reporter.logs_all()

    def _answered(
        self,
        replies: Iterable[tuple[bytes, bytes]],
        sizes: Collection[tuple[Owner, int]],
        given_back: int,
        given_room: int,
    ) -> None:
        """Send replies, and make room.

        Args:
            replies: Reply subjects, and what is sent there.
            sizes: How many bytes of replies each owner has.
            given_back: How many bytes the requests counted as.
            given_room: How much of the room that was reserved for their replies is left.
        """
        if sizes:
            self._outbox.add_all(replies, sizes)
        self._request_bytes -= given_back
        self._reply_bytes -= given_room
        if not self._request_bytes:
            self._is_empty.set()
        if self._without_room:
            self._let_go_on()

    def _finish(self, request: Request, reply: bytes, outcome: Any) -> None:
        """Answer a request that was carried out."""
        seconds = perf_counter() - request.arrived
        request.owner.meter.durations[request.operation.name].add(seconds)
        if seconds > limits.SLOW_SECONDS or self._reporter.logs_all():
            self._reporter.done(request, seconds, outcome)
        self._send(request, reply, is_written=request.written is not None)

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request that was refused, or has failed."""
        self._send(request, self._refusal(request, error))

    def _refusal(self, request: Request, error: Exception) -> bytes:
        if request.operation is TOO_FAST:
            self._refused_busy(request.owner, TOO_FAST, *((1, 0) if request.reply else (0, 1)))
            return BUSY
        if request.operation is WITHDRAWN:
            return b""
        request.owner.meter.errors[wire_code(error)] += 1
        return self._reporter.refused(request, error)

    def _send(self, request: Request, reply: bytes, *, is_written: bool = False) -> None:
        if request.collector is not None:
            collector, request.collector, request.reply = request.collector, None, b""
            collector.add(request.position, reply, is_written)
        elif request.reply:
            self._outbox.add(request.owner, request.reply, reply)
            request.reply = b""
            request.reserved -= len(reply)  # the outbox has them now

    def end(self, request: Request) -> None:
        """Note that a request is done, and let its owner go on."""
        owner = request.owner
        # `cancel` and `joint` refer back to the request, and Python's garbage collector does not follow requests
        # (`gc=False`): it would free neither.
        request.cancel = request.joint = request.content = None
        if request.written is not None:
            owner.end_write(request)
        elif request.read is not None:
            owner.end_read(request)
        self._make_room(owner, request.size, request.reserved)

    def _make_room(self, owner: Owner, size: int, reply_size: int) -> None:
        """Give back the bytes that a finished request counted as, and what is left of the room for its reply."""
        owner.under_way -= 1
        owner.under_way_bytes -= size
        owner.request_bytes -= size
        self._request_bytes -= size
        if not self._request_bytes:
            self._is_empty.set()
        self._sent([(owner, reply_size)])

    def _sent(self, replies: Iterable[tuple[Owner, int]]) -> None:
        """Give back room for replies, each of an owner and a size, and let owners go on that have waited for it."""
        for owner, size in replies:
            owner.reply_bytes -= size
            self._reply_bytes -= size
            if not owner.is_in_turn and (owner.waiting or owner.ready):
                self._turns.give(owner)
        if self._without_room:
            self._let_go_on()

    def _let_go_on(self) -> None:
        """Let owners go on that have waited for room, if there is some."""
        if self._reply_bytes < self._most_replies:
            waiting, self._without_room = self._without_room, {}
            for other in waiting:
                if not other.is_in_turn:
                    self._turns.give(other)

    def _refused_busy(self, owner: Owner, operation: Operation, answered: int, dropped: int) -> None:
        owner.meter.errors[Busy.code] += answered
        owner.meter.dropped += dropped
        self._reporter.refused_busy(owner.name, operation, answered, dropped)
