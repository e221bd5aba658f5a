"""The plugins' table, which two revisions make and drop."""

from typing import Final

import sqlalchemy as sa
from alembic import op

_TABLE: Final = "plugin_kv_storage"


def make(*, unless_there: bool = False) -> None:
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
        if_not_exists=unless_there,
    )
    expires = sa.text("expires_at IS NOT NULL")
    op.create_index(
        "idx_plugin_kv_expires",
        _TABLE,
        ["expires_at"],
        sqlite_where=expires,
        postgresql_where=expires,
        if_not_exists=unless_there,
    )
    op.create_index("idx_plugin_kv_prefix", _TABLE, ["plugin_name", "key"], if_not_exists=unless_there)


def drop() -> None:
    """If it is there."""
    op.drop_index("idx_plugin_kv_prefix", table_name=_TABLE, if_exists=True)
    op.drop_index("idx_plugin_kv_expires", table_name=_TABLE, if_exists=True)
    op.drop_table(_TABLE, if_exists=True)


def _text(characters: int) -> sa.String:
    """Both databases sort it alike, by code point."""
    return sa.String(characters).with_variant(sa.String(characters, collation="C"), "postgresql")
