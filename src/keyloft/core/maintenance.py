"""The operator's door to a database: whole ones are looked through, moved, saved and put in order.

No face goes through it. It knows rows as they are stored, those that have expired included, with versions and times;
the faces' three verbs show and write none of that.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from keyloft.core.records import Key, Record, Space
from keyloft.errors import Busy, KeyloftError, Undecodable

Progress: TypeAlias = Callable[[int, int], None]
"""Told how much of what is to be done is done; how much it is may change on the way."""


LAST_MOMENT: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, which is the last one that a `datetime` knows."""

UNVERSIONED: Final = -1
"""The version of a row that is to get a new one."""


class Range(Struct, frozen=True, gc=False):
    """The rows in `[start, end)` of a space; None leaves an end open. Of PLUGINS it may span several plugins."""

    space: Space
    start: Key | None = None
    end: Key | None = None


EVERYTHING: Final = tuple(map(Range, Space))
"""All rows of a database, space by space."""


class Facts(Struct, frozen=True):
    """What a database is."""

    engine: str
    """As in `SQLite 3.50.4`."""
    revision: str
    database_bytes: int
    """What all of it takes, the log not included."""
    log_bytes: int | None
    """What SQLite's log takes; None where there is none of our own."""


class Size(Struct, frozen=True, gc=False):
    """A row without its value."""

    key: Key
    value_bytes: int
    expires_at: int | None


class Snapshot(Protocol):
    """A database at one moment, for as long as it is open. It keeps nobody from writing."""

    clock: int
    """The version of the last commit."""
    now: int
    """When it was made, by the database's own time."""

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        """The rows of a range, or those of them after a key, in the order of their keys, with all times.

        Some come at a time: about a megabyte, and one at least.
        """

    async def count(self, part: Range) -> int:
        """How many rows there are."""

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        """The same without the values."""


class Existing(StrEnum):
    """What becomes of an entry in whose place another one is to be put."""

    REFUSE = "refuse"
    KEEP = "keep"
    REPLACE = "replace"


class AlreadyThere(KeyloftError):
    """Something else is stored in the place of an entry that was to be put there."""

    code = "ALREADY_THERE"

    def __init__(self, space: Space, key: Key) -> None:
        super().__init__("another entry is stored under that key")
        self.space = space
        self.key = key


class Loaded(Struct):
    """What became of the rows that were to be put."""

    new: int = 0
    same: int = 0
    """They were there already."""
    kept: int = 0
    """Others were there, and still are."""
    replaced: int = 0

    def add(self, other: "Loaded") -> None:
        self.new += other.new
        self.same += other.same
        self.kept += other.kept
        self.replaced += other.replaced

    @property
    def all(self) -> int:
        return self.new + self.same + self.kept + self.replaced


class Maintenance(Protocol):
    """A database, as whoever runs it sees it."""

    async def facts(self) -> Facts: ...

    def snapshot(self) -> AbstractAsyncContextManager[Snapshot]: ...

    async def load(self, rows: Sequence[tuple[Space, Record]], clock: int, existing: Existing) -> Loaded:
        """Put rows, with their versions and times, all of them or none, and move the clock up to that of their origin.

        What replaces another entry gets a new version, as any write does: nobody can take it for what was there.

        Raises:
            AlreadyThere: And others are to be refused.
        """

    async def become(self, source: Snapshot, progress: Progress, *, clock: int | None = None) -> int:
        """Replace all that is stored by what the source holds, all of it or nothing; returns how many rows that is.

        The clock goes on from the higher of the two.

        Args:
            source: What it becomes.
            progress: Told of the rows.
            clock: What the clock must still be: whoever looked at what is to be replaced knows that nothing was added.

        Raises:
            Busy: It is another one; nothing was changed.
        """

    async def damage(self, progress: Progress) -> list[str]:
        """What the database itself finds wrong: pages, indexes, tables."""

    async def backup(self, target: str, progress: Progress) -> None:
        """Write all that is stored now into a fresh SQLite file, while others go on writing.

        Raises:
            DatabaseError: It can't be read, or the file can't be written.
        """

    async def compact(self) -> None:
        """Give back the room of what was removed.

        Raises:
            Busy: Others hold what is to be given back.
        """

    async def aclose(self) -> None: ...


def check_clock(before: int, clock: int | None) -> None:
    """Refuse to replace what nobody has looked at.

    Raises:
        Busy: Somebody has written since the clock was this one.
    """
    if clock is not None and before != clock:
        raise Busy("somebody wrote into the database meanwhile; nothing was changed: try again")


def weigh(
    space: Space, rows: Sequence[Record], stored: dict[Key, Record], existing: Existing, now: int, version: int
) -> tuple[list[Record], Loaded]:
    """Decide what becomes of rows: which of them are written, and how many of each kind there are.

    A row whose key came before meets what was made of that one, as if it had been stored.

    Args:
        space: Where they are to be put.
        rows: They.
        stored: What is stored under their keys, expired or not.
        existing: What to do where something else is.
        now: What has expired by then is nothing.
        version: What replaces something gets this one.

    Raises:
        AlreadyThere: And others are to be refused.
    """
    written: dict[Key, Record] = {}
    told = Loaded()
    for row in rows:
        there = written.get(row.key) or stored.get(row.key)
        if there is not None and content(there) == content(row):
            told.same += 1
        elif there is None or not there.is_alive(now):
            told.new += 1
            written[row.key] = row if row.version != UNVERSIONED else replace(row, version=version)
        elif existing is Existing.KEEP:
            told.kept += 1
        elif existing is Existing.REPLACE:
            told.replaced += 1
            written[row.key] = replace(row, version=version)
        else:
            raise AlreadyThere(space, row.key)
    return list(written.values()), told


def clock_after(before: int, clock: int, written: Iterable[Record], version: int) -> int:
    """Where the clock goes once rows are written, whose origin had that other clock."""
    return version if before > clock or any(row.version == version for row in written) else clock


def content(row: Record) -> tuple[bytes, int, int | None]:
    """What makes two rows under one key the same to whoever reads them."""
    return row.value, row.encoding, row.expires_at


def text_of(row: Record) -> str:
    """The value of a plugin's row, as its column holds it.

    Raises:
        Undecodable: It is no text.
    """
    try:
        return row.value.decode()
    except UnicodeDecodeError:
        plugin, key = row.key
        raise Undecodable(f"what plugin {plugin} stores under {key!a} is no text: see `keyloft check`") from None
