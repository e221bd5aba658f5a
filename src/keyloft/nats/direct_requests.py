"""Requests that reach an intake directly instead of over NATS, as those of HTTP do: their replies go to a function."""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from keyloft.errors import KeyloftError
from keyloft.nats.refused_operations import RefusedOperation
from keyloft.nats.requests import Request

logger = logging.getLogger(__name__)

DIRECT: Final = b"not over NATS"
"""Stands for the reply subject of a direct request, which has a deadline because its client waits. It is no subject of
NATS, since those have no space."""
WITHDRAWN: Final = RefusedOperation(KeyloftError, "the client no longer waits for this reply")
"""Stands for the operation of a request that was withdrawn before it was read."""


class WithdrawsRequests(Protocol):
    """The intake, as a direct request knows it."""

    def withdraw(self, request: Request, data: bytes) -> None:
        """Don't carry out a request, if that is still possible."""


class DirectRequest:
    """A request that did not arrive over NATS, until it is answered or withdrawn."""

    __slots__ = ("_answer", "_data", "_intake", "_request")

    def __init__(
        self, intake: WithdrawsRequests, request: Request, data: bytes, answer: Callable[[bytes], None]
    ) -> None:
        """`answer` is called with the reply, once, unless the request is withdrawn before."""
        self._intake = intake
        self._request: Request | None = request
        self._data = data
        self._answer = answer
        request.collector = self

    def add(self, position: int, reply: bytes, is_written: bool) -> None:
        """Take the reply. If `answer` raises, that is logged: requests that are answered at the same time go on."""
        self._request = None
        try:
            self._answer(reply)
        except Exception:
            logger.exception("a function that was to take a reply failed")

    def withdraw(self) -> None:
        """Note that the client no longer waits for the reply: nothing more is begun for it, and its reads are given up.

        A write may be carried out nevertheless.
        """
        request, self._request = self._request, None
        if request is not None:
            self._intake.withdraw(request, self._data)
