"""The SQL of the tables that the revisions make."""

from typing import Final

import sqlalchemy as sa

from keyloft.core.adoption import Adoption, examine_postgres, examine_sqlite, examined
from keyloft.core.schema import (
    CHANGES_TABLE,
    PLUGIN_TABLE,
    SEMANTIC_TABLE,
    STORE_TABLE,
    TIMELINE,
    TUPLE_TABLE,
    VERSION_BY_HAND,
    VERSION_COUNTER_TABLE,
)

ROWS: Final = (TUPLE_TABLE, SEMANTIC_TABLE)
COUNTER_TIME: Final = "at BIGINT NOT NULL"
"""The column of PostgreSQL's version counter that earlier revisions lack."""
COUNTER_TIMELINE: Final = "timeline BIGINT NOT NULL DEFAULT 0"
"""Another one: the timeline of the last commit."""
NOTE_TIMELINE: Final = (
    f"DO $keyloft$ BEGIN UPDATE {VERSION_COUNTER_TABLE} SET timeline = {TIMELINE}; "
    "EXCEPTION WHEN OTHERS THEN NULL; END $keyloft$"
)
"""Sets it, on a server that tells its timeline."""
CHECKSUM: Final = "checksum INTEGER"
"""The column of SQLite's rows that earlier revisions lack."""


def version_counter(dialect: str) -> tuple[str, ...]:
    """PostgreSQL's version counter; in SQLite the newest row of the change log is the counter."""
    if dialect == "sqlite":
        return ()
    return (
        f"CREATE TABLE {VERSION_COUNTER_TABLE} (id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1), "
        f"version BIGINT NOT NULL, {COUNTER_TIME}, {COUNTER_TIMELINE})",
        f"INSERT INTO {VERSION_COUNTER_TABLE} (id, version, at) VALUES (1, {VERSION_BY_HAND}, 0)",
        NOTE_TIMELINE,
    )


def change_log(dialect: str, counter: str | None = None) -> tuple[str, ...]:
    """The change log, with the row that it begins with.

    Args:
        dialect: Of the SQL.
        counter: A table with the version counter from which the log continues; None for an empty database.
    """
    if dialect == "sqlite":
        create = (
            f"CREATE TABLE {CHANGES_TABLE} (version INTEGER NOT NULL, part INTEGER NOT NULL, base INTEGER NOT NULL, "
            "at INTEGER NOT NULL, size INTEGER NOT NULL, changes BLOB NOT NULL, "
            "PRIMARY KEY (version, part)) WITHOUT ROWID"
        )
        no_changes = "x'90'"
    else:
        create = (
            f"CREATE TABLE {CHANGES_TABLE} (version BIGINT NOT NULL, part INTEGER NOT NULL, base BIGINT NOT NULL, "
            "at BIGINT NOT NULL, size BIGINT NOT NULL, commit_id BYTEA, changes BYTEA, PRIMARY KEY (version, part))"
        )
        no_changes = "decode('90', 'hex')"
    # Time 0, because earlier revisions kept no time of the last commit: a watch from this version on then reports every
    # expired entry that is still stored.
    first = (
        f"VALUES ({VERSION_BY_HAND}, 0, -1, 0, 0, {no_changes})"
        if counter is None
        else f"SELECT version, 0, version - 1, 0, 0, {no_changes} FROM {counter}"
    )
    insert = f"INSERT INTO {CHANGES_TABLE} (version, part, base, at, size, changes) {first}"
    if dialect == "sqlite":
        return create, insert
    index = f"CREATE INDEX {CHANGES_TABLE}_commit ON {CHANGES_TABLE} (commit_id) WHERE commit_id IS NOT NULL"
    return create, index, insert


def store(dialect: str) -> tuple[str, ...]:
    """The table with the store's id, which is random."""
    integer, random = (
        ("INTEGER", "lower(hex(randomblob(16)))")
        if dialect == "sqlite"
        else ("BIGINT", "md5(random()::text || clock_timestamp()::text || random()::text)")
    )
    return (
        f"CREATE TABLE {STORE_TABLE} (id {integer} NOT NULL PRIMARY KEY CHECK (id = 1), store_id TEXT NOT NULL)",
        f"INSERT INTO {STORE_TABLE} (id, store_id) VALUES (1, {random})",
    )


def rows(table: str, dialect: str) -> tuple[str, ...]:
    """A table with a binary key, its index and, on SQLite, the table of its large values (ADR 5)."""
    index = f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL"
    if dialect == "sqlite":
        return (
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, "
            f"{CHECKSUM}, large INTEGER, value BLOB) WITHOUT ROWID",
            index,
            f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        )
    return (
        f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, version BIGINT NOT NULL, "
        "expires_at BIGINT, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
        index,
    )


def plugin_table(dialect: str) -> tuple[str, ...]:
    """The plugins' table and its indexes."""
    if dialect == "sqlite":
        # The default time is as wide as all times there, so that texts sort as times.
        text, time, now = "", "DATETIME", "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
    else:
        # Both databases sort keys by code point.
        text, time, now = ' COLLATE "C"', "TIMESTAMP WITH TIME ZONE", "CURRENT_TIMESTAMP"
    return (
        f"CREATE TABLE {PLUGIN_TABLE} (plugin_name VARCHAR(100){text} NOT NULL, key VARCHAR(255){text} NOT NULL, "
        f"value_json TEXT NOT NULL, expires_at {time}, created_at {time} DEFAULT {now} NOT NULL, "
        f"updated_at {time} DEFAULT {now} NOT NULL, version BIGINT DEFAULT 0 NOT NULL, "
        "CONSTRAINT pk_plugin_kv_storage PRIMARY KEY (plugin_name, key))",
        f"CREATE INDEX idx_plugin_kv_expires ON {PLUGIN_TABLE} (expires_at) WHERE expires_at IS NOT NULL",
        f"CREATE INDEX idx_plugin_kv_prefix ON {PLUGIN_TABLE} (plugin_name, key)",
    )


def plugin_table_adoption(connection: sa.Connection) -> Adoption | None:
    """What is to be done with a plugins' table that is there already; None where there is none. Nothing is changed."""
    dialect = connection.dialect.name
    examine = examine_sqlite if dialect == "sqlite" else examine_postgres
    return examined(examine(plugin_table(dialect)), lambda query: [*connection.exec_driver_sql(query)])
