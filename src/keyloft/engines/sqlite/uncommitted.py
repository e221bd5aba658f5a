"""A group of batches that is written to an SQLite file and waits for its COMMIT."""

from msgspec import Struct

from keyloft.engines.commit.outcomes import Outcome


class UncommittedGroup(Struct, frozen=True):
    """A group that is written in an open transaction, before its COMMIT."""

    outcome: Outcome
    """What its callers learn once it is committed."""
    at: int
    has_version: bool
    """Whether a batch of it took a version; if not, nothing was written."""
    is_small: bool
    """Whether its COMMIT takes little longer than a sync."""
    log_size: int
    """Of the change log, with this group."""
    restarts_log: bool = False
    """Of a small one, whether its COMMIT restarts the write-ahead log."""
