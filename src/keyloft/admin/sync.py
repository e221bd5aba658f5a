"""The functions of `keyloft.admin` without `await`: `from keyloft.admin import sync as admin`.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Iterator
from typing import IO

from keyloft import admin as asynchronous
from keyloft import limits
from keyloft.admin.backup import BackupReport, RestoreReport
from keyloft.admin.changes import KeyChange
from keyloft.admin.check import CheckReport
from keyloft.admin.compact import CompactReport
from keyloft.admin.databases import Database, Progress
from keyloft.admin.import_from import ForeignStore, ImportFromReport
from keyloft.admin.stats import StatsReport
from keyloft.admin.transfer import CopyReport, ExportReport, IfExists, ImportReport
from keyloft.core.drivers import iterate_alone, run_alone
from keyloft.core.keys import KeyLike, TupleKey


def backup(
    database: Database, file: Database, *, overwrite: bool = False, progress: Progress | None = None
) -> BackupReport:
    """Write all that is stored at this moment into a file, while others continue to write.

    The file is an SQLite database, also for PostgreSQL. It gets its name once it is complete, checked and on disk, and
    only its owner can read it.

    Example:
        >>> admin.backup("postgresql://localhost/app", "nightly.db")

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
    return run_alone(asynchronous.backup(database, file, overwrite=overwrite, progress=progress))


def changes(
    database: Database,
    *,
    since: int | None = None,
    limit: int | None = None,
    prefix: TupleKey | None = None,
    plugin: str | None = None,
    project: str | None = None,
    name: str | None = None,
) -> Iterator[KeyChange]:
    """The changes that the change log holds, oldest first, as it is at one moment: all of them, or those of some keys.

    Example:
        >>> for change in admin.changes("app.db", since=4711):
        ...     print(change.version, change.kind, change.key)

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        since: Only what changed after this version; None for all that the log holds.
        limit: How many to return at most.
        prefix: Of the tuple store, only what is below it.
        plugin: Only what this plugin stores.
        project: Only this project of the semantic store: `tenant/<tenant>/project/<project>`.
        name: Only the tuple store of this name.

    Raises:
        HistoryGone: The log does not reach back to `since`.
        InvalidArgument: `since` or `limit` is below 0.
        InvalidInput: A prefix, plugin, project or store can't have this name.
        DatabaseError: The database can't be read.
    """
    return iterate_alone(
        asynchronous.changes(
            database, since=since, limit=limit, prefix=prefix, plugin=plugin, project=project, name=name
        )
    )


def check(database: Database, *, limit: int = limits.FINDINGS, progress: Progress | None = None) -> CheckReport:
    """Find what is wrong with a database. It may run beside a service, and changes nothing.

    It reads pages and indexes, the schema, the change log, and all rows: those that don't match their checksum, keys
    and values that can't be decoded, versions that were never given, rows that point to nothing.

    Example:
        >>> report = admin.check("nightly.db")
        >>> [finding.what for finding in report.findings]

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        limit: How many findings to return; all are counted.
        progress: Called with the stage, how much is done, and the total or None.

    Returns:
        The findings, without values, and how many there are.

    Raises:
        InvalidArgument: `limit` is below 0.
        DatabaseError: The database can't be checked: its server does not answer, or this user may not read it.
    """
    return run_alone(asynchronous.check(database, limit=limit, progress=progress))


def compact(database: Database, *, progress: Progress | None = None) -> CompactReport:
    """Give the space of removed entries back.

    An SQLite file is written again: that needs as much free space as the file has, and writers wait. PostgreSQL makes
    the space free for new rows, and keeps most of it. etcd forgets old revisions, those of other programs included, and
    its members give the space back one after the other.

    Example:
        >>> report = admin.compact("app.db")
        >>> report.before.database_bytes - report.after.database_bytes

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        progress: Called when the work begins and when it is done: no engine reports progress in between.

    Returns:
        The sizes before and after.

    Raises:
        Busy: Other processes hold the database for too long.
        DatabaseError: The database can't be opened or written.
    """
    return run_alone(asynchronous.compact(database, progress=progress))


def copy(
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
        >>> admin.copy("app.db", "postgresql://localhost/app")

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
    return run_alone(
        asynchronous.copy(
            source,
            target,
            prefix=prefix,
            plugin=plugin,
            project=project,
            name=name,
            existing=existing,
            progress=progress,
        )
    )


def export(
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
        >>> admin.export("app.db", "users.jsonl", prefix=("users",))

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
    return run_alone(
        asynchronous.export(
            database,
            target,
            prefix=prefix,
            plugin=plugin,
            project=project,
            name=name,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    )


def import_(
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
        >>> admin.import_("users.jsonl", "app.db", existing="keep")

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
    return run_alone(
        asynchronous.import_(
            source,
            database,
            prefix=prefix,
            plugin=plugin,
            project=project,
            name=name,
            existing=existing,
            progress=progress,
        )
    )


def import_from(
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
        >>> admin.import_from("diskcache", "/var/cache/app", "app.db", prefix=("cache",))

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
    return run_alone(
        asynchronous.import_from(
            kind,
            source,
            database,
            prefix=prefix,
            name=name,
            table=table,
            trust=trust,
            existing=existing,
            progress=progress,
        )
    )


def restore(
    file: Database, database: Database, *, replace: bool = False, progress: Progress | None = None
) -> RestoreReport:
    """Bring back what a backup holds, all of it or nothing, and compare the database with the backup.

    Other processes may have the database open. Their watches of prefixes end with HISTORY_GONE, because it is not known
    what changed. The version counter jumps to the next multiple of 2**40, so that no version is given twice, and the
    store gets another id. If one backup is restored into two new files, these are two stores with different ids, which
    may give the same versions.

    Example:
        >>> admin.restore("nightly.db", "app.db", replace=True)

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
    return run_alone(asynchronous.restore(file, database, replace=replace, progress=progress))


def stats(database: Database, *, soon: float = limits.SOON_SECONDS, progress: Progress | None = None) -> StatsReport:
    """Count what a database holds, per interface, named store, plugin and project, and what expires.

    Example:
        >>> report = admin.stats("app.db")
        >>> report.total.entries

    Args:
        database: A path, `sqlite:///…`, `postgresql://…` or `etcd://…`.
        soon: What expires within this many seconds counts as expiring soon.
        progress: Called with the stage, how many rows are counted, and the total, which is None until the end.

    Returns:
        The counts. An entry that has expired and is not yet swept does not count as an entry. Each slice of some
        thousand rows is counted as it is at that moment, so that nothing waits while a large database is counted.

    Raises:
        InvalidArgument: `soon` is out of range.
        DatabaseError: The database can't be read.
    """
    return run_alone(asynchronous.stats(database, soon=soon, progress=progress))
