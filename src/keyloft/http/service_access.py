"""Passes HTTP requests to the intake of a service on NATS, and turns its replies into HTTP answers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from keyloft import limits
from keyloft.errors import Busy, KeyloftError, NoService
from keyloft.http.problems import Problem, status_of
from keyloft.http.replies import Headers
from keyloft.http.requests import ClientGone, HttpRequest
from keyloft.nats.errors import WIRE_ERRORS, overloaded
from keyloft.nats.outbox import TOO_MUCH
from keyloft.nats.service import NatsService
from keyloft.nats.service_streams import ServiceStream

RETRY: Final[Headers] = ((b"retry-after", b"1"),)

_DONE: Final = b'{"success":true'


class ServiceAccess:
    """One service on NATS, which routes reach through its intake, whether the service is connected to NATS or not."""

    def __init__(self) -> None:
        self.current: NatsService | None = None
        """The service, while it runs."""
        self._arriving: Counter[str] = Counter()
        """The size of the bodies that are being received, by owner."""

    def service(self) -> NatsService:
        """The service that runs now.

        Raises:
            Problem: No service runs.
        """
        if self.current is None:
            raise service_unavailable("the service is starting, or connects to NATS: try again soon")
        return self.current

    async def body(self, request: HttpRequest, names: Sequence[str]) -> bytes:
        """The body of a request; it counts towards its owner's bound already while it arrives.

        Raises:
            Busy: Too much arrives at a time.
            ValueTooLarge: It is larger than a message of NATS may be.
        """
        service, owner = self.service(), names[0]
        most = service.nats.max_payload
        declared = request.header(b"content-length")
        size = most if declared is None else min(int(declared), most)
        bounds, arriving = service.bounds, self._arriving
        if arriving[owner] + size > bounds.owner_bytes or arriving.total() + size > bounds.request_bytes:
            raise overloaded(TOO_MUCH)
        arriving[owner] += size
        try:
            return await request.body(most)
        finally:
            arriving[owner] -= size
            if not arriving[owner]:
                del arriving[owner]

    async def ask(
        self,
        request: HttpRequest,
        names: Sequence[str],
        operation: str,
        data: bytes,
        stream: ServiceStream | None = None,
    ) -> bytes:
        """The reply of the service to a request, as it would arrive over NATS.

        Args:
            request: Is withdrawn if its client hangs up.
            names: The plugin, or the tenant and the project.
            operation: What is asked for.
            data: The message.
            stream: Gets the events of a watch.

        Raises:
            ClientGone: The client no longer waits for the reply.
            Problem: The service is not up.
            KeyloftError: The request is refused before it is carried out.
        """
        waiting = _Waiting(request)
        try:
            direct = self.service().hand_in(names, operation, data, waiting.answer, stream)
        except NoService as error:
            raise service_unavailable(str(error)) from None
        try:
            return await waiting.reply()
        finally:
            direct.withdraw()


class _Waiting:
    """A client that waits for a reply, unless it hangs up."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    def answer(self, reply: bytes) -> None:
        """Take the reply; it may arrive in the same moment in which the client hangs up."""
        if not self._replied.done():
            self._replied.set_result(reply)

    async def reply(self) -> bytes:
        """Wait for the reply.

        Raises:
            ClientGone: The client has hung up before.
        """
        # Only a long wait is worth a task that notices when the client hangs up; most replies arrive sooner.
        timer = asyncio.get_running_loop().call_later(limits.HTTP_PATIENCE_SECONDS, self._watch)
        try:
            return await self._replied
        finally:
            timer.cancel()
            if self._watching is not None:
                self._watching.cancel()

    def _watch(self) -> None:
        self._watching = asyncio.create_task(self._request.wait_for_end())
        self._watching.add_done_callback(self._gone)

    def _gone(self, watching: "asyncio.Task[None]") -> None:
        if not watching.cancelled() and not self._replied.done():
            self._replied.set_exception(ClientGone())


def service_unavailable(reason: str) -> Problem:
    """The answer while a service does not run."""
    return Problem(503, NoService.code, reason, headers=RETRY)


def was_carried_out(reply: bytes) -> bool:
    """Whether a reply of a service reports success."""
    return reply.startswith(_DONE)


def refusal_of(reply: bytes) -> Problem:
    """The HTTP answer for a reply that reports an error: its code, its message, and its further fields."""
    fields: dict[str, Any] = msgspec.json.decode(reply, type=dict[str, msgspec.Raw])
    code = msgspec.json.decode(fields.pop("error_code"), type=str)
    message = msgspec.json.decode(fields.pop("message"), type=str)
    del fields["success"]
    status = status_of(WIRE_ERRORS.get(code, KeyloftError))
    # No Retry-After if the database failed: the request may have been carried out, and would be carried out twice.
    return Problem(status, code, message, headers=RETRY if code == Busy.code else (), more=fields)
