"""Loads rows into a whole database, the same way on every engine: merges them, or replaces all that is stored."""

from collections.abc import Sequence
from typing import Any, Protocol

from keyloft.core.maintenance import (
    EVERYTHING,
    Existing,
    Loaded,
    Progress,
    Range,
    Snapshot,
    check_unchanged,
    merge,
    version_after_load,
)
from keyloft.core.records import Key, Record, Space


class LoadTransaction(Protocol):
    """An open transaction in which no other process can commit."""

    version: int
    """The version counter."""
    now: int

    async def stored(self, space: Space, rows: Sequence[Record]) -> dict[Key, Record]:
        """What is stored under the keys of some rows, expired or not."""

    async def put(self, space: Space, rows: Sequence[Record]) -> None:
        """Store rows over whatever is stored under their keys."""

    async def clear(self) -> None:
        """Remove all rows."""


async def load(
    transaction: LoadTransaction, rows: Sequence[tuple[Space, Record]], source_version: int, existing: Existing
) -> tuple[Loaded, int | None]:
    """Store rows; returns what they met, and the new version counter, or None if nothing was written."""
    loaded, all_written = Loaded(), list[Record]()
    new_version = max(transaction.version, source_version) + 1
    for space in Space:
        if some := [row for at, row in rows if at is space]:
            stored = await transaction.stored(space, some)
            written, met = merge(space, some, stored, existing, transaction.now, new_version)
            await transaction.put(space, written)
            loaded.add(met)
            all_written += written
    if not all_written:
        return loaded, None
    return loaded, version_after_load(transaction.version, source_version, all_written, new_version)


async def replace_all(
    transaction: LoadTransaction, source: Snapshot, progress: Progress, expected_version: int | None
) -> tuple[int, int]:
    """Replace all rows by those of a snapshot; returns how many those are, and the new version counter."""
    before = transaction.version
    check_unchanged(before, expected_version)
    await transaction.clear()
    done = 0
    for part in EVERYTHING:
        async for rows in source.rows(part):
            await transaction.put(part.space, rows)
            done += len(rows)
            progress(done, None)
    return done, before + 1 if before >= source.version else source.version


def range_condition(part: Range, after: Key | None, key: Sequence[str], mark: str) -> tuple[str, list[Any]]:
    """The WHERE clause of a range, or of what is left of it after a key, and its bindings.

    Args:
        part: The range.
        after: The last key that was read, if any.
        key: The columns of the key.
        mark: What stands before the number of a binding: `?` or `$`.
    """
    conditions: list[str] = []
    bindings: list[Any] = []
    start, operator = (part.start, ">=") if after is None else (after, ">")
    for bound, comparison in ((start, operator), (part.end, "<")):
        if bound is not None:
            first = len(bindings) + 1
            bindings += bound if len(key) > 1 else [bound]
            marks = ", ".join([f"{mark}{number}" for number in range(first, len(bindings) + 1)])
            conditions.append(f"({', '.join(key)}) {comparison} ({marks})")
    return f" WHERE {' AND '.join(conditions)}" if conditions else "", bindings
