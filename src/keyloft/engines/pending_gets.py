"""Gets that wait for a database server, and what becomes of them when a read of several callers fails."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from keyloft.core.records import Get, Record
from keyloft.engines.commit.outcomes import copy
from keyloft.errors import Busy, DatabaseError, KeyloftError, Unreachable

logger = logging.getLogger(__name__)

PendingGets: TypeAlias = tuple[Sequence[Get], asyncio.Future[list[Record | None]], float]
"""The gets of a caller, its future, and when it arrived by the event loop's time."""


def fail(pending: Iterable[PendingGets], error: KeyloftError) -> None:
    """Let callers have an error, each a copy of its own."""
    for _, future, _ in pending:
        if not future.done():
            future.set_exception(copy(error))
            future.exception()  # its caller may be gone, and asyncio would log it


def fail_late(pending: Sequence[PendingGets], error: Exception, server: str, patience: float) -> Sequence[PendingGets]:
    """Let the callers of a read that failed have its error; returns those that have time left for another try.

    Args:
        pending: In the order in which they arrived; the first has waited for as long as it may.
        error: Why the read failed. Anything but an error of Keyloft is a defect, and is logged.
        server: Its name, for messages.
        patience: How many seconds a caller waits for a server that does not answer.
    """
    if isinstance(error, Unreachable | Busy):
        late = pending[0][1].get_loop().time() - patience
        overdue = max(1, sum(arrived <= late for _, _, arrived in pending))
        fail(pending[:overdue], error)
        return pending[overdue:]
    if not isinstance(error, KeyloftError):
        logger.error("looking up keys failed unexpectedly", exc_info=error)
        error = DatabaseError(f"{server}: reading failed unexpectedly: {type(error).__name__}")
    fail(pending, error)
    return ()
