"""A group of batches that is written to an SQLite file and waits for its COMMIT."""

from msgspec import Struct

from keyloft.engines.commit.outcomes import Outcome


class UncommittedGroup(Struct, frozen=True):
    """A group that is written in an open transaction, before its COMMIT."""

    outcome: Outcome
    """The outcome of the group once it is committed."""
    at: int
    has_version: bool
    """Whether a batch of it took a version; if not, nothing was written."""
    is_small: bool
    """Whether its COMMIT takes hardly longer than a sync."""
    log_size: int
    """The size of the change log, with this group."""
    restarts_log: bool = False
    """For a small group: whether its COMMIT restarts the write-ahead log."""
