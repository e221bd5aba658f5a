"""On SQLite, rows lie in the order of their keys, and large values aside; one step down drops the plugins' table.

PostgreSQL has no such tables, and moves large values aside by itself.

A step down from the last revision is known to drop `plugin_kv_storage`. So this one does, and makes that table on its
way up where it is not there.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

from keyloft.migrations import plugin_table

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

_TABLES = ("keyloft_tuples", "keyloft_semantic")
_COLUMNS = "key, encoding, version, expires_at, created_at, updated_at"
_DECLARED = (
    "key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, version INTEGER NOT NULL, expires_at INTEGER, "
    "created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL"
)
_IS_LARGE = "length(key) + length(value) > 512"


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        for table in _TABLES:
            _put_in_order(table)
    plugin_table.make(unless_there=True)


def downgrade() -> None:
    plugin_table.drop()
    if op.get_context().dialect.name == "sqlite":
        for table in reversed(_TABLES):
            _take_out_of_order(table)


def _put_in_order(table: str) -> None:
    op.execute(f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)")
    op.execute(f"INSERT INTO {table}_large (id, key, value) SELECT rowid, key, value FROM {table} WHERE {_IS_LARGE}")
    _replace(
        table,
        f"({_DECLARED}, large INTEGER, value BLOB) WITHOUT ROWID",
        f"({_COLUMNS}, large, value) SELECT {_COLUMNS}, CASE WHEN {_IS_LARGE} THEN rowid END, "
        f"CASE WHEN {_IS_LARGE} THEN NULL ELSE value END FROM {table} ORDER BY key",
    )


def _take_out_of_order(table: str) -> None:
    joined = f"{table} LEFT JOIN {table}_large AS aside ON aside.id = large AND aside.key = {table}.key"
    # A value that is lost has no encoding.
    encoding = f"CASE WHEN {table}.value IS NULL AND aside.id IS NULL THEN -1 ELSE encoding END"
    _replace(
        table,
        f"({_DECLARED}, value BLOB NOT NULL)",
        f"({_COLUMNS}, value) SELECT {table}.key, {encoding}, version, expires_at, created_at, updated_at, "
        f"coalesce({table}.value, aside.value, x'') FROM {joined} ORDER BY {table}.key",
    )
    op.execute(f"DROP TABLE {table}_large")


def _replace(table: str, columns: str, rows: str) -> None:
    op.execute(f"CREATE TABLE {table}_new {columns}")
    op.execute(f"INSERT INTO {table}_new {rows}")
    op.execute(f"DROP TABLE {table}")
    op.execute(f"ALTER TABLE {table}_new RENAME TO {table}")
    op.execute(f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL")
