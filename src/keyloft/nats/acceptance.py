"""Accepts the requests of a service, or refuses them by its bounds, before anything of their messages is read."""

from time import perf_counter

from keyloft import limits
from keyloft.nats.bounds import IntakeBounds
from keyloft.nats.deadlines import Deadlines
from keyloft.nats.messages import Handled, RefusedNames
from keyloft.nats.owner_work import OwnerWork
from keyloft.nats.reporting import EventSubject
from keyloft.nats.requests import NO_OPERATION, Operation, Owner, Request


class Acceptance(OwnerWork):
    """The part of an intake that messages reach first. It never awaits: they are read as fast as they arrive."""

    _bounds: IntakeBounds
    _most_requests: int
    _reserve: int
    _deadlines: Deadlines

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
                route = owners.route(subject)
            except EventSubject:
                return []
        name, operation, about = route
        if operation.holds_requests:
            size += limits.REQUEST_BYTES * min(1 + data.count(b","), limits.MANY_REQUESTS)
        owner = owners.known.get(name) or owners.of(name)
        now = perf_counter()
        unanswered = owner.request_bytes + size
        most = (
            self._most_requests if unanswered > limits.LITTLE_UNANSWERED_BYTES else self._most_requests + self._reserve
        )
        if (
            unanswered > bounds.owner_bytes
            or self._request_bytes + size > most
            or (bounds.requests_per_second is not None and owner.is_too_fast(bounds.requests_per_second, now))
        ):
            replies = self._refuse(owner, operation, reply)
            return self._outbox.wait_for_room() if self._outbox.is_full() else replies
        if not self._request_bytes:
            self._is_empty.clear()
            self._deadlines.start()
        if not owner.request_bytes:
            owner.visits += 1
        owner.request_bytes = unanswered
        self._request_bytes += size
        owner.waiting.append(Request(owner, operation, about, reply, data, now, size))
        if not owner.is_in_turn:
            self._turns.give(owner)
        return None

    def refuses(self, subject: bytes, reply: bytes, size: int) -> bool:
        """Whether a large message, of which no more than its size is known, is refused because too much is waiting."""
        size += len(reply) + limits.REQUEST_BYTES
        if (route := self._owners.routes.get(subject)) is None:
            if is_refused := self._is_refused_name(subject, size):
                self._refuse(self._owners.others, NO_OPERATION, reply)
            return is_refused
        owner = self._owners.known.get(route.owner, self._owners.others)
        if owner.request_bytes + size <= self._bounds.owner_bytes and self._request_bytes + size <= self._most_requests:
            return False
        self._refuse(owner, route.operation, reply)
        return True

    def _is_refused_name(self, subject: bytes, size: int) -> bool:
        """Whether a subject that is not remembered names no owner with a queue of its own, and the common one is full.

        What a service publishes as events arrives here, too: the prefix is the same.
        """
        owners = self._owners
        if owners.others.request_bytes + size <= self._bounds.owner_bytes or b".events." in subject:
            return False
        return not owners.knows(subject)

    def _refuse_others(self, reply: bytes) -> Handled:
        """Refuse what names an owner without a queue of its own, whatever it asks for: there may be very many."""
        replies = self._refuse(self._owners.others, NO_OPERATION, reply)
        return self._outbox.wait_for_room() if self._outbox.is_full() else RefusedNames(self._owners.knows, replies)

    def _refuse(self, owner: Owner, operation: Operation, reply: bytes) -> list[bytes]:
        """Answer a message with BUSY; returns the list to which those that follow may be added."""
        replies = self._outbox.refuse(owner, operation)
        replies.append(reply)
        return replies
