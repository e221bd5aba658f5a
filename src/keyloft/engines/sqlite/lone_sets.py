"""Sets of one small value that never expires: the most frequent batch, which needs not be settled (ADR 6)."""

from typing import Final, TypeGuard
from zlib import adler32

from keyloft import limits
from keyloft.core.records import ChangeKind, Mutation, Set
from keyloft.core.schema import Row
from keyloft.engines.sqlite.tables import CHECKSUM_BASE, LAYOUTS

PUT: Final = ChangeKind.PUT
"""Python 3.11 takes long to find it in its class."""


def is_plain(mutation: Mutation) -> TypeGuard[Set]:
    """Whether it is a Set of a small value that never expires, and does not depend on what is stored."""
    if type(mutation) is not Set or mutation.if_absent or mutation.keep_expiry:
        return False
    if mutation.expire_in is not None or mutation.expire_at is not None:
        return False
    # As `LargeValueTable.holds` does it.
    is_small = len(mutation.key) + len(mutation.value) <= limits.ROW_BYTES
    return is_small and LAYOUTS[mutation.space].large is not None


def bind_set(key: bytes, value: bytes, encoding: int, version: int, now: int) -> Row:
    """What `bind_put` returns for an entry that never expires, in a table with one binary key."""
    return key, value, encoding, version, None, now, now, False, adler32(value, adler32(key, encoding)) + CHECKSUM_BASE
