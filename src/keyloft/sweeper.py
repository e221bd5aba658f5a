"""Makes expiry physical: removes what is due from the database, in slices that don't hold up other writers."""

import asyncio
import logging

from keyloft import limits
from keyloft.engine import Engine
from keyloft.errors import Closed, KeyloftError
from keyloft.records import Batch, Committed, Expired, Purge, Space

logger = logging.getLogger(__name__)


async def sweep(engine: Engine, space: Space) -> int:
    """Remove the expired entries of a space; returns how many there were.

    An entry that is written again meanwhile stays: each removal is bound to the version that was found expired.
    """
    removed = 0
    while True:
        [due] = await engine.read(Expired(space, limits.SWEEP_SLICE))
        if not due:
            return removed
        done = await engine.commit(Batch(tuple(Purge(space, record.key, record.version) for record in due)))
        purged = sum(done.found) if isinstance(done, Committed) else 0
        removed += purged
        if len(due) < limits.SWEEP_SLICE or not purged:
            return removed


async def sweep_regularly(engine: Engine, space: Space, seconds: float) -> None:
    """Sweep again and again until the engine closes; an error waits for the next time."""
    while True:
        await asyncio.sleep(seconds)
        try:
            removed = await sweep(engine, space)
        except Closed:
            return
        except KeyloftError as error:
            logger.warning("sweeping expired entries failed (%s), next try in %g s: %s", error.code, seconds, error)
        else:
            if removed:
                logger.debug("swept %d expired entries", removed)
