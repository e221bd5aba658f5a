"""What both ways to commit a group share: what an attempt takes and returns, and the rows that it reads and writes."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from keyloft.core.records import Address, Append, Batch, Key, Record, Space
from keyloft.engines.commit.outcomes import Outcome
from keyloft.engines.postgres.connections import Slot, Transaction
from keyloft.engines.postgres.tables import LAYOUTS
from keyloft.errors import ClockSetBack


class LostRace(Enum):
    """Why an attempt wrote nothing; the next one may succeed."""

    LOCKED = "another client has locked a row"
    CHANGED = "another client has changed a row since it was read"
    REFUSED = "the server got the commit too late"


Attempted: TypeAlias = Outcome | LostRace


class CommitAttempt:
    """One attempt, with an id that the change log holds if it is committed."""

    def __init__(self, group: Sequence[Batch]) -> None:
        self.group = group
        self.operations = sum([batch.operations for batch in group])
        self.commit_id = secrets.token_bytes(16)
        self.completed: Callable[[int, int], Outcome] | None = None
        """Set when the committing statement is sent: from then on the outcome may become unknown.

        It makes the outcome from the version before the group and the time of the commit.
        """


class CommitWay(Protocol):
    """A way to commit a group."""

    async def commit(self, slot: Slot, attempt: CommitAttempt) -> Attempted:
        """Decide a group, and write it unless a race is lost.

        Raises:
            DatabaseError: The database refuses all commits.
        """


def written_keys(group: Sequence[Batch]) -> dict[Space, list[Key]]:
    """The keys that a group may write, by space and in order; the keys of Appends are not known yet."""
    keys: dict[Space, set[Key]] = {}
    for batch in group:
        for mutation in batch.mutations:
            if type(mutation) is not Append:
                keys.setdefault(mutation.space, set()).add(mutation.key)
    return {space: sorted(keys[space]) for space in Space if space in keys}


def by_space(addresses: Iterable[Address]) -> dict[Space, list[Key]]:
    """Keys by their space."""
    keys: dict[Space, list[Key]] = {}
    for space, key in addresses:
        keys.setdefault(space, []).append(key)
    return keys


async def load_values(at: Slot | Transaction, addresses: Iterable[Address]) -> dict[Address, Record]:
    """The stored rows of some keys, with their values; keys without a row are left out."""
    found: dict[Address, Record] = {}
    for space, keys in by_space(addresses).items():
        layout = LAYOUTS[space]
        rows = await at.fetch(layout.load_values, *layout.bind_keys(keys))
        found |= {(space, key): record for key, record in layout.found(rows).items()}
    return found


def clock_set_back(name: str, milliseconds: int) -> ClockSetBack:
    """The error for a server whose clock is this many milliseconds behind its last commit."""
    return ClockSetBack(
        f"{name}: the time of the last commit is {milliseconds / 1000:.0f} s ahead of the server's clock; nothing was "
        "written: set the clock right, or wait until it has caught up"
    )
