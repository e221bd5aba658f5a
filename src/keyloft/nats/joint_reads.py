"""Makes the point reads of several owners' turns together: an engine on this machine takes less time for many at once.

With ten owners that have six gets each, a get takes a tenth less CPU time than with a read per owner.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.core.records import Get, Record
from keyloft.nats.requests import Owner, Request


def read_at_once(engine: Engine, asks: Sequence[Get]) -> Sequence[Record | None] | None:
    """The answers of an engine that `reads_at_once`; None if it has to wait, or fails: then each owner reads alone."""
    reading = engine.read(*asks)
    try:
        reading.send(None)
    except StopIteration as read:
        records: Sequence[Record | None] = read.value
        return records
    except Exception:
        return None
    reading.close()
    return None


class JointReads:
    """The reads that turns have begun, until they are made."""

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Owner, Sequence[Request]], None],
        answer: Callable[[Mapping[Owner, Sequence[Request]], Sequence[Record | None]], Sequence[int]],
        send: Callable[[], None],
    ) -> None:
        """Args:
        engine: Reads the entries.
        make: Makes the reads of one owner alone.
        answer: Called with the requests of some owners and the entries that they ask for; returns about how many bytes
            those of each owner and their replies have.
        send: Sends the replies.
        """
        self._engine = engine
        self._reads_at_once = engine.reads_at_once
        self._make = make
        self._answer = answer
        self._send = send
        self.begun: dict[Owner, Sequence[Request]] = {}
        """The reads that are not yet made."""
        self._count = 0

    def add(self, owner: Owner, requests: Sequence[Request]) -> None:
        """Add reads that a turn has begun: they are made before the owner's next turn, at the latest by `make_all`."""
        if not self._reads_at_once:
            self._make(owner, requests)
            return
        if self.begun and self._count + len(requests) > limits.GETS_PER_READ:
            # Sent now, so that their senders go on while others' requests are read.
            self.make_in_turn_of(owner)
        self.begun[owner] = requests
        self._count += len(requests)

    def make_in_turn_of(self, owner: Owner) -> None:
        """Make all reads now, in the turn of an owner."""
        # The owner pays for its turn with credit; these reads are paid by the owners that asked for them.
        began = perf_counter()
        self.make_all()
        self._send()
        owner.credit += perf_counter() - began

    def make_all(self) -> None:
        """Make the reads that were added."""
        if not self.begun:
            return
        begun, self.begun = self.begun, {}
        count, self._count = self._count, 0
        if count > limits.GETS_PER_READ or not self._made_together(begun):
            for owner, requests in begun.items():
                began = perf_counter()
                self._make(owner, requests)
                owner.credit -= perf_counter() - began

    def _made_together(self, begun: dict[Owner, Sequence[Request]]) -> bool:
        """Make reads of several owners as one; returns whether the engine answered at once."""
        began = perf_counter()
        asks = [request.content for some in begun.values() for request in some]
        if (records := read_at_once(self._engine, asks)) is None:
            return False
        # The time to read and answer an entry depends on its size, and hardly on its owner.
        sizes = self._answer(begun, records)
        price = (perf_counter() - began) / sum(sizes)
        for owner, size in zip(begun, sizes, strict=True):
            owner.credit -= price * size
        return True
