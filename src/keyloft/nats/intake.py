"""Takes in the requests of a service: bounds in bytes, owners that take turns, order within an owner, deadlines.

The path of a message: `receive` (`admission.py`) puts it into its owner's queue, or refuses it if the queue is full.
Requests over HTTP take the same path from `hand_in` on.
Owners take turns (`scheduler.py`): an owner's messages are read, and what they ask for is begun. The reply goes to the
outbox, and `end` makes room for the next request.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core.engine import Engine, TakesSeveral, Verdict
from keyloft.errors import InvalidSubject
from keyloft.nats.admission import Admission
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.deadlines import NOT_CARRIED_OUT, Deadlines
from keyloft.nats.direct_requests import DIRECT
from keyloft.nats.joint_reads import JointReads
from keyloft.nats.joint_writes import JointWrites
from keyloft.nats.many import Collectors
from keyloft.nats.many_intake import ManyIntake
from keyloft.nats.meters import ServiceMeters
from keyloft.nats.outbox import Outbox
from keyloft.nats.owners import Owners
from keyloft.nats.reporting import IntakeReporter, Route
from keyloft.nats.requests import UNKNOWN_OPERATION, Call, EngineWrite, Owner, PointRead, Request, Variant
from keyloft.nats.scheduler import OwnerScheduler, steps
from keyloft.nats.turn_reads import PendingReads, TurnReads


class Intake(ManyIntake, Admission):
    """Takes in the requests of one service, carries them out on an engine, and answers them."""

    def __init__(
        self,
        nats: Nats,
        engine: Engine,
        *,
        route: Callable[[str], Route],
        words: int,
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
        words: How many words of a subject follow its prefix; the first of them is the owner's name.
        reporter: Logs what becomes of requests.
        meters: Counts them.
        reserved: The service's own prefixes: a reply there would be a request in its name.
        deadline: How many seconds a sender waits for the database at most.
        bounds: How much is taken in.
        """
        self._engine = engine
        self._several = engine if isinstance(engine, TakesSeveral) else None
        self._joint_writes = None if self._several is None else JointWrites(self._several, self._decided_each)
        self._collectors = Collectors(nats)
        self._reporter = reporter
        self._reserved = tuple([prefix.encode() for prefix in reserved])
        self._deadline = deadline
        self._bounds = bounds
        # Copied into attributes, which are faster to read: each request needs them.
        self._most_requests, self._reserve = bounds.request_bytes, bounds.reserve_bytes
        self._most_replies = bounds.reply_bytes
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(nats, (*self._reserved, DIRECT), self._sent, self._refused_busy, reporter.unsent)
        self._owners = Owners(route, words, meters)
        self._without_room: dict[Owner, None] = {}
        self._request_bytes = self._reply_bytes = 0
        self.calls: set[Request] = set()
        """The requests that are carried out by a coroutine."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn_reads = TurnReads(engine, self._answer, lambda: self.deadlines.stalled())
        self._joint_reads = JointReads(engine, self._turn_reads.make, self._answer_found, self._send_replies)
        self._turns = OwnerScheduler(nats, self._take_turn, self._can_go_on, self._end_turns)
        self.reads = self._turn_reads.under_way
        """The requests that wait for the database to read, by their tasks."""
        self._writes: list[Request] = []
        """Writes that are decided and not yet answered."""
        self._verdicts: list[Verdict | Exception] = []
        """The verdicts of these writes."""
        self._decided_writes = []
        self.deadlines = Deadlines(self, self._reserved, deadline)
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def close(self) -> int:
        """Wait until all accepted requests are done and answered; returns how many a stuck database has left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.CLOSING_SECONDS):
                await self._is_empty.wait()
        await self._outbox.close(self._deadline)
        self.deadlines.close()
        return self.unanswered

    # Taking turns

    def _take_turn(self, owner: Owner, now: float) -> None:
        """Read an owner's messages and begin what they ask for, until its time is used up."""
        if owner in self._joint_reads.begun:  # what it asks for next may change what these read
            self._joint_reads.make_in_turn_of(owner)
        ends = now + owner.credit
        reads = PendingReads()
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
            # Reading the clock takes a tenth of the time of a small request. A turn of a few needs it at its end alone.
            if request.size > limits.SMALL_REQUEST_BYTES or len(waiting) % 8 == 4:
                now = perf_counter()
        if reads:
            self._joint_reads.add(owner, reads)

    def _end_turns(self) -> None:
        """Let the engine do what turns have begun, and send the replies that there are."""
        self._submit_begun()
        self._joint_reads.make_all()
        self._send_replies()

    def _has_room(self, owner: Owner) -> bool:
        """Whether another request of an owner may be read and begun."""
        if owner.under_way >= limits.OWNER_REQUESTS_UNDER_WAY or owner.under_way_bytes >= limits.OWNER_BYTES_UNDER_WAY:
            return False  # until one of them is done
        if owner.reply_bytes >= limits.OWNER_REPLY_BYTES or self._reply_bytes >= self._most_replies:
            return self._has_room_for_reply(owner)
        return True

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

    def _start(self, request: Request, now: float, reads: PendingReads) -> None:
        """Read a message; then begin what it asks for, unless it waits for earlier requests."""
        owner, operation = request.owner, request.operation
        try:
            if request.reply.startswith(self._reserved):
                request.reply = b""
                raise InvalidSubject("a reply subject under the service's own prefixes is refused")
            if operation is UNKNOWN_OPERATION:
                subject, request.content = request.content
                route = self._owners.route(subject)
                operation = request.operation = route.operation
                request.about = route.about
            if now - request.arrived > self._deadline and request.reply:
                raise self.deadlines.stalled(NOT_CARRIED_OUT)
            content = request.content = operation.read(request.about, request.content)
        except Variant as asked:
            operation = request.operation = operation.variants[asked.name]
            content = request.content = asked.content
        except Exception as error:
            self.refuse(request, error)
            self.end(request)
            return
        if isinstance(operation, PointRead):
            if not owner.writes:  # most of them: as in `_begin`
                request.reserved = size = operation.reply_bytes
                owner.reply_bytes += size
                self._reply_bytes += size
                reads.append(request)
                return
            if waits := owner.read_waits(request, (content.key,)):
                owner.begin_read(request, (content.key,))
        elif isinstance(operation, EngineWrite):  # the engine keeps the order of its keys
            if not owner.unordered and not reads and not operation.reply_bytes:
                self._submit(request, operation)
                return
            keys = [mutation.key for mutation in operation.batch(content).mutations]
            self._turn_reads.make_before(owner, reads, keys)
            waits = owner.unordered > 0 and owner.write_waits(request, keys)
        elif isinstance(operation, Call):
            waits = self._call_waits(request, operation, reads)
        else:
            self._take_in_many(request, content, is_ordered=not owner.unordered and not reads)
            return
        if not waits:
            self._begin(request, reads)

    def _call_waits(self, request: Request, operation: Call, reads: PendingReads) -> bool:
        """Whether a call waits for earlier requests. From now on, later requests of its keys wait for it."""
        owner, written = request.owner, operation.written(request.content)
        if written is None or written:
            self._turn_reads.make_before(owner, reads, written)
            return owner.write_waits(request, written)
        keys = operation.keys_read(request.content)
        waits = owner.read_waits(request, keys)
        if operation.shows_entries and (keys is None or keys):
            owner.begin_read(request, keys)
        return waits

    def _begin(self, request: Request, reads: PendingReads) -> None:
        """Begin a request that waits for nothing; reads are made at the end of the turn."""
        operation = request.operation
        if request.is_given_up:
            self.end(request)
            return
        if size := operation.reply_bytes:
            request.reserved = size
            request.owner.reply_bytes += size
            self._reply_bytes += size
        if isinstance(operation, PointRead):
            reads.append(request)
        elif isinstance(operation, EngineWrite):
            self._submit(request, operation)
        else:
            assert isinstance(operation, Call)
            self._call(request, operation)

    # Carrying out

    def _submit(self, request: Request, operation: EngineWrite) -> None:
        owner, batch = request.owner, operation.batch(request.content)
        if request.written is None:
            mutations = batch.mutations
            owner.begin_write(request, (mutations[0].key,) if len(mutations) == 1 else [one.key for one in mutations])
            request.is_submitted = True
            if self._joint_writes is not None and len(mutations) == 1 and request.size <= limits.SMALL_REQUEST_BYTES:
                self._joint_writes.add(request, batch)
                return
        self._submit_begun()
        try:
            submission = self._engine.submit(batch, partial(self._decided, request))
        except Exception as error:
            self._answer([request], [error])
        else:
            # A write of several keys is not withdrawn: requests that wait for it would not wait for the earlier writes
            # of these keys.
            if len(request.written or ()) < 2:
                request.cancel = submission.withdraw
            if not request.is_submitted:
                owner.submitted(request)

    def _submit_begun(self) -> None:
        if self._joint_writes is not None:
            self._joint_writes.submit()

    def _decided(self, request: Request, verdict: Verdict) -> None:
        """Note what became of a write. Writes that are decided at the same time are answered together."""
        if not self._writes:
            self._loop.call_soon(self._answer_writes)
        self._writes.append(request)
        self._verdicts.append(verdict)

    def _decided_each(self, requests: Sequence[Request], verdicts: Sequence[Verdict | Exception]) -> None:
        if not self._writes:
            self._loop.call_soon(self._answer_writes)
        self._writes += requests
        self._verdicts += verdicts

    def _answer_writes(self) -> None:
        writes, self._writes = self._writes, []
        verdicts, self._verdicts = self._verdicts, []
        together, self._decided_writes = self._decided_writes, []
        self._answer(writes, verdicts)
        for request in together:
            self._answer_together(request)
        # Answered before the engine begins the next group, so that the senders go on while the engine works.
        self._send_replies()

    def _call(self, request: Request, operation: Call) -> None:
        self.calls.add(request)
        task = self._loop.create_task(self._carry_out(request, operation))
        self._tasks.add(task)
        task.add_done_callback(partial(self._called, request))
        if request.written is None:
            request.cancel = task.cancel

    async def _carry_out(self, request: Request, operation: Call) -> None:
        try:
            reply, outcome = await steps(request.owner, operation.carry_out(request.content))
            if reply:  # an internal request has no reply
                self._finish(request, reply, outcome)
        except Exception as error:
            self.refuse(request, error)

    def _called(self, request: Request, task: "asyncio.Task[None]") -> None:
        """End a request whose call has ended, or was cancelled at its deadline, perhaps before its first step."""
        self._tasks.discard(task)
        self.calls.discard(request)
        self.end(request)
