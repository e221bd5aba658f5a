"""Accepts the requests of a service, or refuses them by its bounds, before their messages are parsed."""

from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Final

from keyloft import limits
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.deadlines import Deadlines
from keyloft.nats.direct_requests import DIRECT, WITHDRAWN, DirectRequest
from keyloft.nats.errors import overloaded
from keyloft.nats.handlers import Handled, RefusedNames
from keyloft.nats.internal_requests import InternalRequests
from keyloft.nats.outbox import TOO_MUCH
from keyloft.nats.refused_operations import TooLargeMessage
from keyloft.nats.reporting import EventSubject, Route
from keyloft.nats.requests import (
    NO_OPERATION,
    UNKNOWN_OPERATION,
    EngineWrite,
    Operation,
    Owner,
    Request,
)

_UNROUTED: Final = Route("", UNKNOWN_OPERATION, None)


class Admission(InternalRequests):
    """The part of an intake that messages reach first. It never awaits, so messages are read as fast as they arrive."""

    _bounds: IntakeBounds
    _most_requests: int
    _reserve: int
    deadlines: Deadlines

    def receive(self, subject: bytes, reply: bytes, data: bytes) -> Handled:
        """Accept a request, or refuse it.

        Raises:
            UnicodeDecodeError: The subject is not UTF-8.
        """
        owners, bounds = self._owners, self._bounds
        size = len(data) + len(reply) + limits.REQUEST_BYTES
        if (route := owners.routes.get(subject)) is None:
            if self._is_refused_name(subject, size):
                return self._refuse_others(reply)
            try:
                # Finding out what a subject means is the slowest step here; in a flood of names it is left to the
                # owner's turn.
                route = _UNROUTED if owners.shares_queue(subject) else owners.route(subject)
            except EventSubject:
                return []
        operation = route.operation
        if operation.holds_requests:
            size += limits.REQUEST_BYTES * min(1 + data.count(b","), limits.MANY_REQUESTS)
        owner = owners.others if route is _UNROUTED else owners.known.get(route.owner) or owners.of(route.owner)
        now = perf_counter()
        unanswered, of_all = owner.request_bytes + size, self._request_bytes + size
        if (
            unanswered > bounds.owner_bytes
            or (of_all > self._most_requests and not self._may_use_reserve(unanswered, of_all))
            or (bounds.requests_per_second is not None and owner.is_too_fast(bounds.requests_per_second, now))
        ):
            replies = self._refuse(owner, operation, reply)
            return self._outbox.wait_for_room() if self._outbox.is_full() else replies
        if not self._request_bytes:
            self._is_empty.clear()
            self.deadlines.start()
        if not owner.request_bytes:
            owner.visits += 1
        owner.request_bytes, self._request_bytes = unanswered, of_all
        content = (subject, data) if route is _UNROUTED else data
        owner.waiting.append(Request(owner, operation, route.about, reply, content, now, size))
        if not owner.is_in_turn:
            self._turns.give(owner)
        return None

    def _may_use_reserve(self, unanswered: int, of_all: int) -> bool:
        """Whether an owner with so much unanswered, itself included, may use what is kept for those with little."""
        return unanswered <= limits.LITTLE_UNANSWERED_BYTES and of_all <= self._most_requests + self._reserve

    def hand_in(
        self, subject: bytes, data: bytes, answer: Callable[[bytes], None], operation: Operation | None = None
    ) -> DirectRequest:
        """Accept a request that did not arrive over NATS, as if it had arrived on this subject.

        Args:
            subject: Names the owner and the operation.
            data: What the message over NATS would contain.
            answer: Called with the reply, later, unless the request is withdrawn before.
            operation: Carries out the request, instead of the operation that the subject names.

        Raises:
            Busy: Too much is waiting.
        """
        owners = self._owners
        route = owners.routes.get(subject) or owners.route(subject)
        refused = self.receive(subject, DIRECT, data)
        if refused is not None:
            if isinstance(refused, Coroutine):
                refused.close()  # the reader of NATS would await it, to slow down
            raise overloaded(TOO_MUCH)
        request = owners.known.get(route.owner, owners.others).waiting[-1]
        if operation is not None:
            request.operation = operation
        return DirectRequest(self, request, data, answer)

    def withdraw(self, request: Request, data: bytes) -> None:
        """Don't answer a request that was handed in with this data, and stop it, if that is still possible."""
        request.collector, request.reply = None, b""
        if request.content is data:  # the request waits to be read
            request.operation, request.content = WITHDRAWN, b""
            return
        request.is_given_up = True  # the request may wait for earlier ones
        if request.stop() and isinstance(request.operation, EngineWrite):
            self.end(request)

    def end(self, request: Request) -> None:
        """Note that a request is done, and make room for the next one."""
        raise NotImplementedError

    def refuses(self, subject: bytes, reply: bytes, size: int) -> bool:
        """Whether to refuse a large message, of which only the beginning has arrived.

        That is so if too much is waiting, or if no message of its operation may be as large as this one.
        """
        counted = size + len(reply) + limits.REQUEST_BYTES
        owners = self._owners
        if (route := owners.routes.get(subject)) is None:
            if self._is_refused_name(subject, counted - size):  # whatever its size
                self._refuse(owners.others, NO_OPERATION, reply)
                return True
            try:
                route = _UNROUTED if owners.shares_queue(subject) else owners.route(subject)
            except (EventSubject, UnicodeDecodeError):
                return False  # `receive` meets the same
        if size > route.operation.most_bytes:
            self._refuse_too_large(subject, reply, size, route)
            return True
        owner = owners.others if route is _UNROUTED else owners.known.get(route.owner, owners.others)
        if (
            owner.request_bytes + counted <= self._bounds.owner_bytes
            and self._request_bytes + counted <= self._most_requests
        ):
            return False
        self._refuse(owner, route.operation, reply)
        return True

    def _refuse_too_large(self, subject: bytes, reply: bytes, size: int, route: Route) -> None:
        """Refuse a message by its size. Its error is sent in its owner's turn, as if the message had been read."""
        refused = self.receive(subject, reply, b"")
        if refused is None:
            owner = self._owners.known.get(route.owner, self._owners.others)
            owner.waiting[-1].operation = TooLargeMessage(route.operation, size)
        elif isinstance(refused, Coroutine):
            refused.close()  # the reader would await it, to slow down; the rest of the message slows it down enough

    def _is_refused_name(self, subject: bytes, size: int) -> bool:
        """Whether an unknown subject names an owner without a queue of its own, and the shared queue is full.

        The events that a service publishes arrive here, too, because they have the same prefix.
        """
        owners = self._owners
        if owners.others.request_bytes + size <= self._bounds.owner_bytes or b".events." in subject:
            return False
        return not owners.knows(subject)

    def _refuse_others(self, reply: bytes) -> Handled:
        """Refuse all requests of owners without a queue of their own, without reading them: there may be very many."""
        replies = self._refuse(self._owners.others, NO_OPERATION, reply)
        return self._outbox.wait_for_room() if self._outbox.is_full() else RefusedNames(self._owners.knows, replies)

    def _refuse(self, owner: Owner, operation: Operation, reply: bytes) -> list[bytes]:
        """Answer a message with BUSY; returns the list to which the reader may add the messages that follow."""
        replies = self._outbox.refuse(owner, operation)
        replies.append(reply)
        return replies
