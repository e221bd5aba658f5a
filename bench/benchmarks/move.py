"""Export, import, copy, backup and restore of a million entries: speed and memory, `scripts/bench move`."""

import filecmp
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from bench.harness.benchmark import Benchmark
from bench.harness.contest import same
from bench.harness.figures import Figure, Row, within
from bench.harness.postgres_server import serving
from keyloft.admin.export_files import ExportWriter
from keyloft.core.keys import encode
from keyloft.core.records import Record, Space
from tools.postgres import fresh_database

MOST_MEGABYTES: Final = 150.0
"""Memory that a command may take, whatever the size of the database."""
_CHUNK: Final = 10_000


class _Run(Struct):
    """One command, from its start to its end."""

    seconds: float
    megabytes: float
    report: dict[str, int]
    """What it printed."""


def prepared(quick: bool, folder: Path, closing: ExitStack) -> Benchmark:
    entries, rounds = (20_000, 1) if quick else (1_000_000, 3)
    server = closing.enter_context(serving(folder))
    return Benchmark(
        rows={"move": lambda: _moving(folder, server.url, entries, rounds)},
        about=server.software(),
        notes=[f"{entries:,} entries of about 100 bytes, one in ten with an expiry; a process of its own per command"],
    )


def _moving(folder: Path, server: str, entries: int, rounds: int) -> Row:
    origin = folder / "origin.jsonl"
    _write(origin, entries)
    found: dict[str, list[_Run]] = {}
    for number in range(rounds):
        with ExitStack() as closing:
            postgres = closing.enter_context(fresh_database(server))
            for name, run in _round(folder, number, origin, entries, postgres).items():
                found.setdefault(name, []).append(run)
    rates = [Figure(name, "entries/s", tuple(entries / run.seconds for run in runs)) for name, runs in found.items()]
    resident = [Figure(f"{name}: resident", "MB", tuple(run.megabytes for run in runs)) for name, runs in found.items()]
    return Row(
        f"{entries:,} entries moved",
        figures=(*rates, *resident),
        verdicts=tuple(within(figure, MOST_MEGABYTES) for figure in resident),
    )


def _round(folder: Path, number: int, origin: Path, entries: int, postgres: str) -> dict[str, _Run]:
    first, second = folder / f"first-{number}.db", folder / f"second-{number}.db"
    text, kept, back = folder / f"out-{number}.jsonl", folder / f"backup-{number}.db", folder / f"back-{number}.db"
    done = {
        "import": _keyloft("import", origin, "--database", first),
        "import of entries already present": _keyloft("import", origin, "--database", first),
        "export": _keyloft("export", text, "--database", first),
        "copy, SQLite to SQLite, compared": _keyloft("copy", first, second),
        "copy, SQLite to PostgreSQL, compared": _keyloft("copy", first, postgres),
        "export from PostgreSQL": _keyloft("export", "--force", folder / "postgres.jsonl", "--database", postgres),
        "backup": _keyloft("backup", kept, "--database", first),
        "restore": _keyloft("restore", kept, "--database", back),
    }
    same(done["import"].report["new"], entries)
    same(done["import of entries already present"].report["same"], entries)
    for exported in (text, folder / "postgres.jsonl"):
        same(filecmp.cmp(exported, origin, shallow=False), True)
    for name in ("copy, SQLite to SQLite, compared", "copy, SQLite to PostgreSQL, compared"):
        same(
            (done[name].report["compared"], done[name].report["missing"], done[name].report["different"]),
            (entries, 0, 0),
        )
    same(_keyloft("export", "--force", text, "--database", back).report["entries"], entries)
    same(filecmp.cmp(text, origin, shallow=False), True)
    for file in (first, second, text, kept, back):
        file.unlink()
    return done


def _write(file: Path, entries: int) -> None:
    """An export of a database with that many entries, in their order."""
    with file.open("wb") as out:
        writer = ExportWriter(out)
        writer.begin(entries, {})
        for start in range(0, entries, _CHUNK):
            writer.write(Space.TUPLES, [_row(number) for number in range(start, min(entries, start + _CHUNK))])
        writer.finish(entries)


def _row(number: int) -> Record:
    value = msgspec.json.encode({"name": f"user {number}", "score": number * 7, "text": "x" * 60})
    expires_at = None if number % 10 else 2**43
    return Record(encode(("users", number)), value, 0, number + 1, expires_at, 1_700_000_000_000, 1_700_000_000_000)


def _keyloft(*arguments: str | Path) -> _Run:
    command = [sys.executable, "-m", "keyloft", *map(str, arguments)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    same(process.returncode, 0)
    # Linux counts in kilobytes. A child starts with its parent's memory, so this process must stay small.
    return _Run(seconds, used.ru_maxrss / 1000, msgspec.json.decode(printed))
