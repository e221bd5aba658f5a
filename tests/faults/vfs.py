"""The access of SQLite to the disk: recorded as a disk would see it (`RecordingVFS`), or limited (`QuotaVFS`).

Both pass everything on to the real files, through which SQLite reads, locks and shares memory as ever.
"""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import apsw

from .disk import Create, DiskWrite, Image, Lose, Remove, Request, Sync, Truncate

_numbers = itertools.count(1000)
# The unix VFS syncs the folder along with the first sync of a journal or log that it created, and never else.
_SYNCS_ITS_FOLDER: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL


class RecordingVFS(apsw.VFS):
    """Records what SQLite asks of the disk, in order."""

    def __init__(self, *, ignores_syncs: bool = False) -> None:
        self.vfs_name = f"recording-{next(_numbers)}"
        self.requests: list[Request] = []
        self.ignores_syncs = ignores_syncs
        self.failing_syncs: Callable[[], bool] = lambda: False
        self.is_full = False
        self.lock = threading.Lock()
        self._files: dict[str, int] = {}
        super().__init__(self.vfs_name, "")

    @classmethod
    def on(cls, image: Image) -> "RecordingVFS":
        """Begin with the files of a `Disk.holding(image)`."""
        vfs = cls()
        vfs._files = {name: file for file, name in enumerate(sorted(image))}
        return vfs

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "RecordingFile":  # noqa: N802
        path = _path(name)
        with self.lock:
            created = not path.exists()
            if created:
                self._files[path.name] = next(_numbers)
                self.requests.append(Create(path.name, self._files[path.name]))
            file = self._files[path.name]
            return RecordingFile(self, file, name, flags, syncs_folder=created and bool(flags[0] & _SYNCS_ITS_FOLDER))

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        with self.lock:
            super().xDelete(filename, syncdir)
            self.requests.append(Remove(Path(filename).name, syncdir))


class RecordingFile(apsw.VFSFile):
    def __init__(
        self, vfs: RecordingVFS, file: int, name: str | apsw.URIFilename | None, flags: list[int], *, syncs_folder: bool
    ) -> None:
        super().__init__("", name, flags)
        self._vfs = vfs
        self._file = file
        self._syncs_folder = syncs_folder

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        with self._vfs.lock:
            if self._vfs.is_full:
                raise apsw.FullError("the disk is full")
            super().xWrite(data, offset)
            self._vfs.requests.append(DiskWrite(self._file, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        with self._vfs.lock:
            super().xTruncate(newsize)
            self._vfs.requests.append(Truncate(self._file, newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802
        # Not passed on: the disk of these tests is the recorded one.
        with self._vfs.lock:
            if self._vfs.failing_syncs():
                self._vfs.requests.append(Lose(self._file))
                raise apsw.IOError("the disk failed to sync")
            if not self._vfs.ignores_syncs:
                self._vfs.requests.append(Sync(self._file, self._syncs_folder))
            self._syncs_folder = False


class QuotaVFS(apsw.VFS):
    """Gives out a number of bytes, by the growth of files, and then says that the disk is full."""

    def __init__(self, left: int) -> None:
        self.vfs_name = f"quota-{next(_numbers)}"
        self.left = left
        self.refused = 0
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "QuotaFile":  # noqa: N802
        return QuotaFile(self, name, flags)


class QuotaFile(apsw.VFSFile):
    def __init__(self, vfs: QuotaVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._vfs = vfs

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        growth = max(0, offset + len(data) - self.xFileSize())
        if growth > self._vfs.left:
            self._vfs.refused += 1
            raise apsw.FullError("the quota is used up")
        super().xWrite(data, offset)
        self._vfs.left -= growth


def _path(name: str | apsw.URIFilename | None) -> Path:
    assert name is not None, "SQLite asked for a temporary file: it has no business with any here"
    return Path(name if isinstance(name, str) else name.filename())
