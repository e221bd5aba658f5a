"""What a service gives its intake: the meaning of a subject, and a log for what becomes of requests."""

from typing import Any, Protocol

from msgspec import Struct

from keyloft.nats.requests import Operation, Request


class Route(Struct, frozen=True):
    """What a subject means."""

    owner: str
    """The name of a plugin or tenant; empty if the subject names none."""
    operation: Operation
    about: Any
    """What the operation knows of the subject: a plugin, or a project."""


class EventSubject(Exception):
    """Raised instead of a route for a subject of events: what is sent there is no request, and is ignored."""


class IntakeReporter(Protocol):
    """Logs what becomes of requests, and says how they are refused."""

    def logs_all(self) -> bool:
        """Whether each request is logged, or slow ones alone."""

    def done(self, request: Request, seconds: float, outcome: Any) -> None:
        """Log a request that was carried out."""

    def refused(self, request: Request, error: Exception) -> bytes:
        """Log a request that was refused or failed; returns the reply."""

    def refused_busy(self, owner: str, operation: Operation, answered: int, dropped: int) -> None:
        """Log how many requests were answered BUSY, and how many published messages were dropped."""

    def unsent(self, reason: str) -> None:
        """Log that replies could not be sent."""
