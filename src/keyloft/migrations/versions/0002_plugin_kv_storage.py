"""The plugins' table, and nothing else.

Revision ID: 0002
Revises: 0001
"""

from keyloft.migrations import plugin_table

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    plugin_table.make()


def downgrade() -> None:
    plugin_table.drop()
