"""Puts the rows of an SQLite file in the order of their keys, and large values aside; or as they were."""

from typing import Final

from alembic import op

_TABLES: Final = ("keyloft_tuples", "keyloft_semantic")
_COLUMNS: Final = "key, encoding, version, expires_at, created_at, updated_at"
_DECLARED: Final = (
    "key BLOB NOT NULL PRIMARY KEY, encoding INTEGER NOT NULL, version INTEGER NOT NULL, expires_at INTEGER, "
    "created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL"
)
_IS_LARGE: Final = "length(key) + length(value) > 512"


def put_in_order() -> None:
    for table in _TABLES:
        op.execute(f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, value BLOB NOT NULL)")
        op.execute(f"INSERT INTO {table}_large (id, value) SELECT rowid, value FROM {table} WHERE {_IS_LARGE}")
        _replace(
            table,
            f"({_DECLARED}, large INTEGER, value BLOB) WITHOUT ROWID",
            f"({_COLUMNS}, large, value) SELECT {_COLUMNS}, CASE WHEN {_IS_LARGE} THEN rowid END, "
            f"CASE WHEN {_IS_LARGE} THEN NULL ELSE value END FROM {table} ORDER BY key",
        )


def take_out_of_order() -> None:
    for table in _TABLES:
        whole = f"coalesce(value, (SELECT aside.value FROM {table}_large AS aside WHERE aside.id = large))"
        _replace(
            table,
            f"({_DECLARED}, value BLOB NOT NULL)",
            f"({_COLUMNS}, value) SELECT {_COLUMNS}, {whole} FROM {table} ORDER BY key",
        )
        op.execute(f"DROP TABLE {table}_large")


def _replace(table: str, columns: str, rows: str) -> None:
    op.execute(f"CREATE TABLE {table}_new {columns}")
    op.execute(f"INSERT INTO {table}_new {rows}")
    op.execute(f"DROP TABLE {table}")
    op.execute(f"ALTER TABLE {table}_new RENAME TO {table}")
    op.execute(f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL")
