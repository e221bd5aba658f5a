"""A disk as power cuts see it: what was asked of it, in order, and what may be left of that at any moment.

The model grants no more than POSIX and SQLite's own assumption (`SQLITE_IOCAP_POWERSAFE_OVERWRITE`): a write that was
not synced may be there or not, sector by sector, in any order; a name that was made or removed may be so or not until
its folder is synced; bytes outside of a write are never harmed.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Create(NamedTuple):
    """A name now leads to a new, empty file."""

    name: str
    file: int


class Remove(NamedTuple):
    """A name is gone; its file exists as long as a process has it open."""

    name: str
    with_folder: bool


class DiskWrite(NamedTuple):
    file: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    file: int
    size: int


class Sync(NamedTuple):
    """All writes to a file so far are safe; with the folder, so are all names."""

    file: int
    with_folder: bool


class Lose(NamedTuple):
    """A sync failed: Linux then forgets what was to be written, and the next sync says that all is well."""

    file: int


Request: TypeAlias = Create | Remove | DiskWrite | Truncate | Sync | Lose
Image: TypeAlias = dict[str, bytes]


@dataclass
class _File:
    safe: bytearray = field(default_factory=bytearray)
    unsafe: list[DiskWrite | Truncate] = field(default_factory=list)


_LeftOf: TypeAlias = Callable[[_File], bytes]


class Disk:
    """Takes requests one by one; between any two of them the power may be cut, as often as one likes."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._safe_names: dict[str, int] = {}
        self._unsafe_names: list[tuple[str, int | None]] = []

    @classmethod
    def holding(cls, image: Image) -> "Disk":
        """A disk with these files on it, all of them safe; they are numbered in the order of their names."""
        disk = cls()
        for file, (name, content) in enumerate(sorted(image.items())):
            disk._files[file] = _File(bytearray(content))
            disk._safe_names[name] = file
        return disk

    def take(self, request: Request) -> None:
        match request:
            case Create(name, file):
                self._files[file] = _File()
                self._unsafe_names.append((name, file))
            case Remove(name, with_folder):
                self._unsafe_names.append((name, None))
                if with_folder:
                    self._settle_names()
            case DiskWrite(file) | Truncate(file):
                self._files[file].unsafe.append(request)
            case Lose(file):
                self._files[file].unsafe.clear()
            case Sync(file, with_folder):
                there = self._files[file]
                for unsafe in there.unsafe:
                    _apply(there.safe, unsafe)
                there.unsafe.clear()
                if with_folder:
                    self._settle_names()

    def synced(self) -> Image:
        """What is left if the cut takes all that was not synced."""
        return {name: bytes(self._files[file].safe) for name, file in self._safe_names.items()}

    def written(self) -> Image:
        """What is left if everything happened to reach the disk."""
        return self._image(_names(self._safe_names, self._unsafe_names), _whole)

    def torn(self, rng: random.Random, sector: int, *, garbled: bool) -> Image:
        """What is left if each unsynced sector, size and name is of a moment of its own.

        Args:
            garbled: A sector that was being written may hold anything.
        """
        safe = dict(self._safe_names)
        for name in {name for name, _ in self._unsafe_names}:
            changes = [change for change in self._unsafe_names if change[0] == name]
            safe = _names(safe, changes[: rng.randint(0, len(changes))])
        return self._image(safe, lambda file: _torn(file, rng, sector, garbled=garbled))

    def _image(self, names: dict[str, int], left_of: _LeftOf) -> Image:
        return {name: left_of(self._files[file]) for name, file in sorted(names.items())}

    def _settle_names(self) -> None:
        self._safe_names = _names(self._safe_names, self._unsafe_names)
        self._unsafe_names.clear()


def _names(names: dict[str, int], changes: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    changed = dict(names)
    for name, file in changes:
        if file is None:
            changed.pop(name, None)
        else:
            changed[name] = file
    return changed


def _whole(file: _File) -> bytes:
    content = bytearray(file.safe)
    for unsafe in file.unsafe:
        _apply(content, unsafe)
    return bytes(content)


def _torn(file: _File, rng: random.Random, sector: int, *, garbled: bool) -> bytes:
    sizes = [len(file.safe)]
    for unsafe in file.unsafe:
        sizes.append(unsafe.size if isinstance(unsafe, Truncate) else max(sizes[-1], unsafe.offset + len(unsafe.data)))
    content = file.safe.ljust(max(sizes), b"\0")
    moments: dict[int, int] = {}
    for moment, unsafe in enumerate(file.unsafe):
        for piece in _pieces(unsafe, sector, len(content)):
            seen = moments.setdefault(piece.offset // sector, rng.randint(0, len(file.unsafe)))
            if moment < seen:
                data = rng.randbytes(len(piece.data)) if garbled and rng.random() < 0.2 else piece.data
                content[piece.offset : piece.offset + len(data)] = data
    return bytes(content[: rng.choice(sizes)])


def _pieces(unsafe: DiskWrite | Truncate, sector: int, end: int) -> Iterator[DiskWrite]:
    """A write, or the zeros that a truncation leaves, cut at the borders of sectors."""
    if isinstance(unsafe, Truncate):
        unsafe = DiskWrite(unsafe.file, unsafe.size, bytes(max(0, end - unsafe.size)))
    at = 0
    while at < len(unsafe.data):
        offset = unsafe.offset + at
        length = sector - offset % sector
        yield DiskWrite(unsafe.file, offset, unsafe.data[at : at + length])
        at += length


def _apply(content: bytearray, unsafe: DiskWrite | Truncate) -> None:
    if isinstance(unsafe, Truncate):
        del content[unsafe.size :]
        content.extend(bytes(unsafe.size - len(content)))
    else:
        content.extend(bytes(max(0, unsafe.offset - len(content))))
        content[unsafe.offset : unsafe.offset + len(unsafe.data)] = unsafe.data
