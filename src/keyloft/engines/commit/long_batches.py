"""Divides a long batch, so that no step of its commit takes long; the parts are written in one transaction.

Each part is decided after the parts before it are written. So the engine needs only the rows of one part at a time;
those of a whole batch of 100,000 keys would also make the garbage collector stop everything for tens of milliseconds.
"""

from collections.abc import Iterator

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import Batch, Committed, Conflict, FailedCheck
from keyloft.engines.commit.outcomes import NO_VERSION, Outcome
from keyloft.engines.commit.settle import Settled
from keyloft.errors import KeyloftError


def is_long(batch: Batch) -> bool:
    """Whether a batch is to be committed in parts; it is then alone in its group."""
    return len(batch.checks) + len(batch.mutations) > limits.LONG_BATCH_OPERATIONS


def divided(batch: Batch) -> Iterator[Batch]:
    """The parts of a batch: first all checks, then the mutations in their order."""
    some = limits.SLICE_ITEMS
    for first in range(0, len(batch.checks), some):
        yield Batch((), batch.checks[first : first + some])
    for first in range(0, len(batch.mutations), some):
        yield Batch(batch.mutations[first : first + some])


class GatheredVerdict:
    """Gathers the verdicts on the parts of a batch. Each part is settled from the version before the batch."""

    def __init__(self, before: int, now: int) -> None:
        self._before = before
        self._now = now
        self._failed: list[FailedCheck] = []
        self._error: KeyloftError | None = None
        self._found: list[bool] = []
        self._values: list[int] = []
        self._next_expiry: int | None = None

    def refuses(self, part: Batch) -> bool:
        """Whether nothing of the batch may be written, and this part need not be settled."""
        return self._error is not None or (bool(part.mutations) and bool(self._failed))

    def add(self, settled: Settled) -> None:
        """Add the verdict on a part that was settled."""
        [verdict] = settled.verdicts
        if isinstance(verdict, Committed):
            self._found += verdict.found
            self._values += verdict.values
            moments = [moment for moment in (self._next_expiry, settled.next_expiry) if moment is not None]
            self._next_expiry = min(moments, default=None)
        elif isinstance(verdict, Conflict):
            self._failed += verdict.failed
        else:
            self._error = verdict

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole batch."""
        if self._error is not None:
            return self._error
        if self._failed:
            return Conflict(tuple(self._failed))
        return Committed(self._before + 1, tuple(self._found), self._now, tuple(self._values))

    def outcome(self) -> Outcome:
        """The outcome of the whole batch. Watches read its changes from the log, a slice at a time."""
        verdict = self.verdict
        if isinstance(verdict, Committed):
            return Outcome([verdict], NO_VERSION, verdict.version, (), self._next_expiry)
        return Outcome([verdict], self._before, self._before)
