"""Reads a folder of diskcache: a Cache, an Index or a FanoutCache, with the default Disk or with JSONDisk."""

import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from keyloft import limits
from keyloft.admin.other_stores.entries import ForeignEntry, NotReadable, RefusedEntry, Unpickle, shown_key
from keyloft.admin.other_stores.sqlite_files import open_foreign, rows_of
from keyloft.core.schema import LAST_MOMENT
from keyloft.errors import InvalidArgument

_FILE: Final = "cache.db"
_INNER: Final = ("cache", "deque", "index")
"""Folders in which a FanoutCache keeps caches, deques and indexes that have names."""
_ROWS: Final = "SELECT key, raw, expire_time, mode, filename, value FROM Cache ORDER BY rowid"
_RAW, _BINARY, _TEXT, _PICKLE = 1, 2, 3, 4
"""How a value is stored, in the column `mode`."""


def read(folder: Path, unpickle: Unpickle, table: str | None) -> Iterator[ForeignEntry | RefusedEntry]:
    """The entries of a folder.

    Raises:
        InvalidArgument: The folder is not one of diskcache.
    """
    if table is not None:
        raise InvalidArgument("table: only for sqlitedict; a folder of diskcache has one table")
    shards = [folder] if (folder / _FILE).is_file() else sorted(file.parent for file in folder.glob(f"[0-9]*/{_FILE}"))
    if not shards:
        raise InvalidArgument(f"{folder} is not a folder of diskcache: it has no {_FILE}")
    for shard in shards:
        yield from _read_shard(shard, unpickle)
    for inner in sorted(file.parent for kind in _INNER for file in (folder / kind).rglob(_FILE)):
        shown = shown_key(inner.relative_to(folder).as_posix())
        yield RefusedEntry(
            shown, "is a folder of its own within this one: import it by itself, under a prefix of its own"
        )


def _read_shard(folder: Path, unpickle: Unpickle) -> Iterator[ForeignEntry | RefusedEntry]:
    with closing(open_foreign(folder / _FILE)) as connection:
        try:
            is_json = _is_of_json_disk(
                connection.execute("SELECT key, raw FROM Cache ORDER BY rowid LIMIT 1").fetchone()
            )
            rows = rows_of(connection, _ROWS, folder / _FILE)
        except sqlite3.Error as error:
            raise InvalidArgument(f"{folder / _FILE} is not a file of diskcache: {error}") from None
        for row in rows:
            if isinstance(row, RefusedEntry):
                yield row
                return
            key, raw, expire_time, mode, filename, value = row
            shown = shown_key(key)
            try:
                found_key = _key(key, raw, is_json, unpickle)
                shown = shown_key(found_key)
                found = _value(folder, mode, filename, value, is_json, unpickle)
                due = None if expire_time is None else int(min(max(expire_time * 1000, 0), LAST_MOMENT))
            except (NotReadable, OSError, ValueError, TypeError, RecursionError) as error:
                reason = str(error) if isinstance(error, NotReadable) else f"can't be read ({type(error).__name__})"
                yield RefusedEntry(shown, reason)
            else:
                yield ForeignEntry(found_key, found, due)


def _is_of_json_disk(first: tuple[Any, int] | None) -> bool:
    """Whether JSONDisk wrote the first key of a folder: diskcache does not store which Disk a folder has."""
    if first is None or not isinstance(first[0], bytes) or not first[1]:
        return False
    try:
        _inflated(first[0])
    except (NotReadable, ValueError):
        return False
    return True


def _key(key: Any, raw: int, is_json: bool, unpickle: Unpickle) -> Any:
    if is_json:
        return _inflated(key)
    return key if raw else unpickle(key)


def _value(folder: Path, mode: int, filename: str | None, value: Any, is_json: bool, unpickle: Unpickle) -> Any:
    if filename is not None:
        file = (folder / filename).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise NotReadable("names a file outside of the folder")
        if file.exists() and not file.is_file():  # to read a pipe would never end
            raise NotReadable("names something that is not a plain file")
        if file.stat().st_size > limits.LARGEST_VALUE_BYTES:
            raise NotReadable(f"has a file of more than {limits.LARGEST_VALUE_BYTES:,} bytes")
        value = file.read_bytes()
        if mode == _TEXT:
            value = value.decode()
    if is_json:
        return _inflated(value)
    if mode == _PICKLE:
        return unpickle(value)
    if mode in (_RAW, _BINARY, _TEXT):
        return value
    raise NotReadable(f"is stored in a mode that is not known, {shown_key(mode)}")


def _inflated(data: bytes) -> Any:
    """The value of JSON as JSONDisk stores it."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, limits.LARGEST_VALUE_BYTES)
    except zlib.error:
        raise NotReadable("is not what JSONDisk writes") from None
    if not inflating.eof:
        raise NotReadable(f"is cut, or larger than {limits.LARGEST_VALUE_BYTES:,} bytes")
    return json.loads(text)
