"""The commands that move entries between files and databases: `export`, `import`, `import-from`, `copy`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

from keyloft import admin
from keyloft.cli.database import NamedDatabase, TupleDatabase
from keyloft.cli.options import Commands, Options, Output, argument, flag, option
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, is_for_people, remark
from keyloft.core import key_text
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import InvalidArgument, TransferFailed


class PartOptions(Options, frozen=True, kw_only=True):
    """Which entries: all of them, or some."""

    prefix: Annotated[str | None, option("PREFIX", "Of the tuple store, only what is below it, as in users.")] = None
    plugin: Annotated[str | None, option("NAME", "Only what this plugin stores.")] = None
    project: Annotated[str | None, option("PROJECT", "Only this project: tenant/<tenant>/project/<project>.")] = None
    name: Annotated[str | None, option("NAME", "Only the tuple store of this name.")] = None

    def arguments(self) -> dict[str, Any]:
        """As the functions of `keyloft.admin` take them."""
        prefix = None if self.prefix is None else key_text.read_prefix(self.prefix)
        return {"prefix": prefix, "plugin": self.plugin, "project": self.project, "name": self.name}


class Incoming(PartOptions, frozen=True, kw_only=True):
    """Which entries are stored, and what happens to entries that are in the database already."""

    keep: Annotated[bool, flag("--keep", "Leave entries that are stored already as they are.")] = False
    replace: Annotated[bool, flag("--replace", "Replace entries that are stored already.")] = False

    def arguments(self) -> dict[str, Any]:
        """As the functions of `keyloft.admin` take them."""
        return {**super().arguments(), "existing": _existing(keep=self.keep, replace=self.replace)}


def _existing(*, keep: bool, replace: bool) -> str:
    if keep and replace:
        raise InvalidArgument("--keep, --replace: expected one of them, got both")
    return "keep" if keep else "replace" if replace else "refuse"


def export(
    file: Annotated[str, argument("FILE", "Where to; - is the standard output.")] = "-",
    *,
    part: PartOptions,
    resume: Annotated[bool, flag("--resume", "Continue an export that did not end.")] = False,
    force: Annotated[bool, flag("--force", "Overwrite FILE.")] = False,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Write entries as lines of JSON, all of them or some. All are as of one moment.

    Keys, values of all kinds, expiries, versions. What has expired is left out, except where workflows can still
    restore it. A file gets its name when it is complete; until then it is FILE.partial. Its last line has the number of
    entries and a hash, so that `import` notices a file that was cut.

    Example: keyloft export backup.jsonl
    """
    url = database.url()
    target = sys.stdout.buffer if file == "-" else file
    chosen = {**part.arguments(), "resume": resume, "overwrite": force}
    with _explain_stop("Nothing was changed." if file == "-" else f"--resume continues {file}.partial."):
        # Lines and a bar at the same terminal would overwrite each other.
        report = with_progress(admin.export, url, target, **chosen, is_shown=file != "-" or not is_for_people())
    if file != "-":
        out.show_report(report, f"{file} holds {_entries(report.entries)}, up to version {report.version}")
    elif is_for_people(sys.stderr):
        remark(_entries(report.entries))


def import_(
    file: Annotated[str, argument("FILE", "Lines as `export` writes them; - is the standard input.")],
    *,
    incoming: Incoming,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Store entries from lines of JSON, as `export` writes them. Versions and expiries are kept.

    Some thousand at a time, each slice as a whole or not at all. After an error the same command continues: what is
    stored already is skipped. A line by hand needs a key and a value: {"key":"users/alice","value":1}.

    Example: keyloft import backup.jsonl --database new.db
    """
    url = database.url(make=True)
    # The raw stream: if a thread still waited for a buffered one, the interpreter would crash when it ends.
    source = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer) if file == "-" else file
    chosen = incoming.arguments()
    with _explain_stop():
        report = with_progress(admin.import_, source, url, **chosen)
    out.show_report(report, f"{_stored(report)} in {database.shown}")


def import_from(
    kind: Annotated[admin.ForeignStore, argument("KIND", "diskcache, sqlitedict or shelve.")],
    source: Annotated[str, argument("PATH", "A folder of diskcache, a file of sqlitedict, or a name for shelve.open.")],
    *,
    prefix: Annotated[str, option("PREFIX", "Stands before every key, as in cache.")] = "",
    table: Annotated[str | None, option("TABLE", "Of a sqlitedict, if its file has several.")] = None,
    trust: Annotated[bool, flag("--trust", "Read pickles: you trust all who could write them.")] = False,
    keep: Annotated[bool, flag("--keep", "Leave entries that are stored already as they are.")] = False,
    replace: Annotated[bool, flag("--replace", "Replace entries that are stored already.")] = False,
    out: Output,
    database: TupleDatabase,
) -> None:
    """Store what diskcache, sqlitedict or shelve has stored.

    Expiries are kept. Exit code 1 if some of it can't be stored. Texts, numbers, bytes and JSON are imported. Loading a
    pickle can run any code that its writer chose (CVE-2025-69872), so pickles are refused without --trust, and pickles
    that name a class even with it.

    Example: keyloft import-from diskcache /var/cache/app --prefix cache
    """
    chosen: dict[str, Any] = {"prefix": key_text.read_prefix(prefix), "name": database.name, "table": table}
    chosen |= {"trust": trust, "existing": _existing(keep=keep, replace=replace)}

    def show(report: admin.ImportFromReport) -> None:
        left_out = {"expired": report.expired, "refused": report.refused}
        others = "".join([f", {number:,} {what}" for what, number in left_out.items() if number])
        out.show_report(report, f"{_stored(report)}{others} in {database.shown}")
        if out.is_for_people:
            for refusal in report.refusals:
                remark(refusal)

    try:
        with _explain_stop():
            show(with_progress(admin.import_from, kind, source, database.url(make=True), **chosen))
    except TransferFailed as error:
        if isinstance(error.result, admin.ImportFromReport):
            show(error.result)
        raise


def copy(
    source: Annotated[str, argument("FROM", "A path, sqlite:///…, postgresql://… or etcd://…")],
    target: Annotated[str, argument("TO", "The same; it is made if need be.")],
    *,
    incoming: Incoming,
    out: Output,
) -> None:
    """Copy entries from one database to another, and compare. Exit code 1 if the two differ.

    They are copied as they are at one moment, while others may write. After an error the same command continues.

    Example: keyloft copy keyloft.db postgresql://localhost/keyloft
    """
    chosen = incoming.arguments()

    def show(report: admin.CopyReport) -> None:
        compared = f"{_entries(report.compared)} compared, {report.missing:,} missing, {report.different:,} different"
        out.show_report(report, f"{_stored(report)} in {DatabaseUrl.parse(target).shown}; {compared}")

    try:
        with _explain_stop():
            show(with_progress(admin.copy, source, target, **chosen))
    except TransferFailed as error:
        if isinstance(error.result, admin.CopyReport):
            show(error.result)
        raise


def _entries(number: int) -> str:
    return counted(number, "entry", "entries")


def _stored(report: admin.ImportReport) -> str:
    others = {"stored already": report.same, "kept as they were": report.kept, "replaced": report.replaced}
    met = "".join([f", {number:,} {what}" for what, number in others.items() if number])
    return f"{_entries(report.new)} stored{met}"


@contextmanager
def _explain_stop(what: str = "What is stored stays stored; the same command continues from there.") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        remark(f"Stopped. {what}")
        raise


COMMANDS: Final[Commands] = (export, import_, import_from, copy)
