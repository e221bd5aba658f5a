"""Answers the requests of a service whose deadline has passed, wherever they are."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from keyloft.errors import Stalled
from keyloft.nats.requests import EngineWrite, Owner, Request
from keyloft.nats.turn_reads import TurnReads


class LateRequests:
    """What `Deadlines` does with late requests: those that wait, those that are carried out, and those that read."""

    def __init__(
        self,
        owners: Callable[[], Iterable[Owner]],
        calls: Mapping[Request, Any],
        reads: TurnReads,
        *,
        refuse: Callable[[Request, Exception], None],
        end: Callable[[Request], None],
        reserved: Sequence[str],
        deadline: float,
    ) -> None:
        """Args:
        owners: Returns the owners that have sent something lately.
        calls: The requests that a coroutine carries out.
        reads: The reads that may wait for the database.
        refuse: Answers a request with an error.
        end: Called with a request that is done.
        reserved: What no reply's subject may begin with.
        deadline: How many seconds a sender waits for the database at most.
        """
        self._owners = owners
        self._calls = calls
        self._reads = reads
        self._refuse = refuse
        self._end = end
        self._reserved = tuple(reserved)
        self._reason = f"the database has not answered within {deadline:g} s"
        self._late: deque[Request] = deque()
        """Requests that were not begun in time, and are about to be refused."""

    @property
    def owners(self) -> Iterable[Owner]:
        return self._owners()

    def error(self, more: str = "; it was not carried out") -> Stalled:
        """The error for a late request; `more` says what became of it."""
        return Stalled(self._reason + more)

    def give_up_late(self, late: float) -> None:
        """Give up what waits for the database since before a time."""
        for request in list(self._calls):
            if request.reply and request.arrived <= late:
                self._give_up(request)
        self._reads.give_up_late(late)

    def check_owner(self, owner: Owner, late: float, ends: float) -> bool:
        """Answer the late requests of an owner, until this slice ends; returns whether some are left."""
        for request in owner.held_up():
            if request.reply and request.arrived <= late:
                # It keeps its place, and ends with the writes that it waits for.
                request.is_given_up = True
                self._refuse(request, self.error())
        for request in list(owner.writes.values()):
            if request.reply and request.arrived <= late and request not in self._calls:
                self._give_up(request)
        if owner.waiting and owner.waiting[0].arrived <= late:
            # Once for all of them: what was published has no deadline, and may be in between.
            kept: deque[Request] = deque()
            for request in owner.waiting:
                (self._late if request.reply and request.arrived <= late else kept).append(request)
            owner.waiting = kept
        while self._late and perf_counter() < ends:
            self._refuse_late(self._late.popleft())
        return bool(self._late)

    def _refuse_late(self, request: Request) -> None:
        """Answer a request that was not begun in time."""
        if request.reply.startswith(self._reserved):
            request.reply = ""
        request.owner.under_way += 1
        request.owner.under_way_bytes += request.size
        self._refuse(request, self.error())
        self._end(request)

    def _give_up(self, request: Request) -> None:
        """Answer a request whose database has not answered in time; a write may still be carried out."""
        was_given_up = request.cancel is not None and len(request.written or ()) < 2 and request.cancel()
        text = "; it was not carried out" if was_given_up else "; it may still be carried out"
        self._refuse(request, self.error(text if request.written is not None else ""))
        if was_given_up and isinstance(request.operation, EngineWrite):
            self._end(request)
