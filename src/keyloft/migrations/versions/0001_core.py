"""The clock, and the tables of the tuple store and the semantic store.

Revision ID: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

# Versions and milliseconds need 64 bits; any INTEGER of SQLite has them.
_LONG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "keyloft_clock",
        sa.Column("id", _LONG, sa.CheckConstraint("id = 1"), primary_key=True, autoincrement=False, nullable=False),
        sa.Column("version", _LONG, nullable=False),
    )
    op.execute("INSERT INTO keyloft_clock (id, version) VALUES (1, 0)")
    for table in ("keyloft_tuples", "keyloft_semantic"):
        op.create_table(
            table,
            sa.Column("key", sa.LargeBinary(), primary_key=True, nullable=False),
            sa.Column("encoding", sa.Integer(), nullable=False),
            sa.Column("version", _LONG, nullable=False),
            sa.Column("expires_at", _LONG),
            sa.Column("created_at", _LONG, nullable=False),
            sa.Column("updated_at", _LONG, nullable=False),
            sa.Column("value", sa.LargeBinary(), nullable=False),
        )
        expires = sa.text("expires_at IS NOT NULL")
        op.create_index(f"{table}_expires", table, ["expires_at"], sqlite_where=expires, postgresql_where=expires)


def downgrade() -> None:
    for table in ("keyloft_semantic", "keyloft_tuples"):
        op.drop_index(f"{table}_expires", table_name=table)
        op.drop_table(table)
    op.drop_table("keyloft_clock")
