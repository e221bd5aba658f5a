"""Removes expired entries from the database, in slices so small that other writers don't wait long."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Expired, Purge, Space
from keyloft.errors import Closed, KeyloftError, ReadOnly

logger = logging.getLogger(__name__)


async def sweep(engine: Engine, space: Space) -> int:
    """Remove the expired entries of a space; returns how many there were.

    An entry that is written again meanwhile stays: each Purge names the version that was found expired.
    """
    removed, size, last = 0, limits.SWEEP_SLICE, None
    while True:
        [due] = await engine.read(Expired(space, size))
        if not due:
            return removed
        done = await write(engine, *[Purge(space, record.key, record.version) for record in due])
        purged = sum(done.found)
        removed += purged
        if len(due) < size or not purged:
            return removed
        # Versions count commits: if there was none between the last two slices, no other writer waits for a larger one.
        alone = last is not None and done.version == last + 1
        size, last = limits.SWEEP_SLICE_ALONE if alone else limits.SWEEP_SLICE, done.version


async def sweep_regularly(sweep_once: Callable[[], Awaitable[int]], seconds: float) -> None:
    """Sweep at regular intervals until the engine closes; errors are logged."""
    while True:
        await asyncio.sleep(seconds)
        try:
            removed = await sweep_once()
        except (Closed, ReadOnly):
            return  # a database that is opened for reading is swept by the processes that write to it
        except KeyloftError as error:
            logger.warning("sweeping expired entries failed (%s), next try in %g s: %s", error.code, seconds, error)
        except Exception:
            logger.exception("sweeping expired entries failed unexpectedly, next try in %g s", seconds)
        else:
            if removed:
                logger.debug("swept %d expired entries", removed)
