"""Arms in JavaScript: Deno KV, and a simple key-value table on Bun's SQLite, each in a process of its own.

The process reads laps of operations as lines and times them itself, so that no traffic between processes counts.
"""

import asyncio
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import deno  # type: ignore[import-untyped]
import msgspec
from msgspec import Struct

from bench.harness import processes
from bench.harness.contest import Contestant, Entrant, Operation, StoreSetup, same
from bench.harness.data import Pair
from bench.harness.race import Timed, Unavailable

_SCRIPTS = Path(__file__).parent / "javascript"
_TOOLS = Path(__file__).parents[2] / ".venvs" / "npm"
_INSTALL_SECONDS = 120.0


class _Lap(Struct, frozen=True):
    """A script's answer."""

    took: float
    seconds: list[float]
    answers: list[Any]


class Script(Contestant):
    """A process with an open store."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def lap(self, operation: Operation, planned: list[Any], workers: int) -> Timed[Any]:
        done = await self._ask(operation, self.asks(operation, planned), workers)
        return Timed(done.answers, done.seconds, done.took)

    def seen(self, operation: Operation, answer: Any) -> Any:
        return [(tuple(key), value) for key, value in answer] if operation == "list" else answer

    async def check(self, operation: Operation, plan: Any, done: Timed[Any]) -> None:
        same([answer for answer in done.answers if answer is False], [])
        await super().check(operation, plan, done)

    async def fill(self, pairs: list[Pair]) -> None:
        done = await self._ask("fill", [pairs], 1)
        same([answer for answer in done.answers if answer is False], [])

    async def _ask(self, operation: str, asks: list[Any], workers: int) -> _Lap:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = msgspec.json.encode({"operation": operation, "asks": asks, "workers": workers})
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the script ended during {operation}")
        return msgspec.json.decode(answer, type=_Lap)

    async def close(self) -> None:
        """Close its input, upon which it shuts down."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with processes.ending(self._process):
            pass


async def _entered(setup: StoreSetup, *command: str) -> Script:
    process = await processes.started(*command)
    script = Script(process)
    try:
        if not await processes.is_ready(process):
            raise Unavailable(f"{Path(command[0]).name} did not start")
        # Deno KV takes 800 KiB per atomic write at the most.
        for pairs in setup.chunks(10 if setup.task.large else 500):
            await script.fill(pairs)
    except BaseException:
        await script.close()
        raise
    return script


async def _enter_deno(setup: StoreSetup, *options: str) -> Script:
    command = [deno.find_deno_bin(), "run", "--quiet", "--allow-all", "--unstable-kv", str(_SCRIPTS / "deno_kv.js")]
    return await _entered(setup, *command, str(setup.folder / "deno.db"), *options)


async def _enter_deno_batches(setup: StoreSetup) -> Script:
    return await _enter_deno(setup, "500")


async def _enter_bun(setup: StoreSetup) -> Script:
    return await _entered(setup, bun(), str(_SCRIPTS / "bun_sqlite.js"), str(setup.folder / "bun.db"))


async def _enter_bun_wal(setup: StoreSetup) -> Script:
    return await _entered(setup, bun(), str(_SCRIPTS / "bun_sqlite.js"), str(setup.folder / "bun.db"), "wal")


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
