"""Opens SQLite files of other programs, to read them and nothing else."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keyloft.admin.other_stores.entries import RefusedEntry
from keyloft.errors import InvalidArgument


def open_foreign(file: Path) -> sqlite3.Connection:
    """A connection that reads a file; any thread may use it.

    It uses Python's own SQLite, which must never open a file of Keyloft: closing such a file would drop the locks that
    the engine's SQLite library has on it.

    Raises:
        InvalidArgument: The file does not exist, is a folder, or is not one of SQLite.
    """
    if file.is_dir():
        raise InvalidArgument(f"{file} is a folder: expected a file of SQLite")
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    with ExitStack() as closing:
        try:
            connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            closing.callback(connection.close)
            # A text that is not UTF-8 is refused with its entry: SQLite's own error would end the import, and show it.
            connection.text_factory = lambda data: data.decode(errors="surrogateescape")
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            raise InvalidArgument(f"{file} can't be read with SQLite: {error}") from None
        closing.pop_all()
    return connection


def rows_of(connection: sqlite3.Connection, query: str, file: Path) -> Iterator[tuple[Any, ...] | RefusedEntry]:
    """The rows of a query; from where on the file is damaged, a refusal instead of them.

    Raises:
        sqlite3.Error: The file has no such table.
    """
    return _fetched(connection.execute(query), file)


def _fetched(found: sqlite3.Cursor, file: Path) -> Iterator[tuple[Any, ...] | RefusedEntry]:
    while True:
        try:
            row = found.fetchone()
        except sqlite3.Error as error:
            yield RefusedEntry(f"the rest of {file.name}", f"can't be read with SQLite: {error}")
            return
        if row is None:
            return
        yield row
