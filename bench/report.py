"""Shows what was measured: a table for the terminal, JSON for later, and the machine it ran on."""

import os
import platform
import sqlite3
import subprocess
from collections.abc import Iterable
from pathlib import Path

import apsw
import msgspec

import keyloft
from bench.harness import Row


def machine(folder: Path) -> dict[str, str]:
    """What the figures depend on."""
    return {
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "disk": _file_system(folder),
        "python": platform.python_version(),
        "keyloft": f"{keyloft.__version__}, {_revision()}",
        "apsw": f"{apsw.apsw_version()} with SQLite {apsw.sqlite_lib_version()}",
        "sqlite3": f"SQLite {sqlite3.sqlite_version}",
        "msgspec": msgspec.__version__,
    }


def show_head(about: dict[str, str], notes: Iterable[str]) -> None:
    for name, text in about.items():
        print(f"{name:>8}  {text}")
    for note in notes:
        print(f"    note  {note}")


def show(row: Row) -> None:
    print(f"\n{row.title}")
    for figure in row.figures:
        print(f"  {figure.name:<44}{_number(figure.median):>10} {figure.unit:<4}{_spread(figure.rounds):<24}")
    for verdict in row.verdicts:
        bar = f"{'>=' if verdict.at_least else '<='} {_number(verdict.bar)} {verdict.unit}"
        print(
            f"  {verdict.name:<44}{_number(verdict.median):>10} {verdict.unit:<4}{_spread(verdict.rounds):<24}"
            f"{bar:<14}{'ok' if verdict.ok else 'MISS'}",
            flush=True,
        )


def save(path: Path, about: dict[str, str], notes: Iterable[str], rows: Iterable[Row]) -> None:
    shown = [
        {
            "title": row.title,
            "figures": [{**msgspec.to_builtins(figure), "median": figure.median} for figure in row.figures],
            "verdicts": [{**msgspec.to_builtins(verdict), "ok": verdict.ok} for verdict in row.verdicts],
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode({"machine": about, "notes": list(notes), "rows": shown})
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def _number(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _spread(rounds: tuple[float, ...]) -> str:
    return f"({_number(min(rounds))} … {_number(max(rounds))})" if len(rounds) > 1 else ""


def _revision() -> str:
    """Which source was measured; «dirty» if it was not the committed one."""
    command = ["git", "-C", str(Path(keyloft.__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "revision unknown"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The kind of disk: figures from a RAM disk would say nothing about durable writes."""
    best, kind = Path("/"), "an unknown file system"
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return kind
    for point, name in mounts:
        if folder.is_relative_to(point) and len(Path(point).parts) >= len(best.parts):
            best, kind = Path(point), name
    return kind
