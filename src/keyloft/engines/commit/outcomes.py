"""The outcome of a group of batches, for its callers, its engine and the watches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Verdict
from keyloft.core.records import Batch, LoggedChange
from keyloft.engines.commit.settle import Settled
from keyloft.errors import DatabaseError, KeyloftError

NO_VERSION: Final = -1
"""A `version_before` that no watch has seen, so that the watches read the change log."""


class Outcome(Struct, frozen=True):
    """The verdicts on a group, and the version counter before and after it."""

    verdicts: Sequence[Verdict | None]
    """One per batch; None for a batch that was not decided, and joins the next group."""
    version_before: int
    version_after: int
    changes: Sequence[LoggedChange] = ()
    next_expiry: int | None = None
    """The earliest expiry that the group has given to an entry."""


def committed(settled: Settled, before: int) -> Outcome:
    """The outcome of a group that was committed as it was settled, after version `before`."""
    if len(settled.changes) > limits.WATCH_INLINE_CHANGES:
        # Watches read so many changes from the log: freeing them here would block the event loop for long.
        return Outcome(settled.verdicts, NO_VERSION, settled.version, (), settled.next_expiry)
    return Outcome(settled.verdicts, before, settled.version, settled.changes, settled.next_expiry)


def failed(group: Sequence[Batch | Verdict | None], error: DatabaseError, version: int) -> Outcome:
    """The outcome of a group that the database refused, given its batches or the verdicts that it would have got."""
    # A copy for each batch: an exception that is raised in many tasks would collect all their tracebacks.
    return Outcome([copy(error) for _ in group], version, version)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a group that was committed batch by batch; other processes may have committed in between."""
    alone = all(one.version_after == other.version_before for one, other in pairwise(outcomes))
    return Outcome(
        [verdict for outcome in outcomes for verdict in outcome.verdicts],
        outcomes[0].version_before if alone else NO_VERSION,
        outcomes[-1].version_after,
        [change for outcome in outcomes for change in outcome.changes],
        min([outcome.next_expiry for outcome in outcomes if outcome.next_expiry is not None], default=None),
    )


def copy(error: KeyloftError) -> KeyloftError:
    copied = type(error)(*error.args)
    copied.__cause__ = error.__cause__
    return copied
