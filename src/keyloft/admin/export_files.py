"""Writes and reads the files of exports, and notices when lines of one are missing."""

import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

from keyloft import limits
from keyloft.admin import export_format as lines
from keyloft.admin.databases import Database
from keyloft.admin.files import check_name, give_name
from keyloft.admin.selection import Position, Selection
from keyloft.admin.threads import in_thread
from keyloft.clock import SystemClock
from keyloft.core.files import OUT_OF_SPACE, OWNER_ONLY, create_private
from keyloft.core.records import Record, Space
from keyloft.errors import DiskFull, InvalidArgument

Slice: TypeAlias = list[tuple[Space, Record]]
"""Rows that are stored in one commit."""


def is_export(file: Path) -> bool:
    """Whether a file begins as exports do."""
    if not file.is_file():
        return False
    with suppress(OSError), file.open("rb") as start:
        return start.read(len(lines.BEGINNING)) == lines.BEGINNING
    return False


class ExportWriter:
    """Writes the lines of an export, and counts and hashes them."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._hash = hashlib.sha256()
        self._has_head = False
        self.entries = 0
        self.after: Position | None = None
        """The last entry of an export that is continued."""
        self.sha256 = ""
        """The hash of all lines but the last one, which has it."""

    def begin(self, version: int, only: Mapping[str, str]) -> None:
        """Write the first line, unless the file that is continued has one."""
        if not self._has_head:
            self._write(lines.head(version, only))

    def write(self, space: Space, rows: Sequence[Record]) -> None:
        """Write entries."""
        self._write(lines.write(space, rows))
        self.entries += len(rows)

    def finish(self, version: int) -> None:
        """Write the last line."""
        self.sha256 = self._hash.hexdigest()
        self._out.write(lines.end(self.entries, version, self.sha256))
        self._out.flush()

    def _write(self, text: bytes) -> None:
        self._hash.update(text)
        self._out.write(text)

    def resume(self, only: Mapping[str, str]) -> None:
        """Read an incomplete export, and continue after its last whole entry; what follows that entry is cut off.

        Raises:
            InvalidArgument: The file is an export of another part of the database.
        """
        last, size = b"", 0
        for line, is_whole in _split(self._out):
            mark = lines.read_mark(line)
            if not is_whole or isinstance(mark, lines.LastLine):
                break
            if not self._has_head and (mark is None or mark.format != lines.FORMAT):
                raise InvalidArgument(f"{self._out.name} is not an export of this version: overwrite=True replaces it")
            if mark is None:
                last = line
                self.entries += 1
            elif mark.only != only:
                raise InvalidArgument(
                    f"{self._out.name} is an export of another part of the database: pass its prefix=, plugin=, "
                    "project= and name=, or overwrite=True"
                )
            self._has_head = True
            self._hash.update(line + b"\n")
            size += len(line) + 1
        self._out.seek(size)
        self._out.truncate()
        if last:
            space, row = lines.read(last, 0)
            self.after = space, row.key


@asynccontextmanager
async def writable(
    target: Database | IO[bytes], only: Mapping[str, str], *, resume: bool, overwrite: bool
) -> AsyncIterator[ExportWriter]:
    """An export to a stream; or to a file, which is FILE.partial until all of it is written and on disk.

    Raises:
        InvalidArgument: The file exists already, or an incomplete export does; or the folder does not exist.
        DiskFull: There is no space for it; what is written stays, and can be continued.
    """
    if not isinstance(target, str | os.PathLike):
        if not hasattr(target, "write"):
            raise InvalidArgument(
                f"target: expected a path or a binary stream to write to, got {type(target).__name__}"
            )
        if resume or overwrite:
            raise InvalidArgument("resume=True and overwrite=True are for a file, not for a stream")
        yield ExportWriter(target)
        return
    file = Path(target)
    check_name(file, overwrite=overwrite)
    if not file.parent.is_dir():
        raise InvalidArgument(f"{file} can't be written: there is no folder {file.parent}")
    unfinished = file.with_name(f"{file.name}.partial")
    if unfinished.exists() and not (resume or overwrite):
        raise InvalidArgument(
            f"{unfinished} is an incomplete export: resume=True continues it, overwrite=True replaces it"
        )
    if not resume:
        unfinished.unlink(missing_ok=True)
    if not unfinished.exists() and (error := create_private(unfinished)):
        raise error
    try:
        with unfinished.open("rb+") as out:
            os.fchmod(out.fileno(), OWNER_ONLY)
            writer = ExportWriter(out)
            if resume:
                await in_thread(partial(writer.resume, only))
            yield writer
        await in_thread(partial(give_name, unfinished, file, overwrite=overwrite))
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise DiskFull(f"no space is left for {unfinished}: resume=True continues it once there is space") from None


@contextmanager
def readable(source: Database | IO[bytes]) -> Iterator[tuple[IO[bytes], int | None]]:
    """A stream to read from, and its size; None if that is not known."""
    if not isinstance(source, str | os.PathLike):
        if not hasattr(source, "read"):
            raise InvalidArgument(f"source: expected a path or a binary stream to read, got {type(source).__name__}")
        yield source, None
        return
    file = Path(source)
    if file.is_dir():
        raise InvalidArgument(f"{file} is a folder: name a file in it")
    if not file.exists():
        raise InvalidArgument(f"there is no file {file}")
    with file.open("rb", buffering=0) as stream:
        yield stream, os.fstat(stream.fileno()).st_size or None


class ExportReader:
    """Reads the entries of an export, or of a file written by hand, in slices that one commit can hold."""

    def __init__(self, source: IO[bytes], selection: Selection) -> None:
        self._entries = self._read(source, selection)
        self.version = 0
        """The highest version of the database that the export came from, as far as was read."""
        self.done_bytes = 0
        self.fault: str | None = None
        """What is wrong with the file, if something is."""

    def take(self) -> Slice:
        """The next entries; none after the last one, or after a fault."""
        taken, size = Slice(), 0
        try:
            for space, row in self._entries:
                taken.append((space, row))
                size += len(row.value)
                if len(taken) >= limits.MAINTENANCE_ROWS or size >= limits.TRANSFER_SLICE_BYTES:
                    break
        except InvalidArgument as error:
            self.fault = str(error)
        return taken

    def _read(self, source: IO[bytes], selection: Selection) -> Iterator[tuple[Space, Record]]:
        now, number, entries, hashed, is_empty = SystemClock().now(), 0, 0, None, True
        is_after_end = False
        for number, (line, is_whole) in enumerate(_split(source), 1):
            self.done_bytes += len(line) + is_whole
            try:
                mark = lines.read_mark(line)
                entry = lines.read(line, now) if mark is None and line.strip() else None
            except InvalidArgument as error:
                if not is_whole and (hashed is not None or line.startswith(b'{"keyloft"')):
                    raise InvalidArgument(f"the file was cut inside line {number}, after {_number(entries)}") from None
                raise InvalidArgument(f"line {number}: {error}") from None
            is_empty = is_empty and mark is None and entry is None
            if isinstance(mark, lines.FirstLine):
                if hashed is not None:
                    raise InvalidArgument(_without_end(entries, f"line {number} begins another export"))
                self.version = max(self.version, mark.version)
                entries, hashed, is_after_end = 0, hashlib.sha256(), False
            elif isinstance(mark, lines.LastLine):
                self.version = max(self.version, mark.version)
                _check_complete(mark, entries, None if hashed is None else hashed.hexdigest())
                hashed, is_after_end = None, True
            elif entry is not None and is_after_end:
                raise InvalidArgument(
                    f"line {number} comes after the last line of the export: import it from a file of its own"
                )
            if hashed is not None:
                hashed.update(line + b"\n")
                entries += entry is not None
            if entry is not None and selection.holds(entry[0], entry[1].key):
                yield entry
        if is_empty:
            raise InvalidArgument("the file is empty: it was cut, or the export that wrote it failed")
        if hashed is not None:
            raise InvalidArgument(_without_end(entries, f"it ends with line {number}"))


def _number(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries:,} entries"


def _without_end(entries: int, what: str) -> str:
    return f"the file was cut after {_number(entries)}: {what}, without the last line of an export, which counts them"


def _check_complete(end: lines.LastLine, entries: int, sha256: str | None) -> None:
    if sha256 is None:
        raise InvalidArgument("the file was cut: the first line of the export is missing")
    if entries != end.entries:
        raise InvalidArgument(
            f"lines are missing or were added: the file has {_number(entries)}, and its last line says {end.entries:,}"
        )
    if sha256 != end.sha256:
        raise InvalidArgument("the file was changed since it was written: its last line has another SHA-256")


def _split(source: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their line ends, and whether they had one; `readline` of a raw stream would read byte by byte."""
    pieces: list[bytes] = []
    while chunk := source.read(limits.SCAN_BYTES):
        first, *rest = chunk.split(b"\n")
        pieces.append(first)
        if rest:
            yield b"".join(pieces), True
            yield from [(line, True) for line in rest[:-1]]
            pieces = [rest[-1]]
    if last := b"".join(pieces):
        yield last, False
