"""Imports what other stores keep in files: diskcache, sqlitedict and shelve."""

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from msgspec.structs import asdict

from keyloft import limits
from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.admin.export_files import Slice
from keyloft.admin.other_stores import diskcache, shelve, sqlitedict
from keyloft.admin.other_stores.entries import (
    ForeignEntry,
    RefusedEntry,
    Unpickle,
    read_plain_pickle,
    refuse_pickle,
    shown_key,
)
from keyloft.admin.transfer import IfExists, ImportReport, check_existing, load
from keyloft.core import keys, values
from keyloft.core.keys import KeyLike
from keyloft.core.maintenance import UNVERSIONED, Loaded
from keyloft.core.records import Record, Space
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import InvalidArgument, InvalidKey, InvalidValue, TransferFailed
from keyloft.tuples.named import check_name

ForeignStore: TypeAlias = Literal["diskcache", "sqlitedict", "shelve"]

_Read: TypeAlias = Callable[[Path, Unpickle, str | None], Iterator[ForeignEntry | RefusedEntry]]
_READERS: Final[dict[str, _Read]] = {
    "diskcache": diskcache.read,
    "sqlitedict": sqlitedict.read,
    "shelve": shelve.read,
}


class ImportFromReport(ImportReport, frozen=True, kw_only=True):
    """What became of the entries of another store."""

    expired: int = 0
    """Entries that had expired, and were left out."""
    refused: int = 0
    refusals: tuple[str, ...] = ()
    """The keys of the first hundred entries that were refused, and why."""


async def import_from(
    kind: ForeignStore,
    source: Database,
    database: Database,
    *,
    prefix: KeyLike = (),
    name: str | None = None,
    table: str | None = None,
    trust: bool = False,
    existing: IfExists = "refuse",
    progress: Progress | None = None,
) -> ImportFromReport:
    """Store what another store holds in a tuple store, with expiries, in a database that is made if need be.

    A key becomes the last part of a tuple key, or its last parts if it is a tuple. Texts, numbers, bytes and JSON are
    imported. A pickle is read only with `trust`; one that names a class or a function is refused even then.

    Example:
        >>> await admin.import_from("diskcache", "/var/cache/app", "app.db", prefix=("cache",))

    Args:
        kind: "diskcache", "sqlitedict" or "shelve".
        source: The folder of a diskcache, the file of a sqlitedict, or the name that `shelve.open` takes.
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        prefix: Stands before every key.
        name: The name of the tuple store; None is the unnamed one.
        table: Of a sqlitedict, if its file has several.
        trust: Read pickles: you trust all who could write them.
        existing: What to do where another entry is stored: "refuse", "keep" it or "replace" it.
        progress: Called with the stage, how many entries are read, and the total or None.

    Returns:
        What became of the entries.

    Raises:
        TransferFailed: Some entries can't be stored, or another entry is stored. All others that were read are stored;
            `result` is a report of that.
        InvalidArgument: The source is not of that kind.
        DatabaseError: The database can't be written.
    """
    if not isinstance(kind, str) or kind not in _READERS:
        raise InvalidArgument(f"kind: expected one of {', '.join(get_args(ForeignStore))}")
    if type(trust) is not bool:
        raise InvalidArgument(f"trust: expected True or False, got {type(trust).__name__}")
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgument(f"source: expected a path, got {type(source).__name__}")
    at = Path(source)
    _check_different(at, DatabaseUrl.parse(database).file)
    before = b"" if name is None else keys.store_prefix(check_name(name))
    conflict, loaded, reading = check_existing(existing), Loaded(), _Reading(before, prefix)
    slices = reading.slices(_READERS[kind](at, read_plain_pickle if trust else refuse_pickle, table))
    with ThreadPoolExecutor(1, "keyloft admin") as reader, stage(progress, "importing") as advance:

        async def next_slice() -> Slice | None:
            # Always in the same thread: some files can only be read by the thread that opened them.
            return await asyncio.get_running_loop().run_in_executor(reader, next, slices, None)

        try:
            rows = await next_slice()  # before the database is made: the source may not exist
            async with opened(database, make=True) as target:
                while rows is not None:
                    if rows:
                        await load(target, rows, 0, conflict, loaded)
                    advance(reading.entries, None)
                    rows = await next_slice()
        finally:
            reader.submit(slices.close)
    report = ImportFromReport(
        **asdict(loaded), expired=reading.expired, refused=reading.refused, refusals=tuple(reading.refusals)
    )
    if report.refused:
        count = f"{report.refused:,} {'entry was' if report.refused == 1 else 'entries were'}"
        raise TransferFailed(f"{count} not imported, beginning with {report.refusals[0]}", report)
    return report


def _check_different(source: Path, file: Path | None) -> None:
    if file is not None and file.exists() and source.exists() and file.samefile(source):
        raise InvalidArgument("database: expected another file than the one that is imported")


class _Reading:
    """Turns the entries of another store into rows, and counts those that it leaves out."""

    def __init__(self, before: bytes, prefix: KeyLike) -> None:
        self._before = before
        keys.encode_prefix(prefix)  # before it is a tuple: a text would become one of its characters
        self._prefix = tuple(prefix)
        self._now = time.time_ns() // 1_000_000
        self.entries = 0
        self.expired = 0
        self.refused = 0
        self.refusals: list[str] = []
        self._tuples = set[int]()
        """The hashes of keys that were tuples."""
        self._others = set[int]()
        """The hashes of keys that were not, and became the last part of a key."""

    def slices(self, found: Iterator[ForeignEntry | RefusedEntry]) -> Generator[Slice, None, None]:
        """Rows in slices that one commit can hold."""
        rows: list[tuple[Space, Record]] = []
        size = 0
        for entry in found:
            self.entries += 1
            if (row := self._row(entry)) is None:
                continue
            rows.append((Space.TUPLES, row))
            size += len(row.value)
            if len(rows) >= limits.MAINTENANCE_ROWS or size >= limits.TRANSFER_SLICE_BYTES:
                yield rows
                rows, size = [], 0
        yield rows

    def _row(self, entry: ForeignEntry | RefusedEntry) -> Record | None:
        if isinstance(entry, RefusedEntry):
            self._refuse(entry.key, entry.reason)
            return None
        if entry.expires_at is not None and entry.expires_at <= self._now:
            self.expired += 1
            return None
        parts = entry.key if isinstance(entry.key, (tuple, list)) else (entry.key,)
        try:
            key = self._before + keys.encode((*self._prefix, *parts))
            data, encoding = values.encode(entry.value, limits.LARGEST_VALUE_BYTES)
        except (InvalidKey, InvalidValue) as error:
            self._refuse(shown_key(entry.key), str(error))
            return None
        if (other := self._same(key, entry.key)) is not None:
            self._refuse(
                shown_key(entry.key), f"would have the same key as {other}, which comes before it: rename one of them"
            )
            return None
        return Record(key, data, encoding, UNVERSIONED, entry.expires_at, self._now, self._now)

    def _same(self, encoded: bytes, key: Any) -> str | None:
        """The earlier key of the other store that became the same key; None if there is none.

        "a" and ("a",) become the same, and so do two pickles of one tuple in different protocols. Hashes are kept,
        because a store can have millions of keys.
        """
        is_tuple, number = isinstance(key, (tuple, list)), hash(encoded)
        if number in self._tuples:
            return shown_key(key if is_tuple else (key,))
        if number in self._others:
            return shown_key(key[0] if is_tuple else key)
        (self._tuples if is_tuple else self._others).add(number)
        return None

    def _refuse(self, key: str, reason: str) -> None:
        self.refused += 1
        if len(self.refusals) < limits.FINDINGS:
            self.refusals.append(f"{key}: {reason}")
