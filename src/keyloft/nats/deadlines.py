"""Answers requests whose deadline has passed, in slices, so that other requests don't wait meanwhile."""

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Final, Protocol

from keyloft import limits
from keyloft.errors import Stalled
from keyloft.nats.requests import EngineWrite, Owner, Request

NOT_CARRIED_OUT: Final = "; it was not carried out"


class UnansweredRequests(Protocol):
    """The requests that are not yet answered, and how to answer them."""

    @property
    def owners(self) -> Iterable[Owner]: ...

    @property
    def calls(self) -> Collection[Request]:
        """The requests that are carried out by a coroutine."""

    @property
    def reads(self) -> Mapping["asyncio.Task[None]", Sequence[Request]]:
        """The requests that wait for a read of the database, by task; a cancelled task answers its own requests."""

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request with an error."""

    def end(self, request: Request) -> None:
        """Note that a request is done."""


class Deadlines:
    """Checks four times within a deadline, while there are requests. Published messages have no deadline."""

    def __init__(self, unanswered: UnansweredRequests, reserved: tuple[bytes, ...], seconds: float) -> None:
        """Args:
        unanswered: The requests.
        reserved: The service's own prefixes, to which nothing is replied.
        seconds: How long a sender waits at most.
        """
        self._unanswered = unanswered
        self._reserved = reserved
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._unchecked: deque[Owner] = deque()
        self._late: deque[Request] = deque()
        """Requests that were not begun in time, and are about to be refused."""

    def start(self) -> None:
        """Begin to check, because there are requests now."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds / 4, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def stalled(self, more: str = "") -> Stalled:
        """The error of a late request."""
        return Stalled(f"the database has not answered within {self._seconds:g} s{more}")

    def give_up_late(self, late: float) -> None:
        """Give up the requests that have waited for the database since before a time."""
        for request in list(self._unanswered.calls):
            if request.reply and request.arrived <= late:
                self._give_up(request)
        for task in [task for task, requests in self._unanswered.reads.items() if requests[0].arrived <= late]:
            task.cancel()

    def _check(self) -> None:
        now = perf_counter()
        late, ends = now - self._seconds, now + limits.TURNS_SECONDS
        unchecked = self._unchecked
        if not unchecked:
            self.give_up_late(late)
            unchecked.extend(self._unanswered.owners)
        while unchecked and perf_counter() < ends:
            if not self._check_owner(unchecked[0], late, ends):
                unchecked.popleft()
        self._timer = None
        if unchecked:
            self._timer = self._loop.call_later(limits.TURN_SECONDS, self._check)
        elif any(owner.request_bytes for owner in self._unanswered.owners):
            self.start()

    def _check_owner(self, owner: Owner, late: float, ends: float) -> bool:
        """Answer the late requests of an owner, until this slice ends; returns whether some are left."""
        for request in owner.held_up():
            if request.reply and request.arrived <= late:
                # The request keeps its place in the order: it ends together with the writes that it waits for.
                request.is_given_up = True
                self._unanswered.refuse(request, self.stalled(NOT_CARRIED_OUT))
        for request in list(owner.writes.values()):
            if request.reply and request.arrived <= late and request not in self._unanswered.calls:
                self._give_up(request)
        if owner.waiting and owner.waiting[0].arrived <= late:
            # One pass for all of them: published messages, which have no deadline, may stand in between.
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
            request.reply = b""
        request.owner.under_way += 1
        request.owner.under_way_bytes += request.size
        self._unanswered.refuse(request, self.stalled(NOT_CARRIED_OUT))
        self._unanswered.end(request)

    def _give_up(self, request: Request) -> None:
        """Answer a request whose database has not answered in time; a write may still be carried out."""
        was_given_up = request.stop()
        text = NOT_CARRIED_OUT if was_given_up else "; it may still be carried out"
        self._unanswered.refuse(request, self.stalled(text if request.written is not None else ""))
        if was_given_up and isinstance(request.operation, EngineWrite):
            self._unanswered.end(request)
