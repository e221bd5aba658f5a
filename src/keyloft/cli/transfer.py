"""The commands that move entries between files and databases: `export`, `import`, `copy`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer

from keyloft import admin
from keyloft.cli.database import named_database
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import with_progress
from keyloft.cli.terminal import counted, is_for_people, remark, show_result
from keyloft.core import key_text
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import InvalidArgument, TransferFailed
from keyloft.server.config import Flags

Prefix: TypeAlias = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="Of the tuple store, only what is below it, as in users.")
]
Plugin: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="Only what this plugin stores.")]
Project: TypeAlias = Annotated[
    str | None, typer.Option(metavar="PROJECT", help="Only this project: tenant/<tenant>/project/<project>.")
]
Keep: TypeAlias = Annotated[bool, typer.Option("--keep", help="Leave entries that are stored already as they are.")]
Replace: TypeAlias = Annotated[bool, typer.Option("--replace", help="Replace entries that are stored already.")]


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"export": export, "import": import_})
    add_commands(app, None, {"copy": copy})


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to; - is the standard output.")] = "-",
    *,
    prefix: Prefix = None,
    plugin: Plugin = None,
    project: Project = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an export that did not end.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Write entries as lines of JSON, as they are at one moment: all of them, or some.

    Keys, values of all kinds, expiries, versions. What has expired is left out, except where workflows can still
    restore it. A file gets its name when it is complete; until then it is FILE.partial. Its last line has the number of
    entries and a hash, so that `import` notices a file that was cut.

    Example: keyloft export backup.jsonl
    """
    url = named_database(flags)
    parts = _parts(prefix, plugin, project)
    with _explain_stop("Nothing was changed." if file == "-" else f"--resume continues {file}.partial."):
        report = with_progress(
            lambda progress: admin.export(
                url,
                sys.stdout.buffer if file == "-" else file,
                **parts,
                resume=resume,
                overwrite=force,
                progress=progress,
            )
        )
    sentence = f"{file} holds {_entries(report.entries)}, up to version {report.version}"
    if file != "-":
        show_result(report, sentence, as_json=as_json)
    elif is_for_people(sys.stderr):
        remark(_entries(report.entries))


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Lines as `export` writes them; - reads them.")],
    *,
    prefix: Prefix = None,
    plugin: Plugin = None,
    project: Project = None,
    keep: Keep = False,
    replace: Replace = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Store entries from lines of JSON, with their versions and expiries.

    Some thousand at a time, each slice as a whole or not at all. After an error the same command continues: what is
    stored already is passed over. A line by hand needs a key and a value: {"key":"users/alice","value":1}.

    Example: keyloft import backup.jsonl --database new.db
    """
    url = named_database(flags, make=True)
    # The raw stream: a thread that waits for a buffered one would crash the interpreter's end.
    source = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer) if file == "-" else file
    chosen = {**_parts(prefix, plugin, project), "existing": _existing(keep, replace)}
    with _explain_stop():
        report = with_progress(lambda progress: admin.import_(source, url, **chosen, progress=progress))
    show_result(report, f"{_stored(report)} in {DatabaseUrl.parse(url).shown}", as_json=as_json)


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A path, sqlite:///… or postgresql://…")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The same; it is made if need be.")],
    *,
    prefix: Prefix = None,
    plugin: Plugin = None,
    project: Project = None,
    keep: Keep = False,
    replace: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Copy entries from one database to another, then read both and compare; exit code 1 if they differ.

    They are copied as they are at one moment, while others may write. After an error the same command continues.

    Example: keyloft copy keyloft.db postgresql://localhost/keyloft
    """
    chosen = {**_parts(prefix, plugin, project), "existing": _existing(keep, replace)}

    def show(report: admin.CopyReport) -> None:
        compared = f"{_entries(report.compared)} compared, {report.missing:,} missing, {report.different:,} different"
        show_result(report, f"{_stored(report)} in {DatabaseUrl.parse(target).shown}; {compared}", as_json=as_json)

    try:
        with _explain_stop():
            show(with_progress(lambda progress: admin.copy(source, target, **chosen, progress=progress)))
    except TransferFailed as error:
        if isinstance(error.result, admin.CopyReport):
            show(error.result)
        raise


def _parts(prefix: str | None, plugin: str | None, project: str | None) -> dict[str, Any]:
    return {
        "prefix": None if prefix is None else key_text.read_prefix(prefix),
        "plugin": plugin,
        "project": project,
    }


def _existing(keep: bool, replace: bool) -> str:
    if keep and replace:
        raise InvalidArgument("--keep and --replace exclude each other")
    return "keep" if keep else "replace" if replace else "refuse"


def _entries(number: int) -> str:
    return counted(number, "entry", "entries")


def _stored(report: admin.ImportReport) -> str:
    others = {"stored already": report.same, "kept as they were": report.kept, "replaced": report.replaced}
    met = "".join([f", {number:,} {what}" for what, number in others.items() if number])
    return f"{_entries(report.new)} stored{met}"


@contextmanager
def _explain_stop(what: str = "What is stored stays stored; the same command goes on from there.") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        remark(f"Stopped. {what}")
        raise
