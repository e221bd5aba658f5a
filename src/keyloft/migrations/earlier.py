"""Migrates databases with a stamp of an earlier revision, which today's revisions replace.

Stamps from 0002 on had more than one meaning, so the tables decide what is to be done, not the stamp.
"""

from typing import Final

import sqlalchemy as sa
from msgspec import Struct

from keyloft.core.schema import PLUGIN_TABLE, REVISION_TABLE, SEMANTIC_TABLE, VERSION_COUNTER_TABLE
from keyloft.migrations import tables

STAMPS: Final = ("0001", "0002", "0003", "0004", "0005")
_EARLIER_COUNTER: Final = "keyloft_clock"
_PLUGIN_INDEXES: Final = {"idx_plugin_kv_expires", "idx_plugin_kv_prefix"}
_COLUMNS: Final = "key, encoding, version, expires_at, created_at, updated_at"
# What the layout had when these rows were written: `limits.ROW_BYTES` may change.
_IS_LARGE: Final = "length(key) + length(value) > 512"


class Succession(Struct, frozen=True):
    """How a database gets from an earlier stamp to a revision of today."""

    stamp: str
    statements: tuple[str, ...]


def succession(connection: sa.Connection) -> Succession:
    """What to do with a database that has an earlier stamp. Nothing is changed."""
    dialect = connection.dialect.name
    inspector = sa.inspect(connection)
    # Another table of this name lacks the indexes: the step to 0007 fails, and says so.
    indexes = inspector.get_indexes(PLUGIN_TABLE) if inspector.has_table(PLUGIN_TABLE) else []
    stamp = "0007" if {index["name"] for index in indexes}.issuperset(_PLUGIN_INDEXES) else "0006"
    statements = []
    renames_counter = inspector.has_table(_EARLIER_COUNTER)
    if renames_counter:
        statements.append(f"ALTER TABLE {_EARLIER_COUNTER} RENAME TO {VERSION_COUNTER_TABLE}")
    if dialect == "sqlite":
        for table in tables.ROWS:
            if "large" not in _columns(inspector, table):
                statements += _put_in_order(table)
            elif "key" not in _columns(inspector, f"{table}_large"):
                statements += _name_keys(table)
        statements.append(_INDEX_AUDIT_SQLITE)
    else:
        if renames_counter:
            named = (
                f"SELECT conname FROM pg_constraint WHERE conrelid = '{_EARLIER_COUNTER}'::regclass ORDER BY conname"
            )
            for name in connection.exec_driver_sql(named).scalars():
                new = name.replace(_EARLIER_COUNTER, VERSION_COUNTER_TABLE)
                statements.append(f'ALTER TABLE {VERSION_COUNTER_TABLE} RENAME CONSTRAINT "{name}" TO "{new}"')
        statements.append(_INDEX_AUDIT_POSTGRES)
    return Succession(stamp, (*statements, f"UPDATE {REVISION_TABLE} SET version_num = '{stamp}'"))


def _columns(inspector: sa.Inspector, table: str) -> set[str]:
    return {column["name"] for column in inspector.get_columns(table)}


def _put_in_order(table: str) -> list[str]:
    """Lay rows in the order of their keys, and large values into a table of their own."""
    create, index, create_large = tables.rows(table, "sqlite")
    return [
        f"DROP INDEX {table}_expires",
        f"ALTER TABLE {table} RENAME TO {table}_earlier",
        create_large,
        f"INSERT INTO {table}_large (id, key, value) SELECT rowid, key, value FROM {table}_earlier WHERE {_IS_LARGE}",
        create,
        f"INSERT INTO {table} ({_COLUMNS}, large, value) SELECT {_COLUMNS}, CASE WHEN {_IS_LARGE} THEN rowid END, "
        f"CASE WHEN {_IS_LARGE} THEN NULL ELSE value END FROM {table}_earlier ORDER BY key",
        f"DROP TABLE {table}_earlier",
        index,
    ]


def _name_keys(table: str) -> list[str]:
    """Add its key to each large value."""
    *_, create_large = tables.rows(table, "sqlite")
    return [
        f"ALTER TABLE {table}_large RENAME TO {table}_large_earlier",
        create_large,
        f"INSERT INTO {table}_large (id, key, value) SELECT earlier.id, {table}.key, earlier.value FROM {table} "
        f"JOIN {table}_large_earlier AS earlier ON earlier.id = {table}.large",
        f"DROP TABLE {table}_large_earlier",
    ]


# An audit record of a put was found through the one after it. Now an index row under the key names it: its key is the
# kind, tenant, project and path, a zero byte, and the last ten bytes of the record's key (`semantic/audit.py`). Some of
# these rows may exist already. Damaged records get none.
_INDEX_AUDIT_SQLITE: Final = (
    f"INSERT OR IGNORE INTO {SEMANTIC_TABLE} (key, value, encoding, version, expires_at, created_at, updated_at) "
    "SELECT CAST('i/' || substr(key, 3, length(key) - 12) || json_extract(fact, '$.k') || x'00' || substr(key, -10) "
    "AS BLOB), x'', 1, version, expires_at, created_at, updated_at FROM ("
    f"SELECT *, CAST(coalesce(value, (SELECT big.value FROM {SEMANTIC_TABLE}_large AS big WHERE big.id = large)) "
    f"AS TEXT) AS fact FROM {SEMANTIC_TABLE} WHERE key >= x'612F' AND key < x'6130'"
    ") WHERE json_valid(fact) AND json_extract(fact, '$.a') <> 'conflict'"
)
# PostgreSQL can't ask whether a text is JSON, and fails at one that is not. Quotes within JSON's texts are escaped, so
# the two fields can be found in the text; Latin-1 accepts all bytes but zero.
_INDEX_AUDIT_POSTGRES: Final = (
    f"INSERT INTO {SEMANTIC_TABLE} (key, value, encoding, version, expires_at, created_at, updated_at) "
    "SELECT convert_to('i/', 'UTF8') || substr(key, 3, length(key) - 12) || convert_to(path, 'UTF8') || "
    "decode('00', 'hex') || substr(key, length(key) - 9), decode('', 'hex'), 1, version, expires_at, created_at, "
    """updated_at FROM (SELECT *, substring(fact from '"k":"([a-z0-9._/-]+)"') AS path, """
    """substring(fact from '"a":"([a-z]+)"') AS action FROM ("""
    "SELECT *, CASE WHEN position(decode('00', 'hex') in value) = 0 THEN convert_from(value, 'LATIN1') END AS fact "
    f"FROM {SEMANTIC_TABLE} WHERE key >= decode('612f', 'hex') AND key < decode('6130', 'hex')) AS log) AS facts "
    "WHERE path IS NOT NULL AND action <> 'conflict' ON CONFLICT DO NOTHING"
)
