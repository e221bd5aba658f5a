"""Opens SQLite files of other programs, to read them and nothing else."""

import sqlite3
from contextlib import ExitStack
from pathlib import Path

from keyloft.errors import InvalidArgument


def open_foreign(file: Path) -> sqlite3.Connection:
    """A connection that reads a file, for whichever thread has it.

    Python's own SQLite serves here, and never for a file of Keyloft: to close one would drop the locks of the other
    SQLite library, that of the engine.

    Raises:
        InvalidArgument: There is no such file, or it is not one of SQLite.
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
