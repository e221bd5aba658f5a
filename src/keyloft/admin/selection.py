"""Selects entries of a database: everything, or a prefix, a plugin, a project, a named store; and reads their rows."""

from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from keyloft.admin.export_format import row_name
from keyloft.core import key_text, keys
from keyloft.core.keys import TupleKey
from keyloft.core.maintenance import EVERYTHING, Range, Snapshot
from keyloft.core.records import SERVICE_ROWS, Key, Record, Space
from keyloft.core.values import DAMAGED, LOST
from keyloft.errors import Undecodable
from keyloft.plugins import rules
from keyloft.semantic.keys import rows_of_project
from keyloft.tuples.named import check_name

_TIMES: Final = (int, type(None))

Position: TypeAlias = tuple[Space, Key]
"""Where an entry stands in the order of an export."""


class Selection(Struct, frozen=True):
    """Which entries of a database are meant."""

    parts: tuple[Range, ...] = EVERYTHING
    named: dict[str, str] = {}
    """The selectors, as an export's first line has them."""

    @classmethod
    def of(
        cls, prefix: TupleKey | None, plugin: str | None, project: str | None, name: str | None = None
    ) -> "Selection":
        """The selection of all named parts; everything if none is named. `prefix` is in the store called `name`.

        Raises:
            InvalidInput: A prefix, plugin, project or store can't have this name.
        """
        parts: list[Range] = []
        named: dict[str, str] = {}
        if prefix is not None or name is not None:
            before = b"" if name is None else keys.store_prefix(check_name(name))
            parts.append(
                Range(Space.TUPLES, *keys.below(before + keys.encode_prefix(() if prefix is None else prefix)))
            )
        if prefix is not None:
            named["prefix"] = key_text.write(prefix)
        if name is not None:
            named["name"] = name
        if project is not None:
            parts += [Range(Space.SEMANTIC, *rows) for rows in rows_of_project(project)]
            named["project"] = project
        if plugin is not None:
            name = rules.plugin_name(plugin, "plugin")
            parts.append(Range(Space.PLUGINS, (name, ""), (f"{name}\x01", "")))
            named["plugin"] = name
        return cls(tuple(parts) or EVERYTHING, named)

    def holds(self, space: Space, key: Key) -> bool:
        """Whether an entry is selected."""
        return any(
            part.space is space and (part.start is None or part.start <= key) and (part.end is None or key < part.end)
            for part in self.parts
        )


async def rows_of(
    snapshot: Snapshot, selection: Selection, after: Position | None = None
) -> AsyncIterator[tuple[Space, Sequence[Record]]]:
    """The selected rows in pages, always in the same order; or those after a position in that order."""
    for part in selection.parts:
        if after is not None and (part.space is not after[0] or (part.end is not None and part.end <= after[1])):
            continue
        begin = None if after is None else after[1]
        after = None  # later parts are read whole
        async for rows in movable_rows(snapshot, part, begin):
            yield part.space, rows


async def movable_rows(snapshot: Snapshot, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
    """The rows of a range that are to be exported or copied, in pages.

    Expired rows are left out, except those of workflows: they can be restored, and their expiry must be recorded. Rows
    that services keep for their clients are left out, too: they are of no use in another database.
    """
    async for rows in snapshot.rows(part, after):
        _check_types(part.space, rows)
        if part.space is Space.SEMANTIC:
            yield [row for row in rows if not row.key.startswith(SERVICE_ROWS)]
        elif alive := [row for row in rows if row.is_alive(snapshot.now)]:
            yield alive


def _check_types(space: Space, rows: Sequence[Record]) -> None:
    """Refuse rows written by hand with wrong types, which SQLite stores in any column: they would change on the way.

    Raises:
        Undecodable: A row has a key, value or time of another type.
    """
    for row in rows:
        key, value = row.key, row.value
        is_key = type(key) is bytes if space is not Space.PLUGINS else type(key[0]) is str and type(key[1]) is str
        is_whole = type(value) is bytes and row.encoding not in (LOST, DAMAGED)
        if not (is_key and is_whole and type(row.version) is int and type(row.expires_at) in _TIMES):
            name = f"the row {row_name(space, key)}"
            raise Undecodable(f"{name} can't be moved: correct or remove it; `keyloft check` shows all such rows")


async def count(snapshot: Snapshot, selection: Selection) -> int:
    """How many rows are selected, expired or not."""
    return sum([await snapshot.count(part) for part in selection.parts])
