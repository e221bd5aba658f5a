"""Puts a file in its place once it is whole: until then it has another name, and what fails leaves nothing of it."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keyloft.errors import CannotOpen, InvalidArgument

# SQLite keeps these beside a file while it is open.
_COMPANIONS = ("", "-journal", "-wal", "-shm")
_NOBODY_ELSE = 0o600


@contextmanager
def put_in_place(target: Path, *, mode: int, force: bool = False) -> Iterator[Path]:
    """A file to be written, which takes its name when the block ends well; it must be closed by then.

    Args:
        target: Its name.
        mode: Who may read and write it.
        force: What has that name already is replaced.

    Raises:
        InvalidArgument: Something has that name.
        CannotOpen: No file can be made there.
    """
    if not force:
        _check_free(target)
    for left in [target.with_name(f"{target.name}{ending}") for ending in ("-wal", "-journal")]:
        if left.exists():
            raise CannotOpen(
                f"{left} is there, of another file of that name, and SQLite would apply it to this one: close what has "
                "it open, or move it away"
            )
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.unfinished")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    except OSError as error:
        raise CannotOpen(f"{target} can't be written: {error.strerror}") from None
    try:
        yield unfinished
        sync(unfinished)
        if force:
            unfinished.replace(target)
        else:
            _rename_to_free(unfinished, target)
        sync(target.parent)
    finally:
        for companion in _COMPANIONS:
            Path(f"{unfinished}{companion}").unlink(missing_ok=True)


def _check_free(target: Path) -> None:
    """Refuse a name that something has.

    Raises:
        InvalidArgument: Something has it.
    """
    if os.path.lexists(target):
        raise InvalidArgument(f"{target} exists already, and is left as it is")


def _rename_to_free(file: Path, target: Path) -> None:
    """A rename would replace what somebody else made meanwhile; a link does not."""
    try:
        os.link(file, target)
    except FileExistsError:
        _check_free(target)
        raise
    except OSError:
        # Not every file system has links.
        _check_free(target)
        file.rename(target)


def mode_of(source: Path | None) -> int:
    """Who may read and write a file that holds what a database holds: those who may that one; of a server, we alone."""
    return _NOBODY_ELSE if source is None or not source.exists() else stat.S_IMODE(source.stat().st_mode)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(PermissionError):  # of a folder, on some systems
            os.fsync(handle)
    finally:
        os.close(handle)
