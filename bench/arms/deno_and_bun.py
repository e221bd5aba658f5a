"""Arms in JavaScript: Deno KV, and a simple key-value table on Bun's SQLite, each in a process of its own."""

import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import deno  # type: ignore[import-untyped]

from bench.arms.store_process import StoreProcess, entered
from bench.harness.contest import Entrant, StoreSetup
from bench.harness.race import Unavailable

_SCRIPTS = Path(__file__).parent / "javascript"
_TOOLS = Path(__file__).parents[2] / ".venvs" / "npm"
_INSTALL_SECONDS = 120.0


async def _enter_deno(setup: StoreSetup, *options: str) -> StoreProcess:
    command = [deno.find_deno_bin(), "run", "--quiet", "--allow-all", "--unstable-kv", str(_SCRIPTS / "deno_kv.js")]
    return await entered(setup, *command, str(setup.folder / "deno.db"), *options)


async def _enter_deno_batches(setup: StoreSetup) -> StoreProcess:
    return await _enter_deno(setup, "500")


async def _enter_bun(setup: StoreSetup) -> StoreProcess:
    return await entered(setup, bun(), str(_SCRIPTS / "bun_sqlite.js"), str(setup.folder / "bun.db"))


async def _enter_bun_wal(setup: StoreSetup) -> StoreProcess:
    return await entered(setup, bun(), str(_SCRIPTS / "bun_sqlite.js"), str(setup.folder / "bun.db"), "wal")


def bun() -> str:
    """The path of Bun: the one on the PATH, or one that npm installs.

    Raises:
        Unavailable: There is none, and npm is missing or can't install it.
    """
    path, why = _find_bun()
    if path is None:
        raise Unavailable(why)
    return path


@cache
def _find_bun() -> tuple[str | None, str]:
    """The path, or why there is none; npm runs once."""
    installed = _TOOLS / "node_modules" / ".bin" / "bun"
    found = shutil.which("bun") or (str(installed) if installed.exists() else None)
    npm = shutil.which("npm")
    if found is not None or npm is None:
        return found, "neither bun nor npm is installed"
    _TOOLS.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(_TOOLS), "bun"]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=_INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None, "npm could not install bun"
    return str(installed), ""


def versions() -> dict[str, str]:
    """Versions of Deno and Bun."""
    found = {"deno": _version(deno.find_deno_bin())}
    with suppress(Unavailable):
        found["bun"] = _version(bun())
    return found


def _version(binary: str) -> str:
    printed = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    return printed.splitlines()[0].removeprefix("deno ")


DENO = Entrant(
    "Deno KV",
    _enter_deno,
    frozenset({"get", "set", "get_many", "list", "swap"}),
    durable="on disk (WAL, synced)",
)
DENO_BATCHES = Entrant("Deno KV, batches of 500", _enter_deno_batches, frozenset({"list"}), durable=None)
"""The largest batches in which Deno KV reads a list."""
BUN = Entrant(
    "bun:sqlite, simple table",
    _enter_bun,
    frozenset({"get", "set", "get_many", "list"}),
    durable="on disk (rollback journal, synced)",
)
BUN_WAL = Entrant(
    "bun:sqlite, simple table, WAL",
    _enter_bun_wal,
    frozenset({"get", "set", "get_many", "list"}),
    durable="on disk (WAL, synced)",
)
