"""The version counter, and the tables of the tuple store and the semantic store

Revision ID: 0006
Revises: nothing
"""

from alembic import op

from keyloft.core.schema import VERSION_COUNTER_TABLE
from keyloft.migrations import tables

revision: str = "0006"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    rows = [statement for table in tables.ROWS for statement in tables.rows(table, dialect)]
    for statement in (*tables.version_counter(dialect), *rows):
        op.execute(statement)


def downgrade() -> None:
    for table in (*tables.ROWS, VERSION_COUNTER_TABLE):
        op.drop_table(table)
    if op.get_context().dialect.name == "sqlite":
        for table in tables.ROWS:
            op.drop_table(f"{table}_large")
