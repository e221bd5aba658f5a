"""The plugins' table, and nothing else

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import context, op
from alembic.util import CommandError

from keyloft.migrations import tables

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    now = {
        # Of the same width as all times there, so that texts sort as times.
        "sqlite": sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"),
        "postgresql": sa.text("CURRENT_TIMESTAMP"),
    }[op.get_context().dialect.name]
    op.create_table(
        tables.PLUGINS,
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
    op.create_index(
        "idx_plugin_kv_expires", tables.PLUGINS, ["expires_at"], sqlite_where=expires, postgresql_where=expires
    )
    op.create_index("idx_plugin_kv_prefix", tables.PLUGINS, ["plugin_name", "key"])


def downgrade() -> None:
    may_drop = context.config.attributes.get("drop") or context.get_x_argument(as_dictionary=True).get("drop") == "yes"
    if not may_drop and not context.is_offline_mode() and _has_rows():
        raise CommandError(
            f"{tables.PLUGINS} has rows, and this step would delete them: copy the database first, then repeat "
            "the command with `--drop` (keyloft migrate) or `-x drop=yes` (alembic)"
        )
    op.drop_table(tables.PLUGINS)


def _has_rows() -> bool:
    return bool(op.get_bind().scalar(sa.text(f"SELECT EXISTS (SELECT 1 FROM {tables.PLUGINS})")))


def _text(characters: int) -> sa.String:
    """Both databases sort it alike, by code point."""
    return sa.String(characters).with_variant(sa.String(characters, collation="C"), "postgresql")
