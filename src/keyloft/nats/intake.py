"""Takes in the requests of a service: bounds in bytes, owners that take turns, order within an owner, deadlines.

The path of a message: `receive` puts it into its owner's queue, or refuses it if the queue is full. It never awaits, so
that messages are read from the socket as fast as they arrive. Owners take turns (`turns.py`): an owner's messages are
read, and what they ask for is begun. The reply goes to the outbox, and `_end` makes room for the next request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine, Verdict
from keyloft.core.records import Record
from keyloft.errors import Busy, InvalidSubject
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.deadlines import Deadlines
from keyloft.nats.errors import wire_code
from keyloft.nats.late_requests import LateRequests
from keyloft.nats.many import NO_REPLIES, Collectors, ManyRequests, taken_apart
from keyloft.nats.messages import Handled
from keyloft.nats.meters import OTHER, ServiceMeters
from keyloft.nats.outbox import Outbox
from keyloft.nats.owner_work import OwnerWork
from keyloft.nats.reporting import EventSubject, IntakeReporter, Route
from keyloft.nats.requests import Call, EngineWrite, Operation, Owner, PointRead, Request, Variant
from keyloft.nats.turn_reads import TurnReads
from keyloft.nats.turns import Turns, steps


class Intake(OwnerWork):
    """Takes in the requests of one service, carries them out on an engine, and answers them."""

    def __init__(
        self,
        nats: Nats,
        engine: Engine,
        *,
        route: Callable[[str], Route],
        reporter: IntakeReporter,
        meters: ServiceMeters,
        reserved: Sequence[str],
        deadline: float,
        bounds: IntakeBounds,
    ) -> None:
        """Args:
        nats: The connection on which requests arrive.
        engine: Carries out the operations that are a read or a batch.
        route: What a subject means.
        reporter: Logs what becomes of requests.
        meters: Counts them.
        reserved: The service's own prefixes: a reply there would be a request in its name.
        deadline: How many seconds a sender waits for the database at most.
        bounds: How much is taken in.
        """
        self._engine = engine
        self._collectors = Collectors(nats)
        self._find_route = route
        self._reporter = reporter
        self._meters = meters
        self._reserved = tuple(reserved)
        self._deadline = deadline
        self._bounds, self._most_replies = bounds, bounds.reply_bytes
        self._most_requests, self._reserve = bounds.request_bytes, bounds.reserve_bytes
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(nats, reserved, self._sent, self._refused_busy, reporter.unsent)
        self._routes: dict[str, Route] = {}
        self._owners: dict[str, Owner] = {}
        self._turns = Turns(nats, self._take_turn, self._can_go_on)
        self._without_room: dict[Owner, None] = {}
        """Owners whose next request waits until other owners' replies are sent."""
        self._request_bytes = self._reply_bytes = 0
        self._calls: dict[Request, asyncio.Task[None]] = {}
        self._reads = TurnReads(engine, self._answer, self._fail)
        self._late = LateRequests(
            self._owners.values,
            self._calls,
            self._reads,
            refuse=self._refuse,
            end=self._end,
            reserved=reserved,
            deadline=deadline,
        )
        self._deadlines = Deadlines(self._late, deadline)
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def close(self) -> int:
        """Wait until all accepted requests are done and answered; returns how many a stuck database has left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.CLOSING_SECONDS):
                await self._is_empty.wait()
        await self._outbox.close(self._deadline)
        self._deadlines.close()
        return self.unanswered

    # Accepting requests

    def receive(self, subject: str, reply: str, data: bytes) -> Handled:
        """Accept a request, or refuse it."""
        try:
            name, operation, about = self._routes.get(subject) or self._route(subject)
        except EventSubject:
            return []  # what a service publishes arrives here, too: requests have the same prefix
        size = len(data) + len(reply) + limits.REQUEST_BYTES
        if operation.holds_requests:
            size += limits.REQUEST_BYTES * min(1 + data.count(b","), limits.MANY_REQUESTS)
        if (owner := self._owners.get(name)) is None:
            if len(self._owners) > limits.ROUTES:
                size += limits.FURTHER_OWNER_BYTES
            # One that is refused needs no owner of its own: a flood of names is refused as fast as any other.
            name = name if self._request_bytes + size <= self._most_requests + self._reserve else ""
            if (owner := self._owners.get(name)) is None:
                owner = self._owners[name] = Owner(name, self._meters.of(name or OTHER))
        now = perf_counter()
        bounds, unanswered = self._bounds, owner.request_bytes + size
        most = (
            self._most_requests if unanswered > limits.LITTLE_UNANSWERED_BYTES else self._most_requests + self._reserve
        )
        if (
            unanswered > bounds.owner_bytes
            or self._request_bytes + size > most
            or (bounds.requests_per_second is not None and owner.is_too_fast(bounds.requests_per_second, now))
        ):
            replies = self._outbox.refuse(owner, operation)
            replies.append(reply.encode())
            return self._outbox.wait_for_room() if self._outbox.is_full() else replies
        if not self._request_bytes:
            self._is_empty.clear()
            self._deadlines.start()
        owner.request_bytes += size
        self._request_bytes += size
        owner.waiting.append(Request(owner, operation, about, reply, data, now, size))
        if not owner.is_in_turn:
            self._turns.give(owner)
        return None

    def _route(self, subject: str) -> Route:
        """The owner and the operation: a subject names them, and nothing else does."""
        if len(self._routes) >= limits.ROUTES:
            self._routes.clear()  # names cost their sender nothing
        found = self._routes[subject] = self._find_route(subject)
        return found

    # Taking turns

    def _take_turn(self, owner: Owner, now: float) -> None:
        """Read an owner's messages and begin what they ask for, until its time is used up."""
        ends = now + owner.credit
        reads: list[Request] = []
        ready, waiting = owner.ready, owner.waiting
        while ready and self._has_room_for_reply(owner):
            self._begin(ready.popleft(), reads)
            if (now := perf_counter()) > ends:
                break
        while waiting and now <= ends and self._has_room(owner):
            request = waiting.popleft()
            owner.under_way += 1
            owner.under_way_bytes += request.size
            self._start(request, now, reads)
            # To ask for the time takes as long as a tenth of a small request.
            if request.size > limits.SMALL_REQUEST_BYTES or not len(waiting) % 8:
                now = perf_counter()
        if reads:
            self._reads.make(owner, reads)

    def _has_room(self, owner: Owner) -> bool:
        """Whether another request of an owner may be read and begun."""
        if owner.under_way >= limits.OWNER_REQUESTS_UNDER_WAY or owner.under_way_bytes >= limits.OWNER_BYTES_UNDER_WAY:
            return False  # until one of them is done
        return self._has_room_for_reply(owner)

    def _has_room_for_reply(self, owner: Owner) -> bool:
        if owner.reply_bytes >= limits.OWNER_REPLY_BYTES:
            return False  # until one of them is sent
        if self._reply_bytes >= self._most_replies:
            self._without_room[owner] = None
            return False
        return True

    def _can_go_on(self, owner: Owner) -> bool:
        """Whether an owner has something to do in its next turn."""
        return self._has_room_for_reply(owner) if owner.ready else bool(owner.waiting) and self._has_room(owner)

    def _start(self, request: Request, now: float, reads: list[Request]) -> None:
        """Read a message; then begin what it asks for, unless it waits for earlier writes."""
        owner, operation = request.owner, request.operation
        try:
            if request.reply.startswith(self._reserved):
                request.reply = ""
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            if now - request.arrived > self._deadline and request.reply:
                raise self._late.error()
            content = request.content = operation.read(request.about, request.content)
        except Variant as asked:
            operation = request.operation = operation.variants[asked.name]
            content = request.content = asked.content
        except Exception as error:
            self._refuse(request, error)
            self._end(request)
            return
        if operation.holds_requests:
            self._take_apart(request, content)
            return
        if isinstance(operation, PointRead):
            waits = bool(owner.writes) and owner.must_wait(request, (content.key,))
        elif isinstance(operation, EngineWrite):  # the engine keeps the order of its keys
            waits = owner.exclusive is not None and owner.waits_in_order(request, operation.written(content))
        else:
            assert isinstance(operation, Call)
            waits = owner.waits_in_order(request, operation.written(content), operation.keys_read(content))
        if not waits:
            self._begin(request, reads)

    def _take_apart(self, request: Request, content: ManyRequests) -> None:
        """Let the requests that a message holds be the owner's next ones."""
        owner, count, collector = request.owner, len(content.requests), None
        if request.reply and count:
            collector = self._collectors.collector(content, partial(self._collected, request, count))
        requests = taken_apart(request, content, collector, self._bounds.requests_per_second)
        owner.waiting.extendleft(reversed(requests))
        given = sum([one.size for one in requests])  # the bounds have counted them with the message
        request.size -= given
        owner.under_way_bytes -= given
        if collector is None:
            self._collected(request, count, NO_REPLIES, True)

    def _collected(self, request: Request, count: int, reply: bytes, is_last: bool) -> None:
        """Send replies to the requests that a message held."""
        if is_last:
            self._finish(request, reply, count)
            self._end(request)
        else:
            request.owner.reply_bytes += len(reply)
            self._reply_bytes += len(reply)
            self._outbox.add(request.owner, request.reply, reply)

    def _begin(self, request: Request, reads: list[Request]) -> None:
        """Begin a request that waits for nothing; reads are made at the end of the turn."""
        operation = request.operation
        if request.is_given_up:
            self._end(request)
            return
        if size := operation.reply_bytes:
            request.reserved = size
            request.owner.reply_bytes += size
            self._reply_bytes += size
        if isinstance(operation, PointRead):
            reads.append(request)
        elif isinstance(operation, EngineWrite):
            self._submit(request, operation)
        elif isinstance(operation, Call):
            self._call(request, operation)

    # Carrying out

    def _fail(self, requests: Sequence[Request], error: Exception | None) -> None:
        for request in requests:
            self._refuse(request, error or self._late.error(""))
            self._end(request)

    def _answer(self, owner: Owner, requests: Sequence[Request], records: Sequence[Record | None]) -> None:
        # Most requests are gets, so they are counted and answered together.
        now = perf_counter()
        durations, logs_all = owner.meter.durations, self._reporter.logs_all()
        replies: list[tuple[str, bytes]] = []
        reserved = reply_size = size = 0
        for request, record in zip(requests, records, strict=True):
            operation, seconds = request.operation, now - request.arrived
            assert isinstance(operation, PointRead)
            durations[operation.name].add(seconds)
            if logs_all or seconds > limits.SLOW_SECONDS:
                self._reporter.done(request, seconds, record)
            try:
                reply = operation.reply(record)
            except Exception as error:
                reply = self._reporter.refused(request, error)
            if request.collector is not None:
                request.collector.add(request.position, reply, False)
            elif request.reply:
                replies.append((request.reply, reply))
                reply_size += len(reply)
            reserved += request.reserved
            size += request.size
        if replies:
            self._outbox.add_all(owner, replies, reply_size)
        self._make_room(owner, len(requests), size, reserved - reply_size)

    def _submit(self, request: Request, operation: EngineWrite) -> None:
        content = request.content
        if request.written is None:
            request.owner.begin_write(request, operation.written(content))
        try:
            submission = self._engine.submit(operation.batch(content), partial(self._committed, request))
        except Exception as error:
            self._refuse(request, error)
            self._end(request)
        else:
            request.cancel = submission.withdraw

    def _committed(self, request: Request, verdict: Verdict) -> None:
        operation = request.operation
        assert isinstance(operation, EngineWrite)
        try:
            if isinstance(verdict, Exception):
                raise verdict
            self._finish(request, operation.reply(request.content, verdict), verdict)
        except Exception as error:
            self._refuse(request, error)
        self._end(request)

    def _call(self, request: Request, operation: Call) -> None:
        task = self._calls[request] = self._loop.create_task(self._carry_out(request, operation))
        task.add_done_callback(partial(self._called, request))
        if request.written is None:
            request.cancel = task.cancel

    async def _carry_out(self, request: Request, operation: Call) -> None:
        try:
            reply, outcome = await steps(request.owner, operation.carry_out(request.content))
            if reply:  # else no message has asked for it
                self._finish(request, reply, outcome)
        except Exception as error:
            self._refuse(request, error)

    def _called(self, request: Request, task: "asyncio.Task[None]") -> None:
        """A call has ended, or was cancelled because its deadline was over, perhaps before its first step."""
        del self._calls[request]
        self._end(request)

    # Answering

    def _finish(self, request: Request, reply: bytes, outcome: Any) -> None:
        """Answer a request that was carried out."""
        seconds = perf_counter() - request.arrived
        request.owner.meter.durations[request.operation.name].add(seconds)
        if seconds > limits.SLOW_SECONDS or self._reporter.logs_all():
            self._reporter.done(request, seconds, outcome)
        self._send(request, reply, is_written=request.written is not None)

    def _refuse(self, request: Request, error: Exception) -> None:
        """Answer a request that was refused, or has failed."""
        request.owner.meter.errors[wire_code(error)] += 1
        self._send(request, self._reporter.refused(request, error))

    def _send(self, request: Request, reply: bytes, *, is_written: bool = False) -> None:
        if request.collector is not None:
            collector, request.collector, request.reply = request.collector, None, ""
            collector.add(request.position, reply, is_written)
        elif request.reply:
            self._outbox.add(request.owner, request.reply, reply)
            request.reply = ""
            request.reserved -= len(reply)  # the outbox has them now

    def _end(self, request: Request) -> None:
        """A request is done."""
        owner = request.owner
        # What it cancels refers to the request; the collector does not see requests, and would free neither.
        request.cancel = request.content = None
        if request.written is not None:
            owner.end_write(request)
        self._make_room(owner, 1, request.size, request.reserved)

    def _make_room(self, owner: Owner, requests: int, size: int, reply_size: int) -> None:
        """Give back what the finished requests of an owner counted as, and the room for replies that they left."""
        owner.under_way -= requests
        owner.under_way_bytes -= size
        owner.request_bytes -= size
        self._request_bytes -= size
        if not self._request_bytes:
            self._is_empty.set()
        self._sent(owner, reply_size)

    def _sent(self, owner: Owner, size: int) -> None:
        """Give back room for replies, and let owners go on that have waited for it."""
        owner.reply_bytes -= size
        self._reply_bytes -= size
        if not owner.is_in_turn:
            if owner.waiting or owner.ready:
                self._turns.give(owner)
            else:
                self._forget_if_idle(owner)
        if self._without_room and self._reply_bytes < self._most_replies:
            waiting, self._without_room = self._without_room, {}
            for other in waiting:
                if not other.is_in_turn:
                    self._turns.give(other)

    def _forget_if_idle(self, owner: Owner) -> None:
        if len(self._owners) > limits.ROUTES and owner.is_idle and self._owners.get(owner.name) is owner:
            del self._owners[owner.name]

    def _refused_busy(self, owner: Owner, operation: Operation, answered: int, dropped: int) -> None:
        owner.meter.errors[Busy.code] += answered
        owner.meter.dropped += dropped
        self._reporter.refused_busy(owner.name, operation, answered, dropped)
        self._forget_if_idle(owner)
