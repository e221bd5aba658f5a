"""The plugins' table, and nothing else: one step down from here drops it.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

from keyloft.migrations import rows

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | None = None
depends_on: str | None = None

_TABLE = "plugin_kv_storage"


def upgrade() -> None:
    if not op.get_context().as_sql and _is_there():
        # Before the first release, this step was number 0002, and the one before it was not there.
        if "large" not in _columns("keyloft_tuples") and op.get_context().dialect.name == "sqlite":
            rows.put_in_order()
        return
    now = {
        # Of the same width as all times there, so that texts sort as times.
        "sqlite": sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"),
        "postgresql": sa.text("CURRENT_TIMESTAMP"),
    }[op.get_context().dialect.name]
    op.create_table(
        _TABLE,
        sa.Column("plugin_name", _text(100), nullable=False),
        sa.Column("key", _text(255), nullable=False),
        sa.Column("value_json", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=now, nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=now, nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("plugin_name", "key", name="pk_plugin_kv_storage"),
    )
    expires = sa.text("expires_at IS NOT NULL")
    op.create_index("idx_plugin_kv_expires", _TABLE, ["expires_at"], sqlite_where=expires, postgresql_where=expires)
    op.create_index("idx_plugin_kv_prefix", _TABLE, ["plugin_name", "key"])


def downgrade() -> None:
    op.drop_index("idx_plugin_kv_prefix", table_name=_TABLE)
    op.drop_index("idx_plugin_kv_expires", table_name=_TABLE)
    op.drop_table(_TABLE)


def _is_there() -> bool:
    """Whether the table is ours already, with all that belongs to it."""
    looking = sa.inspect(op.get_bind())
    if not looking.has_table(_TABLE):
        return False
    return {"idx_plugin_kv_expires", "idx_plugin_kv_prefix"} <= {index["name"] for index in looking.get_indexes(_TABLE)}


def _columns(table: str) -> set[str]:
    return {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}


def _text(characters: int) -> sa.String:
    """Both databases sort it alike, by code point."""
    return sa.String(characters).with_variant(sa.String(characters, collation="C"), "postgresql")
