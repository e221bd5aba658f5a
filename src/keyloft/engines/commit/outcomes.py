"""What became of a group of batches."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from keyloft.core.records import Address, Batch
from keyloft.engines.commit.settle import Verdict
from keyloft.errors import DatabaseError

_SOMEBODY_CAME_BETWEEN: Final = -1


class Outcome(Struct, frozen=True):
    """The verdicts on a group, and between which clocks it stands."""

    verdicts: Sequence[Verdict | None]
    """None for a batch that was not decided and still has time."""
    clock_before: int
    clock_after: int
    touched: Iterable[Address] = ()


def failed(group: Sequence[Batch], error: DatabaseError, clock: int) -> Outcome:
    """The database refused the whole group."""
    # A copy each: an exception that is raised in many tasks would collect all their tracebacks.
    return Outcome([copy(error) for _ in group], clock, clock)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a group that was committed batch by batch."""
    alone = all(one.clock_after == other.clock_before for one, other in pairwise(outcomes))
    return Outcome(
        [verdict for outcome in outcomes for verdict in outcome.verdicts],
        outcomes[0].clock_before if alone else _SOMEBODY_CAME_BETWEEN,
        outcomes[-1].clock_after,
        [address for outcome in outcomes for address in outcome.touched],
    )


def copy(error: DatabaseError) -> DatabaseError:
    copied = type(error)(*error.args)
    copied.__cause__ = error.__cause__
    return copied
