"""Writes and removes rows, with their large values, in an open transaction."""

from collections.abc import Sequence

import apsw

from keyloft.core.records import Key, Record
from keyloft.core.schema import Row
from keyloft.engines.sqlite.tables import LargeValueTable, SqliteLayout, StoredHead


def put(cursor: apsw.Cursor, layout: SqliteLayout, record: Record, *, is_new_entry: bool) -> None:
    """Store a record; a large value goes into the large value table."""
    bindings, large = layout.bind_put(record, is_new_entry), layout.large
    if large is not None and large.holds(record):
        large_id = _put_large(cursor, large, record.key, record.value)
        cursor.execute(layout.put_large, (record.key, None, *bindings[2:], large_id))
    else:
        put_rows(cursor, layout, [bindings])


def put_rows(cursor: apsw.Cursor, layout: SqliteLayout, rows: Sequence[Row]) -> None:
    """Store records without large values, each as `bind_put` binds it, with one call for all."""
    connection, large = cursor.connection, layout.large
    if len(rows) == 1:  # a lone set
        cursor.execute(layout.put, rows[0])
        if large is None or connection.changes():
            return
    else:
        before = connection.total_changes()
        cursor.executemany(layout.put, rows)
        if large is None or connection.total_changes() - before == len(rows):
            return
    # The statement changes nothing where a large value is stored, so large values are removed first.
    for bindings in rows:
        key = bindings[0]
        if (large_id := cursor.execute(large.find, (key,)).get) is not None:
            cursor.execute(large.remove, (key, large_id))
            cursor.execute(layout.put_large, (*bindings, None))


def _put_large(cursor: apsw.Cursor, large: LargeValueTable, key: Key, value: bytes) -> int:
    """Store a large value; returns its id."""
    large_id: int | None = cursor.execute(large.find, (key,)).get
    if large_id is not None:
        cursor.execute(large.replace, (key, large_id, value))
        if cursor.connection.changes():
            return large_id
    cursor.execute(large.add, (key, value))
    return cursor.connection.last_insert_rowid()


def remove_large(cursor: apsw.Cursor, layout: SqliteLayout, stored: Record) -> None:
    """Remove the large value of a stored record, if it has one."""
    large, key = layout.large, stored.key
    if large is not None:
        large_id = stored.large if type(stored) is StoredHead else cursor.execute(large.find, (key,)).get
        if large_id is not None:
            cursor.execute(large.remove, (key, large_id))
