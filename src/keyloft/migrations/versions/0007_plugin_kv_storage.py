"""The plugins' table, and nothing else

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import context, op
from alembic.util import CommandError

from keyloft.core.schema import PLUGIN_TABLE

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        # The default time is as wide as all times there, so that texts sort as times.
        text, time, now = "", "DATETIME", "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
    else:
        # Both databases sort keys by code point.
        text, time, now = ' COLLATE "C"', "TIMESTAMP WITH TIME ZONE", "CURRENT_TIMESTAMP"
    op.execute(
        f"CREATE TABLE {PLUGIN_TABLE} (plugin_name VARCHAR(100){text} NOT NULL, key VARCHAR(255){text} NOT NULL, "
        f"value_json TEXT NOT NULL, expires_at {time}, created_at {time} DEFAULT {now} NOT NULL, "
        f"updated_at {time} DEFAULT {now} NOT NULL, version BIGINT DEFAULT 0 NOT NULL, "
        "CONSTRAINT pk_plugin_kv_storage PRIMARY KEY (plugin_name, key))"
    )
    op.execute(f"CREATE INDEX idx_plugin_kv_expires ON {PLUGIN_TABLE} (expires_at) WHERE expires_at IS NOT NULL")
    op.execute(f"CREATE INDEX idx_plugin_kv_prefix ON {PLUGIN_TABLE} (plugin_name, key)")


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
