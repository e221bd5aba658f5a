"""The SQL of the tables that the first revision makes."""

from typing import Final

from keyloft.core.schema import SEMANTIC_TABLE, TUPLE_TABLE, VERSION_COUNTER_TABLE

ROWS: Final = (TUPLE_TABLE, SEMANTIC_TABLE)


def version_counter(dialect: str) -> tuple[str, ...]:
    integer = "INTEGER" if dialect == "sqlite" else "BIGINT"
    return (
        f"CREATE TABLE {VERSION_COUNTER_TABLE} (id {integer} NOT NULL PRIMARY KEY CHECK (id = 1), "
        f"version {integer} NOT NULL)",
        f"INSERT INTO {VERSION_COUNTER_TABLE} (id, version) VALUES (1, 0)",
    )


def rows(table: str, dialect: str) -> tuple[str, ...]:
    """A table with a binary key, its index and, on SQLite, the table of its large values (ADR 5)."""
    index = f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL"
    if dialect == "sqlite":
        return (
            f"CREATE TABLE {table} (key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, "
            "version INTEGER NOT NULL, expires_at INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, "
            "large INTEGER, value BLOB) WITHOUT ROWID",
            index,
            f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
        )
    return (
        f"CREATE TABLE {table} (key BYTEA NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, version BIGINT NOT NULL, "
        "expires_at BIGINT, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, value BYTEA NOT NULL)",
        index,
    )
