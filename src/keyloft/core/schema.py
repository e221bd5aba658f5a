"""What the schemas of SQLite and PostgreSQL share: the names of tables, and the revision that this version reads."""

from typing import Any, Final, TypeAlias

from keyloft.errors import DatabaseError, SchemaTooNew, SchemaTooOld

Row: TypeAlias = tuple[Any, ...]
"""A row of a table, or the values that a statement binds."""

REVISION: Final = "0011"
"""The schema that this version reads and writes. A later revision is a larger string."""

REVISION_TABLE: Final = "keyloft_version"
"""Where Alembic keeps the revision of a database."""

TUPLE_TABLE: Final = "keyloft_tuples"
SEMANTIC_TABLE: Final = "keyloft_semantic"
PLUGIN_TABLE: Final = "plugin_kv_storage"
CHANGES_TABLE: Final = "keyloft_changes"
"""The change log. In SQLite it is also the version counter: the version of its newest row."""
VERSION_COUNTER_TABLE: Final = "keyloft_version_counter"
"""PostgreSQL's version counter; every commit locks its row."""
STORE_TABLE: Final = "keyloft_store"
"""One row with the id of the store."""

TIMELINE: Final = "('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint"
"""SQL: the timeline of a PostgreSQL primary. Its control file has it only after the next checkpoint."""

VERSION_BY_HAND: Final = 1
"""The version of a row that a person inserted with SQL, which has 0 in its column. No commit has this version, because
the version counter of an empty store starts with it."""

NEVER: Final = 2**62
"""An expiry that is never reached, for a row inserted by hand whose expiry is `infinity` or not a time."""

LAST_MOMENT: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, the last one that a `datetime` can hold."""


def check_revision(revision: str, database: str, url: str, remark: str = "") -> None:
    """Refuse a database whose schema is not that of this version.

    Args:
        revision: The revision that the database has.
        database: Its name, for messages.
        url: What `keyloft migrate --database` takes.
        remark: What to say about that command.

    Raises:
        SchemaTooOld: It must be migrated.
        SchemaTooNew: A later version of Keyloft wrote it.
    """
    if revision < REVISION:
        raise SchemaTooOld(
            f"{database} has schema {revision}, this version of Keyloft has {REVISION}: "
            f"run `keyloft migrate --database {url}`{remark}; it was left as it is"
        )
    if revision > REVISION:
        raise SchemaTooNew(
            f"{database} has schema {revision}, which this version of Keyloft does not know (it has {REVISION}): "
            "upgrade keyloft; it was left as it is"
        )


READ_STORE_ID: Final = f"SELECT store_id FROM {STORE_TABLE}"


def lost_store_id(database: str) -> DatabaseError:
    """The error for a database whose id was deleted."""
    return DatabaseError(f"{database}: {STORE_TABLE} has no row; restore a backup")


def lost_counter(database: str, table: str) -> DatabaseError:
    """The error for a database whose version counter was deleted from this table."""
    return DatabaseError(f"{database}: {table} has no row, so the last version is not known; restore a backup")


def damaged_counter(database: str, table: str) -> DatabaseError:
    """The error for a database whose version counter in this table is not a number any more."""
    return DatabaseError(
        f"{database}: the newest row of {table} is damaged, so the last version is not known; restore a backup"
    )
