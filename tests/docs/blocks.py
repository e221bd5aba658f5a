"""Runs the code blocks of a document, in their order, in a world of its own: a folder, NATS, a service, databases.

The first word behind a fence is the block's language, the rest says what is done with it:

    python                  runs at a prompt that understands await; the blocks of a document share their names
    python file=NAME        is saved as NAME, for the sh blocks after it
    python signature        is only parsed
    sh                      runs in the document's folder, and must succeed
    sh background           is started, waited for until it is ready, and ended with the document
    json                    is JSON
    json request SUBJECT    is sent to the service; the next block is `json reply`: what it replies («…»: anything)
    sql                     runs on bot.db in the document's folder, which is made if it does not exist
    sql postgres            runs in psql as an administrator, in the PostgreSQL database that the document made last
    toml                    is a configuration that the service takes
    text                    is for people; `text output` is what the block before it printed

Python blocks, `keyloft` and `alembic` run in copies of a process that has imported Keyloft
(tests/support/fork_server.py).
Addresses such as 127.0.0.1:4222 become addresses with free ports. `scripts/serve` runs the command that it would run,
without making a virtual environment first, which would take minutes. PostgreSQL at 127.0.0.1:5432 is the tests' server.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tests.support.fork_server import ForkedProcess, launcher, run
from tests.support.ports import free_port

ROOT: Final = Path(__file__).parents[2]
LANGUAGES: Final = {
    "python": r"(file=[\w.-]+|signature)?",
    "sh": r"(background)?",
    "json": r"(request [\w.$-]+|reply)?",
    "sql": r"(postgres)?",
    "toml": "",
    "text": r"(output)?",
}
"""The languages that blocks can have, and what can stand behind them."""

_PATIENCE_SECONDS: Final = 90.0
_ADDRESS: Final = re.compile(r"(?:(?<=127\.0\.0\.1:)|(?<=--nats-port ))[1-9]\d{3}\b")
_READY: Final = ("is running.", "Server is ready")
_SQL: Final = "import sqlite3, sys; c = sqlite3.connect('bot.db'); c.executescript(sys.argv[1]); c.close()"
_CURL: Final = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[-1]).read().decode())\n"
_TOML: Final = "from keyloft.server import config as c; c.check_service(c.load({'config': 'keyloft.toml'}, {}))"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it stands, what it is, and its lines."""

    line: int
    language: str
    purpose: str
    text: str


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif opened is None:
            assert line.startswith("```"), f"line {number}: a fence begins in the first column"
            opened, lines = (number, line[3:].strip()), []
        else:
            language, _, purpose = opened[1].partition(" ")
            found.append(Block(opened[0], language, purpose, "\n".join([*lines, ""])))
            opened = None
    assert opened is None, f"line {opened}: the block has no end"
    return found


def prose_of(text: str) -> str:
    """A document without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _agrees(shown: Any, reply: Any) -> bool:
    """Whether a reply is the one that a document shows; «…» stands for anything."""
    if isinstance(shown, dict) and isinstance(reply, dict):
        return shown.keys() == reply.keys() and all(_agrees(shown[name], reply[name]) for name in shown)
    if isinstance(shown, list) and isinstance(reply, list):
        return len(shown) == len(reply) and all(map(_agrees, shown, reply))
    return bool(shown == "…" or shown == reply)


class Databases(Protocol):
    """PostgreSQL, as far as one document is concerned."""

    programs: Path

    def translate(self, text: str) -> str: ...
    def run(self, script: str) -> str: ...
    def end(self) -> None: ...


class DocumentRun:
    """What the blocks of one document run in."""

    def __init__(self, folder: Path, databases_for: Callable[[list[Block]], Databases | None]) -> None:
        self.folder = folder
        self._databases_for = databases_for
        self._databases: Databases | None = None
        self._ports: dict[str, int] = defaultdict(free_port)
        self._background: list[tuple[subprocess.Popen[bytes], str]] = []
        self._prompt: _Prompt | None = None
        self._printed = ""
        self._reply: Any = None
        programs = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KEYLOFT_", "DATABASE_URL"))},
            "PATH": os.pathsep.join([str(folder / "bin"), str(programs), os.environ["PATH"]]),
            "KEYLOFT_HTTP": f"127.0.0.1:{self._ports['9464']}",
        }
        self._make_program("scripts/serve", '#!/bin/sh\nexec keyloft serve "$@"\n')
        self._make_program("bin/keyloft", launcher("keyloft"))
        self._make_program("bin/alembic", launcher("alembic.config:main"))
        for name in ("alembic.ini", "src"):
            (folder / name).symlink_to(ROOT / name)
        if shutil.which("curl") is None:
            self._make_program("bin/curl", f"#!{sys.executable}\n{_CURL}")

    def _make_program(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run(self, blocks: list[Block]) -> None:
        """Run the blocks; a document that starts no service, and needs one, gets one."""
        self._databases = self._databases_for(blocks)
        if self._databases is not None:
            self._environment["PATH"] = os.pathsep.join([str(self._databases.programs), self._environment["PATH"]])
        requests = [block for block in blocks if "127.0.0.1:4222" in block.text or block.purpose.startswith("request")]
        if requests and not any(block.purpose == "background" for block in blocks):
            self._start("scripts/serve")
        for block in blocks:
            try:
                self._run(block)
            except Exception as error:
                error.add_note(f"in the {block.language} block of line {block.line}")
                raise

    def _run(self, block: Block) -> None:
        text = block.text if self._databases is None else self._databases.translate(block.text)
        text = _ADDRESS.sub(lambda found: str(self._ports[found[0]]), text)
        match block.language, block.purpose.partition(" ")[0].partition("=")[0]:
            case "python", "":
                self._type(text)
            case "python", "file":
                (self.folder / block.purpose.removeprefix("file=")).write_text(text)
            case "python", "signature":
                ast.parse(text)
            case "sh", "":
                self._shell(text)
            case "sh", "background":
                self._start(text)
            case "json", "":
                json.loads(text)
            case "json", "request":
                self._reply = asyncio.run(self._ask(block.purpose.partition(" ")[2], text.strip().encode()))
            case "json", "reply":
                assert _agrees(json.loads(text), self._reply), f"the service answered {json.dumps(self._reply)}"
            case "sql", "":
                self._query(text)
            case "sql", "postgres":
                assert self._databases is not None
                self._printed = self._databases.run(text)
            case "toml", "":
                self._configure(text)
            case "text", "output":
                assert self._printed.strip() == text.strip(), f"this was printed: {self._printed}"
            case "text", "":
                pass
            case unknown:
                raise AssertionError(f"there is no way to check {unknown}")

    # The kinds of blocks

    def _type(self, source: str) -> None:
        if self._prompt is None:
            self._prompt = _Prompt(self.folder, self._environment)
        self._printed, error = self._prompt.type(source)
        assert error is None, error

    def _shell(self, script: str) -> None:
        # Where no address is given, these commands look for NATS at its usual port.
        environment = self._environment | {"KEYLOFT_NATS_URL": f"nats://127.0.0.1:{self._ports['4222']}"}
        done = subprocess.run(
            ["sh", "-eu", "-c", script],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        self._printed = done.stdout

    def _start(self, command: str) -> None:
        log = self.folder / f"background-{len(self._background)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                # The process is the command itself, not a shell around it: it is the one that is ended.
                ["sh", "-eu", "-c", f"exec env {command.strip()}"],
                cwd=self.folder,
                env=self._environment | {"KEYLOFT_NATS_PORT": str(self._ports["4222"])},
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(sign in log.read_text() for sign in _READY):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise AssertionError(f"{command.strip()} does not run: {log.read_text()}")
            time.sleep(0.02)
        self._background.append((process, command))

    async def _ask(self, subject: str, data: bytes) -> Any:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{self._ports['4222']}")
        try:
            return json.loads((await client.request(subject, data, timeout=_PATIENCE_SECONDS)).data)
        finally:
            await client.close()

    def _query(self, script: str) -> None:
        if not (self.folder / "bot.db").exists():
            self._shell("keyloft migrate --database sqlite:///bot.db")
        # In a process of its own, with the library that an operator's tools have.
        self._python(_SQL, script)

    def _configure(self, text: str) -> None:
        (self.folder / "keyloft.toml").write_text(text)
        for name in re.findall(r'"([\w-]+\.(?:creds|pem))"', text):
            (self.folder / name).touch()  # a file that is named must be there; what it holds is NATS' concern
        self._python(_TOML)

    def _python(self, program: str, *arguments: str) -> None:
        done = run(["-c", program, *arguments], cwd=self.folder, env=self._environment, timeout=_PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        """End what runs; a service that gets SIGTERM ends with exit code 0."""
        if self._prompt is not None:
            self._prompt.close()
        codes = {}
        for process, command in reversed(self._background):
            # After SIGTERM, nats-server ends with exit code 1.
            process.send_signal(signal.SIGINT if "nats-server" in command else signal.SIGTERM)
            codes[command] = _ended(process)
        if self._databases is not None:
            self._databases.end()
        assert not any(codes.values()), codes


def _ended(process: subprocess.Popen[Any] | ForkedProcess) -> int:
    try:
        return process.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Prompt:
    """A process that runs the Python blocks of a document."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        (stdin, typed), (printed, stdout) = os.pipe(), os.pipe()
        self._typed, self._printed = os.fdopen(typed, "w"), os.fdopen(printed)
        self._process = ForkedProcess(
            ["-m", __name__],
            cwd=folder,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=sys.__stderr__,
            finalizes=True,
        )
        for its_end in (stdin, stdout):
            os.close(its_end)

    def type(self, source: str) -> tuple[str, str | None]:
        """Run a block: what it printed, and its traceback if it failed."""
        self._typed.write(json.dumps(source) + "\n")
        self._typed.flush()
        ready, _, _ = select.select([self._printed], [], [], _PATIENCE_SECONDS)
        assert ready, "the block takes too long"
        printed, error = json.loads(self._printed.readline())
        return printed, error

    def close(self) -> None:
        self._typed.close()
        _ended(self._process)
        self._printed.close()


# The prompt: the other end of `_Prompt.type`


async def _converse() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    replies = sys.stdout
    while line := await asyncio.to_thread(sys.stdin.readline):
        printed, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                await _execute(json.loads(line), names)
        except Exception:
            error = traceback.format_exc()
        replies.write(json.dumps([printed.getvalue(), error]) + "\n")
        replies.flush()


async def _execute(source: str, names: dict[str, Any]) -> None:
    code = compile(source, "<block>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    if code.co_flags & inspect.CO_COROUTINE:
        await running


if __name__ == "__main__":
    asyncio.run(_converse())
