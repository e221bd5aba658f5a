"""How each key space lies in its table: the SQL of every hot statement, and how a row becomes a record.

The commit path, the clock, watches and expiry are the same for all spaces; a layout is all that sets them apart.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from msgspec import Struct

from keyloft.records import Key, Record, Scan, Space

Row: TypeAlias = tuple[Any, ...]


class Layout(Struct, frozen=True):
    """A table that holds one key space. Statements take the row of bindings that stands beside them."""

    table: str
    create: tuple[str, ...]
    record: Callable[..., Record]
    """Makes a record of the columns that `get`, `scan` and `expired` select."""
    bind_key: Callable[[Key], Row]
    get: str
    """key"""
    scans: Mapping[tuple[bool, bool, bool], str]
    """start, end, now, limit; by (reverse, keys_only, after)"""
    count: str
    """start, end, now"""
    expired: str
    """now, limit"""
    bind_put: Callable[[Record, bool], Row]
    put: str
    retime: str
    """expires_at, key"""
    remove: str
    """key"""

    def scan(self, ask: Scan) -> str:
        return self.scans[ask.reverse, ask.keys_only, ask.after]


def bytes_layout(table: str) -> Layout:
    """A table with one binary key.

    The table has a rowid: keys that come in random order are inserted twice as fast as WITHOUT ROWID. The value comes
    last, so that nothing else has to be read past a large one.
    """
    columns = "key, value, encoding, version, expires_at, created_at, updated_at"
    # No list shows when an entry was written: leaving that out takes a scan of 1000 from 0.41 to 0.35 ms.
    listed = "key, value, encoding, version, expires_at"
    no_value = "key, x'', encoding, version, expires_at"

    def scan(reverse: bool, keys_only: bool, after: bool) -> str:
        return (
            f"SELECT {no_value if keys_only else listed} FROM {table} "
            f"WHERE key {'>' if after else '>='} ?1 AND key < ?2 AND (expires_at IS NULL OR expires_at > ?3) "
            f"ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT ?4"
        )

    flags = (False, True)
    return Layout(
        table=table,
        create=(
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, "
            "updated_at INTEGER NOT NULL, value BLOB NOT NULL)",
            f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL",
        ),
        record=Record,
        bind_key=lambda key: (key,),
        get=f"SELECT {columns} FROM {table} WHERE key = ?1",
        scans={(r, k, a): scan(r, k, a) for r in flags for k in flags for a in flags},
        # The key index alone tells how many there are; only what has expired and is not yet swept needs its rows.
        count=(
            f"SELECT (SELECT count(*) FROM {table} WHERE key >= ?1 AND key < ?2) - "
            f"(SELECT count(*) FROM {table} WHERE expires_at <= ?3 AND +key >= ?1 AND +key < ?2)"
        ),
        expired=f"SELECT {no_value} FROM {table} WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
        bind_put=lambda record, anew: (
            record.key,
            record.value,
            record.encoding,
            record.version,
            record.expires_at,
            record.created_at,
            record.updated_at,
            anew,
        ),
        put=(
            f"INSERT INTO {table} ({columns}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (key) DO UPDATE SET "
            "value = ?2, encoding = ?3, version = ?4, expires_at = ?5, updated_at = ?7, "
            "created_at = CASE WHEN ?8 OR expires_at <= ?7 THEN ?6 ELSE created_at END"
        ),
        retime=f"UPDATE {table} SET expires_at = ?1 WHERE key = ?2",
        remove=f"DELETE FROM {table} WHERE key = ?1",
    )


LAYOUTS: Final[Mapping[Space, Layout]] = {
    Space.TUPLES: bytes_layout("keyloft_tuples"),
    Space.SEMANTIC: bytes_layout("keyloft_semantic"),
}

REVISION: Final = "0001"
"""The schema that this version reads and writes. A later revision is a larger string."""

VERSION_TABLE: Final = "keyloft_version"
READ_CLOCK: Final = "SELECT version FROM keyloft_clock"
WRITE_CLOCK: Final = "UPDATE keyloft_clock SET version = ?1"

CREATE: Final[tuple[str, ...]] = (
    f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, "
    f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))",
    "CREATE TABLE keyloft_clock (id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL)",
    "INSERT INTO keyloft_clock (id, version) VALUES (1, 0)",
    *(statement for layout in LAYOUTS.values() for statement in layout.create),
    f"INSERT INTO {VERSION_TABLE} (version_num) VALUES ('{REVISION}')",
)
"""What makes an empty database ours."""
