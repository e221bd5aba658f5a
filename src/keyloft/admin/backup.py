"""Saves a whole database into an SQLite file, and brings it back."""

import hashlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.admin.export_files import is_export
from keyloft.admin.export_format import row_name
from keyloft.admin.files import complete_file
from keyloft.admin.selection import Selection, count
from keyloft.admin.threads import in_thread
from keyloft.core.maintenance import EVERYTHING, Maintenance, Snapshot, version_after_jump
from keyloft.core.urls import DatabaseUrl
from keyloft.core.values import DAMAGED
from keyloft.errors import Busy, DatabaseError, DiskFull, InvalidArgument, NotADatabase, NotEmpty


class BackupReport(Struct, frozen=True, kw_only=True):
    """What a backup holds."""

    file: str
    rows: int
    bytes: int
    """The size of the file."""
    version: int
    """The version of the last commit that it contains."""


class RestoreReport(Struct, frozen=True, kw_only=True):
    """What a restore brought back."""

    file: str
    database: str
    """The database that was restored, without a password."""
    rows: int
    version: int
    """The version of the database's last commit."""
    verified: bool
    """Whether the database holds what the backup holds; False if others wrote into it meanwhile."""


class Digest(Struct, frozen=True):
    """The number of rows of a database, and a hash of their keys, values, versions and times."""

    rows: int
    hash: str


async def backup(
    database: Database, file: Database, *, overwrite: bool = False, progress: Progress | None = None
) -> BackupReport:
    """Write all that is stored at this moment into a file, while others continue to write.

    The file is an SQLite database, also for PostgreSQL. It gets its name once it is complete, checked and on disk, and
    only its owner can read it.

    Example:
        >>> await admin.backup("postgresql://localhost/app", "nightly.db")

    Args:
        database: What to save: a path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        file: Where to write it.
        overwrite: Replace `file` if it exists.
        progress: Called with the stage, how much is done, and the total or None.

    Returns:
        What the backup holds.

    Raises:
        InvalidArgument: `file` exists, is a folder, or is the database itself.
        DiskFull: There is no space for it; nothing of it is left.
        DatabaseError: The database can't be read, is damaged, or the file can't be written.
    """
    target, source = _path(file), DatabaseUrl.parse(database)
    if source.file is not None and _is_same(source.file, target):
        raise InvalidArgument(f"{file} is the database itself: name another file")
    try:
        async with opened(source) as maintenance, complete_file(target, overwrite=overwrite) as unfinished:
            with stage(progress, "saving") as advance:
                await maintenance.backup(str(unfinished), advance)
            async with opened(unfinished) as saved:
                await _check(saved, source.shown, progress)
                rows, version = await _count(saved)
    except DiskFull:
        raise DiskFull(f"no space is left for {target}: the backup was not made, and nothing of it is left") from None
    return BackupReport(file=str(target), rows=rows, bytes=target.stat().st_size, version=version)


async def restore(
    file: Database, database: Database, *, replace: bool = False, progress: Progress | None = None
) -> RestoreReport:
    """Bring back what a backup holds, all of it or nothing, and compare the database with the backup.

    Other processes may have the database open. Their watches of prefixes end with HISTORY_GONE, because it is not known
    what changed. The version counter jumps to the next multiple of 2**40, so that no version is given twice, and the
    store gets another id. If one backup is restored into two new files, these are two stores with different ids, which
    may give the same versions.

    Example:
        >>> await admin.restore("nightly.db", "app.db", replace=True)

    Args:
        file: What `backup` wrote.
        database: Where to restore it; a file that does not exist is made, readable by its owner alone.
        replace: Replace all that is in the database now.
        progress: Called with the stage, how much is done, and the total or None.

    Returns:
        What was brought back.

    Raises:
        NotEmpty: The database holds rows, and `replace` is False.
        InvalidArgument: `file` is the database itself.
        CannotOpen: There is no such file.
        NotADatabase: It is an export, or no SQLite file at all.
        DiskFull: There is no space for it; nothing was changed.
        Busy: Another process wrote into the database meanwhile; nothing was changed.
        DatabaseError: The backup is damaged, or the database can't be written.
    """
    source, url = _path(file), DatabaseUrl.parse(database)
    target = url.file
    if target is not None and _is_same(source, target):
        raise InvalidArgument(f"{file} is the database itself: name another database= to restore it into")
    if await in_thread(partial(is_export, source)):
        raise NotADatabase(f"{source} is an export, not a backup: `keyloft import` reads it")
    is_new = target is not None and not target.exists()
    async with opened(source) as saved, saved.snapshot() as wanted:
        lost = 0 if is_new else await _rows_in(url)
        if lost and not replace:
            raise NotEmpty(url.shown, lost, await count(wanted, Selection()))
        await _check(saved, str(source), progress)
        held = await _digest(wanted, progress, "reading")
        if target is not None and is_new:
            # The file is copied as a whole, so that tables of other programs come along.
            try:
                async with complete_file(target) as unfinished:
                    with stage(progress, "restoring") as advance:
                        await saved.backup(str(unfinished), advance)
                    async with opened(unfinished) as made:
                        version = await made.restart_history()
                        async with made.snapshot() as found:
                            verified = await _verify(held, found, progress)
            except DiskFull:
                raise DiskFull(f"no space is left for {target}: nothing was restored, and nothing is left") from None
        else:
            verified, version = await _replace_rows(wanted, held, url, lost, progress)
    return RestoreReport(file=str(source), database=url.shown, rows=held.rows, version=version, verified=verified)


async def _replace_rows(
    wanted: Snapshot, held: Digest, database: DatabaseUrl, lost: int, progress: Progress | None
) -> tuple[bool, int]:
    """Replace all rows of a database; whether it now holds the same, and its version."""
    async with opened(database, make=True) as target:
        rows, before = await _count(target)
        if rows and not lost:
            raise Busy(f"another process wrote into {database.shown} meanwhile; nothing was changed")
        # If the database was empty, so that nothing could be lost, no row may have been added since.
        with stage(progress, "restoring", held.rows) as advance:
            await target.become(wanted, advance, expected_version=None if lost else before)
        version_if_alone = version_after_jump(before, wanted.version)
        async with target.snapshot() as found:
            return await _verify(held, found, progress, alone=found.version == version_if_alone), found.version


async def _check(saved: Maintenance, origin: str, progress: Progress | None) -> None:
    """Refuse a damaged backup; the database that it is a copy of is damaged, too."""
    with stage(progress, "checking") as advance:
        found = await saved.damage()
        async with saved.snapshot() as snapshot:
            found += [f"{name} does not match its checksum" async for name in _damaged_rows(snapshot)]
        if found:
            raise DatabaseError(f"{origin} is damaged: {found[0]}; `keyloft check --database {origin}` shows all of it")
        advance(1, 1)


async def _damaged_rows(snapshot: Snapshot) -> AsyncIterator[str]:
    for part in EVERYTHING:
        async for rows in snapshot.rows(part):
            for row in rows:
                if row.encoding == DAMAGED:
                    yield row_name(part.space, row.key)


async def _count(maintenance: Maintenance) -> tuple[int, int]:
    """How many rows there are, and the version of the last commit."""
    async with maintenance.snapshot() as snapshot:
        return await count(snapshot, Selection()), snapshot.version


async def _rows_in(database: DatabaseUrl) -> int:
    try:
        async with opened(database) as target:
            return (await _count(target))[0]
    except NotADatabase:
        return 0


async def _verify(held: Digest, found: Snapshot, progress: Progress | None, *, alone: bool = True) -> bool:
    """Whether a database holds what the backup does; if it is not `alone`, others may have changed it.

    Raises:
        DatabaseError: It holds something else, although no other process wrote.
    """
    is_same = await _digest(found, progress, "comparing") == held
    if not is_same and alone:
        raise DatabaseError("what was restored is not what the backup holds: check the disk, and restore again")
    return is_same


async def _digest(snapshot: Snapshot, progress: Progress | None, name: str) -> Digest:
    """The digest of a database; `name` is that of the stage."""
    rows, hashed = 0, hashlib.blake2b(digest_size=32)
    to_bytes = msgspec.msgpack.Encoder().encode
    with stage(progress, name) as advance:
        for part in EVERYTHING:
            hashed.update(part.space.encode())
            async for some in snapshot.rows(part):
                # Row by row: the hash must not depend on where a page ends.
                for row in some:
                    hashed.update(to_bytes(row))
                rows += len(some)
                advance(rows, None)
    return Digest(rows, hashed.hexdigest())


def _path(file: Database) -> Path:
    url = DatabaseUrl.parse(file)
    if url.file is None:
        raise InvalidArgument(f"{url.shown}: a backup is an SQLite file: name one by its path")
    return url.file


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
