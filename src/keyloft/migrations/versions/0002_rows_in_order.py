"""On SQLite, rows of the tuple store and the semantic store lie in the order of their keys, and large values aside.

PostgreSQL, which has no such tables and moves large values aside by itself, is left as it is.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

from keyloft.migrations import rows

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        rows.put_in_order()


def downgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        rows.take_out_of_order()
