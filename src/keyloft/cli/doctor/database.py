"""Examines a database without changing it: its URL, file and folder, schema, clock, and the disk below."""

import getpass
import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from keyloft import limits
from keyloft.admin import Finding
from keyloft.admin.threads import in_thread
from keyloft.cli.doctor.checks import STORE_ID, ok, problem, skipped, warning
from keyloft.cli.terminal import sized
from keyloft.core.adoption import CHAPTER
from keyloft.core.schema import PLUGIN_TABLE
from keyloft.core.urls import DatabaseUrl
from keyloft.engines import Inspection, inspect_database
from keyloft.errors import CannotOpen, DatabaseError, InvalidInput, NotADatabase, Unreachable

_MOUNTS: Final = Path("/proc/self/mountinfo")
_REMOTE: Final = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "davfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.davfs", "vboxsf"),
)


async def examine(url: str) -> list[Finding]:
    """Whether the database can be used, and what time it has."""
    try:
        named = DatabaseUrl.parse(url)
    except (InvalidInput, DatabaseError) as error:
        return [_failed(error)]
    location, migrate, found = named.shown, "`keyloft migrate`, with the same settings", None
    if (file := named.file) is not None:
        location, migrate = str(file), f"`keyloft migrate --database {_quoted(file)}`"
        found = await in_thread(lambda: file_finding(file))
        if found.severity == "problem" or not await in_thread(file.exists):
            return [found]
    try:
        inspection = await inspect_database(named, patience=limits.DOCTOR_DATABASE_SECONDS)
    except DatabaseError as error:
        return [_failed(error)]
    if inspection is None:
        what = f"{named.shown} is in memory: its data ends with its process"
        return [warning("database", what, cure="--database FILE keeps it")]
    if found is None or found.severity == "ok":
        found = ok("database", f"{location} opens and answers ({inspection.software})")
    obstacles = [problem("rights", seen, cure=advice) for seen, advice in inspection.obstacles]
    doubts = [warning("cluster", seen, cure=advice) for seen, advice in inspection.doubts]
    return [
        found,
        schema(inspection, migrate),
        *([ok("store", f"{STORE_ID}{inspection.store}")] if inspection.store else []),
        *existing_table(inspection),
        *obstacles,
        *doubts,
        *servers(inspection),
        *checksums(inspection),
        clock(inspection),
    ]


def _failed(error: Exception) -> Finding:
    return problem("database", str(error), cure=_advice(error))


def _advice(error: Exception) -> str:
    match error:
        case InvalidInput():
            return (
                "write a path, sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE or etcd://HOST,HOST,HOST/PREFIX"
            )
        case Unreachable():
            return "start it, or correct --database (KEYLOFT_DATABASE_URL)"
        case NotADatabase():
            return "name another file with --database, or restore it from a backup"
        case CannotOpen():
            return "correct --database (KEYLOFT_DATABASE_URL), or what the message names"
    return "see what the message names; `keyloft serve` would fail likewise"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def file_finding(file: Path) -> Finding:
    """Whether a file, and what SQLite keeps beside it, can be written."""
    try:
        # From Python 3.14 on, `exists()` and the like no longer raise what prevents them: `stat()` does.
        with suppress(FileNotFoundError, NotADirectoryError):
            file.stat()
        return _refusal(file) or _doubt(file) or ok("database", str(file))
    except OSError as error:
        what = f"{file} can't be read: {error.strerror}"
        return problem("database", what, cure=f"let {_user()} enter the folders above it")


def _refusal(file: Path) -> Finding | None:
    """What prevents the use of a file."""
    folder, user = file.parent, _user()
    if not folder.exists():
        advice = f"mkdir -p {_quoted(folder)}, or name another with --database"
        return problem("database", f"the folder {folder} is not there", cure=advice)
    if not folder.is_dir():
        what = f"{folder} is a file, and {file.name} can't be in it"
        return problem("database", what, cure="name another with --database")
    if file.is_dir():
        return problem("database", f"{file} is a folder", cure="name a file in it with --database")
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"the folder {folder} can't be written by {user}: SQLite keeps its log there"
        advice = f"let {user} write to it, with chown or chmod, or name another file with --database"
        return problem("database", what, cure=advice)
    for part in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        if part.exists() and not os.access(part, os.R_OK | os.W_OK):
            advice = f"chown {user} {_quoted(part)}, or chmod u+rw it"
            return problem("database", f"{part} can't be written by {user}", cure=advice)
    return None


def _doubt(file: Path) -> Finding | None:
    """What may be a mistake about a file that can be used."""
    if (kind := filesystem_of(file.parent)) in _REMOTE:
        what = f"{file.parent} is on a network file system ({kind}), on which SQLite's locks may fail and data get lost"
        return warning("database", what, cure="use a local disk, or PostgreSQL for several machines")
    if not file.exists():
        advice = "the first write makes it; --database names another"
        return warning("database", f"there is no file {file} yet", cure=advice)
    return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"the user {os.getuid()}"


def filesystem_of(folder: Path, mounts: Path = _MOUNTS) -> str | None:
    """The kind of file system that a folder is on; None if the operating system does not say."""
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    resolved = folder.resolve()
    kind, depth = None, -1
    for line in lines:
        before, _, after = line.partition(" - ")
        # Spaces and similar characters are written in octal.
        point = Path(before.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape"))
        # A later mount hides an earlier one at the same path.
        if resolved.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = after.split(" ")[0], len(point.parts)
    return kind


def schema(inspection: Inspection, migrate: str) -> Finding:
    """Whether the tables are those of this version."""
    revision, wanted = inspection.revision, inspection.wanted
    if revision is None:
        advice = "opening it makes them; --database names another database"
        return warning("schema", "there are no tables of Keyloft in it yet", cure=advice)
    if revision == wanted:
        return ok("schema", f"schema {revision}, that of this version")
    is_older = revision < wanted
    what = f"schema {revision} is {'older' if is_older else 'newer'} than {wanted}, which this version of Keyloft has"
    advice = f"stop what uses it, make a copy, then {migrate}" if is_older else "upgrade Keyloft"
    return problem("schema", what, cure=advice)


def existing_table(inspection: Inspection) -> list[Finding]:
    """What opening the database would do with a plugins' table that another program made."""
    if (adoption := inspection.adoption) is None:
        return []
    what = f"a table {PLUGIN_TABLE} is there already"
    if adoption.differences:
        advice = f"change or rename it: {CHAPTER}, has the statements"
        return [problem("adoption", f"{what}, and can't be adopted: {'; '.join(adoption.differences)}", cure=advice)]
    if not adoption.statements:
        return [ok("adoption", f"{what}: opening adopts it, leaves it as it is, and keeps its rows")]
    advice = "make a copy first; `keyloft migrate --dry-run` shows the statements"
    return [
        warning(
            "adoption", f"{what}: opening adopts it, changes its columns or indexes, and keeps its rows", cure=advice
        )
    ]


def servers(inspection: Inspection) -> list[Finding]:
    """Which host is the primary, and whether the failover of a server would lose something."""
    found = inspection.servers
    if found is None:
        return []
    what = "; ".join([line for line in found.lines if not line.startswith(("failovers", "unknown"))])
    if len([host for host in found.hosts if host.role == "primary"]) > 1:
        return [problem("servers", f"{what}: two hosts can be written", cure="stop the former primary")]
    if silent := [host.name for host in found.hosts if host.role == "unreachable"]:
        return [warning("servers", what, cure=f"start {', '.join(silent)}, or leave it out of the URL")]
    if len(found.hosts) > 1 and found.synchronous == "":
        cure = "set synchronous_standby_names; with Patroni, synchronous_mode: quorum"
        return [warning("servers", f"{what}: a failover may lose acknowledged writes", cure=cure)]
    return [ok("servers", what)]


def checksums(inspection: Inspection) -> list[Finding]:
    """Whether a server notices pages that a disk has changed."""
    if inspection.has_checksums is not False:
        return []
    what = "the server has no checksums of its pages (data_checksums): it would serve damaged pages as data"
    return [warning("checksums", what, cure="stop the server, run pg_checksums --enable, and start it again")]


def clock(inspection: Inspection) -> Finding:
    """Whether the database and this machine agree on the time."""
    if inspection.ahead is None:
        return ok("clock", "expiry goes by this machine's clock: there is no other to differ from")
    skew = abs(inspection.ahead)
    if skew <= limits.DOCTOR_SKEW_SECONDS:
        return ok("clock", "the database and this machine agree on the time")
    direction = "ahead of" if inspection.ahead > 0 else "behind"
    what = f"the database's clock is {skew:,.1f} s {direction} this machine's; expiry goes by the database's"
    return (problem if skew > limits.DOCTOR_HARMFUL_SKEW_SECONDS else warning)("clock", what, cure="set both by NTP")


async def disk(url: str) -> list[Finding]:
    """Whether there is space for the database to grow."""
    try:
        file = DatabaseUrl.parse(url).file
    except (InvalidInput, DatabaseError):
        file = None  # `examine` reports it
    if file is None:
        return [skipped("disk", "the data is in no file of this machine, as far as is known")]
    return [await in_thread(lambda: _disk_below(file))]


def _disk_below(file: Path) -> Finding:
    try:
        space, room = shutil.disk_usage(file.parent), os.statvfs(file.parent)
    except OSError:
        return skipped("disk", f"the folder {file.parent} can't be read")
    size = sum(part.stat().st_size for part in (file, Path(f"{file}-wal")) if part.is_file())
    return space_for(size, space.free, room.f_favail if room.f_files else None)


def space_for(size: int, free: int, inodes: int | None) -> Finding:
    """Whether so much free space is enough for a database of this size."""
    what = f"{sized(free)} free, the database has {sized(size)}"
    if free < limits.DOCTOR_LEAST_FREE_BYTES:
        return problem("disk", what, cure="make space: writes fail on a full disk")
    if free < max(limits.DOCTOR_FREE_BYTES, 2 * size):
        return warning("disk", what, cure="make space: a copy or a migration needs as much as the database has")
    if inodes is not None and inodes < limits.DOCTOR_FREE_INODES:
        return warning("disk", f"{what}; only {inodes} more files can be made", cure="remove files")
    return ok("disk", what)
