"""The operator's interface to a whole database: inspect, copy, load, check, back up, compact.

Only `keyloft.admin` uses it. It reads and writes rows as they are stored, expired ones included, with their versions
and times, which the engine's three verbs can't.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.core.records import Key, LoggedChange, Record, Set, Space
from keyloft.core.schema import LAST_MOMENT, NEVER
from keyloft.errors import AlreadyExists, Busy, DatabaseError, Undecodable

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with how much is done, and how much there is to do, which may grow meanwhile, or be unknown."""


UNVERSIONED: Final = -1
"""The version of a row that is to get a new one."""


class Range(Struct, frozen=True, gc=False):
    """The rows in `[start, end)` of a space; None leaves an end open. In PLUGINS it may span several plugins."""

    space: Space
    start: Key | None = None
    end: Key | None = None


EVERYTHING: Final = tuple(map(Range, Space))
"""All rows of a database, space by space."""


class Facts(Struct, frozen=True):
    """What a database is, and how large."""

    engine: str
    """As in `SQLite 3.50.4`."""
    revision: str
    database_bytes: int
    """The size of the database, without the write-ahead log."""
    wal_bytes: int | None
    """The size of SQLite's write-ahead log; None for PostgreSQL, whose log belongs to the server."""


class Size(Struct, frozen=True, gc=False):
    """A row with the size of its value instead of the value."""

    key: Key
    value_bytes: int
    expires_at: int | None


class LogRow(Struct, frozen=True, gc=False):
    """A row of the change log: one part of what a group of commits changed."""

    version: int
    """The version of the last commit of the group."""
    part: int
    base: int
    """The version before the group."""
    at: int
    size: int
    """The size of the log up to and including this row, in bytes."""
    changes: bytes


class LogFacts(Struct, frozen=True):
    """How much the change log holds."""

    rows: int
    bytes: int
    oldest_version: int
    """A watch can begin after this version, or after any later one."""
    oldest_at: int
    """The time of that version; 0 if it is not known."""


class Snapshot(Protocol):
    """A database at one moment, for as long as it is open. Writers don't wait for it.

    A snapshot that is not held shows, at each read, the database as it is then, and keeps nothing from one read to the
    next.
    """

    version: int
    """The version of the last commit that it contains."""
    now: int
    """The database's time when the snapshot was made."""

    def rows(self, part: Range, after: Key | None = None) -> AsyncIterator[Sequence[Record]]:
        """The rows of a range, or those after a key of it, in the order of their keys.

        They arrive in slices of about a megabyte, each of one row at least.
        """

    async def count(self, part: Range) -> int:
        """How many rows there are in a range."""

    def sizes(self, part: Range) -> AsyncIterator[Sequence[Size]]:
        """The same rows without their values."""

    def log(self, since: int | None = None) -> AsyncIterator[Sequence[LogRow]]:
        """The change log, oldest row first; with `since`, only rows that end after that version."""

    def changes(self, since: int | None) -> AsyncIterator[Sequence[LoggedChange]]:
        """The changes in the change log, oldest first; or only those after a version.

        Raises:
            HistoryGone: The log does not reach back to `since`.
        """

    async def log_facts(self) -> LogFacts:
        """How much the change log holds."""

    async def store_id(self) -> str:
        """The id of the store."""


class Existing(StrEnum):
    """What happens to a stored entry when another one is loaded under its key."""

    REFUSE = "refuse"
    KEEP = "keep"
    REPLACE = "replace"


class Loaded(Struct):
    """How many rows were loaded, by what was stored under their keys."""

    new: int = 0
    same: int = 0
    """Rows of which an equal one was stored already."""
    kept: int = 0
    """Rows in whose place another entry was stored, which stays."""
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
    """A whole database, as its operator sees it."""

    async def facts(self) -> Facts: ...

    def snapshot(self, *, held: bool = True) -> AbstractAsyncContextManager[Snapshot]:
        """The database at one moment; or, not held, as it is at each read.

        While a snapshot is held, SQLite's write-ahead log grows, and PostgreSQL keeps what others remove.
        """

    async def load(
        self, rows: Sequence[tuple[Space, Record]], version: int, existing: Existing, *, is_copy: bool = False
    ) -> Loaded:
        """Store rows with their versions and times, all of them or none, and log their keys as one commit does.

        A row that replaces another entry gets the version of this commit, as with any write.

        Args:
            rows: Each with its space.
            version: The version of the database they come from; this database's version counter ends at or above it.
            existing: What happens where another entry is stored.
            is_copy: Whether the version counter jumps, unless an earlier jump took it above that of the source.

        Raises:
            AlreadyExists: `existing` is REFUSE, and another entry is stored under a row's key.
        """

    async def become(
        self,
        source: Snapshot,
        progress: Progress,
        *,
        expected_version: int | None = None,
        with_history: bool = False,
    ) -> int:
        """Replace everything that is stored by what the source holds, or nothing; returns how many rows that is.

        The version counter jumps above both counters, the change log is emptied, and the store gets another id.

        Args:
            source: What to store.
            progress: Called as rows are stored.
            expected_version: Replace only if this is still the version of the last commit.
            with_history: Take over the source's version counter, change log and id instead, as a backup does.

        Raises:
            Busy: The last commit has another version than expected; nothing was changed.
        """

    async def restart_history(self) -> int:
        """Make a copy of a file a store of its own: its version counter jumps, it gets an empty log and another id.

        Returns:
            The version counter.
        """

    async def damage(self) -> list[str]:
        """What the database's own check finds wrong with pages, indexes and tables."""

    async def backup(self, target: str, progress: Progress) -> None:
        """Write all that is stored now into a new SQLite file, while others continue to write.

        Raises:
            DatabaseError: The database can't be read, or the file can't be written.
        """

    async def compact(self) -> None:
        """Give the space of removed entries back.

        Raises:
            Busy: Other processes still read what is to be given back.
        """

    async def aclose(self) -> None: ...


def check_unchanged(version: int, expected: int | None) -> None:
    """Refuse to replace what another process wrote since the caller read it.

    Raises:
        Busy: The last commit is another one than expected.
    """
    if expected is not None and version != expected:
        raise Busy("another process wrote into the database meanwhile; nothing was changed: try again")


def merge(
    space: Space, rows: Sequence[Record], stored: dict[Key, Record], existing: Existing, now: int, version: int
) -> tuple[list[Record], Loaded]:
    """Decide which rows to write, and count the outcomes.

    If two rows have the same key, the first counts as stored when the second is decided.

    Args:
        space: The space of the rows.
        rows: What to load.
        stored: What is stored under their keys, expired or not.
        existing: What happens where another entry is stored.
        now: An entry that has expired by then counts as absent.
        version: The version of a row that replaces another entry.

    Raises:
        AlreadyExists: `existing` is REFUSE, and another entry is stored under a row's key.
    """
    written: dict[Key, Record] = {}
    loaded = Loaded()
    for row in rows:
        current = written.get(row.key) or stored.get(row.key)
        if current is not None and content(current) == content(row):
            loaded.same += 1
        elif current is None or not current.is_alive(now):
            loaded.new += 1
            written[row.key] = row if row.version != UNVERSIONED else replace(row, version=version)
        elif existing is Existing.KEEP:
            loaded.kept += 1
        elif existing is Existing.REPLACE:
            loaded.replaced += 1
            written[row.key] = replace(row, version=version)
        else:
            raise AlreadyExists(space, row.key)
    return list(written.values()), loaded


def version_after_jump(*counters: int) -> int:
    """The next version of a restored or copied database: a multiple of VERSION_JUMP above all these counters.

    Raises:
        DatabaseError: There are no versions left.
    """
    version = (max(counters) // limits.VERSION_JUMP + 1) * limits.VERSION_JUMP
    return check_version(version)


def check_version(version: int) -> int:
    """Refuse a version counter that is beyond the last version.

    Raises:
        DatabaseError: There are no versions left.
    """
    if version > limits.LAST_VERSION:
        raise DatabaseError(
            f"no versions are left above {limits.LAST_VERSION:,}: export the entries, remove `version` from the lines, "
            "and import them into a new database"
        )
    return version


def content(row: Record) -> tuple[bytes, int, int | None]:
    """What a reader sees of a row: two rows under one key with the same content are equal."""
    return row.value, row.encoding, row.expires_at


def plugin_text(row: Record | Set) -> str:
    """The value of a plugin's row, or of a Set, as its column holds it.

    Raises:
        Undecodable: It is not text.
    """
    try:
        return row.value.decode()
    except UnicodeDecodeError:
        plugin, key = row.key
        raise Undecodable(f"the value of plugin {plugin} under {key!a} is not text: run `keyloft check`") from None


def movable_time(moment: int | None) -> int | None:
    """A time, limited to what any database can hold: one written by hand may be before 1970 or after 9999."""
    return None if moment is None or moment >= NEVER else min(max(moment, 0), LAST_MOMENT)
