"""Writes files that only their owner can read, and that get their name once they are complete and on disk."""

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from keyloft.admin.threads import in_thread
from keyloft.core.files import create_private
from keyloft.errors import CannotOpen, InvalidArgument


@asynccontextmanager
async def complete_file(target: Path, *, overwrite: bool = False) -> AsyncIterator[Path]:
    """A file to write, under another name until the block ends without an error; it must be closed by then.

    Raises:
        InvalidArgument: A file has that name already, and is not to be overwritten.
        CannotOpen: No file can be made there.
    """
    with unfinished_file(target, overwrite=overwrite) as unfinished:
        yield unfinished
        await in_thread(partial(give_name, unfinished, target, overwrite=overwrite))


@contextmanager
def unfinished_file(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A file to write beside `target`; it is removed when the block ends, unless `give_name` has given it its name.

    Raises:
        InvalidArgument: A file has that name already, and `overwrite` is False.
        CannotOpen: No file can be made there.
    """
    check_name(target, overwrite=overwrite)
    for left in [target.with_name(f"{target.name}{ending}") for ending in ("-wal", "-journal")]:
        if left.exists():
            raise CannotOpen(
                f"{left} exists. It belongs to another file of that name, and SQLite would apply it to this one: close "
                "what has it open, or move it away"
            )
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.unfinished")
    if error := create_private(unfinished):
        missing = isinstance(error, FileNotFoundError)
        reason = f"the folder {target.parent} does not exist" if missing else error.strerror
        raise CannotOpen(f"{target} can't be written: {reason}")
    try:
        yield unfinished
    finally:
        for beside in ("", "-journal", "-wal", "-shm"):  # as SQLite has them while the file is open
            Path(f"{unfinished}{beside}").unlink(missing_ok=True)


def check_name(target: Path, *, overwrite: bool) -> None:
    """Refuse a name that a new file can't get.

    Raises:
        InvalidArgument: A folder has that name, or a file that is not to be overwritten.
    """
    if target.is_dir():
        raise InvalidArgument(f"{target} is a folder: name a file in it")
    if not overwrite and os.path.lexists(target):
        raise InvalidArgument(f"{target} exists already: name another file, or pass overwrite=True")


def give_name(file: Path, target: Path, *, overwrite: bool) -> None:
    """Give a complete file its name, once it is on disk; a coroutine calls it in a thread, since a disk can stall.

    Raises:
        InvalidArgument: Another process has made a file of that name meanwhile, and it is not to be overwritten.
    """
    _sync(file)
    try:
        # A rename would replace a file that another process made meanwhile; a link does not.
        os.link(file, target)
    except OSError:
        # The name is taken, or the file system has no links.
        check_name(target, overwrite=overwrite)
        file.replace(target)
    file.unlink(missing_ok=True)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(PermissionError):  # of a folder, on some systems
            os.fsync(handle)
    finally:
        os.close(handle)
