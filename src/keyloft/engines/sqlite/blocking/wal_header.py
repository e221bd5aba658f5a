"""Reads the header of SQLite's WAL index, which every commit of any process changes, to find out if a view is current.

SQLite maps the WAL index into the memory of each process; its format is documented (https://sqlite.org/walformat.html).
SQLite's own mapping is used, found through its VFS: opening the file a second time, and closing it, would drop the
locks that SQLite has on it in this process.
"""

import ctypes
from typing import Final

import apsw

_HEADER_BYTES: Final = 48
_REGION_BYTES: Final = 32 * 1024
_METHODS_WITH_SHARED_MEMORY: Final = 2
"""The version of `sqlite3_io_methods` from which on it has `xShmMap`."""
_BEFORE_MAP: Final = 12
"""How many functions precede `xShmMap`."""


class _IoMethods(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("others", ctypes.c_void_p * _BEFORE_MAP),
        ("map", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p])),
    )


def wal_header(connection: apsw.Connection) -> "ctypes.Array[ctypes.c_char] | None":
    """The header, whose `raw` bytes differ after each commit. It may be read while the connection is open.

    None if there is no header: in memory, and with a VFS that has no shared memory.
    """
    file, region = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        if connection.pragma("journal_mode") != "wal":
            return None
        connection.execute("SELECT 1 FROM sqlite_schema").fetchall()  # maps the WAL index
        found = connection.file_control("main", apsw.SQLITE_FCNTL_FILE_POINTER, ctypes.addressof(file))
    except apsw.Error:
        return None
    methods_at = ctypes.c_void_p.from_address(file.value).value if found and file.value else None
    if not methods_at or ctypes.c_int.from_address(methods_at).value < _METHODS_WITH_SHARED_MEMORY:
        return None
    methods = _IoMethods.from_address(methods_at)
    if not methods.map or methods.map(file, 0, _REGION_BYTES, 0, ctypes.addressof(region)) or not region.value:
        return None
    return (ctypes.c_char * _HEADER_BYTES).from_address(region.value)
