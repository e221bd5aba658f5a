"""The commands that move entries between files and databases: `export`, `import`, `copy`."""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any, TypeAlias

import typer

from keyloft.admin import export_format as lines
from keyloft.admin.comparison import compare
from keyloft.admin.files import mode_of, sync
from keyloft.admin.selection import Place, Selection, Slices, count, rows_of
from keyloft.cli.database import file_of, maintenance_of, named_database, quiet, with_maintenance
from keyloft.cli.options import AsJson, add_commands
from keyloft.cli.progress import progress
from keyloft.cli.terminal import fail, is_for_people, remark, show_json, told
from keyloft.clock import SystemClock
from keyloft.core.maintenance import Existing, Loaded, Maintenance, Snapshot
from keyloft.core.urls import without_password
from keyloft.engines import open_maintenance
from keyloft.errors import CannotOpen, InvalidArgument
from keyloft.server.config import Flags

Prefix: TypeAlias = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="Of the tuple store, only what is below it, as in users.")
]
Plugin: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="Only what this plugin stores.")]
Project: TypeAlias = Annotated[
    str | None, typer.Option(metavar="PROJECT", help="Only this project: tenant/<tenant>/project/<project>.")
]
Keep: TypeAlias = Annotated[bool, typer.Option("--keep", help="Leave entries that are there already as they are.")]
Replace: TypeAlias = Annotated[bool, typer.Option("--replace", help="Replace entries that are there already.")]


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"export": export, "import": importing})
    app.command("copy")(told(copy))


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to; - is the standard output.")] = "-",
    *,
    prefix: Prefix = None,
    plugin: Plugin = None,
    project: Project = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an export that did not end.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Write entries as lines of JSON, as they are at one moment: all of them, or some.

    Keys, values of all kinds, expiries, versions. What has expired is left out, except where workflows can still
    restore it. A file gets its name when it is complete; until then it is FILE.partial.

    Example: keyloft export backup.jsonl
    """
    database = named_database(flags)
    selection = Selection.of(prefix, plugin, project)
    if file == "-" and (resume or force):
        raise InvalidArgument("--resume and --force are for a FILE")
    if file != "-":
        _check_place(Path(file))
    mode = mode_of(file_of(database))

    async def work(source: Maintenance) -> dict[str, Any]:
        whole = (
            nullcontext((sys.stdout.buffer, None))
            if file == "-"
            else _whole(Path(file), mode, selection.named, resume=resume, force=force)
        )
        async with source.snapshot() as snapshot:
            with whole as (out, after):
                written = await _write(out, snapshot, selection, after)
            return {"file": file, "entries": written, "clock": snapshot.version}

    with _told_if_stopped("Nothing else was changed." if file == "-" else f"--resume goes on with {file}.partial."):
        done = with_maintenance(database, work)
    if file != "-":
        show_json(done, as_json=as_json)
    elif is_for_people(sys.stderr):
        remark(f"{done['entries']:,} entries")
    return 0


def importing(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Lines as `export` writes them; - reads them.")],
    *,
    prefix: Prefix = None,
    plugin: Plugin = None,
    project: Project = None,
    keep: Keep = False,
    replace: Replace = False,
    as_json: AsJson = False,
    flags: Flags,
) -> int:
    """Store entries from lines of JSON, with their versions and expiries.

    Some thousand at a time, each slice as a whole or not at all. Whatever stops it, the same command goes on: what is
    stored already is passed over. A line that somebody writes needs a key and a value: {"key":"users/alice","value":1}.

    Example: keyloft import backup.jsonl --database new.db
    """
    database = named_database(flags)
    selection, existing = Selection.of(prefix, plugin, project), _existing(keep, replace)

    quiet()
    with _opened(file) as source, _told_if_stopped(), asyncio.Runner() as runner:
        target = runner.run(open_maintenance(database, make=True))
        try:
            slices = Slices(target, 0, existing)
            # Not within the event loop: whoever waits for somebody to type, or for a pipe, can be interrupted.
            for _ in _read(source, slices, selection):
                flushing = slices.flush()
                try:
                    runner.run(flushing)
                finally:
                    # Ctrl-C may come before it has begun, and Python would complain that nobody awaited it.
                    flushing.close()
        finally:
            runner.run(target.aclose())
    show_json(_shown(slices.loaded), as_json=as_json)
    return 0


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
) -> int:
    """Copy entries from one database to another, then read both and compare; exit code 1 if they differ.

    They are copied as they are at one moment, while others may go on writing. Whatever stops it, the same command goes
    on.

    Example: keyloft copy keyloft.db postgresql://localhost/keyloft
    """
    selection, existing = Selection.of(prefix, plugin, project), _existing(keep, replace)
    if (file := file_of(source)) is not None and not file.exists():
        raise CannotOpen(f"there is no file {file} to copy from")

    async def work(origin: Maintenance) -> dict[str, Any]:
        async with maintenance_of(target, make=True) as goal, origin.snapshot() as snapshot:
            slices = Slices(goal, snapshot.version, existing)
            await _put_all(snapshot, slices, selection)
            async with goal.snapshot() as arrived:
                with progress("comparing") as advance:
                    compared = await compare(snapshot, arrived, selection, advance)
        return {
            **_shown(slices.loaded),
            "compared": compared.entries,
            "missing": compared.missing,
            "different": compared.different,
            "other_versions": compared.other_versions,
            "first_difference": compared.first,
            "source_sha256": compared.source_hash,
            "target_sha256": compared.target_hash,
        }

    with _told_if_stopped():
        done = with_maintenance(source, work)
    show_json(done, as_json=as_json)
    if done["missing"] or done["different"] > done["kept"]:
        fail(
            f"{without_password(target)} does not hold what {without_password(source)} held, beginning with "
            f"{done['first_difference']}; did somebody else write there meanwhile?"
        )
    return 0


async def _write(out: IO[bytes], snapshot: Snapshot, selection: Selection, after: Place | None) -> int:
    """Write entries to a file; returns how many."""
    with progress("exporting") as advance:
        total = await count(snapshot, selection)
        out.write(lines.head(snapshot.version, selection.named))
        written = 0
        async for space, rows in rows_of(snapshot, selection, after):
            out.write(lines.write(space, rows))
            written += len(rows)
            advance(written, total)
    out.flush()
    return written


def _read(source: IO[bytes], slices: Slices, selection: Selection) -> Iterator[None]:
    """Add what a file holds to slices, and yield whenever one is to be put."""
    now, done = SystemClock().now(), 0
    size = os.fstat(source.fileno()).st_size
    with progress("importing") as advance:
        for number, line in enumerate(source, 1):
            done += len(line)
            try:
                header = lines.read_head(line)
                entry = lines.read(line, now) if header is None and line.strip() else None
            except InvalidArgument as error:
                yield
                if not slices.loaded.all:
                    fail(
                        f"line {number}: {error}. Nothing is stored. Is it a file of `keyloft export`? A line by hand "
                        'is like {"key":"users/alice","value":1}; the JSON file of a plugin is for '
                        "`keyloft plugin import-json`"
                    )
                fail(
                    f"line {number}: {error}. What comes before it is stored; correct it, and the same command goes on"
                )
            if header is not None:
                slices.clock = max(slices.clock, header.clock)
            elif entry is not None and selection.holds(entry[0], entry[1].key) and slices.add(*entry):
                yield
                advance(done, max(size, done))
        yield


async def _put_all(snapshot: Snapshot, slices: Slices, selection: Selection) -> None:
    with progress("copying") as advance:
        total, done = await count(snapshot, selection), 0
        async for space, rows in rows_of(snapshot, selection):
            for row in rows:
                if slices.add(space, row):
                    await slices.flush()
            done += len(rows)
            advance(done, total)
        await slices.flush()


def _check_place(file: Path) -> None:
    """Whether a file can have that name.

    Raises:
        InvalidArgument: It is a folder, or in none.
    """
    if file.is_dir():
        raise InvalidArgument(f"{file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise InvalidArgument(f"{file} can't be written: there is no folder {file.parent}")


@contextmanager
def _whole(
    file: Path, mode: int, only: Mapping[str, str], *, resume: bool, force: bool
) -> Iterator[tuple[IO[bytes], Place | None]]:
    """A file that gets its name when all of it is written and on the disk; with it, after which entry to go on.

    It holds what the database holds: whoever may not read that one does not read this one.
    """
    partial = file.with_name(f"{file.name}.partial")
    if file.exists() and not force:
        raise InvalidArgument(f"{file} is there already: --force overwrites it")
    if partial.exists() and not (resume or force):
        raise InvalidArgument(f"{partial} is an export that did not end: --resume goes on with it, --force begins anew")
    after = _last_place(partial, only) if resume and partial.exists() else None
    if not (resume and partial.exists()):
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    with partial.open("ab") as out:
        yield out, after
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def _last_place(partial: Path, only: Mapping[str, str]) -> Place | None:
    """The last entry of a file, whose last line may be cut short: that one is taken away.

    Raises:
        InvalidArgument: It is an export of another part of the database.
    """
    last = b""
    with partial.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_END)
                file.truncate()
                break
            if (header := lines.read_head(line)) is None:
                last = line
            elif (header.only or {}) != only:
                raise InvalidArgument(f"{partial} is an export of another part: say the same --prefix, --plugin, …")
    if not last:
        return None
    space, row = lines.read(last, 0)
    return space, row.key


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    path = Path(file)
    if path.is_dir():
        raise InvalidArgument(f"{file} is a folder: name a file in it")
    if not path.exists():
        raise InvalidArgument(f"there is no file {file}")
    with path.open("rb") as source:
        yield source


@contextmanager
def _told_if_stopped(what: str = "What is stored stays stored; the same command goes on from there.") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        remark(f"Stopped. {what}")
        raise


def _existing(keep: bool, replace: bool) -> Existing:
    if keep and replace:
        raise InvalidArgument("--keep and --replace exclude each other")
    return Existing.KEEP if keep else Existing.REPLACE if replace else Existing.REFUSE


def _shown(loaded: Loaded) -> dict[str, Any]:
    return {"new": loaded.new, "same": loaded.same, "kept": loaded.kept, "replaced": loaded.replaced}
