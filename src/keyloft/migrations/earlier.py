"""Migrates databases with a stamp of an earlier revision, which today's revisions replace.

Stamps from 0002 on had more than one meaning, so the tables decide what is to be done, not the stamp.
"""

from typing import Any, Final
from zlib import adler32

import sqlalchemy as sa
from msgspec import Struct

from keyloft.core.schema import (
    PLUGIN_TABLE,
    REVISION_TABLE,
    SEMANTIC_TABLE,
    VERSION_BY_HAND,
    VERSION_COUNTER_TABLE,
)
from keyloft.migrations import tables

STAMPS: Final = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009")
_LOGS_CHANGES: Final = "0008"
"""From this stamp on, only the timeline of PostgreSQL's version counter is missing."""
_INDEXES_AUDIT: Final = "0006"
"""From this stamp on, every audit record has its index row."""
_EARLIER_COUNTER: Final = "keyloft_clock"
_PLUGIN_INDEXES: Final = {"idx_plugin_kv_expires", "idx_plugin_kv_prefix"}
_COLUMNS: Final = "key, encoding, version, expires_at, created_at, updated_at"
# What the layout had when these rows were written: `limits.ROW_BYTES` may change.
_IS_LARGE: Final = "length(key) + length(value) > 512"


class Succession(Struct, frozen=True):
    """How a database gets from an earlier stamp to a revision of today."""

    stamp: str
    statements: tuple[str, ...]


def succession(connection: sa.Connection, stamp: str) -> Succession:
    """What to do with a database that has an earlier stamp. Nothing is changed."""
    dialect = connection.dialect.name
    inspector = sa.inspect(connection)
    # Another program's table of this name lacks the indexes: the step to 0011 adopts it, or says why not.
    indexes = inspector.get_indexes(PLUGIN_TABLE) if inspector.has_table(PLUGIN_TABLE) else []
    successor = "0011" if {index["name"] for index in indexes}.issuperset(_PLUGIN_INDEXES) else "0010"
    statements = _up_to_change_log(connection, inspector, stamp) if stamp < _LOGS_CHANGES else []
    if dialect != "sqlite":
        statements.append(f"ALTER TABLE {VERSION_COUNTER_TABLE} ADD COLUMN {tables.COUNTER_TIMELINE}")
        statements.append(tables.NOTE_TIMELINE)
    return Succession(successor, (*statements, f"UPDATE {REVISION_TABLE} SET version_num = '{successor}'"))


def _up_to_change_log(connection: sa.Connection, inspector: sa.Inspector, stamp: str) -> list[str]:
    """What a database lacks that has no change log."""
    dialect = connection.dialect.name
    counter = _EARLIER_COUNTER if inspector.has_table(_EARLIER_COUNTER) else VERSION_COUNTER_TABLE
    # The counter of an empty store began with 0.
    begin = f"UPDATE {counter} SET version = {VERSION_BY_HAND} WHERE version < {VERSION_BY_HAND}"
    statements = [begin, *tables.change_log(dialect, counter), *tables.store(dialect)]
    if dialect == "sqlite":
        statements.append(f"DROP TABLE {counter}")
        for table in tables.ROWS:
            if "large" not in _columns(inspector, table):
                statements += _put_in_order(table)
                continue
            statements.append(f"ALTER TABLE {table} ADD COLUMN {tables.CHECKSUM}")
            if "key" not in _columns(inspector, f"{table}_large"):
                statements += _name_keys(table)
    else:
        if counter == _EARLIER_COUNTER:
            statements += _rename_counter(connection)
        statements.append(f"ALTER TABLE {VERSION_COUNTER_TABLE} ADD COLUMN {tables.COUNTER_TIME} DEFAULT 0")
        statements.append(f"ALTER TABLE {VERSION_COUNTER_TABLE} ALTER COLUMN at DROP DEFAULT")
    if stamp < _INDEXES_AUDIT:
        statements.append(_INDEX_AUDIT_SQLITE if dialect == "sqlite" else _INDEX_AUDIT_POSTGRES)
    return statements


def add_checksums(connection: sa.Connection) -> None:
    """Give the rows of an SQLite file their checksums: what the disk changes from now on is noticed.

    SQL has no function for it. A plan that was carried out by hand leaves the checksums out, and such rows are served
    unchecked until they are written again.
    """
    driver: Any = connection.connection.driver_connection
    driver.create_function("keyloft_checksum", 3, _checksum, deterministic=True)
    for table in tables.ROWS:
        connection.exec_driver_sql(
            f"UPDATE {table} SET checksum = keyloft_checksum(key, encoding, coalesce(value, "
            f"(SELECT big.value FROM {table}_large AS big WHERE big.id = large AND big.key = {table}.key))) "
            "WHERE checksum IS NULL"
        )


def _checksum(key: object, encoding: object, value: object) -> int | None:
    """As the SQLite engine computes it; None for a row that is damaged already."""
    if isinstance(key, bytes) and isinstance(encoding, int) and isinstance(value, bytes):
        return adler32(value, adler32(key, encoding)) + 2**32
    return None


def _rename_counter(connection: sa.Connection) -> list[str]:
    """Give PostgreSQL's version counter and its constraints the names that they have today."""
    named = f"SELECT conname FROM pg_constraint WHERE conrelid = '{_EARLIER_COUNTER}'::regclass ORDER BY conname"
    return [f"ALTER TABLE {_EARLIER_COUNTER} RENAME TO {VERSION_COUNTER_TABLE}"] + [
        f'ALTER TABLE {VERSION_COUNTER_TABLE} RENAME CONSTRAINT "{name}" '
        f'TO "{name.replace(_EARLIER_COUNTER, VERSION_COUNTER_TABLE)}"'
        for name in connection.exec_driver_sql(named).scalars()
    ]


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
