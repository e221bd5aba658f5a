"""The commands that save a database, bring it back: `backup`, `restore`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from keyloft.admin.comparison import Digest, digest
from keyloft.admin.files import mode_of, put_in_place
from keyloft.admin.selection import Selection, count
from keyloft.cli.database import check_there, file_of, finished, maintenance_of, named_database
from keyloft.cli.options import AsJson, Yes, add_commands
from keyloft.cli.progress import progress
from keyloft.cli.terminal import confirm, is_for_people, remark, say, show_json, sized
from keyloft.core.maintenance import Maintenance, Snapshot
from keyloft.core.urls import without_password
from keyloft.errors import Busy, CannotOpen, DatabaseError, DiskFull, InvalidArgument, NotADatabase
from keyloft.server.config import Flags

Target: TypeAlias = Annotated[str, typer.Argument(metavar="FILE", help="Where to write it: an SQLite file.")]
Backup: TypeAlias = Annotated[str, typer.Argument(metavar="FILE", help="What `keyloft backup` wrote.")]


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"backup": backup, "restore": restore})


def backup(
    file: Target,
    *,
    force: Annotated[bool, typer.Option("--force", help="FILE may exist already; it is replaced.")] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Write all that is stored at this moment into a file, while others go on writing.

    The file is an SQLite database, of PostgreSQL, too. It has its name once it is complete, checked, and on disk.

    Example: keyloft backup nightly.db
    """
    url, target = named_database(flags), _path(file)
    source = file_of(url)
    if source is not None and _is_same(source, target):
        raise InvalidArgument(f"{file} is the database itself: name another file")
    if target.is_dir():
        raise InvalidArgument(f"{target} is a folder: name a file in it")
    if os.path.lexists(target) and not force:
        raise InvalidArgument(f"{target} exists already, and is left as it is: name another file, or say --force")

    check_there(url)
    mode = mode_of(source)
    try:
        with put_in_place(target, mode=mode, force=force) as unfinished:
            rows, clock = finished(_saved(url, unfinished))
    except DiskFull:
        raise DiskFull(f"no space is left for {target}: the backup was not made, and nothing of it is left") from None
    made = {"file": str(target), "rows": rows, "bytes": target.stat().st_size, "clock": clock}
    if as_json or not is_for_people():
        show_json(made, as_json=True)
    else:
        say(f"{target} holds {rows:,} rows in {sized(target.stat().st_size)}, up to version {clock}")
    return 0


def restore(
    file: Backup,
    *,
    replace: Annotated[
        bool, typer.Option("--replace", help="All that is in the database now is lost; asks before, with the number.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Bring back what a backup holds, into a database that is empty, or not there yet.

    All of it or nothing; what is there is compared with the backup afterwards. A service that runs goes on.

    Example: keyloft restore nightly.db --database app.db
    """
    url, source = named_database(flags), _path(file)
    target = file_of(url)
    if not source.exists():
        raise CannotOpen(f"there is no file {source}")
    if target is not None and _is_same(source, target):
        raise InvalidArgument(f"{file} is the database itself: --database names where to restore it")

    saved, lost = finished(_look(source, url))
    if lost:
        _ask(url, lost, saved, replace=replace, yes=yes)
    if target is not None and not target.exists():
        with put_in_place(target, mode=mode_of(source)) as unfinished:
            outcome = finished(_copied(source, unfinished))
    else:
        outcome = finished(_restored(source, url, had=lost))
    made = {"file": str(source), "database": without_password(url), **outcome}
    if not made["verified"]:
        remark("Others wrote into the database meanwhile: it can't be compared with the backup any more.")
    if as_json or not is_for_people():
        show_json(made, as_json=True)
    else:
        verified = ", the same as in the backup" if made["verified"] else " of the backup, and what others wrote since"
        say(f"{made['database']} holds {made['rows']:,} rows{verified}, up to version {made['clock']}")
    return 0


async def _saved(url: str, file: Path) -> tuple[int, int]:
    """Make a backup; how many rows it has, and its clock."""
    async with maintenance_of(url) as maintenance:
        with progress("saving") as advance:
            await maintenance.backup(str(file), advance)
    return await _checked(file, without_password(url))


async def _checked(file: Path, origin: str) -> tuple[int, int]:
    """How many rows a backup has, and its clock; it opens, and is whole.

    Raises:
        DatabaseError: It is not, and neither is what it is a copy of.
    """
    async with maintenance_of(str(file)) as maintenance:
        with progress("checking") as advance:
            if found := await maintenance.damage(advance):
                raise DatabaseError(f"{origin} is damaged: {found[0]}; `keyloft check --database {origin}` tells all")
        return await _counted(maintenance)


async def _counted(maintenance: Maintenance) -> tuple[int, int]:
    """How many rows there are, and the clock."""
    async with maintenance.snapshot() as snapshot:
        return await count(snapshot, Selection()), snapshot.version


async def _look(source: Path, url: str) -> tuple[int, int]:
    """How many rows a backup would bring, and how many it would take away."""
    saved, _ = await _checked(source, str(source))
    try:
        if (file := file_of(url)) is not None and not file.exists():
            return saved, 0
        async with maintenance_of(url) as target:
            return saved, (await _counted(target))[0]
    except NotADatabase:
        return saved, 0


def _ask(url: str, lost: int, saved: int, *, replace: bool, yes: bool) -> None:
    """Have it said that what is stored is to be lost."""
    name = without_password(url)
    if not replace:
        raise InvalidArgument(
            f"{name} holds {lost:,} rows, which would be lost, and is left as it is: restore into another database, or "
            "say --replace"
        )
    if not yes:
        confirm(f"Replace the {lost:,} rows in {name} by the {saved:,} of the backup?")


async def _restored(source: Path, url: str, *, had: int) -> dict[str, Any]:
    """Replace all rows of a database by those of the backup."""
    async with maintenance_of(str(source)) as saved, saved.snapshot() as wanted, _ours(url) as maintenance:
        rows, clock = await _counted(maintenance)
        if rows and not had:
            raise Busy(f"somebody wrote into {without_password(url)} meanwhile; nothing was changed")
        held = await _digest(wanted)
        with progress("restoring", held.rows) as advance:
            # Where nothing was to be lost, nothing may have come meanwhile.
            await maintenance.become(wanted, advance, expected_version=None if had else clock)
        alone = wanted.version if clock < wanted.version else clock + 1
        async with maintenance.snapshot() as found:
            verified = await _verified(held, found, alone=found.version == alone)
            return {"rows": held.rows, "clock": found.version, "verified": verified}


async def _copied(source: Path, file: Path) -> dict[str, Any]:
    """Make a file anew, with what other programs had in it."""
    async with maintenance_of(str(source)) as saved:
        with progress("restoring") as advance:
            await saved.backup(str(file), advance)
        async with maintenance_of(str(file)) as made, saved.snapshot() as wanted, made.snapshot() as found:
            held = await _digest(wanted)
            await _verified(held, found, alone=True)
            return {"rows": held.rows, "clock": found.version, "verified": True}


@asynccontextmanager
async def _ours(url: str) -> AsyncIterator[Maintenance]:
    """A whole database, in which our tables are made if there are none."""
    try:
        async with maintenance_of(url):
            make = False
    except NotADatabase:
        make = True
    async with maintenance_of(url, make=make) as maintenance:
        yield maintenance


async def _verified(held: Digest, found: Snapshot, *, alone: bool) -> bool:
    """Whether a database holds what the backup does; if others write there, it need not.

    Raises:
        DatabaseError: It does not, and nobody else wrote.
    """
    is_same = await _digest(found) == held
    if not is_same and alone:
        raise DatabaseError("what was restored is not what the backup holds: check the disk, and restore again")
    return is_same


async def _digest(snapshot: Snapshot) -> Digest:
    with progress("comparing") as advance:
        return await digest(snapshot, advance)


def _path(file: str) -> Path:
    """The file that an argument names."""
    path = file_of(file)
    if path is None:
        raise InvalidArgument(f"{without_password(file)}: a backup is an SQLite file; --database names the database")
    return path.absolute()


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
