"""Requests that a service has accepted, what they ask for, and their order within their owner."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Optional, Protocol

from msgspec import Struct

from keyloft.core.records import Batch, Committed, Conflict, Get, Record
from keyloft.errors import KeyloftError
from keyloft.nats import payloads
from keyloft.nats.meters import Meter


class Variant(Exception):
    """Raised by the reader of a message that asks for a variant of its operation, which another operation carries out.

    Raised, not returned: most messages ask for none, and each of them would be tested for it.
    """

    def __init__(self, name: str, content: Any) -> None:
        """`name` of the variant among those of the operation, and what the message asks for."""
        super().__init__(name)
        self.name = name
        self.content = content


class Operation:
    """An operation of a service: how its messages are read and logged."""

    name: str
    reply_bytes: int = 0
    """How many bytes are reserved for the reply before a request is begun: the most that it takes; 0 if it is short."""
    most_bytes: int = sys.maxsize
    """How large a message may be. A larger one is refused by its size, most of it before it has arrived."""
    holds_requests: bool = False
    """Whether its messages hold several requests (`many.py`)."""
    variants: Mapping[str, "Operation"] = {}
    """The operations that carry out variants of this one, by variant; they share its name."""
    parsed: "Operation"
    """The same operation, for messages that `read_all` has read."""

    def read(self, about: Any, data: bytes, /) -> Any:
        """What a message asks for.

        Args:
            about: What its subject names: a plugin, or a project.
            data: The message.

        Raises:
            KeyloftError: It is refused.
            Variant: It asks for a variant of this operation.
        """
        raise NotImplementedError

    def read_all(self, about: Any, data: bytes, /) -> Sequence[Any] | None:
        """What the requests of a `many` ask for, if all of them are ordinary ones of this operation; else None."""
        return None

    def too_large(self, size: int) -> KeyloftError:
        """The error of a message that has more than `most_bytes`."""
        return payloads.too_large(size, self.most_bytes)

    def reply(self, content: Any, outcome: Any, /) -> bytes:
        """The reply, made from what `read` returned and its outcome; a Call makes its own."""
        raise NotImplementedError

    def reply_each(self, outcomes: Sequence[Any], /) -> Sequence[bytes] | None:
        """The replies to several that were carried out, made together; None if each is to be made by `reply`."""
        return None

    def values(self, outcomes: Sequence[Any], /) -> bytes | None:
        """Of a get: the values that several have found, with commas between them; None if some have no usual reply."""
        return None

    def key(self, content: Any) -> str:
        """The key that a line of the log names."""
        return ""

    def details(self, content: Any, outcome: Any) -> dict[str, int | None]:
        """Further fields of the log line, once the request is carried out."""
        return {}


class NoOperation(Operation):
    """Stands for the operation of a message that is refused before its subject is understood."""

    name = ""


NO_OPERATION: Final = NoOperation()
UNKNOWN_OPERATION: Final = NoOperation()
"""Stands for the operation of a message whose subject is not yet read; its content is the subject, and the message."""


class PointRead(Operation):
    """Reads one entry. The reads of one turn are made together."""

    def read(self, about: Any, data: bytes, /) -> Get:
        raise NotImplementedError

    def reply(self, content: Get, outcome: Record | None, /) -> bytes:
        raise NotImplementedError


class EngineWrite(Operation):
    """Commits one batch. The engine keeps the order of batches that share a key."""

    def batch(self, content: Any) -> Batch:
        raise NotImplementedError

    def reply(self, content: Any, outcome: Committed | Conflict, /) -> bytes:
        raise NotImplementedError


class Call(Operation):
    """Anything else: a coroutine. It waits for the earlier writes of the keys that it reads or writes."""

    shows_entries: bool = True
    """Of a read: whether later writes of the keys that it reads wait for it."""

    def written(self, content: Any) -> Collection[Hashable] | None:
        """The keys that it writes, None for any key of its owner; later requests of these keys wait for it."""
        return ()

    def keys_read(self, content: Any) -> Collection[Hashable] | None:
        """The keys that it reads, if it writes none; None for any key of its owner."""
        return None

    def carry_out(self, content: Any) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        """The reply, and the outcome that `details` shows."""
        raise NotImplementedError


class ReplyCollector(Protocol):
    """Takes the replies to the requests that were in one message, or to one that did not arrive over NATS."""

    def add(self, position: int, reply: bytes, is_written: bool) -> None: ...


class WithdrawsWrites(Protocol):
    """Small writes of several requests that go to the engine together (`joint_writes.py`)."""

    def withdraw(self, request: "Request") -> bool:
        """Withdraw one of them, unless it is being written; returns whether that was done."""


class Request(Struct, gc=False, eq=False):
    """A message that was accepted and is not yet done."""

    owner: "Owner"
    operation: Operation
    about: Any
    """What its subject names: a plugin, or a project."""
    reply: bytes
    """Where its reply goes; empty if it was published, or is answered already."""
    content: Any
    """The message; once it is read, what the operation made of it."""
    arrived: float
    size: int
    """How many bytes it counts as."""
    reserved: int = 0
    """How many bytes of replies are reserved for it."""
    written: Collection[Hashable] | None = None
    """Of a write that has begun: its keys."""
    read: Collection[Hashable] | None = None
    """Of a read for which later writes wait: its keys; empty for any of its owner's."""
    is_submitted: bool = False
    """Of a write: whether the engine has it, and keeps its order with later ones of its keys."""
    number: int = 0
    """Of a write: its number among the writes of its owner. Of a request that waits for all earlier writes: the number
    of the last of them."""
    is_done: bool = False
    is_given_up: bool = False
    """Whether its deadline has passed while it waited for earlier writes: then it is answered and not carried out."""
    waits_for: int = 0
    """For how many earlier requests it waits."""
    before: Optional["Request"] = None
    """Of a write of one key: the write of that key before it, if that was under way. Once it has ended, because it was
    withdrawn: the last one that was still under way."""
    waiting: list["Request"] | None = None
    """The later requests that wait for it."""
    cancel: Callable[[], bool] | None = None
    """Stops what was begun, if that is still possible; returns whether it was."""
    joint: WithdrawsWrites | None = None
    """Of a write that goes to the engine together with others: what withdraws it alone, instead of `cancel`."""
    collector: ReplyCollector | None = None
    """Where its reply goes, if its message held several requests, or did not arrive over NATS."""
    position: int = 0
    """Its position in that message."""

    def stop(self) -> bool:
        """Stop what was begun, if that is still possible; returns whether it was."""
        if self.joint is not None:
            return self.joint.withdraw(self)
        return self.cancel is not None and self.cancel()


class Owner:
    """Whose requests they are: a plugin, or a tenant. Owners take turns, and each has bounds of its own."""

    __slots__ = (
        "_barriers",
        "_exclusive",
        "_numbered",
        "_writing",
        "credit",
        "examined_at",
        "is_in_turn",
        "meter",
        "name",
        "reading",
        "reads",
        "ready",
        "reply_bytes",
        "request_bytes",
        "sent",
        "sent_at",
        "under_way",
        "under_way_bytes",
        "unordered",
        "visits",
        "waiting",
        "writes",
    )

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.waiting: deque[Request] = deque()
        """Requests that have arrived and are not yet read."""
        self.request_bytes = 0
        """The size of all requests that are not yet done."""
        self.reply_bytes = 0
        """The size of the replies that are being made or sent."""
        self.under_way = 0
        """How many requests are read and not yet done."""
        self.under_way_bytes = 0
        """Their size."""
        self.credit = 0.0
        """How many seconds of work it may have before others have their turn."""
        self.is_in_turn = False
        """Whether it waits for its turn."""
        self.visits = 0
        """How often it has sent something while it had nothing unanswered, lately."""
        self.examined_at = 0.0
        """When it was last examined whether it may be forgotten."""
        self.sent, self.sent_at = 0.0, 0.0
        """How many requests of the last second count against a limit of its rate, and when the last one arrived."""
        self.ready: deque[Request] = deque()
        """Requests that have waited for earlier ones, and may be begun now."""
        self.writes: dict[int, Request] = {}
        """The writes under way by their numbers, in their order."""
        self.unordered = 0
        """How many reads and writes under way have no order that the engine keeps. While there are none, a write is
        submitted at once."""
        self._exclusive: Request | None = None
        """The last write under way that may write any key: all later requests wait for it."""
        self._writing: dict[Hashable, Request] = {}
        """The last write under way, by key."""
        self.reads: dict[Request, None] = {}
        """The reads that wait or are carried out, as far as later writes wait for them."""
        self.reading: dict[Hashable, dict[Request, None]] = {}
        """By key, the reads that no later write of the key waits for yet."""
        self._barriers: deque[Request] = deque()
        """Requests that wait for all earlier writes, in their order."""
        self._numbered = 0

    @property
    def is_idle(self) -> bool:
        return not self.request_bytes and not self.reply_bytes

    def is_too_fast(self, most: float, now: float) -> bool:
        """Count a request; returns whether more than this many have arrived within a second."""
        self.sent = max(0.0, self.sent - (now - self.sent_at) * most)
        self.sent_at = now
        if self.sent + 1 > max(most, 1.0):
            return True
        self.sent += 1
        return False

    def read_waits(self, request: Request, keys: Collection[Hashable] | None) -> bool:
        """Whether a read waits for earlier writes of these keys, or of all; `ready` has it later."""
        if not self.writes:
            return False
        if keys is None:
            request.number = self._numbered
            self._barriers.append(request)
            return True
        self._wait_for_writes(request, keys)
        return request.waits_for > 0

    def write_waits(self, request: Request, keys: Collection[Hashable] | None) -> bool:
        """Whether a write waits for earlier requests; later ones wait for it from now on.

        Args:
            request: The write that has arrived.
            keys: The keys that it writes; None for any.
        """
        if keys is None:
            for write in reversed(self.writes.values()):
                _wait(request, write)
                if write is self._exclusive:
                    break  # a write of any key itself waits for all earlier requests
            for read in self.reads:
                _wait(request, read)
            self.reading.clear()
        else:
            self._wait_for_writes(request, keys)
            for key in keys:
                # Requests that wait for this write need not wait for the reads before it.
                for read in self.reading.pop(key, ()):
                    _wait(request, read)
            for read in self.reads:
                if not read.read:
                    _wait(request, read)
        self.begin_write(request, keys)
        self.unordered += 1
        return request.waits_for > 0

    def _wait_for_writes(self, request: Request, keys: Collection[Hashable]) -> None:
        if self._exclusive is not None:
            _wait(request, self._exclusive)
        is_submittable = isinstance(request.operation, EngineWrite)
        for key in keys:
            write = self._writing.get(key)
            if write is not None and not (is_submittable and write.is_submitted):
                _wait(request, write)

    def begin_read(self, read: Request, keys: Collection[Hashable] | None) -> None:
        """Let later writes of these keys, or of all, wait for this read."""
        self.unordered += 1
        read.read = keys or ()
        self.reads[read] = None
        for key in read.read:
            if (others := self.reading.get(key)) is None:
                others = self.reading[key] = {}
            others[read] = None

    def end_read(self, read: Request) -> None:
        """Note that a read has ended, with or without success, so that requests no longer wait for it."""
        self.unordered -= 1
        del self.reads[read]
        for key in read.read or ():
            others = self.reading.get(key, {})
            others.pop(read, None)
            if not others:
                self.reading.pop(key, None)
        read.read = None
        self._release(read.waiting)
        read.waiting = None

    def submitted(self, write: Request) -> None:
        """Note that the engine has a write. Later writes of its keys may follow: the engine keeps their order."""
        write.is_submitted = True
        self.unordered -= 1
        if write.waiting is not None:
            later = write.waiting
            write.waiting = [one for one in later if not isinstance(one.operation, EngineWrite)]
            self._release([one for one in later if isinstance(one.operation, EngineWrite)])

    def _release(self, waiting: Iterable[Request] | None) -> None:
        for request in waiting or ():
            request.waits_for -= 1
            if not request.waits_for:
                self.ready.append(request)

    def is_writing(self, keys: Iterable[Hashable]) -> bool:
        """Whether a write of one of these keys is under way."""
        return bool(self._writing) and not self._writing.keys().isdisjoint(keys)

    def begin_write(self, write: Request, keys: Collection[Hashable] | None) -> None:
        """Let later requests of these keys, or all later requests, wait for this write."""
        self._numbered = write.number = self._numbered + 1
        self.writes[write.number] = write
        if keys is None:
            self._exclusive, keys = write, ()
        write.written = keys
        writing = self._writing
        if len(keys) == 1:
            [key] = keys
            # Most keys are not being written: then one search of the dict is enough.
            if (before := writing.setdefault(key, write)) is not write:
                write.before, writing[key] = before, write
        else:
            writing |= dict.fromkeys(keys, write)

    def end_write(self, write: Request) -> None:
        """Note that a write has ended, with or without success, so that requests no longer wait for it."""
        write.is_done = True
        del self.writes[write.number]
        if not write.is_submitted:
            self.unordered -= 1
        if self._exclusive is write:
            self._exclusive = None
        # A withdrawn write may end before an earlier write of its key: requests that waited for it wait for that one.
        heir = write.before
        while heir is not None and heir.is_done:
            heir = heir.before
        write.before = heir  # kept for a later write of the key, which may be withdrawn, too
        writing = self._writing
        for key in write.written or ():
            if (last := writing.pop(key, None)) is not write:
                if last is not None:
                    writing[key] = last
            elif heir is not None:
                writing[key] = heir
        if write.waiting is not None:
            if heir is not None:
                heir.waiting = [*(heir.waiting or ()), *write.waiting]
            else:
                self._release(write.waiting)
        writes, barriers = self.writes, self._barriers
        while barriers and (not writes or barriers[0].number < next(iter(writes))):
            self.ready.append(barriers.popleft())

    def held_up(self) -> list[Request]:
        """The requests that wait for others."""
        earlier = (*self.writes.values(), *self.reads)
        return [*self._barriers, *[request for one in earlier for request in one.waiting or ()]]


def _wait(request: Request, earlier: Request) -> None:
    """Let a request wait for an earlier one."""
    if earlier.waiting is None:
        earlier.waiting = []
    earlier.waiting.append(request)
    request.waits_for += 1
