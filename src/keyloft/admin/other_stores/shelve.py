"""Reads a file of the standard library's shelve: every value is a pickle."""

import dbm
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from keyloft.admin.other_stores.entries import ForeignEntry, NotReadable, RefusedEntry, Unpickle, shown_key
from keyloft.errors import InvalidArgument


def read(file: Path, unpickle: Unpickle, table: str | None) -> Iterator[ForeignEntry | RefusedEntry]:
    """The entries of a file, named as for `shelve.open`, which may add a suffix to it.

    Raises:
        InvalidArgument: There is no such file, or this Python can't read it.
    """
    if table is not None:
        raise InvalidArgument("table: only for sqlitedict; a file of shelve has no tables")
    try:
        opened = dbm.open(str(file), "r")  # noqa: SIM115 (closed below)
    except (*dbm.error, OSError, ImportError) as error:
        raise InvalidArgument(f"{file} can't be read as a file of shelve: {error}") from None
    with closing(opened) as shelf:
        for raw in list(shelf.keys()):
            assert isinstance(raw, bytes), "dbm has bytes"
            key = raw.decode(errors="replace")
            try:
                yield ForeignEntry(raw.decode(), unpickle(shelf[raw]))
            except UnicodeDecodeError:
                yield RefusedEntry(shown_key(key), "has a key that is not text")
            except NotReadable as error:
                yield RefusedEntry(shown_key(key), str(error))
