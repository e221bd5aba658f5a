"""Removes expired entries from the database, in slices so small that other writers don't wait long."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter

from msgspec import Struct

from keyloft import limits
from keyloft.core.engine import Engine, write
from keyloft.core.records import Expired, Purge, Record, Space
from keyloft.errors import Closed, KeyloftError, ReadOnly

logger = logging.getLogger(__name__)


class Swept(Struct, frozen=True):
    """The outcome of removing a slice of expired rows."""

    rows: int
    """How many rows were removed; the others were written again meanwhile."""
    commits: int
    version: int
    """The version of the last of these commits."""


async def purge(engine: Engine, space: Space, due: Sequence[Record]) -> Swept:
    """Remove expired rows in one commit; a row that was written again meanwhile has another version, and stays."""
    done = await write(engine, *[Purge(space, record.key, record.version, record.expires_at) for record in due])
    return Swept(sum(done.found), 1, done.version)


async def sweep(
    engine: Engine,
    space: Space,
    remove: Callable[[Engine, Space, Sequence[Record]], Awaitable[Swept]] = purge,
    largest_slice: int = limits.SWEEP_SLICE_ALONE,
) -> int:
    """Remove the expired rows of a space, a slice at a time; returns how many there were.

    Args:
        engine: The database.
        space: The key space to sweep.
        remove: Removes a slice, for an interface that keeps something of what has expired.
        largest_slice: How many rows a slice has at most, also while no other writer commits.
    """
    removed, size, last = 0, limits.SWEEP_SLICE, None
    while True:
        [due] = await engine.read(Expired(space, limits.SWEEP_ROWS))
        # In the order of their keys, so that each page of the table is written by one slice instead of many.
        due = sorted(due, key=attrgetter("key"))
        removed_before, first = removed, 0
        while first < len(due):
            done = await remove(engine, space, due[first : first + size])
            first += size
            removed += done.rows
            # Versions count commits: if no one else has committed since the last slice, a larger slice makes no other
            # writer wait.
            alone = last is not None and done.version == last + done.commits
            size = min(limits.SWEEP_GROWTH * size, largest_slice) if alone else limits.SWEEP_SLICE
            last = done.version
        if len(due) < limits.SWEEP_ROWS or removed == removed_before:
            return removed


async def sweep_regularly(
    sweep_once: Callable[[], Awaitable[int]],
    seconds: float,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Sweep at regular intervals until the engine closes; errors are logged."""
    while True:
        await sleep(seconds)
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
