"""Processes that tests start: they can be interrupted, and none of them outlives the run.

PYTEST_DONT_REWRITE: it is loaded before the tests are.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

MARK: Final = "KEYLOFT_TEST_RUN"
"""An environment variable that all processes of a run have in common."""

ENDING_SECONDS = 10.0
"""How long processes may take to end after the last test, such as a PostgreSQL that is shutting down."""

_is_outermost = not os.environ.get(MARK)  # workers of xdist, and runs within tests, inherit the mark
RUN: Final = os.environ.get(MARK) or uuid4().hex
os.environ[MARK] = RUN

# In the background of a shell without job control these are ignored, and children inherit that. A handler they don't.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

_popen: Any = subprocess.Popen.__init__


def _popen_with_mark(self: Any, *arguments: Any, env: Any = None, **options: Any) -> None:
    """Starts a process with the mark, also where a test chose its environment or emptied its own."""
    _popen(self, *arguments, env={MARK: RUN, **(os.environ if env is None else env)}, **options)


subprocess.Popen.__init__ = _popen_with_mark  # type: ignore[method-assign]


def left_over() -> dict[int, str]:
    """The processes of this run that still exist, with their command lines; empty where there is no /proc."""
    sign = f"{MARK}={RUN}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if sign in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until each thread of the process has stopped: a busy machine takes a while for that."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + ENDING_SECONDS
    while (states := _thread_states(pid)) != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} does not stop: {states}"
        time.sleep(0.001)


def _thread_states(pid: int) -> set[str]:
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found.add((thread / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return found


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run that leaves processes behind, and ends them."""
    yield  # xdist ends its workers
    if not _is_outermost:
        return
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := left_over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, command in left.items():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        session.config.get_terminal_writer().line(f"\nprocess {pid} outlived the run, and was killed: {command[:300]}")
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
