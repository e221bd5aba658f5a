"""The plugins' table, and nothing else

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import context, op
from alembic.util import CommandError

from keyloft.core.schema import PLUGIN_TABLE
from keyloft.migrations import tables

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    if context.is_offline_mode():
        adoption = context.config.attributes.get("adoption")
    else:
        adoption = tables.plugin_table_adoption(op.get_bind())
        if adoption is not None:
            adoption.check("the database")
    for statement in tables.plugin_table(dialect) if adoption is None else adoption.statements:
        op.execute(statement)


def downgrade() -> None:
    may_drop = context.config.attributes.get("drop") or context.get_x_argument(as_dictionary=True).get("drop") == "yes"
    if not may_drop and not context.is_offline_mode() and _has_rows():
        raise CommandError(
            f"{PLUGIN_TABLE} has rows, and this step would delete them: copy the database first, then repeat "
            "the command with `--drop` (keyloft migrate) or `-x drop=yes` (alembic)"
        )
    op.drop_table(PLUGIN_TABLE)


def _has_rows() -> bool:
    return bool(op.get_bind().scalar(sa.text(f"SELECT EXISTS (SELECT 1 FROM {PLUGIN_TABLE})")))
