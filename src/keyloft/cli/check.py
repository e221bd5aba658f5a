"""The command that looks for what is wrong with a database: `check`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

import typer
from msgspec import Struct

from keyloft.cli.database import check_there, finished, maintenance_of, named_database
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import progress
from keyloft.cli.terminal import is_for_people, remark, say, show_json
from keyloft.core import key_text, keys, values
from keyloft.core.maintenance import Maintenance, Range, Snapshot
from keyloft.core.records import Record, Space
from keyloft.core.urls import without_password
from keyloft.errors import (
    DatabaseError,
    InvalidArgument,
    InvalidInput,
    NotADatabase,
    SchemaTooNew,
    SchemaTooOld,
    Undecodable,
)
from keyloft.plugins import rules
from keyloft.semantic.keys import is_entry, key_of_row
from keyloft.semantic.row_checks import RowChecker
from keyloft.server.config import Flags

_LONGEST_KEY = 300


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"check": check})


def check(
    *,
    limit: Annotated[int, typer.Option(metavar="N", help="Show so many problems; all are counted.")] = 100,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Look for what is wrong with a database; exit code 1 if something is.

    Pages and indexes, the schema, keys and values that can't be read, versions that were never given out, rows that
    point to nothing. Changes nothing, and shows no values. It may run beside a service.

    Example: keyloft check --database nightly.db
    """
    if limit < 0:
        raise InvalidArgument("--limit: how many problems to show, 0 or more")
    url = named_database(flags)
    check_there(url)
    found = Findings(limit)
    finished(_look(url, found))
    name = without_password(url)
    if as_json or not is_for_people():
        show_json([problem.shown() for problem in found.kept], as_json=True)
    else:
        for problem in found.kept:
            say(problem.line())
    if not found.all:
        remark(f"{name}: nothing is wrong with its {found.rows:,} rows")
        return 0
    shown = f", of which {len(found.kept):,} are shown" if len(found.kept) < found.all else ""
    remark(f"{name}: {found.all:,} problem{'s' if found.all > 1 else ''}{shown}; {found.rows:,} rows were looked at")
    return 1


class Problem(Struct, frozen=True):
    """Something that is wrong."""

    where: str
    """A face, or the database itself."""
    kind: str
    """damage, schema, key, value, version, time, orphan"""
    told: str
    key: str | None = None

    def shown(self) -> dict[str, Any]:
        return {"where": self.where, "kind": self.kind, "key": self.key, "problem": self.told}

    def line(self) -> str:
        return f"{self.where}: {self.told}" if self.key is None else f"{self.where} {self.key}: {self.told}"


class Findings:
    """What is wrong: all of it is counted, some of it is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept: list[Problem] = []
        self.all = 0
        self.rows = 0

    def add(self, problem: Problem) -> None:
        self.all += 1
        if len(self.kept) < self._limit:
            self.kept.append(problem)

    def of_database(self, kind: str, error: object) -> None:
        self.add(Problem("database", kind, " ".join(str(error).split())))


async def _look(url: str, found: Findings) -> None:
    try:
        async with maintenance_of(url) as maintenance:
            await _look_into(maintenance, found)
    except (SchemaTooOld, SchemaTooNew) as error:
        found.of_database("schema", error)
    except DatabaseError as error:
        _check_is_damage(error)
        found.of_database("damage", error)


def _check_is_damage(error: DatabaseError) -> None:
    """What is in the way of a check is no finding: a server that is away, a lock, a missing permission."""
    if type(error) not in (DatabaseError, NotADatabase):
        raise error


async def _look_into(maintenance: Maintenance, found: Findings) -> None:
    with progress("checking the database") as advance:
        try:
            for line in await maintenance.damage(advance):
                found.of_database("damage", line)
        except DatabaseError as error:
            _check_is_damage(error)
            found.of_database("damage", error)
    with progress("checking rows") as advance:
        async with maintenance.snapshot() as snapshot:
            for space in Space:
                defects = _defects_of(space, snapshot)
                try:
                    async for rows in snapshot.rows(Range(space)):
                        for row in rows:
                            for kind, what in defects(row):
                                found.add(Problem(space.value, kind, what, _key(space, row.key)))
                        found.rows += len(rows)
                        advance(found.rows, found.rows)
                except DatabaseError as error:
                    _check_is_damage(error)
                    found.add(Problem(space.value, "damage", f"not all rows can be read: {error}"))


Defects: TypeAlias = Iterator[tuple[str, str]]
"""The kind of each, and what is to be told."""


def _defects_of(space: Space, snapshot: Snapshot) -> Callable[[Record], Defects]:
    """What says what is wrong with the rows of a space, which come in the order of their keys."""
    checker = RowChecker(snapshot.now)

    def semantic(row: Record) -> Defects:
        if (defect := checker.defect(row)) is not None:
            yield defect

    own = {Space.TUPLES: _tuple_defects, Space.PLUGINS: _plugin_defects, Space.SEMANTIC: semantic}[space]

    def defects(row: Record) -> Defects:
        if not isinstance(row.version, int):
            yield "version", "its version is no number"
        elif row.version > snapshot.version:
            yield (
                "version",
                f"its version, {row.version}, is above the clock, {snapshot.version}: no commit has made it",
            )
        if not isinstance(row.expires_at, int | None):
            yield "time", "its expiry is no time"
        elif space is not Space.PLUGINS and not (isinstance(row.key, bytes) and isinstance(row.value, bytes)):
            yield "key", "its key or value is not binary"
        else:
            yield from own(row)

    return defects


def _tuple_defects(row: Record) -> Defects:
    try:
        if keys.encode(keys.decode(row.key)) != row.key:
            yield "key", "its key is written as no key is, so that nobody finds it"
    except (Undecodable, InvalidInput):
        yield "key", "its key can't be read"
    try:
        values.decode(row.value, row.encoding)
    except Undecodable as error:
        yield "value", str(error)


def _plugin_defects(row: Record) -> Defects:
    plugin, key = row.key
    try:
        rules.plugin_name(plugin)
        rules.key(key)
    except InvalidInput as error:
        yield "key", f"no service can serve it: {error}"
    try:
        values.decode_json(row.value)
    except Undecodable as error:
        yield "value", str(error)


def _key(space: Space, key: Any) -> str:
    """A key as people write it, or else with all that is unprintable escaped."""
    shown = ascii(key)
    if isinstance(key, bytes):
        shown = shown[2:-1]
        if space is Space.TUPLES:
            with contextlib.suppress(Undecodable):
                shown = key_text.written(keys.decode(key))
        elif is_entry(key) and "\\" not in shown:
            with contextlib.suppress(ValueError):
                shown = key_of_row(key)
    elif isinstance(key, tuple) and all([isinstance(part, str) for part in key]):
        shown = key_text.written(key)
    return shown if len(shown) <= _LONGEST_KEY else f"{shown[:_LONGEST_KEY]}…"
