"""Moves entries from one place to another: which of them, and how many at a time."""

from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft import limits
from keyloft.admin.export_format import shown_key
from keyloft.core import key_text, keys
from keyloft.core.maintenance import EVERYTHING, Existing, Loaded, Maintenance, Range, Snapshot
from keyloft.core.records import Key, Record, Space
from keyloft.core.values import LOST
from keyloft.errors import AlreadyExists, TransferFailed, Undecodable
from keyloft.plugins import rules
from keyloft.semantic.keys import rows_of_project

_SLICE_BYTES: Final = 4 * limits.SCAN_BYTES
_TIMES: Final = (int, type(None))
_LONGEST_KEY: Final = 300


Place: TypeAlias = tuple[Space, Key]
"""Where an entry is."""


class Selection(Struct, frozen=True):
    """Which entries of a database are meant."""

    parts: tuple[Range, ...] = EVERYTHING
    named: dict[str, str] = {}
    """As it was said."""

    @classmethod
    def of(cls, prefix: str | None, plugin: str | None, project: str | None) -> "Selection":
        """By what somebody says on the command line; nothing means everything."""
        parts: list[Range] = []
        if prefix is not None:
            start, end = keys.below(keys.encode_prefix(key_text.read_prefix(prefix)))
            parts.append(Range(Space.TUPLES, start, end))
        if project is not None:
            parts += [Range(Space.SEMANTIC, *rows) for rows in rows_of_project(project)]
        if plugin is not None:
            name = rules.plugin_name(plugin)
            parts.append(Range(Space.PLUGINS, (name, ""), (f"{name}\x01", "")))
        given = {"prefix": prefix, "plugin": plugin, "project": project}
        return cls(tuple(parts) or EVERYTHING, {name: said for name, said in given.items() if said is not None})

    def holds(self, space: Space, key: Key) -> bool:
        """Whether an entry is among them."""
        return any(
            part.space is space and (part.start is None or part.start <= key) and (part.end is None or key < part.end)
            for part in self.parts
        )


async def rows_of(
    snapshot: Snapshot, selection: Selection, after: Place | None = None
) -> AsyncIterator[tuple[Space, Sequence[Record]]]:
    """What there is to move, some at a time, in a certain order; or what comes after an entry in that order.

    What has expired is gone, except for workflows: there it can be restored, and its expiry is still to be recorded.
    """
    for part in selection.parts:
        if after is not None and (part.space is not after[0] or (part.end is not None and part.end <= after[1])):
            continue
        begin, after = (None if after is None else after[1]), None
        async for rows in snapshot.rows(part, begin):
            _check_types(part.space, rows)
            if part.space is Space.SEMANTIC:
                yield part.space, rows
            elif alive := [row for row in rows if row.is_alive(snapshot.now)]:
                yield part.space, alive


def _check_types(space: Space, rows: Sequence[Record]) -> None:
    """SQLite stores what it is given: a key by hand may be of any type, and would become another one on the way.

    Raises:
        Undecodable: One is.
    """
    for row in rows:
        key, value = row.key, row.value
        is_key = type(key) is bytes if space is not Space.PLUGINS else type(key[0]) is str and type(key[1]) is str
        is_whole = type(value) is bytes and row.encoding != LOST
        if not (is_key and is_whole and type(row.version) is int and type(row.expires_at) in _TIMES):
            raise Undecodable(
                f"the row {ascii(key)[:_LONGEST_KEY]} of {space} is no entry and can't be moved: `keyloft check` tells "
                "all such rows; correct or remove them"
            )


async def count(snapshot: Snapshot, selection: Selection) -> int:
    """How many rows there are among them, expired or not."""
    return sum([await snapshot.count(part) for part in selection.parts])


class Slices:
    """Puts rows into a database, as many at a time as one commit is to hold."""

    def __init__(self, target: Maintenance, clock: int, existing: Existing) -> None:
        self._target = target
        self.clock = clock
        self._existing = existing
        self._rows: list[tuple[Space, Record]] = []
        self._weight = 0
        self.loaded = Loaded()

    def add(self, space: Space, row: Record) -> bool:
        """Take a row; returns whether the slice is full."""
        self._rows.append((space, row))
        self._weight += len(row.value)
        return len(self._rows) >= limits.MAINTENANCE_ROWS or self._weight >= _SLICE_BYTES

    async def flush(self) -> None:
        """Put the slice. Ends the command if something else is in the place of one of them, and is to be refused."""
        rows, self._rows, self._weight = self._rows, [], 0
        if not rows:
            return
        # A file without a first line may still name versions.
        clock = max(self.clock, *[row.version for _, row in rows])
        try:
            self.loaded.add(await self._target.load(rows, clock, self._existing))
        except AlreadyExists as error:
            raise TransferFailed(
                f"{shown_key(error.space, error.key)} is stored already, with another value or expiry: existing="
                '"keep" (--keep) leaves such entries as they are, existing="replace" (--replace) replaces them',
                self.loaded,
            ) from None
