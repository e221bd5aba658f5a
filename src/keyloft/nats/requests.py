"""Requests that a service has accepted, what they ask for, and their order within their owner."""

from collections import deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from typing import Any, Final, NoReturn, Optional, Protocol

from msgspec import Struct

from keyloft.core.records import Batch, Committed, Conflict, Get, Record
from keyloft.errors import KeyloftError
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
    """One thing that a service can be asked for: how its messages are read and logged."""

    name: str
    reply_bytes: int = 0
    """What is reserved for its reply before a request is begun: the most that making it takes. 0 for a short reply."""
    holds_requests: bool = False
    """Whether its messages hold several requests (`many.py`)."""
    variants: Mapping[str, "Operation"] = {}
    """What carries out the variants of this operation; they have its name."""

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

    def reply(self, content: Any, outcome: Any, /) -> bytes:
        """The reply to what `read` returned, from what became of it; a Call makes its own."""
        raise NotImplementedError

    def key(self, content: Any) -> str:
        """The key that a line of the log names."""
        return ""

    def details(self, content: Any, outcome: Any) -> dict[str, int | None]:
        """What a line of the log shows besides, once it is carried out."""
        return {}


class NoOperation(Operation):
    """Stands for the operation of a message that is refused before its subject is understood."""

    name = ""


NO_OPERATION: Final = NoOperation()


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

    def written(self, content: Any) -> Collection[Hashable] | None:
        """The keys that it writes, and later requests for them wait for it; None for any of its owner's."""
        return ()

    def keys_read(self, content: Any) -> Collection[Hashable] | None:
        """The keys that it reads, if it writes none; None for any of its owner's."""
        return None

    def carry_out(self, content: Any) -> Coroutine[Any, Any, tuple[bytes, Any]]:
        """The reply, and the outcome that `details` shows."""
        raise NotImplementedError


class RefusedOperation(NoOperation):
    """Stands for what can't be carried out, such as the operation of a subject that names none: it is refused."""

    def __init__(self, kind: type[KeyloftError], message: str) -> None:
        """`kind` and `message` of the error; not the error itself, whose traceback would keep each message."""
        self._kind = kind
        self._message = message

    def read(self, about: Any, data: bytes, /) -> NoReturn:
        raise self._kind(self._message)


class ReplyCollector(Protocol):
    """Takes the replies to the requests that were in one message."""

    def add(self, position: int, reply: bytes, is_written: bool) -> None: ...


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
    number: int = 0
    """Of a write: its number among the writes of its owner. Of a request that waits for all earlier writes: the number
    of the last of them."""
    is_done: bool = False
    is_given_up: bool = False
    """Its deadline has passed while it waited for earlier writes: it is answered, and will not be carried out."""
    waits_for: int = 0
    """For how many earlier writes it waits."""
    before: Optional["Request"] = None
    """Of a write of one key: the write of that key before it, if that was under way."""
    waiting: list["Request"] | None = None
    """Of a write: the later requests that wait for it."""
    cancel: Callable[[], bool] | None = None
    """Stops what was begun, if that is still possible; returns whether it was. A write of several keys is not stopped:
    what waits for it would not wait for the earlier writes of these keys."""
    collector: ReplyCollector | None = None
    """Where its reply goes, if its message held several requests."""
    position: int = 0
    """Its position in that message."""


class Owner:
    """Whose requests they are: a plugin, or a tenant. Owners take turns, and each has bounds of its own."""

    __slots__ = (
        "_barriers",
        "_numbered",
        "_writing",
        "credit",
        "examined_at",
        "exclusive",
        "is_in_turn",
        "meter",
        "name",
        "ready",
        "reply_bytes",
        "request_bytes",
        "sent",
        "sent_at",
        "under_way",
        "under_way_bytes",
        "visits",
        "waiting",
        "writes",
    )

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.waiting: deque[Request] = deque()
        """What has arrived and is not yet read."""
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
        """What has waited for earlier writes, and may be begun now."""
        self.writes: dict[int, Request] = {}
        """The writes under way by their numbers, in their order."""
        self.exclusive: Request | None = None
        """The last write under way that may write any key: all later requests wait for it."""
        self._writing: dict[Hashable, Request] = {}
        """The last write under way, by key."""
        self._barriers: deque[Request] = deque()
        """Requests that wait for all earlier writes, in their order."""
        self._numbered = 0

    @property
    def is_idle(self) -> bool:
        return not self.request_bytes and not self.reply_bytes

    def is_too_fast(self, most: float, now: float) -> bool:
        """Count a request; returns whether more than so many have arrived within a second."""
        self.sent = max(0.0, self.sent - (now - self.sent_at) * most)
        self.sent_at = now
        if self.sent + 1 > max(most, 1.0):
            return True
        self.sent += 1
        return False

    def must_wait(self, request: Request, keys: Collection[Hashable] | None) -> bool:
        """Whether a request waits for earlier writes of these keys, or of all; `end_write` returns it later."""
        if not self.writes:
            return False
        if keys is None:
            request.number = self._numbered
            self._barriers.append(request)
            return True
        if self.exclusive is not None:
            _wait(request, self.exclusive)
        for key in keys:
            if (write := self._writing.get(key)) is not None:
                _wait(request, write)
        return request.waits_for > 0

    def waits_in_order(
        self, request: Request, written: Collection[Hashable] | None, read: Collection[Hashable] | None = ()
    ) -> bool:
        """Whether a request waits for earlier writes; if it is a write, later requests wait for it from now on.

        Args:
            request: What has arrived.
            written: The keys that it writes; None for any.
            read: The keys that it reads, if it writes none; None for any.
        """
        if written is None:
            for write in reversed(self.writes.values()):
                _wait(request, write)
                if write is self.exclusive:
                    break  # it waits for all earlier ones itself
            waits = request.waits_for > 0
        else:
            waits = self.must_wait(request, written or read)
        if written is None or written:
            self.begin_write(request, written)
        return waits

    def begin_write(self, write: Request, keys: Collection[Hashable] | None) -> None:
        """Later requests about these keys, or all later requests, wait for this write."""
        self._numbered = write.number = self._numbered + 1
        self.writes[write.number] = write
        if keys is None:
            self.exclusive, keys = write, ()
        write.written = keys
        for key in keys:
            write.before = self._writing.get(key) if len(keys) == 1 else None
            self._writing[key] = write

    def end_write(self, write: Request) -> None:
        """Note that a write has ended, with or without success; what has waited for it is ready now."""
        write.is_done = True
        del self.writes[write.number]
        if self.exclusive is write:
            self.exclusive = None
        before, write.before = write.before, None
        # A write that was withdrawn may end before an earlier one of its key: what waited for it waits for that.
        heir = None if before is None or before.is_done else before
        for key in write.written or ():
            if self._writing.get(key) is write:
                if heir is None:
                    del self._writing[key]
                else:
                    self._writing[key] = heir
        if write.waiting is not None:
            if heir is not None:
                heir.waiting = [*(heir.waiting or ()), *write.waiting]
            else:
                for request in write.waiting:
                    request.waits_for -= 1
                    if not request.waits_for:
                        self.ready.append(request)
        writes, barriers = self.writes, self._barriers
        while barriers and (not writes or barriers[0].number < next(iter(writes))):
            self.ready.append(barriers.popleft())

    def held_up(self) -> list[Request]:
        """The requests that wait for a write."""
        return [*self._barriers, *[request for write in self.writes.values() for request in write.waiting or ()]]


def _wait(request: Request, write: Request) -> None:
    """Let a request wait for an earlier write."""
    if write.waiting is None:
        write.waiting = []
    write.waiting.append(request)
    request.waits_for += 1
