"""Does the work of a long call a slice at a time, so that other tasks run in between."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from keyloft import limits

R = TypeVar("R")


async def in_slices(make: Callable[..., R], *columns: Sequence[Any]) -> list[R]:
    """Call `make` for each item, or with one item of each column; a short sequence is done at once."""
    count = len(columns[0])
    if count <= limits.SLICE_ITEMS:
        return list(map(make, *columns))
    made: list[R] = []
    for first in range(0, count, limits.SLICE_ITEMS):
        made += map(make, *[column[first : first + limits.SLICE_ITEMS] for column in columns])
        await asyncio.sleep(0)
    return made


async def free_in_slices(items: list[Any]) -> None:
    """Empty a list, a slice at a time: freeing those of a long one would block the event loop for milliseconds."""
    while len(items) > limits.SLICE_ITEMS:
        del items[-limits.SLICE_ITEMS :]
        await asyncio.sleep(0)


def give_way() -> None:
    """Let other threads run, such as the event loop's: a thread that computes releases the GIL only every 5 ms."""
    time.sleep(limits.GIVE_WAY_SECONDS)


def by_weight(items: Iterable[R], weight: Callable[[R], float], most: float) -> Iterator[list[R]]:
    """Items in slices that weigh no more than this each, or hold one item."""
    some: list[R] = []
    total = 0.0
    for item in items:
        added = weight(item)
        if some and total + added > most:
            yield some
            some, total = [], 0.0
        some.append(item)
        total += added
    if some:
        yield some
