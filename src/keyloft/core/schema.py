"""What the schemas of both databases share: the names of tables, and the revision that this version reads."""

from typing import Any, Final, TypeAlias

from keyloft.errors import DatabaseError, SchemaTooNew, SchemaTooOld

Row: TypeAlias = tuple[Any, ...]
"""A row of a table, or the values that a statement binds."""

REVISION: Final = "0007"
"""The schema that this version reads and writes. A later revision is a larger string."""

REVISION_TABLE: Final = "keyloft_version"
"""Where Alembic keeps the revision of a database."""

TUPLE_TABLE: Final = "keyloft_tuples"
SEMANTIC_TABLE: Final = "keyloft_semantic"
PLUGIN_TABLE: Final = "plugin_kv_storage"
VERSION_COUNTER_TABLE: Final = "keyloft_version_counter"

NEVER: Final = 2**62
"""An expiry that is never reached: what a row inserted by hand has if its expiry is `infinity` or is not a time."""


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


def lost_counter(database: str) -> DatabaseError:
    """The error for a database whose version counter was deleted."""
    return DatabaseError(f"{database}: {VERSION_COUNTER_TABLE} has no row; insert one with the tables' highest version")
