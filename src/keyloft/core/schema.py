"""What the schemas of both databases share: the names of the tables, and the revision that this version reads."""

from typing import Any, Final, TypeAlias

Row: TypeAlias = tuple[Any, ...]
"""A row of a table, or the values that a statement binds."""

REVISION: Final = "0005"
"""The schema that this version reads and writes. A later revision is a larger string."""

REVISION_TABLE: Final = "keyloft_version"
"""Where Alembic keeps the revision of a database."""

TUPLE_TABLE: Final = "keyloft_tuples"
SEMANTIC_TABLE: Final = "keyloft_semantic"
PLUGIN_TABLE: Final = "plugin_kv_storage"
VERSION_COUNTER_TABLE: Final = "keyloft_version_counter"

NEVER: Final = 2**62
"""An expiry that is never reached: what a row inserted by hand has if its expiry is `infinity` or is not a time."""
