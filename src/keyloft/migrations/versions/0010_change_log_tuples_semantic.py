"""The change log, the store's id, and the tables of the tuple store and the semantic store

Revision ID: 0010
Revises: nothing
"""

from typing import Final

from alembic import context, op

from keyloft.core.schema import CHANGES_TABLE, STORE_TABLE, VERSION_COUNTER_TABLE
from keyloft.migrations import tables

revision: str = "0010"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

_FUNCTIONS: Final = (
    "SELECT pg_proc.oid::regprocedure::text FROM pg_proc JOIN pg_class ON pronamespace = relnamespace "
    f"WHERE proname ~ '^keyloft_commit_' AND pg_class.oid = to_regclass('{VERSION_COUNTER_TABLE}')"
)


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    rows = [statement for table in tables.ROWS for statement in tables.rows(table, dialect)]
    for statement in (*tables.version_counter(dialect), *tables.change_log(dialect), *tables.store(dialect), *rows):
        op.execute(statement)


def downgrade() -> None:
    for table in (*tables.ROWS, CHANGES_TABLE, STORE_TABLE):
        op.drop_table(table)
    if op.get_context().dialect.name == "sqlite":
        for table in tables.ROWS:
            op.drop_table(f"{table}_large")
        return
    if not context.is_offline_mode():
        # Opening a database makes a function that commits; each version of Keyloft has one of its own.
        for function in op.get_bind().exec_driver_sql(_FUNCTIONS).scalars().all():
            op.execute(f"DROP FUNCTION {function}")
    op.drop_table(VERSION_COUNTER_TABLE)
