"""Runs a nats-server on this machine, for a service that is not given the address of one."""

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.core.extras import not_installed
from keyloft.errors import InvalidArgument, NatsServerFailed

logger = logging.getLogger("keyloft.nats_server")

_HOST: Final = "127.0.0.1"
_BINARY: Final = "nats-server"
_INPUT: Final = "/dev/stdin"
_LISTENS: Final = re.compile(r"\] Listening for client connections on \S+:(\d+)$")
_RELOADED: Final = re.compile(r"\] (?:Reloaded server configuration|Failed to reload server configuration: (.*))")

# A child sets PR_SET_PDEATHSIG for itself, and execv keeps it. So a few lines of Python run first, instead of a
# preexec_fn, which is unsafe with threads. If the parent has ended by then, nats-server is not started.
_TIED_TO_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_binary() -> str:
    """The path of nats-server: the one that is installed with Keyloft, else the one on the PATH.

    Raises:
        NatsServerFailed: It is not installed.
    """
    beside = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    found = shutil.which(_BINARY, path=beside) or shutil.which(_BINARY)
    if found is None:
        raise NatsServerFailed(f"{not_installed(_BINARY)}; or name a NATS server that runs already with --nats")
    return found


class NatsServer(AsyncClosing):
    """A nats-server on loopback, without JetStream unless its configuration turns it on.

    The server ends with `aclose()`; on Linux also when the thread that started it ends, even if killed. Elsewhere, a
    parent that is killed leaves it running. Its log goes to the logger `keyloft.nats_server`, at DEBUG level.

    Example:
        async with NatsServer() as server:
            client = await nats.connect(server.url)
    """

    ready_seconds = limits.NATS_READY_SECONDS
    """How long `start()` and `reload()` wait for the server."""
    grace_seconds = limits.NATS_GRACE_SECONDS
    """How long `aclose()` waits before it kills."""

    def __init__(self, *, port: int | None = None, config: str | os.PathLike[str] | None = None) -> None:
        """Prepare a server; nothing runs yet.

        Args:
            port: Where it listens; None for a free port. Address and port of the configuration are ignored.
            config: A configuration file of nats-server.
        """
        if port is not None and not 1 <= port <= 65_535:
            raise InvalidArgument("port: expected 1 to 65535, or None for a free port")
        self._port = port
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] | None = None
        self._expected: list[tuple[re.Pattern[str], asyncio.Future[re.Match[str]]]] = []
        self._last_line = ""
        self._stopping = False

    def __repr__(self) -> str:
        address = "a free port" if self._port is None else self.url
        is_running = self._following is not None and not self._following.done()
        return f"<NatsServer at {address}, {'running' if is_running else 'not running'}>"

    @property
    def port(self) -> int:
        """The port it listens on; kept when it is started again."""
        if self._port is None:
            raise NatsServerFailed("the port is known once nats-server was started: port=None takes a free one")
        return self._port

    @property
    def url(self) -> str:
        return f"nats://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def died(self) -> asyncio.Future[str]:
        """Done, with the reason as text, once the server ended without `aclose()`.

        It stays pending over `aclose()` and `restart()`.
        """
        if self._died is None:
            raise NatsServerFailed("nats-server was not started")
        return self._died

    async def start(self) -> None:
        """Start it and return once it accepts connections.

        Raises:
            NatsServerFailed: It is not installed, or ended at once (a taken port, for example), or isn't ready in time.
        """
        if self._following is not None and not self._following.done():
            raise NatsServerFailed("nats-server is running already")
        command = _command(find_binary(), self._port, self._config)
        given = _given_configuration() if _INPUT in command else asyncio.subprocess.DEVNULL
        if self._died is None or self._died.done():
            self._died = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._last_line = ""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=limits.NATS_LOG_LINE_BYTES,
                # Ctrl-C in a terminal reaches all processes of the session, but the server must outlive its clients.
                start_new_session=True,
            )
        finally:
            if given != asyncio.subprocess.DEVNULL:
                os.close(given)
        self._following = asyncio.create_task(self._follow(self._process), name="keyloft nats-server")
        try:
            self._port = int((await self._logs(_LISTENS, "start")).group(1))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End it: SIGTERM, and SIGKILL after the grace time. Does nothing if it is not running."""
        if self._process is None or self._following is None:
            return
        self._stopping = True
        try:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait({self._following}, timeout=self.grace_seconds)
        finally:
            if not self._following.done():
                with suppress(ProcessLookupError):
                    self._process.kill()
        await asyncio.wait({self._following})

    stop = aclose

    async def restart(self) -> None:
        """Stop it, then start it on the same port."""
        await self.aclose()
        await self.start()

    async def reload(self) -> None:
        """Let it read its configuration again; connections of users whose entry has not changed stay open.

        Raises:
            NatsServerFailed: It refused the configuration, and keeps the one before; or it is not running.
        """
        with suppress(ProcessLookupError):
            self._started().send_signal(signal.SIGHUP)
        refusal = (await self._logs(_RELOADED, "reload its configuration")).group(1)
        if refusal is not None:
            raise NatsServerFailed(f"nats-server refused its new configuration and keeps the one before: {refusal}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            raise NatsServerFailed("nats-server is not running")
        return self._process

    async def _logs(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Wait for a line of the server's log."""
        assert self._following is not None
        match: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()
        self._expected.append((pattern, match))
        try:
            either: set[asyncio.Future[Any]] = {match, self._following}
            await asyncio.wait(either, timeout=self.ready_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._expected.remove((pattern, match))
        if match.done():
            return match.result()
        if self._following.done():
            raise NatsServerFailed(f"nats-server could not {what}: {self._last_line or 'its log is empty'}")
        raise NatsServerFailed(f"nats-server did not {what} within {self.ready_seconds:g} seconds")

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Read its log, so that it never waits for a full pipe, and notice its end."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue  # a line longer than the buffer: asyncio has dropped it
            if not line:
                break
            self._last_line = line.decode(errors="replace").rstrip()
            logger.debug("%s", self._last_line)
            for pattern, expected in self._expected:
                if (match := pattern.search(self._last_line)) and not expected.done():
                    expected.set_result(match)
        code = await process.wait()
        if not self._stopping and self._died is not None and not self._died.done():
            self._died.set_result(f"nats-server ended with exit code {code}: {self._last_line or 'its log is empty'}")


def _given_configuration() -> int:
    """A pipe with the settings that have no option on the command line; unlike a file, it need not be removed."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write(f"max_pending: {limits.NATS_PENDING_BYTES}\n")  # as `isolate` writes it
    return reading


def _command(binary: str, port: int | None, config: str | os.PathLike[str] | None) -> Sequence[str]:
    # With -1 the server itself takes a free port, so that two of them never race for one.
    command = [binary, "-a", _HOST, "-p", str(port or -1), "--logtime=false"]
    if config is not None:
        # Keyloft reads the server's log, whatever the configuration says about it.
        command += ["-c", os.fspath(config), "-l", "", "--syslog=false"]
    elif Path(_INPUT).exists():
        command += ["-c", _INPUT]
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]
    return command
