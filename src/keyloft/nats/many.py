"""The operation `many`: several requests in one message, each carried out and answered as if sent alone."""

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from nats.aio.client import Client as Nats

from keyloft import limits
from keyloft.core import json_text
from keyloft.core.engine import Submission, Verdict
from keyloft.errors import Busy, InvalidArgument, InvalidJson, InvalidSubject, KeyloftError, ReplyTooLarge
from keyloft.nats import payloads
from keyloft.nats.errors import refusal
from keyloft.nats.outbox import TOO_MUCH
from keyloft.nats.refused_operations import RefusedOperation
from keyloft.nats.requests import Operation, ReplyCollector, Request

_REPLIES: Final = b'{"success":true,"replies":[%b]}'
NO_REPLIES: Final = _REPLIES % b""
TOO_FAST: Final = RefusedOperation(Busy, TOO_MUCH)
"""Stands for a request beyond the rate of its owner."""
_PART: Final = b'{"success":true,"replies":[%b],"left":%d}'
_VALUES: Final = b'{"success":true,"values":[%b],"left":%d}'
_SAME_REPLY: Final = b'{"success":true,"reply":%b,"count":%d,"left":%d}'
_FRAME_BYTES: Final = len(_PART) + 24
"""How many bytes a part with one reply has besides that reply, its position included."""

# The form in which Keyloft's client sends a message and its requests; any other form is read more slowly.
_SHORT: Final = b'{"parts":true,"short":true,"requests":['
_SHORT_BYTES: Final = len(_SHORT) + len("]}") - 1  # there is a comma less than there are requests
_OF_ONE_OPERATION: Final = [
    (begin + b'{"op":"%b",' % name.encode(), name, begin is _SHORT)
    for begin in (_SHORT, b'{"parts":true,"requests":[')
    for name in ("get", "set")
]
"""How messages begin that `read_all` may read, each with the operation, and whether their replies may be short."""
_ORDINARY: Final = re.compile(rb'\{"op":"([a-z_]+)"(?:,|(?=\}))').match


class ManyRequests(Struct, frozen=True):
    """What a message asks for, request by request."""

    requests: Sequence[tuple[Operation, Any]]
    """Each request with its operation, and its message as if sent alone; or, if that was read already, its content."""
    in_parts: bool
    """Whether the replies may arrive in several messages."""
    is_short: bool
    """Whether a part may leave out what its replies have in common."""
    size: int
    """How many bytes the requests have."""
    together: Sequence[Any] = ()
    """The contents of the requests, if all of them are ordinary requests of one operation."""


class _ManyText(Struct):
    requests: list[Raw]
    parts: bool | UnsetType | None = UNSET
    short: bool | UnsetType | None = UNSET


_read_many = msgspec.json.Decoder(_ManyText).decode
# To read a million requests as a list takes half a second. A struct with a field for each request that is allowed, and
# one more, ignores the rest.
_Beyond: Any = msgspec.defstruct(
    "_Beyond", [(f"request_{number}", Raw, Raw()) for number in range(limits.MANY_REQUESTS + 1)], array_like=True
)
_read_beyond = msgspec.json.Decoder(msgspec.defstruct("_ManyBeyond", [("requests", _Beyond)])).decode
_MANY_COMMAS: Final = 4 * limits.MANY_REQUESTS
_read_name = msgspec.json.Decoder(str).decode
_read_members = msgspec.json.Decoder(dict[str, Raw]).decode
_FLAGS: Final = ("parts", "short")
_FIELDS: Final = ("requests", *_FLAGS)
_LEVELS: Final = payloads.LEVELS + 2
"""How deep a message may nest: a request, the list of requests, and the object that it is a field of."""


class Many(Operation):
    """Takes a message apart; the intake carries out its requests, and a `Collector` gathers their replies."""

    name = "many"
    holds_requests = True

    def __init__(self, nats: Nats, find: Callable[[Any, str], Operation], operations: Sequence[str]) -> None:
        """Args:
        nats: The connection, which knows how large a message may be.
        find: The operation of this name, for what a subject names.
        operations: The names of those that can be a part of it.
        """
        self._nats = nats
        self._find = find
        self._operations = operations

    def read(self, about: Any, data: bytes, /) -> ManyRequests:
        for begin, name, is_short in _OF_ONE_OPERATION:
            if data.startswith(begin) and (read := (operation := self._find(about, name)).read_all(about, data)):
                return ManyRequests([(operation.parsed, one) for one in read], True, is_short, len(data), read)
        try:
            if data.count(b",") > _MANY_COMMAS and _is_beyond(data):
                raise _too_many(limits.MANY_REQUESTS)
            text = json_text.on_any_stack(_read_many, data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _refuse_unreadable(data)
            raise InvalidArgument('requests: expected an array of requests, as in [{"op": "get", "key": …}]') from None
        requests, most = list(map(bytes, text.requests)), limits.MANY_REQUESTS
        if not data.startswith(_SHORT) or len(data) != _SHORT_BYTES + sum(map(len, requests)) + len(requests):
            # Outside the requests, only the names of the fields have quotes, two each. More of them mean another field.
            names = 1 + (text.parts is not UNSET) + (text.short is not UNSET)
            if data.count(b'"') - sum([one.count(b'"') for one in requests]) != 2 * names:
                _refuse_unreadable(data)
        if not text.parts:
            most = min(most, self._nats.max_payload // (2 * limits.SHORT_REPLY_BYTES))
        if len(requests) > most:
            raise _too_many(most)
        found: dict[str, Operation] = {}
        taken = [self._taken(about, one, found) for one in requests]
        return ManyRequests(taken, bool(text.parts), text.short is True, len(data))

    def details(self, content: Any, outcome: int) -> dict[str, int | None]:
        return {"count": outcome}

    def _taken(self, about: Any, data: bytes, found: dict[str, Operation]) -> tuple[Operation, bytes]:
        """The operation of one request, and its message without the field that names it.

        `found` has the operations of earlier requests.
        """
        begins = _ORDINARY(data)
        rest = b"" if begins is None else b"{" + data[begins.end() :]
        try:
            is_doubled = b'"op"' in rest or b"\\u00" in rest  # perhaps; the name may be written with escapes
            name, rest = _without_op(data) if begins is None or is_doubled else (begins[1].decode(), rest)
            if (operation := found.get(name)) is None:
                if name not in self._operations:
                    raise InvalidSubject(f"op: expected one of {', '.join(self._operations)}; send any other alone")
                operation = found[name] = self._find(about, name)
        except KeyloftError as error:
            return RefusedOperation(type(error), str(error)), data
        return operation, rest


def _is_beyond(data: bytes) -> bool:
    """Whether a message has more requests than one may have."""
    found: Any = json_text.on_any_stack(_read_beyond, data)
    return bool(bytes(getattr(found.requests, _Beyond.__struct_fields__[-1])))


def _too_many(most: int) -> InvalidArgument:
    return InvalidArgument(f"requests: expected at most {most:,}; send several messages")


def _refuse_unreadable(data: bytes) -> None:
    """Refuse a message that is not JSON, or has other fields than it should."""
    try:
        fields = json_text.on_any_stack(_read_members, data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        json_text.check_depth(data, _LEVELS)
        json_text.check_syntax(data)
        raise InvalidArgument('the payload must be a JSON object, as in {"requests": […]}') from None
    payloads.refuse_unknown(fields, _FIELDS)
    payloads.field(fields, "requests")
    for name in _FLAGS:
        if bytes(fields.get(name, b"null")) not in (b"true", b"false", b"null"):
            raise InvalidArgument(f"{name}: expected true or false")
    if bytes(fields["requests"]).startswith(b"["):
        raise InvalidJson("Invalid JSON: a name is twice in one object")


def _without_op(data: bytes) -> tuple[str, bytes]:
    """The operation that a request names, wherever it stands, and the request without that field."""
    try:
        members = json_text.on_any_stack(_read_members, data)
        name = _read_name(members["op"])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        members, name = {}, ""
    # Each name has two quotes. If there are more than those of the names and values, a name is there twice.
    if data.count(b'"') - sum([bytes(value).count(b'"') for value in members.values()]) != 2 * len(members):
        name = ""
    if not name:
        fields, _ = payloads.read(data)
        payloads.field(fields, "op")
        raise InvalidArgument("op: expected the name of an operation")
    others = [payloads.to_json(field) + b":" + bytes(value) for field, value in members.items() if field != "op"]
    return name, b"{" + b",".join(others) + b"}"


def requests_of(
    message: Request, content: ManyRequests, collector: ReplyCollector | None, per_second: float | None, first: int
) -> list[Request]:
    """The requests that a message holds.

    Args:
        message: The message, as it was accepted.
        content: What it holds.
        collector: Where their replies go; None if it was published.
        per_second: How many requests its owner may send a second; None for any number.
        first: The position of the first request to return; the requests before it are answered.
    """
    owner, about, reply, arrived = message.owner, message.about, message.reply, message.arrived
    size = limits.REQUEST_BYTES + content.size // max(1, len(content.requests))
    requests = []
    for position, (operation, data) in enumerate(content.requests[first:], first):
        # The message itself was counted as one.
        if position and per_second is not None and owner.is_too_fast(per_second, arrived):
            operation = TOO_FAST
        request = Request(owner, operation, about, reply, data, arrived, size)
        request.collector, request.position = collector, position
        requests.append(request)
    return requests


class ManyWrites:
    """The writes of one message that were submitted together, until all of them are decided."""

    __slots__ = ("answered", "collector", "contents", "is_due", "outcomes", "submissions", "together", "undecided")

    def __init__(self, contents: Sequence[Any], collector: "PartCollector") -> None:
        self.contents = contents
        """The content of each write."""
        self.collector = collector
        self.outcomes: list[Verdict | Exception | None] = [None] * len(contents)
        """The verdict of each write, once it is decided."""
        self.submissions: list[Submission] = []
        self.together: Submission | None = None
        """The one submission of all writes, if the engine takes several at once; it replaces `submissions`."""
        self.undecided = len(contents)
        self.is_due = False
        """Whether some are decided and about to be answered."""
        self.answered: set[int] = set()
        """The positions of the answered writes, while others are not yet answered."""

    @property
    def unanswered(self) -> list[tuple[int, Verdict | Exception | None]]:
        return [one for one in enumerate(self.outcomes) if one[0] not in self.answered]


class Collectors:
    """Makes the collectors of one service."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._loop = asyncio.get_running_loop()
        self._unsent: list[PartCollector] = []
        self.room = limits.HELD_REPLY_BYTES
        """How many more bytes of long replies they may hold until their messages are complete."""

    def collector(
        self, content: ManyRequests, send: Callable[[bytes, bool], None], *, in_one: bool
    ) -> "Collector | PartCollector":
        """The collector for a message, which calls `send` with each reply, and whether it is the last.

        `in_one` says that the sender takes only one reply.
        """
        count, most_bytes = len(content.requests), self._nats.max_payload
        if content.in_parts and not in_one:
            return PartCollector(count, most_bytes, send, self, is_short=content.is_short)
        return Collector(count, most_bytes, send, self)

    def has_part(self, collector: "PartCollector") -> None:
        """Let a collector send a part soon."""
        if not self._unsent:
            self._loop.call_soon(self.send_parts)
        self._unsent.append(collector)

    def send_parts(self) -> None:
        """Send all parts that are ready."""
        unsent, self._unsent = self._unsent, []
        for collector in unsent:
            collector.send_part()


class Collector:
    """Gathers the replies to the requests of one message, and sends them once all are there."""

    def __init__(self, requests: int, most_bytes: int, send: Callable[[bytes, bool], None], shared: Collectors) -> None:
        """Args:
        requests: How many replies there will be, at least one.
        most_bytes: How large a message may be.
        send: Called with the message, and that it is the last.
        shared: Has the room that all collectors of a service share.
        """
        self._left = requests
        self._shared = shared
        self._send = send
        self._replies = [b""] * requests
        # Short replies always fit; the room that they leave is for long ones.
        self._room = most_bytes - _FRAME_BYTES - requests * (limits.SHORT_REPLY_BYTES + 1)
        self._size = 0
        """How many bytes the long replies have."""

    def add(self, position: int, reply: bytes, is_written: bool) -> None:
        """Add the reply to one of the requests.

        Args:
            position: The request's position in the message.
            reply: Its reply.
            is_written: Whether it has written something, so that it must not be repeated.
        """
        if (size := len(reply)) > limits.SHORT_REPLY_BYTES:
            if size > min(self._room, self._shared.room):
                reply = _too_large(is_written)
            else:
                self._room -= size
                self._shared.room -= size
                self._size += size
        self._replies[position] = reply
        self._left -= 1
        if not self._left:
            self._shared.room += self._size
            self._send(_REPLIES % b",".join(self._replies), True)


class PartCollector:
    """Sends the replies to the requests of one message in parts: in each iteration of the event loop, those ready."""

    def __init__(
        self,
        requests: int,
        most_bytes: int,
        send: Callable[[bytes, bool], None],
        shared: Collectors,
        *,
        is_short: bool,
    ) -> None:
        self.is_short = is_short
        """Whether a part may leave out what its replies have in common."""
        self._left = requests
        self._send = send
        self._shared = shared
        self._most_bytes = most_bytes - _FRAME_BYTES
        self._replies: list[bytes] = []
        self._size = 0
        self._is_scheduled = False

    def add_values(self, values: bytes, count: int) -> bool:
        """Send the values that the first requests, which are gets, have found, as JSON with commas between them.

        Returns False if they do not fit into one message.
        """
        if len(values) >= self._most_bytes:
            return False
        self._left -= count
        self._send(_VALUES % (values, self._left), not self._left)
        return True

    def add_first(self, replies: Sequence[bytes], *, is_written: bool) -> None:
        """Add the replies to the first requests, before any other, and send them."""
        # Plain sets have the same reply.
        if self.is_short and is_written and {*replies} == {replies[0]}:
            self._left -= len(replies)
            self._send(_SAME_REPLY % (replies[0], len(replies), self._left), not self._left)
            return
        items = _with_positions(replies)
        if len(items) >= self._most_bytes:
            for position, reply in enumerate(replies):
                self.add(position, reply, is_written)
            return
        self._replies = [items]
        self._left -= len(replies)
        self._send_replies()

    def add(self, position: int, reply: bytes, is_written: bool) -> None:
        if len(reply) > self._most_bytes:
            reply = _too_large(is_written)
        item = b"[%d,%b]" % (position, reply)
        size = self._size + len(item) + 1
        if size > self._most_bytes and self._replies:
            self._send_replies()
            size = len(item) + 1
        self._replies.append(item)
        self._size = size
        self._left -= 1
        if not self._left:
            self._send_replies()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._shared.has_part(self)

    def send_part(self) -> None:
        """Send the replies that are ready."""
        self._is_scheduled = False
        if self._replies:
            self._send_replies()

    def _send_replies(self) -> None:
        replies, self._replies, self._size = self._replies, [], 0
        self._send(_PART % (b",".join(replies), self._left), not self._left)


_BEFORE_REPLIES: Final = (b"[0,", *[b"],[%d," % position for position in range(1, limits.MANY_REQUESTS)])


def _with_positions(replies: Sequence[bytes]) -> bytes:
    """The items of a part for the first requests of a message; in half the time that formatting each would take."""
    return b"".join(chain.from_iterable(zip(_BEFORE_REPLIES, replies, strict=False))) + b"]"


def _too_large(is_written: bool) -> bytes:
    text = "it was carried out" if is_written else "send this request alone"
    error = ReplyTooLarge(f"the reply does not fit into one message with the others; {text}")
    return refusal(error, {"carried_out": is_written})
