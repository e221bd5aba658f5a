"""The rows that a batch of Purges expects: the sweeper has read them, so an engine need not read them again."""

from keyloft.core.records import Address, Batch, Head, Purge, Record


def rows_to_purge(batch: Batch) -> dict[Address, Record]:
    """The rows that a batch expects that does nothing but purge them; else empty: what is stored decides."""
    if batch.checks or not batch.mutations or type(batch.mutations[0]) is not Purge:
        return {}
    rows: dict[Address, Record] = {
        (purge.space, purge.key): Head(purge.key, b"", 0, purge.version, purge.expires_at)
        for purge in batch.mutations
        if type(purge) is Purge and purge.expires_at is not None
    }
    return rows if len(rows) == len(batch.mutations) else {}
