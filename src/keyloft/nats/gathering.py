"""Sends a client's requests in their order. Requests that are made together travel in one message: a `many`.

Calls of one iteration of the event loop are gathered, and calls that are made while the connection can't take more.
A call that is alone is sent alone. The service answers a `many` in parts, so that no caller waits for another's write.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import monotonic
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from nats import errors as nats_errors
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from keyloft import errors, limits
from keyloft.core.values import decode_json, read_json
from keyloft.nats.compatibility import check_nats_py
from keyloft.nats.messages import publish_requests
from keyloft.nats.resending import is_overtaken
from keyloft.nats.subscribing import subscribe_at_once

_MANY: Final = b'{"parts":true,"short":true,"requests":[%b]}'
_PROBE: Final = _MANY % b""
_OP_BYTES: Final = 32
"""How many bytes a request takes beyond its fields, at most: its operation, and a comma."""
_NO_FIELDS: Final = b"}"
_FOUND: Final = b'{"success":true,"exists":true,"value":%b}'
CLIENT_CLOSED: Final = "this client is closed: make a new one"
_STATUS: Final = "Status"
_NO_RESPONDERS: Final = "503"
_OVERTAKEN: Final = (
    "an older instance of the service has refused this call, together with others, while a later request of its key "
    "was on its way; it was not carried out: repeat it"
)


class FoundValue(Struct, frozen=True):
    """The reply to a get that has found an entry, if the service has sent the value alone."""

    value: Any


class _ManyPart(Struct):
    """Some of the replies to a `many`; or its refusal."""

    success: bool
    replies: list[tuple[int, Any]] = []
    """Each with the position of its request."""
    values: list[Any] = []
    """What the first requests, which are gets, have found."""
    reply: Any = None
    """The reply to each of the first `count` requests."""
    count: int = 0
    left: int = 0
    """How many replies are not yet there."""
    error_code: str = ""


class _ManyTexts(_ManyPart):
    """The same part with the replies as texts, because msgspec alone can't decode one of them."""

    replies: list[tuple[int, Raw]] = []
    values: list[Raw] = []


_decode_part = msgspec.json.Decoder(_ManyPart).decode
_decode_texts = msgspec.json.Decoder(_ManyTexts).decode


class ClientCall(Struct, eq=False, gc=False):
    """A request of one caller, until it is answered. No cycle of references passes through it."""

    prefix: str
    """The subject before the operation."""
    operation: str
    fields: bytes
    """A JSON object without the brace that opens it: in a `many`, the name of the operation stands before it."""
    reply: "asyncio.Future[Any]"
    """What the service has answered, decoded."""
    ends: float
    """When its caller stops waiting."""
    refused_in: int = 0
    """The number of the message in which it was refused together with others, since when it is sent alone; else 0."""

    @property
    def subject(self) -> str:
        return f"{self.prefix}.{self.operation}"

    @property
    def data(self) -> bytes:
        """The message, if the call is sent alone."""
        return b"{" + self.fields

    def answer(self, data: bytes) -> None:
        """Hand the reply to the caller, unless the caller no longer waits."""
        if self.reply.done():
            return
        try:
            self.reply.set_result(decode_json(data))
        except errors.Undecodable as error:
            wrong = errors.Unanswered("the reply is not JSON: another program answers on this subject")
            wrong.__cause__ = error
            self.fail(wrong)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class SentMessage:
    """A message that was sent, and the calls that wait for its reply."""

    __slots__ = ("calls", "ends", "is_many", "number", "subject")

    def __init__(self, number: str, subject: str, calls: Sequence[ClientCall], ends: float, *, is_many: bool) -> None:
        self.number = number
        """The last part of its reply subject."""
        self.subject = subject
        self.calls = calls
        """Empty if it only asks whether the service has `many`."""
        self.ends = ends
        """When no caller waits for its reply any more."""
        self.is_many = is_many

    @property
    def prefix(self) -> str:
        """The subject before the operation."""
        return self.subject.rpartition(".")[0]


class RequestSender:
    """Sends the requests of one client over its connection, and hands out the replies."""

    def __init__(
        self,
        nats: Nats,
        *,
        timeout: float,
        gathered: frozenset[str],
        timed_out: Callable[[str], Exception],
        explained: Callable[[Exception], Exception],
    ) -> None:
        """Args:
        nats: The connection.
        timeout: How many seconds a caller waits for its reply.
        gathered: The operations whose requests may travel in one message.
        timed_out: The error for a caller whose request to this subject was not answered in time.
        explained: The error for a caller whose request nats-py did not send, or NATS did not deliver, for this reason.
        """
        self._nats = nats
        self._timeout = timeout
        self._gathered = gathered
        self._timed_out = timed_out
        self._explained = explained
        self._loop = asyncio.get_running_loop()
        self._new_future, self._now = self._loop.create_future, self._loop.time
        self._is_closed = False
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._queue: list[ClientCall] = []
        self._again: list[ClientCall] = []
        """Calls that are sent once more, before those of the queue."""
        self._sending: asyncio.Task[None] | None = None
        self._unsent: Sequence[ClientCall] = ()
        """Calls that are about to be sent."""
        self._sent: dict[str, SentMessage] = {}
        """The messages without a reply, by number, in the order in which they were sent."""
        self._numbered = 0
        self.has_many = False
        """Whether the service has answered a `many`. An older one does not, and older permissions don't allow it."""
        self._next_probe = 0.0
        """When to ask again whether the service has `many`."""
        self._expiring: asyncio.TimerHandle | None = None

    @property
    def sent(self) -> Sequence[SentMessage]:
        """The messages that wait for a reply."""
        return list(self._sent.values())

    @property
    def queued(self) -> list[ClientCall]:
        """The calls that wait until something can be sent."""
        return [*self._again, *self._queue]

    @property
    def unanswered(self) -> list[ClientCall]:
        """The calls whose callers wait for a reply."""
        sent = [call for message in self._sent.values() for call in message.calls]
        return [call for call in (*sent, *self._unsent, *self.queued) if not call.reply.done()]

    def ask(self, prefix: str, operation: str, fields: bytes) -> "asyncio.Future[Any]":
        """Send a request soon; the future gets its reply, or the error for the caller.

        Args:
            prefix: The subject before the operation.
            operation: The name of the operation.
            fields: The fields of the request: a JSON object without the brace that opens it.

        Raises:
            Closed: This client is closed.
        """
        if self._is_closed:
            raise errors.Closed(CLIENT_CLOSED)
        reply = self._new_future()
        self._queue.append(ClientCall(prefix, operation, fields, reply, self._now() + self._timeout))
        if self._sending is None:
            self._start_sending()
        return reply

    async def aclose(self) -> None:
        """Receive no more replies; callers that still wait get an error, and so do further requests."""
        self._is_closed = True
        for call in self.unanswered:
            call.fail(errors.Unanswered("this client was closed before the reply arrived"))
        if self._expiring is not None:
            self._expiring.cancel()
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._nats.is_closed:
            await subscription.unsubscribe()

    def fail(self, message: SentMessage, error: errors.KeyloftError) -> None:
        """Let the calls of a message that was not delivered fail."""
        del self._sent[message.number]
        for call in message.calls:
            call.fail(copy(error))

    def send_singly(self, message: SentMessage) -> None:
        """Send the calls of a `many` that was not carried out again, each alone, and no `many` for a while.

        A call fails if a later request of its key was sent alone meanwhile: sent again, it would be carried out later.
        """
        del self._sent[message.number]
        self.has_many, self._next_probe = False, monotonic() + limits.MANY_PROBE_SECONDS
        number = int(message.number)
        alone = [(sent.calls[0], int(sent.number)) for sent in self._sent.values() if not sent.is_many]
        later = [
            (call.operation, call.data)
            for call, sent_in in alone
            if (call.refused_in or sent_in) > number and call.prefix == message.prefix
        ]
        for call in message.calls:
            call.refused_in = number
            if later and is_overtaken((call.operation, call.data), later):
                call.fail(errors.Unanswered(_OVERTAKEN))
        self._again += message.calls
        self._start_sending()

    def subscribe_again(self) -> None:
        """Let the next request subscribe to replies again, because NATS has refused the subscription."""
        self._subscription = None

    # Sending

    def _start_sending(self) -> None:
        if self._sending is None:
            self._sending = self._loop.create_task(self._send_all(), name="keyloft requests")
        if self._expiring is None:
            self._expiring = self._loop.call_at(self._now() + self._timeout, self._expire)

    async def _send_all(self) -> None:
        try:
            while self._queue or self._again:
                calls, self._queue, self._again = self.queued, [], []
                self._unsent = calls
                try:
                    if self._subscription is None:
                        await self._subscribe()
                    messages = list(self._messages(calls))
                    self._sent |= {message.number: message for message, _ in messages}
                    self._unsent = ()
                    await publish_requests(
                        self._nats,
                        [(message.subject, f"{self._inbox}.{message.number}", data) for message, data in messages],
                    )
                except Exception as error:
                    for call in calls:
                        call.fail(self._explained(error))
        finally:
            self._sending = None

    async def _subscribe(self) -> None:
        check_nats_py()
        self._inbox = self._nats.new_inbox()
        self._subscription = await subscribe_at_once(self._nats, f"{self._inbox}.*", self._arrived)

    def _messages(self, calls: Sequence[ClientCall]) -> Iterator[tuple[SentMessage, bytes]]:
        """The messages that carry calls, in the order of the calls."""
        size, most = 0, self._nats.max_payload
        room = min(limits.GATHERED_BYTES, most - len(_MANY))
        if self._fit_together(calls, room):
            yield from self._as_messages(calls)
            return
        together: list[ClientCall] = []
        for call in calls:
            if call.reply.done():
                continue  # cancelled meanwhile
            if len(call.fields) >= most:
                call.fail(self._explained(nats_errors.MaxPayloadError()))
                continue
            more = len(call.fields) + _OP_BYTES
            is_full = size + more > room or len(together) >= limits.MANY_REQUESTS
            is_alone = call.refused_in or call.operation not in self._gathered or call.fields == _NO_FIELDS
            if together and (is_alone or is_full or call.prefix != together[0].prefix):
                yield from self._as_messages(together)
                together, size = [], 0
            if is_alone:
                yield from self._as_messages([call])
            else:
                together.append(call)
                size += more
        yield from self._as_messages(together)

    def _fit_together(self, calls: Sequence[ClientCall], room: int) -> bool:
        """Whether all calls fit into one message, as most do."""
        fields = [call.fields for call in calls]
        if len(calls) > limits.MANY_REQUESTS or sum(map(len, fields)) + _OP_BYTES * len(calls) > room:
            return False
        if len({call.prefix for call in calls}) > 1 or not {call.operation for call in calls} <= self._gathered:
            return False
        return _NO_FIELDS not in fields and not any([call.refused_in or call.reply.done() for call in calls])

    def _as_messages(self, calls: Sequence[ClientCall]) -> Iterator[tuple[SentMessage, bytes]]:
        """The message that carries calls; until the service is known to have `many`, one for each."""
        if len(calls) > 1 and self.has_many:
            names = {call.operation for call in calls}
            begin = {name: b'{"op":"%b",' % name.encode() for name in names}
            if len(names) == 1:
                [first] = begin.values()
                requests = first + (b"," + first).join([call.fields for call in calls])
            else:
                requests = b",".join([begin[call.operation] + call.fields for call in calls])
            yield self._message(f"{calls[0].prefix}.many", calls), _MANY % requests
            return
        for call in calls:
            yield self._message(call.subject, [call]), call.data
        if len(calls) > 1 and (now := monotonic()) >= self._next_probe:
            self._next_probe = now + limits.MANY_PROBE_SECONDS
            yield self._message(f"{calls[0].prefix}.many", []), _PROBE

    def _message(self, subject: str, calls: Sequence[ClientCall]) -> SentMessage:
        self._numbered += 1
        ends = calls[-1].ends if calls else self._loop.time() + self._timeout
        # A `many` has several calls, or none if it asks whether the service has the operation.
        return SentMessage(str(self._numbered), subject, calls, ends, is_many=len(calls) != 1)

    # Receiving

    def _arrived(self, arrived: Msg) -> None:
        message = self._sent.get(arrived.subject.rpartition(".")[2])
        if message is None:
            return  # its callers no longer wait
        data = arrived.data
        if not data and arrived.headers and arrived.headers.get(_STATUS) == _NO_RESPONDERS:
            del self._sent[message.number]
            for call in message.calls:
                call.fail(self._explained(nats_errors.NoRespondersError()))
        elif not message.is_many:
            del self._sent[message.number]
            [call] = message.calls
            call.answer(data)
        else:
            self._read_part(message, data)

    def _read_part(self, message: SentMessage, data: bytes) -> None:
        calls = message.calls
        try:
            part = read_json(_decode_part, data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            part = _read_texts(data)
        if not part.success:
            if part.error_code == errors.InvalidSubject.code:
                self.send_singly(message)
                return
            # The `many` was refused as a whole: each caller gets the refusal, as if its call had been alone.
            for call in calls:
                call.answer(data)
        else:
            self.has_many = True
        count = len(calls)
        if isinstance(part, _ManyTexts):
            for position, text in part.replies:
                if position < count:
                    calls[position].answer(bytes(text))
            for call, text in zip(calls, part.values, strict=False):
                call.answer(_FOUND % bytes(text))
        else:
            for position, reply in part.replies:
                if position < count and not (waiting := calls[position].reply).done():
                    waiting.set_result(reply)
            for call, found in zip(calls, map(FoundValue, part.values), strict=False):
                if not (waiting := call.reply).done():
                    waiting.set_result(found)
        if part.count:
            reply = part.reply
            for call in calls[: part.count]:
                if not (waiting := call.reply).done():
                    waiting.set_result(reply)
        if not part.left:
            del self._sent[message.number]

    def _expire(self) -> None:
        """Let the calls fail whose time is over, and set the timer for the next one."""
        self._expiring, now = None, self._loop.time()
        waiting = self.unanswered
        for call in waiting:
            if call.ends <= now:
                call.fail(self._timed_out(call.subject))
        # While nothing can be sent, calls that no one waits for any more would add up.
        self._again = [call for call in self._again if not call.reply.done()]
        self._queue = [call for call in self._queue if not call.reply.done()]
        for message in self.sent:
            if message.ends <= now or (message.calls and all([call.reply.done() for call in message.calls])):
                del self._sent[message.number]
        later = [call.ends for call in waiting if call.ends > now]
        if self._sending is not None:
            later.append(now + self._timeout)  # further calls are queued without setting the timer
        if later := [*later, *[message.ends for message in self._sent.values()]]:
            # Not a timer for each call: thousands may end within a few milliseconds.
            self._expiring = self._loop.call_at(max(min(later), now + limits.CALL_EXPIRY_SECONDS), self._expire)


def _read_texts(data: bytes) -> _ManyPart:
    try:
        return _decode_texts(data)
    except (msgspec.MsgspecError, RecursionError):
        return _ManyPart(False)
