"""Python processes that start at once: copies of one process that has imported Keyloft and what it needs.

An interpreter spends 0.1 to 0.5 s of a processor on imports, and tests start hundreds. A copy is a process like any
other: it can be killed, has its own streams and its own event loop. What a fresh interpreter does, such as which
modules it imports, is tested with `subprocess`.

    python -m tests.support.fork_server LISTENER    serves, until its standard input ends; imports with the first copy
    python -IS launcher.py ADDRESS ENTRY ARGUMENT…  runs a copy with the launcher's own streams, folder and environment

PYTEST_DONT_REWRITE: this module runs in the server as well.
"""

import atexit
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Self

_ROOT: Final = Path(__file__).parents[2]
_LAUNCHER: Final = Path(__file__).with_name("launcher.py")
_TIMEOUT_SECONDS: Final = 60.0
_SHARED: Final = "KEYLOFT_TEST_FORK_SERVER"
"""An environment variable that workers of xdist inherit: where the server of all of them listens."""
_shared_address = os.environ.get(_SHARED)
_IMPORTED: Final = (
    "keyloft.admin",
    "keyloft.cli.app",
    "keyloft.engines.postgres.engine",
    "keyloft.plugins",
    "keyloft.semantic",
    "keyloft.server.app",
    "keyloft.cli.doctor.database",
    "keyloft.cli.doctor.host",
    "keyloft.cli.doctor.nats",
    "keyloft.engines.postgres.maintenance",
    "keyloft.engines.sqlite.maintenance",
    "keyloft.migrations.tables",
    "alembic.command",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.ext.asyncio",
    "uvloop",
)
"""Before the first copy is made; with them comes what they import."""
_IMPORTED_IF_THERE: Final = ("typer._adapters", "typer._click.decorators", "uvicorn.lifespan.off", "rich.filesize")
"""What commands import late: Typer imports pydantic with their first argument, which takes 60 ms."""


# The side of the tests


class ForkedProcess:
    """A copy that runs a module or a program; has what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        at_terminal: bool = False,
        finalizes: bool = False,
    ) -> None:
        """Start it.

        Args:
            arguments: As for `python`: `-m MODULE …` or `-c CODE …`.
            cwd: Its folder; the current one by default.
            env: All of its environment variables; those of this process by default.
            stdin: A file or a descriptor.
            stdout: A file or a descriptor.
            stderr: A file or a descriptor.
            at_terminal: Whether `stdin` is the terminal that controls it.
            finalizes: Whether its interpreter clears all modules before it ends: for tests of how a process ends.
        """
        request = {
            "arguments": list(arguments),
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "at_terminal": at_terminal,
            "finalizes": finalizes,
        }
        with Path(os.devnull).open("r+b", buffering=0) as nothing:
            streams = [_descriptor(stream, nothing) for stream in (stdin, stdout, stderr)]
            self._status = socket.socket(socket.AF_UNIX)
            self._status.settimeout(_TIMEOUT_SECONDS)
            self._status.connect(address())
            socket.send_fds(self._status, [b"\n"], streams)
            self._status.sendall(json.dumps(request).encode() + b"\n")
            self._lines = self._status.makefile("rb", buffering=0)
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits until the process exists: the first one of all waits for the server's imports."""
        if self._pid is None:
            self._pid = int(self._lines.readline())
        return self._pid

    def poll(self) -> int | None:
        """Its exit code, as `subprocess.Popen` has it; None while it runs."""
        if self.returncode is None and self._has_line(0):
            if self._pid is None:
                self._pid = int(self._lines.readline())
                return self.poll()
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._status.close()
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT_SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if not self._has_line(deadline - time.monotonic()):
                raise subprocess.TimeoutExpired("a forked process", timeout)
        return code

    def _has_line(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._status], [], [], max(0.0, seconds))
        return bool(ready)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            return
        pid = self.pid
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the server is about to say so
                os.kill(pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedProcess(ForkedProcess):
    """A copy whose output comes through pipes, as text; it is killed if it outlives the block."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        """Start it; the arguments and options are those of `ForkedProcess`."""
        (stdout, its_stdout), (stderr, its_stderr) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(stdout, encoding="utf-8"), os.fdopen(stderr, encoding="utf-8")
        try:
            super().__init__(arguments, **{"stdout": its_stdout, "stderr": its_stderr, **options})
        finally:
            os.close(its_stdout)
            os.close(its_stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def run(
    arguments: Sequence[str], *, given: bytes = b"", timeout: float = _TIMEOUT_SECONDS, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a copy to its end: what `subprocess.run` returns.

    Args:
        arguments: As for `ForkedProcess`.
        given: What it reads from its standard input.
        timeout: Seconds, after which it is killed.
        options: As for `ForkedProcess`.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        process = ForkedProcess(arguments, stdin=stdin, stdout=stdout, stderr=stderr, **options)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        code = process.wait()
        for stream in (stdout, stderr):
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read().decode(), stderr.read().decode())


def _descriptor(stream: int | IO[Any] | None, nothing: IO[Any]) -> int:
    if stream is None or stream == subprocess.DEVNULL:
        return nothing.fileno()
    return stream if isinstance(stream, int) else stream.fileno()


def launcher(entry: str) -> str:
    """A program for shells that runs a copy: `entry` is a module, or `module:function`."""
    return f'#!/bin/sh\nexec {sys.executable} -IS {_LAUNCHER} {address()} {entry} "$@"\n'


@cache
def address() -> str:
    """Where the server listens: that of all workers, or one that the first call starts. It ends with its starter."""
    if _shared_address is not None:
        return _shared_address
    path = str(Path(tempfile.mkdtemp(prefix="keyloft-fork-")) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-W", "error", "-m", __name__, str(number)]
        _running.append(
            # Ctrl-C at a terminal is for the tests, not for the server.
            subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True)
        )
    return path


_running: Final[list[subprocess.Popen[bytes]]] = []


def pytest_configure(config: Any) -> None:
    """Start one server for all workers of xdist, which inherit its address: its imports take a second."""
    if config.getoption("numprocesses", None):
        os.environ[_SHARED] = address()


def pytest_sessionfinish() -> None:
    """End the server of this process."""
    for server in _running:
        server.communicate()
    _running.clear()


# The server


def _serve(listener: socket.socket) -> Callable[[], None]:
    """Make copies until the standard input ends. Returns in a copy alone: with what it has to do."""
    has_imported = False
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for source in (0, woken, listener.fileno()):
        selector.register(source, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if 0 in ready:
            address = Path(listener.getsockname())
            address.unlink(missing_ok=True)
            address.parent.rmdir()
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        if listener.fileno() in ready:
            caller, _ = listener.accept()
            request, streams = _read(caller)
            if not has_imported:
                _import_all()
                has_imported = True
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                selector.close()
                for used in (woken, wake):
                    os.close(used)
                for one in (listener, caller, *running.values()):
                    one.close()
                return _become(request, streams)
            for stream in streams:
                os.close(stream)
            running[pid] = caller
            caller.sendall(b"%d\n" % pid)


def _read(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    _, streams, _, _ = socket.recv_fds(caller, 1, 3)
    with caller.makefile("rb") as lines:
        return json.loads(lines.readline()), streams


def _import_all() -> None:
    from importlib import import_module

    for name in _IMPORTED:
        import_module(name)
    for name in _IMPORTED_IF_THERE:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()


def _report_ended(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as caller:
            try:
                caller.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            except OSError:
                continue  # its caller has ended


def _become(request: dict[str, Any], streams: list[int]) -> Callable[[], None]:
    """Turn this copy into what was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["at_terminal"]:
        os.login_tty(streams[0])
    else:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            try:
                os.close(stream)
            except OSError:
                continue  # login_tty has closed it
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, number, mode, errors in (
        ("stdin", 0, "r", "strict"),
        ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        lines = 1 if number == 2 or os.isatty(number) else -1
        file = open(number, mode, buffering=lines, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    kind, what, *arguments = request["arguments"]
    sys.path[0] = request["folder"]
    sys.argv = [kind if kind == "-c" else what, *arguments]
    if request["finalizes"]:
        return lambda: _run(kind, what)
    return lambda: _run_and_end(kind, what)


class _Replaced(BaseException):
    """In place of `execv`: this copy goes on as another module."""


def _replace(_: str, command: list[str]) -> None:
    raise _Replaced(command[command.index("-m") + 1 :])


def _run(kind: str, what: str) -> None:
    os.execv = _replace  # type: ignore[assignment]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        return
    except _Replaced as replaced:
        [sys.argv] = replaced.args
    _run("-m", sys.argv[0])


def _run_and_end(kind: str, what: str) -> None:
    """End as an interpreter does, but without clearing the modules: that would copy all memory of the server's process.

    Any other exception, Ctrl-C and a closed stream are left to the interpreter.
    """
    code: object = None
    try:
        _run(kind, what)
    except SystemExit as ended:
        code = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if vars(sys.modules["__main__"]) is not globals():
        vars(sys.modules["__main__"]).clear()
    gc.collect()  # what the program forgot to close says so
    if not (code is None or isinstance(code, int)):
        sys.stderr.write(f"{code}\n")
        code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))()
