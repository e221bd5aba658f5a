"""Reads a file of the standard library's shelve: every value is a pickle."""

import dbm
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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
    except Exception as error:  # dbm.dumb reads its index as Python: a damaged one raises almost anything
        raise InvalidArgument(f"{file} can't be read as a file of shelve: {type(error).__name__}") from None
    with closing(opened) as shelf:
        for raw in list(shelf.keys()):
            assert isinstance(raw, bytes), "dbm has bytes"
            yield _entry(raw, shelf, unpickle)


def _entry(raw: bytes, shelf: Any, unpickle: Unpickle) -> ForeignEntry | RefusedEntry:
    shown = shown_key(raw.decode(errors="replace"))
    try:
        key = raw.decode()
    except UnicodeDecodeError:
        return RefusedEntry(shown, "has a key that is not text")
    try:
        return ForeignEntry(key, unpickle(shelf[raw]))
    except NotReadable as error:
        return RefusedEntry(shown, str(error))
    except Exception as error:  # of a damaged file, as above
        return RefusedEntry(shown, f"can't be read ({type(error).__name__})")
