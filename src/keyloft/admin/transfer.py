"""Moves entries between databases and files: `export`, `import_` and `copy`."""

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from keyloft import limits
from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.admin.export_files import ExportReader, Slice, readable, writable
from keyloft.admin.export_format import row_name
from keyloft.admin.selection import Selection, count, movable_rows, rows_of
from keyloft.admin.threads import in_thread
from keyloft.core.keys import TupleKey
from keyloft.core.maintenance import Existing, Loaded, Maintenance, Snapshot, content
from keyloft.core.records import Record, Space
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import AlreadyExists, InvalidArgument, TransferFailed

IfExists: TypeAlias = Literal["refuse", "keep", "replace"]
"""What happens to a stored entry when another one is loaded under its key."""


class ExportReport(Struct, frozen=True, kw_only=True):
    """What an export holds."""

    file: str | None
    """None for a stream."""
    entries: int
    version: int
    """The version of the last commit that it contains."""
    sha256: str
    """The hash of all lines but the last one, which has it."""


class ImportReport(Struct, frozen=True, kw_only=True):
    """What became of the entries that were to be stored."""

    new: int = 0
    same: int = 0
    """Entries of which an equal one was stored already."""
    kept: int = 0
    """Entries in whose place another one was stored, which stays."""
    replaced: int = 0


class CopyReport(ImportReport, frozen=True, kw_only=True):
    """What became of the entries that were copied, and how both databases compare."""

    compared: int
    missing: int
    different: int
    other_versions: int
    """Equal except for the version: they were stored before, or replaced another entry."""
    first_difference: str | None
    source_sha256: str
    target_sha256: str


async def export(
    database: Database,
    target: Database | IO[bytes],
    *,
    prefix: TupleKey | None = None,
    plugin: str | None = None,
    project: str | None = None,
    name: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write entries as lines of JSON, as they are at one moment.

    Entries that have expired are left out, except where workflows can still restore them. The last line has the number
    and the hash of the others, so that `import_` notices a file that was cut. A file is `FILE.partial` until it is
    complete, and only its owner can read it.

    Example:
        >>> await admin.export("app.db", "users.jsonl", prefix=("users",))

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        target: A file, or a binary stream to write to.
        prefix: Of the tuple store, the unnamed one or that of `name`, only what is below it.
        plugin: Only what this plugin stores.
        project: Only this project, `tenant/<tenant>/project/<project>`. With several selectors, all parts are exported.
        name: Only the tuple store of this name.
        resume: Continue an incomplete export; its further entries are then as they are now.
        overwrite: Replace `target`, or an incomplete export.
        progress: Called with the stage, how much is done, and the total or None.

    Returns:
        What the export holds.

    Raises:
        InvalidArgument: The file exists already, or can't be made.
        Undecodable: A row can't be moved; the message names it.
        DiskFull: There is no space for the file; `resume` continues it.
        DatabaseError: The database can't be read.
    """
    selection = Selection.of(prefix, plugin, project, name)
    async with opened(database) as source, source.snapshot() as snapshot:
        total = await count(snapshot, selection) if progress else None
        export_file = writable(target, selection.named, resume=resume, overwrite=overwrite)
        async with export_file as writer:
            with stage(progress, "exporting", total) as advance:
                writer.begin(snapshot.version, selection.named)
                async for space, rows in rows_of(snapshot, selection, writer.after):
                    # In a thread that may be abandoned: the reader of a pipe may be slow, and Ctrl-C must end the wait.
                    await in_thread(partial(writer.write, space, rows))
                    advance(writer.entries, None)
                await in_thread(lambda: writer.finish(snapshot.version))
    file = str(Path(target)) if isinstance(target, str | os.PathLike) else None
    return ExportReport(file=file, entries=writer.entries, version=snapshot.version, sha256=writer.sha256)


async def import_(
    source: Database | IO[bytes],
    database: Database,
    *,
    prefix: TupleKey | None = None,
    plugin: str | None = None,
    project: str | None = None,
    name: str | None = None,
    existing: IfExists = "refuse",
    progress: Progress | None = None,
) -> ImportReport:
    """Store the entries of an export, with their versions and expiries, in a database that is made if need be.

    Some thousand entries at a time are stored in one commit. After an error the same call continues: it skips what is
    stored already.

    Example:
        >>> await admin.import_("users.jsonl", "app.db", existing="keep")

    Args:
        source: A file that `export` wrote, or one with an entry per line, or a binary stream.
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        prefix: Of the tuple store, the unnamed one or that of `name`, only what is below it.
        plugin: Only what this plugin stores.
        project: Only this project, `tenant/<tenant>/project/<project>`.
        name: Only the tuple store of this name.
        existing: What to do where another entry is stored: "refuse", "keep" it or "replace" it.
        progress: Called with the stage, how many bytes are read, and the total or None.

    Returns:
        What became of the entries.

    Raises:
        TransferFailed: A line is not an entry, the file was cut, or another entry is stored. What was read before is
            stored, and stays; `result` is an `ImportReport` of that.
        InvalidArgument: There is no such file.
        DatabaseError: The database can't be written.
    """
    selection, conflict = Selection.of(prefix, plugin, project, name), check_existing(existing)
    with readable(source) as (stream, size), stage(progress, "importing", size) as advance:
        reader, loaded = ExportReader(stream, selection), Loaded()
        async with opened(database, make=True) as target:
            # In a thread that may be abandoned: a pipe may be silent for ever, and Ctrl-C must end the wait.
            while rows := await in_thread(reader.take):
                await load(target, rows, reader.version, conflict, loaded)
                advance(reader.done_bytes, None)
        advance(reader.done_bytes, None)
        report = ImportReport(**asdict(loaded))
        if reader.fault is not None:
            raise TransferFailed(f"{reader.fault}. {_after_fault(loaded.all)}", report)
    return report


async def copy(
    source: Database,
    target: Database,
    *,
    prefix: TupleKey | None = None,
    plugin: str | None = None,
    project: str | None = None,
    name: str | None = None,
    existing: IfExists = "refuse",
    progress: Progress | None = None,
) -> CopyReport:
    """Copy entries from one database to another, then read both and compare them.

    They are copied as they are at one moment, while others may write. After an error the same call continues. The
    version counter of the target jumps to the next multiple of 2**40, so that no version of the source is given again.

    Example:
        >>> await admin.copy("app.db", "postgresql://localhost/app")

    Args:
        source: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        target: The same; it is made if need be.
        prefix: Of the tuple store, the unnamed one or that of `name`, only what is below it.
        plugin: Only what this plugin stores.
        project: Only this project, `tenant/<tenant>/project/<project>`.
        name: Only the tuple store of this name.
        existing: What to do where another entry is stored: "refuse", "keep" it or "replace" it.
        progress: Called with the stage, how much is done, and the total or None.

    Returns:
        What became of the entries, and how both databases compare.

    Raises:
        TransferFailed: Another entry is stored, or what arrived is not what was read; `result` is the report so far.
        Undecodable: A row can't be moved; the message names it.
        DatabaseError: A database can't be read or written.
    """
    selection, conflict = Selection.of(prefix, plugin, project, name), check_existing(existing)
    async with opened(source) as origin, opened(target, make=True) as goal, origin.snapshot() as snapshot:
        loaded, total = Loaded(), await count(snapshot, selection) if progress else None
        with stage(progress, "copying", total) as advance:
            async for rows in _slices(rows_of(snapshot, selection)):
                await load(goal, rows, snapshot.version, conflict, loaded, is_copy=True)
                advance(loaded.all, None)
        async with goal.snapshot() as arrived:
            with stage(progress, "comparing", total) as advance:
                compared = await compare(snapshot, arrived, selection, advance)
    report = CopyReport(**asdict(loaded), **asdict(compared))
    if report.missing or report.different > report.kept:
        raise TransferFailed(
            f"{DatabaseUrl.parse(target).shown} does not hold what {DatabaseUrl.parse(source).shown} held, beginning "
            f"with {report.first_difference}: another process may have written there meanwhile",
            report,
        )
    return report


class Comparison(Struct):
    """How the copied entries compare with those of the source."""

    compared: int = 0
    missing: int = 0
    different: int = 0
    other_versions: int = 0
    """Equal except for the version: they were stored before, or replaced another entry."""
    first_difference: str | None = None
    """The first row that is missing or different."""
    source_sha256: str = ""
    target_sha256: str = ""


async def compare(
    source: Snapshot, target: Snapshot, selection: Selection, advance: Callable[[int, None], object] = lambda *_: None
) -> Comparison:
    """Compare two databases key by key. Further rows of the target don't matter."""
    found, hashes = Comparison(), (hashlib.sha256(), hashlib.sha256())
    for part in selection.parts:
        wanted = _one_by_one(movable_rows(source, part))
        stored = _one_by_one(target.rows(part))
        current = await anext(stored, None)
        async for row in wanted:
            while current is not None and current.key < row.key:
                current = await anext(stored, None)
            if (current is None or current.key != row.key) and not row.is_alive(target.now):
                continue  # the entry expired meanwhile, and was swept
            found.compared += 1
            if not found.compared % limits.ROWS_BETWEEN_PROGRESS:
                advance(found.compared, None)
            hashes[0].update(_bytes(part.space, row))
            if current is None or current.key != row.key:
                found.missing += 1
            else:
                hashes[1].update(_bytes(part.space, current))
                if content(row) == content(current):
                    found.other_versions += row.version != current.version
                    continue
                found.different += 1
            found.first_difference = found.first_difference or row_name(part.space, row.key)
    advance(found.compared, None)
    found.source_sha256, found.target_sha256 = [digest.hexdigest() for digest in hashes]
    return found


async def _slices(pages: AsyncIterator[tuple[Space, Sequence[Record]]]) -> AsyncIterator[Slice]:
    """Rows in slices that one commit can hold."""
    rows, size = Slice(), 0
    async for space, page in pages:
        rows += [(space, row) for row in page]
        size += sum([len(row.value) for row in page])
        if len(rows) >= limits.MAINTENANCE_ROWS or size >= limits.TRANSFER_SLICE_BYTES:
            yield rows
            rows, size = Slice(), 0
    if rows:
        yield rows


async def _one_by_one(pages: AsyncIterator[Sequence[Record]]) -> AsyncIterator[Record]:
    async for rows in pages:
        for row in rows:
            yield row


def _bytes(space: Space, row: Record) -> bytes:
    """A row as bytes, to be compared."""
    key = row.key if isinstance(row.key, bytes) else "\x00".join(row.key).encode()
    head = f"{space} {len(key)} {len(row.value)} {row.encoding} {row.expires_at}\n"
    return head.encode() + key + row.value


async def load(
    target: Maintenance, rows: Slice, version: int, existing: Existing, loaded: Loaded, *, is_copy: bool = False
) -> None:
    """Store rows in one commit, and count the outcomes; `version` is that of the database they come from."""
    try:
        # A file without a first line may still name versions.
        highest = max(version, *[row.version for _, row in rows])
        loaded.add(await target.load(rows, highest, existing, is_copy=is_copy))
    except AlreadyExists as error:
        raise TransferFailed(
            f"{row_name(error.space, error.key)} is stored already, with another value or expiry: "
            'existing="keep" leaves such entries as they are, existing="replace" replaces them',
            ImportReport(**asdict(loaded)),
        ) from None


def check_existing(name: str) -> Existing:
    try:
        return Existing(name)
    except ValueError:
        raise InvalidArgument('existing: expected "refuse", "keep" or "replace"') from None


def _after_fault(stored: int) -> str:
    if not stored:
        return (
            "Nothing is stored. Is it a file of `keyloft export`? A line by hand is like "
            '{"key":"users/alice","value":1}; what `keyloft backup` wrote is for `keyloft restore`, the JSON file of a '
            "plugin for `keyloft plugin import-json`"
        )
    what = (
        "entry before it is stored, and stays" if stored == 1 else f"{stored:,} entries before it are stored, and stay"
    )
    return (
        f"The {what}. Get the whole file, or correct the line, and import it again: what is stored already is skipped"
    )
