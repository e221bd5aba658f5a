"""The outcome of a group of batches: what its callers, its engine and the watches learn of it."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from keyloft.core.records import Address, Batch
from keyloft.engines.commit.settle import Verdict
from keyloft.errors import DatabaseError, KeyloftError

_NO_VERSION: Final = -1
"""A `version_before` that no watch has seen, so that all of them read again."""


class Outcome(Struct, frozen=True):
    """The verdicts on a group, and the version counter before and after it."""

    verdicts: Sequence[Verdict | None]
    """None for a batch that was not decided and goes with the next group."""
    version_before: int
    version_after: int
    touched: Iterable[Address] = ()


def failed(group: Sequence[Batch], error: DatabaseError, version: int) -> Outcome:
    """The database refused the whole group."""
    # A copy each: an exception that is raised in many tasks would collect all their tracebacks.
    return Outcome([copy(error) for _ in group], version, version)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a group that was committed batch by batch; other processes may have committed in between."""
    alone = all(one.version_after == other.version_before for one, other in pairwise(outcomes))
    return Outcome(
        [verdict for outcome in outcomes for verdict in outcome.verdicts],
        outcomes[0].version_before if alone else _NO_VERSION,
        outcomes[-1].version_after,
        [address for outcome in outcomes for address in outcome.touched],
    )


def copy(error: KeyloftError) -> KeyloftError:
    copied = type(error)(*error.args)
    copied.__cause__ = error.__cause__
    return copied
