"""Finds what is wrong with a database, without changing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from msgspec import Struct

from keyloft import errors, limits
from keyloft.admin.databases import Database, Progress, opened, stage
from keyloft.admin.export_format import row_name
from keyloft.clock import SystemClock
from keyloft.core import keys, values
from keyloft.core.maintenance import Maintenance, Range, Snapshot
from keyloft.core.records import Key, Record, Space
from keyloft.core.values import DAMAGED
from keyloft.engines import LogChecker
from keyloft.errors import DatabaseError, InvalidArgument, InvalidInput, Undecodable
from keyloft.plugins import rules
from keyloft.semantic.row_checks import RowChecker
from keyloft.tuples.named import check_name

_CURES: Final = (
    {
        "damage": "export what can still be read, then restore a backup",
        "schema": "migrate the database, or upgrade Keyloft, as the message says",
        "orphan": "nothing: it is harmless",
    }
    | dict.fromkeys(
        ("key", "value", "time"), "correct or remove the row with SQL: readers of other rows are not affected"
    )
    | dict.fromkeys(
        ("version", "log"),
        "back the database up and restore that backup into it, with --replace: its change log then begins again, above "
        "all versions",
    )
)
_NO_DATABASE: Final = "name another file; if this was the database, restore a backup"
_DATABASE: Final = "database"
_LOG: Final = "change log"


class Finding(Struct, frozen=True):
    """What was examined, how it is, and what to do about it. It never holds a value or a password."""

    severity: Literal["ok", "warning", "problem", "skipped"]
    code: str
    """What was examined, or what kind of defect it is: `schema`, `damage`, `key`, …"""
    what: str
    """What was found."""
    where: str = ""
    """The row or file that it concerns, if it concerns one."""
    cure: str = ""
    """What to do about it."""


class CheckReport(Struct, frozen=True, kw_only=True):
    """What a check found."""

    rows: int
    """How many rows were read."""
    problems: int
    """How many problems there are."""
    findings: tuple[Finding, ...]
    """The first of them, up to the limit."""


async def check(database: Database, *, limit: int = limits.FINDINGS, progress: Progress | None = None) -> CheckReport:
    """Find what is wrong with a database. It may run beside a service, and changes nothing.

    It reads pages and indexes, the schema, the change log, and all rows: those that don't match their checksum, keys
    and values that can't be decoded, versions that were never given, rows that point to nothing.

    Example:
        >>> report = await admin.check("nightly.db")
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
    if limit < 0:
        raise InvalidArgument("limit: expected the number of findings to show, 0 or more")
    examination = _Examination(limit)
    with examination.noting(_DATABASE):
        async with opened(database) as maintenance:
            await examination.examine(maintenance, progress)
    return CheckReport(rows=examination.rows, problems=examination.problems, findings=tuple(examination.findings))


class _Examination:
    """Counts all problems, and keeps the first ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.findings: list[Finding] = []
        self.problems = 0
        self.rows = 0

    def add(self, code: str, what: object, where: str, *, cure: str | None = None) -> None:
        self.problems += 1
        if len(self.findings) < self._limit:
            cure = cure or _CURES[code]
            self.findings.append(Finding("problem", code, " ".join(str(what).split()), where, cure))

    @contextmanager
    def noting(self, where: str, what: str = "") -> Iterator[None]:
        """Add an error as a finding; raise it if it prevents the check: no answer, a lock, a missing permission."""
        try:
            yield
        except (errors.SchemaTooOld, errors.SchemaTooNew) as error:
            self.add("schema", error, where)
        except DatabaseError as error:
            if type(error) not in (DatabaseError, errors.NotADatabase):
                raise
            cure = _NO_DATABASE if isinstance(error, errors.NotADatabase) else None
            self.add("damage", f"{what}{error}", where, cure=cure)

    async def examine(self, maintenance: Maintenance, progress: Progress | None) -> None:
        with stage(progress, "checking the database") as advance, self.noting(_DATABASE):
            for line in await maintenance.damage():
                self.add("damage", line, _DATABASE)
            advance(1, 1)
        async with maintenance.snapshot() as snapshot:
            await self._examine_log(snapshot, progress)
            checker = RowChecker(snapshot.now)
            with stage(progress, "checking rows") as advance:
                for space in Space:
                    with self.noting(space.value, "not all rows can be read: "):
                        async for rows in snapshot.rows(Range(space)):
                            for row in rows:
                                for code, what in _defects(space, row, snapshot, checker):
                                    self.add(code, what, row_name(space, row.key))
                            self.rows += len(rows)
                            advance(self.rows, None)

    async def _examine_log(self, snapshot: Snapshot, progress: Progress | None) -> None:
        checker, done = LogChecker(), 0
        with stage(progress, "checking the change log") as advance, self.noting(_LOG, "not all of it can be read: "):
            async for rows in snapshot.log():
                for row in rows:
                    for what in checker.defects(row):
                        self.add("log", what, _LOG)
                done += len(rows)
                advance(done, None)
            for what in checker.defects_at_end(snapshot.version, snapshot.now, SystemClock().now()):
                self.add("log", what, _LOG)


def _defects(space: Space, row: Record, snapshot: Snapshot, checker: RowChecker) -> Iterator[tuple[str, str]]:
    """The code of each defect of a row, and what is wrong; the rows of a space arrive in the order of their keys."""
    if not isinstance(row.version, int):
        yield "version", "its version is not a number"
    elif row.version > snapshot.version:
        yield "version", f"its version, {row.version}, is above the version counter, {snapshot.version}"
    if row.encoding == DAMAGED:
        yield "damage", "it does not match its checksum: the disk or the memory has changed it"
    elif not isinstance(row.expires_at, int | None):
        yield "time", "its expiry is not a time"
    elif space is not Space.PLUGINS and not (isinstance(row.key, bytes) and isinstance(row.value, bytes)):
        yield "key", "its key or value is not binary"
    elif space is Space.SEMANTIC:
        if defect := checker.defect(row):
            yield defect
    else:
        if fault := _key_fault(row.key):
            yield "key", fault
        try:
            values.decode(row.value, row.encoding)
        except Undecodable as error:
            yield "value", str(error)


def _key_fault(key: Key) -> str | None:
    """Why no caller can read the entry of a plugin or of a tuple store; None if callers can."""
    try:
        if isinstance(key, tuple):
            plugin, name = key
            rules.plugin_name(plugin)
            rules.key(name)
        else:
            store, encoded = keys.split_store(key)
            if store is not None:
                check_name(store)
            if keys.encode(keys.decode(encoded)) != encoded:
                return "its key is not encoded as Keyloft encodes keys, so that no read finds it"
    except Undecodable:
        return "its key can't be decoded"
    except InvalidInput as error:
        return f"no service can serve it: {error}"
    return None
