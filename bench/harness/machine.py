"""Describes what figures depend on: the machine, and the versions of what was measured."""

import datetime
import os
import platform
import sqlite3
import subprocess
from pathlib import Path

import apsw
import msgspec

import keyloft


def described(folder: Path) -> dict[str, str]:
    """Machine and versions, by name."""
    return {
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "memory": f"{_memory_gibibytes():.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "disk": _file_system(folder),
        "python": platform.python_version(),
        "keyloft": f"{keyloft.__version__}, {_revision()}",
        "apsw": f"{apsw.apsw_version()} with SQLite {apsw.sqlite_lib_version()}",
        "sqlite3": f"SQLite {sqlite3.sqlite_version}",
        "msgspec": msgspec.__version__,
    }


def _revision() -> str:
    """The commit that was measured, marked «dirty» if files had changed."""
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


def _memory_gibibytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3


def _file_system(folder: Path) -> str:
    """The kind of file system: on a RAM disk, figures of durable writes mean nothing."""
    best, kind = Path("/"), "an unknown file system"
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return kind
    for point, name in mounts:
        if folder.is_relative_to(point) and len(Path(point).parts) >= len(best.parts):
            best, kind = Path(point), name
    return kind
