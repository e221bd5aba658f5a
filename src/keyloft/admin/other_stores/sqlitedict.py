"""Reads a file of sqlitedict: pickles, or JSON if it was made with `encode=json.dumps`."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from keyloft.admin.other_stores.entries import ForeignEntry, NotReadable, RefusedEntry, Unpickle, shown_key
from keyloft.admin.other_stores.sqlite_files import open_foreign, rows_of
from keyloft.errors import InvalidArgument


def read(file: Path, unpickle: Unpickle, table: str | None) -> Iterator[ForeignEntry | RefusedEntry]:
    """The entries of a table, which may be left out if the file has one.

    Raises:
        InvalidArgument: The file is not one of sqlitedict, or has no such table.
    """
    with closing(open_foreign(file)) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            if [row[1] for row in connection.execute("SELECT * FROM pragma_table_info(?)", (name,))] == ["key", "value"]
        ]
        if not tables:
            raise InvalidArgument(f"{file} is not a file of sqlitedict: no table has the columns key and value alone")
        if table is None and len(tables) > 1:
            raise InvalidArgument(f"table: expected one of {', '.join(tables)}, because {file} has several")
        if table is not None and table not in tables:
            raise InvalidArgument(f"table: {file} has no such table, but {', '.join(tables)}")
        quoted = (table or tables[0]).replace('"', '""')
        for row in rows_of(connection, f'SELECT key, value FROM "{quoted}" ORDER BY rowid', file):
            if isinstance(row, RefusedEntry):
                yield row
                return
            key, value = row
            try:
                yield ForeignEntry(key, unpickle(value) if isinstance(value, bytes) else json.loads(value))
            except NotReadable as error:
                yield RefusedEntry(shown_key(key), str(error))
            except (ValueError, TypeError, RecursionError):
                yield RefusedEntry(shown_key(key), "is neither a pickle nor JSON: it was written with another encode=")
