"""Runs commands of `keyloft`: in this process, which takes a tenth of the time, or at a terminal of their own."""

import io
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from keyloft.cli import main
from tests.support.fork_server import ForkedProcess

LONGEST_SECONDS = 30.0
SURROUNDINGS = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""The environment of a command that is run as a process, without settings."""
ON_A_FILE = pytest.mark.parametrize("environment", ["sqlite file"], indirect=True)
"""For what is the same on every database: how a command is called, and what a terminal shows."""
WITHOUT_TABLES = pytest.mark.parametrize("has_tables", [False], ids=["without tables"])
"""For what a command does with an unused PostgreSQL database."""
Outcome = tuple[int, str, str]
Keyloft = Callable[..., Outcome]


def run_command(
    environment: Mapping[str, str], *arguments: str, given: bytes = b"", folder: Path | None = None
) -> Outcome:
    """Run a command in this process, in a thread: the test may have an event loop, and the command has its own.

    Args:
        environment: All environment variables that the command sees.
        arguments: As on the command line.
        given: What the command reads from its standard input.
        folder: The current folder while the command runs.

    Returns:
        The exit code, the standard output and the standard error output.
    """
    code: list[object] = []

    def run() -> None:
        try:
            main(arguments)
        except SystemExit as ended:
            code.append(ended.code or 0)
        except BaseException as error:
            code.append(error)

    with _surroundings(environment, folder), _streams(given) as (out, err):
        thread = Thread(target=run, name=f"keyloft {' '.join(arguments)[:50]}")
        thread.start()
        thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(code[0], BaseException):
        raise code[0]
    assert isinstance(code[0], int)
    return code[0], out.getvalue().decode(), err.getvalue().decode()


@contextmanager
def _surroundings(environment: Mapping[str, str], folder: Path | None) -> Iterator[None]:
    before, wanted, here = dict(os.environ), dict(environment), Path.cwd()
    os.environ.clear()
    os.environ.update(wanted)
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _streams(given: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    before = sys.stdin, sys.stdout, sys.stderr
    out, err = io.BytesIO(), io.BytesIO()
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        sys.stdin = io.TextIOWrapper(file, encoding="utf-8")
        sys.stdout = io.TextIOWrapper(out, encoding="utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(err, encoding="utf-8", write_through=True)
        try:
            yield out, err
        finally:
            streams = sys.stdin, sys.stdout, sys.stderr
            sys.stdin, sys.stdout, sys.stderr = before
            for stream in streams:
                stream.detach()


def at_a_terminal(
    environment: Mapping[str, str], *arguments: str, answer: str = "", after: str = ""
) -> tuple[int, str]:
    """Run a command as a process at a terminal of its own: the exit code, and all it shows.

    There `answer` is typed; or, if `after` is given, once that is on the screen, and again after a second of silence:
    between the question and the read of its answer, Python may lose a Ctrl-C.
    """
    terminal, its_end = os.openpty()
    try:
        process = ForkedProcess(
            ["-m", "keyloft", *arguments],
            env={"TERM": "xterm", **environment},
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            at_terminal=True,
        )
    finally:
        os.close(its_end)
    shown = b""
    is_due = True
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        if answer and is_due and after.encode() in shown:
            os.write(terminal, answer.encode())
            is_due = False
        ready, _, _ = select.select([terminal], [], [], 1.0)
        is_due = is_due or (bool(after) and not ready)
        if ready:
            try:
                some = os.read(terminal, 4096)
            except OSError:
                break
            if not some:
                break
            shown += some
    code = process.wait(LONGEST_SECONDS)
    os.close(terminal)
    return code, shown.decode()
