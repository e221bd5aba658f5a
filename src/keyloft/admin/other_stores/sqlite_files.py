"""Opens SQLite files of other programs, to read them and nothing else."""

import sqlite3
from contextlib import ExitStack
from pathlib import Path

from keyloft.errors import InvalidArgument


def open_foreign(file: Path) -> sqlite3.Connection:
    """A connection that reads a file; any thread may use it.

    It uses Python's own SQLite, which must never open a file of Keyloft: closing such a file would drop the locks that
    the engine's SQLite library has on it.

    Raises:
        InvalidArgument: The file does not exist, or is not one of SQLite.
    """
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    with ExitStack() as closing:
        try:
            connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            closing.callback(connection.close)
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            raise InvalidArgument(f"{file} can't be read with SQLite: {error}") from None
        closing.pop_all()
    return connection
