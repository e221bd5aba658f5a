"""Filters the rows of a table of the admin page: bounds how many are shown, and how many are read."""

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from keyloft import limits

T = TypeVar("T")


async def fitting(rows: AsyncIterator[T], fits: Callable[[T], bool]) -> tuple[list[T], T | None]:
    """The rows for a table.

    Args:
        rows: All of them, in their order.
        fits: Whether the filter lets one through.

    Returns:
        The rows that fit; and the last row that was read, or None if there are no more rows.
    """
    found: list[T] = []
    read, last = 0, None
    async for row in rows:
        if len(found) == limits.PAGE_ROWS or read == limits.PAGE_SCANNED_ROWS:
            return found, last
        read, last = read + 1, row
        if fits(row):
            found.append(row)
    return found, None
